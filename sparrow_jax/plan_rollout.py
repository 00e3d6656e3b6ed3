"""What whole rollouts and steps of training are predicted to take under several schedules: for `plan`.

A rollout is the bytes that its decode steps read (`step_reads.rollout_reads`) over the chip's bandwidth, and a fixed
time for each layer of each step. A step of training adds the products of prefill, scoring and update, at a share of the
chip's speed that such programs usually reach. What limits a pool sets, parked sequences and verifiers are left out.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from sparrow_jax.bench_setup import dense_schedule
from sparrow_jax.chips import Chip
from sparrow_jax.config import ConfigError, RunConfig
from sparrow_jax.console import notice_once
from sparrow_jax.json_files import read_object
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.sparsity.calibration import smallest_budgets
from sparrow_jax.sparsity.schedules import (
    EVERY_PAGE,
    PUBLISHED_PAGE_TOKENS,
    Schedule,
    load_schedule,
    published_targets,
    schedule_of_fields,
)
from sparrow_jax.step_reads import rollout_reads
from sparrow_jax.whole_rollout import Lengths

PRODUCTS_SHARE = 0.4  # of a chip's speed, that forward and backward passes over long rows reach: an assumption
TABLE = '{:<38} {:>5} {:>8} {:>10} {:>10} {:>9} {:>9}'
HEADER = ('schedule', 'page', 'KV read', 'rollout s', 'x dense', 'RL step s', 'x dense')


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule to compare; `holds`: whether its source says that it reaches the target."""

    name: str
    schedule: Schedule
    holds: bool


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Seconds of a step of training on every device, and what the rollout in it is made of.

    Attributes:
        kv_read_fraction: of what a dense sampler reads.
        cache_s, weights_s, layers_s: of the rollout, for reading the cache, reading the weights, and the rest.
        learner_s: of prefill, scoring and update.
    """

    kv_read_fraction: float
    cache_s: float
    weights_s: float
    layers_s: float
    learner_s: float

    @property
    def rollout_s(self) -> float:
        return self.cache_s + self.weights_s + self.layers_s

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.learner_s


def candidates(run: RunConfig, shape: DecoderShape, calibration: str, target: float) -> list[Candidate]:
    """The dense sampler, the configuration's schedule, and those that are known to hold a target.

    Args:
        calibration: a calibration.json, or '' for the published tables of `schedule.model`, if it names a model.
        target: of p05, on the scale of the source: exact for a calibration, the paper's for published tables.

    Raises:
        ConfigError: no such file, or one that is no calibration.
    """
    own = load_schedule(run.schedule, run.rollout, shape.layers, run.mismatch.bin_width_tokens)
    holds = own.kind == 'published' and run.schedule.target_p05 >= target
    name = f'the configuration ({own.kind})'
    found = [Candidate('dense', dense_schedule(own), True), Candidate(name, own, holds)]
    if calibration:
        return found + calibrated(calibration, target, run)
    if not run.schedule.model:
        return found
    for published in published_targets(run.schedule.model):
        config = dataclasses.replace(run.schedule, kind='published', target_p05=published)
        rollout = dataclasses.replace(run.rollout, page_tokens=PUBLISHED_PAGE_TOKENS)
        schedule = load_schedule(config, rollout, shape.layers)
        if schedule != own:
            found.append(Candidate(f'published, p05 {published:g} (top-20)', schedule, published >= target))
    return found


def _check_same_model(name: str, content: Mapping[str, Any], run: RunConfig) -> None:
    """Raises ConfigError where a calibration is of another checkpoint; says if it ends below the longest response."""
    here = run.model.path or 'random weights'
    if (measured := content['settings'].get('model', here)) != here:
        raise ConfigError(
            f'{name}: is of {measured}, the plan of {here}; give one of this model, or set '
            f'--config.model.path={measured}'
        )
    longest = run.rollout.max_prompt_tokens + run.rollout.max_response_tokens
    ends = [len(one['budget_pages']) * one['bin_width_tokens'] for one in content['schedules'].values()]
    if ends and min(ends) < longest:
        notice_once(
            f'{name}: measured up to {min(ends):,} cached tokens; beyond, up to {longest:,}, its last budget is taken'
        )


def calibrated(file: str, target: float, run: RunConfig) -> list[Candidate]:
    """A schedule for each policy and page size of a calibration.

    At the target that the calibration was made for these are the ones that it measured as a whole; at another one, the
    smallest budgets of the sweep that reach it bin by bin. Where none does, every page is read.
    """
    name = f'--calibration={file}'
    content = read_object(Path(file), name)
    if not all(field in content for field in ('settings', 'facts', 'points', 'chosen', 'schedules')):
        raise ConfigError(f'{name}: is no finished calibration; give the calibration.json of sparrow_jax.calibrate')
    _check_same_model(name, content, run)
    found = []
    for chosen in content['chosen']:
        fields = content['schedules'][chosen['file']]
        what = f'{chosen["policy"]}, calibrated'
        if target == content['facts']['target_p05']:
            schedule = schedule_of_fields(fields, name)
            found.append(Candidate(what, schedule, not chosen['missed_bins']))
            continue
        same = lambda point: all(point[key] == chosen[key] for key in ('policy', 'page_tokens'))  # noqa: B023
        points = [point for point in content['points'] if same(point) and not point['every_page']]
        bins = max(len(point['bins']) for point in points)
        lows = [[_low(bin_) for bin_ in point['bins']] + [math.nan] * (bins - len(point['bins'])) for point in points]
        choice = smallest_budgets([p['budget_tokens'] // p['page_tokens'] for p in points], lows, target)
        schedule = schedule_of_fields(fields | {'budget_pages': list(choice.budget_Z)}, name)
        found.append(Candidate(f'{what}, not measured as a whole', schedule, True))
    return found


def forecast(
    run: RunConfig,
    shape: DecoderShape,
    schedule: Schedule,
    chip: Chip,
    mesh_sizes: Mapping[str, int],
    lengths: Lengths,
) -> Forecast:
    """Of one step, whose responses have the lengths of a distribution, one after the other."""
    r, dtype, tensor = run.rollout, jnp.dtype(run.model.compute_dtype), mesh_sizes['tensor']
    devices, shards = math.prod(mesh_sizes.values()), mesh_sizes['data'] * mesh_sizes['fsdp']
    responses = responses_of(run, lengths)
    on_shard = -(-len(responses) // shards)
    sizes = {'prompt_tokens': lengths.prompt_tokens, 'slots': max(r.slots // shards, 1), 'tensor': tensor}
    reads, dense = (
        rollout_reads(shape, one, dtype, response_tokens=responses[:on_shard].tolist(), **sizes)
        for one in (schedule, dense_schedule(schedule))
    )
    dense_layers = shape.layers if schedule.kind == 'dense' else len(schedule.dense_layers)
    return Forecast(
        kv_read_fraction=reads.cache_bytes / dense.cache_bytes,
        cache_s=reads.cache_bytes / chip.read_bytes_per_s,
        weights_s=reads.steps * reads.weight_bytes / chip.read_bytes_per_s,
        layers_s=reads.steps * chip.step_seconds(0, dense_layers, shape.layers - dense_layers),
        learner_s=learner_flops(run, shape, responses, lengths.prompt_tokens)
        / (devices * chip.flops_per_s * PRODUCTS_SHARE),
    )


def responses_of(run: RunConfig, lengths: Lengths) -> np.ndarray:
    """int64: the response lengths of one step, from a file's over and over, cut as sampling would cut them."""
    count = run.rollout.prompts_per_step * run.rollout.samples_per_prompt
    return np.minimum(np.resize(np.asarray(lengths.response_tokens, np.int64), count), run.rollout.max_response_tokens)


def learner_flops(run: RunConfig, shape: DecoderShape, responses: np.ndarray, prompt_tokens: int) -> float:
    """Of prefill, scoring and update: 2 for each parameter and token, and causal attention, forward; twice that
    backward, and once more where layers are computed again.
    """
    parameters = shape.parameter_count() - (0 if shape.tie_embeddings else shape.vocab_size * shape.d_model)

    def forward(tokens: np.ndarray) -> float:
        attention = 2 * shape.layers * shape.query_heads * shape.head_dim * tokens.astype(float) ** 2
        return float((2 * parameters * tokens + attention).sum())

    update = 4 if run.model.remat else 3
    prompts = np.full(run.rollout.prompts_per_step, prompt_tokens)
    return forward(prompts) + (1 + update) * forward(responses + prompt_tokens)


def lines(found: Sequence[tuple[Candidate, Forecast]], target: float) -> list[str]:
    """A table, and which schedule is the best one that holds the target."""
    dense = found[0][1]
    rows = [TABLE.format(*HEADER)]
    for candidate, seen in found:
        rows.append(
            TABLE.format(
                candidate.name,
                candidate.schedule.page_tokens,
                f'{seen.kv_read_fraction:.1%}',
                f'{seen.rollout_s:,.1f}',
                f'{dense.rollout_s / seen.rollout_s:.2f}',
                f'{seen.step_s:,.1f}',
                f'{dense.step_s / seen.step_s:.2f}',
            )
        )
    held = [(candidate, seen) for candidate, seen in found[1:] if candidate.holds]
    if not held:
        rows.append(f'no schedule here is known to hold p05 at {target:g}; python -m sparrow_jax.calibrate finds one')
        return rows
    candidate, seen = min(held, key=lambda pair: pair[1].step_s)
    if seen.step_s >= dense.step_s:
        rows.append(f'best at p05 {target:g}: the dense sampler; no schedule that holds it is faster here')
        return rows
    pages = ' '.join('all' if budget >= EVERY_PAGE else str(budget) for budget in candidate.schedule.budget_pages)
    rows.append(
        f'best at p05 {target:g}: {candidate.name}, pages of {candidate.schedule.page_tokens} tokens, budgets {pages}; '
        f'{dense.rollout_s / seen.rollout_s:.2f} times the rollouts, {dense.step_s / seen.step_s:.2f} times the steps'
    )
    return rows


def plot(found: Sequence[tuple[Candidate, Forecast]], title: str, out: Path) -> None:
    """A bar for each schedule: where the time of a step goes."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.9 + 0.42 * len(found)), layout='constrained')
    names = [f'{candidate.name}, pages of {candidate.schedule.page_tokens}' for candidate, _ in found]
    start = np.zeros(len(found))
    for field, label, colour in (
        ('cache_s', 'reading the cache', '#3b6ea8'),
        ('weights_s', 'reading the weights', '#8fb3d9'),
        ('layers_s', 'the rest of decode steps', '#c9d6e4'),
        ('learner_s', 'prefill, scoring, update', '#c8553d'),
    ):
        seconds = np.asarray([getattr(seen, field) for _, seen in found])
        axis.barh(names, seconds, left=start, color=colour, label=label, height=0.7)
        start = start + seconds
    dense = found[0][1].step_s
    for i, (_, seen) in enumerate(found):
        axis.text(seen.step_s, i, f' {dense / seen.step_s:.2f} x', va='center', fontsize=8, color='#333333')
    axis.invert_yaxis()
    axis.set_xlim(right=1.12 * float(start.max()))
    axis.set_xlabel('seconds of a step of training, predicted', fontsize=9)
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.spines[['top', 'right']].set_visible(False)
    figure.legend(loc='outside lower center', ncols=4, fontsize=8, frameon=False)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def _low(figures: Mapping[str, Any]) -> float:
    return figures['alpha']['p05'][1] if figures['enough'] else math.nan
