"""python -m sparrow_jax.calibrate --config=configs/X.py --workdir=W

How much a model's sparse sampler may leave out: p01, p05, p10 and mean of alpha by length, for a sweep of budgets, page
sizes and selection policies, and the schedule that holds p05 at a target. `configs/base.py`, section `calibrate`.

Sequences are sampled once by the dense policy, and each budget then takes one teacher-forced pass over them (or texts
are given, or every budget samples anew; what was done stands in the output). W/calibration.json has all figures,
W/schedule.json is what `schedule.kind` = 'file' reads. The same command goes on where it stopped.
"""

import dataclasses
import hashlib
import json
import math
import shlex
import statistics as middle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from pallas_kernels.page_select.policies import SelectionPolicy
from sparrow_jax import calibrate_contexts, calibrate_plot, commands
from sparrow_jax.assembly import Parts, assemble
from sparrow_jax.calibrate_contexts import Contexts
from sparrow_jax.calibrate_passes import Passes, choose_passes_kernels
from sparrow_jax.calibrate_results import FILE, SCHEDULE, SCHEDULES, Point, Results
from sparrow_jax.config import ConfigError, RunConfig
from sparrow_jax.console import Column, Console
from sparrow_jax.models.identity import model_hash
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.rollout.engine import Engine, Progress, Sampling
from sparrow_jax.rollout.pool import Request
from sparrow_jax.sparsity.calibration import Choice, Tokens, raised, smallest_budgets, statistics
from sparrow_jax.sparsity.cost import kv_bytes_per_token, kv_read_fraction, pages_read
from sparrow_jax.sparsity.schedules import CALIBRATION_FIELD, EVERY_PAGE, Schedule, to_file

DEFAULT_BUDGETS = 6  # halves of the longest sequence
RAISES = 3  # of a schedule that misses its target as a whole
HOW = {
    'dense_samples': (
        'one teacher-forced sparse pass a budget over sequences that the dense policy sampled: exact for their '
        'contexts; a sparse sampler would come to slightly different ones'
    ),
    'texts': 'one teacher-forced sparse pass a budget over given texts: exact for their contexts',
    'sparse_samples': 'sampled anew by the sparse sampler at every budget, then scored by the dense policy',
}
COLUMNS = (  # ranks above those that the end block shows curves of: points are no course of time
    Column('policy', 'policy', rank=6),
    Column('page', 'page_tokens', 'count', 4),
    Column('budget', 'budget_tokens', 'count', 3),
    Column('p05', 'p05', '.3f', 3),
    Column('worst bin', 'worst', '.3f', 3),
    Column('at least', 'worst_low', '.3f', 4),
    Column('p01', 'p01', '.3f', 5),
    Column('mean', 'mean', '.4f', 6),
    Column('kv read', 'kv_read', 'percent', 4),
    Column('time', 'seconds', 'time', 5),
    Column('left', 'left', 'time', 3),
)


def calibrate(run: RunConfig, workdir: str) -> int:
    """Measures what is not measured yet and writes the results; returns the exit code."""
    if run.parallel.distributed != 'off':
        raise ConfigError(
            f'parallel.distributed={run.parallel.distributed!r}: a calibration runs in one process, on all of its '
            "devices; set it to 'off'"
        )
    began = time.perf_counter()
    run = sized(run)
    points = sweep(run)
    parts = assemble(run, trains=False, samples=not run.calibrate.texts)
    kernels, why = choose_passes_kernels(parts)
    given = calibrate_contexts.read_texts(run, parts.encoder) if run.calibrate.texts else None
    requests = [] if given else calibrate_contexts.make_requests(run, parts.encoder)
    results = Results(workdir, settings(run, parts, str(kernels)))
    with Console(steps=len(points), columns=COLUMNS) as console:
        facts = {
            'model': f'{run.model.path or "random weights"}, hash {results.settings["model_hash"][:12]}',
            'device': f'{jax.device_count()} x {jax.devices()[0].device_kind}',
            'kernels': f'{kernels} ({why})',
            'contexts': HOW[origin(run)],
            'sequences': f'{run.calibrate.sequences} of up to {run.rollout.max_response_tokens:,} response tokens',
            'work directory': str(results.path),
        }
        console.start('Calibration', facts)
        measured = Measured(parts, results, console)
        try:
            measured.prepare(given, requests)
            for number, point in enumerate(points, start=1):
                measured.point(point, number, len(points))
            found = finished(run, parts, measured, points, facts)
        except KeyboardInterrupt:
            console.message('Stopped; what is measured is kept, and the same command goes on from here.')
            raise
        found['facts']['seconds'] = round(time.perf_counter() - began, 1)
        for name, content in found['schedules'].items():
            results.write(name, content)
        results.write(FILE, {'settings': results.settings, **found})
        plots = calibrate_plot.plot(found, results.path)
        for line in table(found):
            console.message(line)
        console.finish(
            'Calibration',
            {
                'schedule': str(results.path / SCHEDULE),
                'figures': str(results.path / FILE),
                'plots': ', '.join(map(str, plots)),
                'use it': f'--config.schedule.kind=file --config.schedule.path={results.path / SCHEDULE}',
            },
        )
    return 0


def origin(run: RunConfig) -> str:
    """A key of `HOW`."""
    return 'texts' if run.calibrate.texts else run.calibrate.contexts


def sized(run: RunConfig) -> RunConfig:
    """The configuration as the passes and the sampler take it: no longer than asked for, no schedule of its own."""
    c, r = run.calibrate, run.rollout
    shards = meshes.axis_sizes(run.parallel, jax.device_count())
    whole = shards['data'] * shards['fsdp']
    slots = min(r.slots, -(-c.sequences // whole) * whole)
    rollout = dataclasses.replace(
        r, slots=slots, max_response_tokens=c.response_tokens or r.max_response_tokens, samples_per_prompt=1
    )
    return dataclasses.replace(
        run,
        rollout=rollout,
        schedule=dataclasses.replace(run.schedule, kind='fixed', path='', budget_pages=EVERY_PAGE),
        mismatch=dataclasses.replace(run.mismatch, every_steps=1),
        learner=dataclasses.replace(run.learner, row_tokens=0),
    )


def sweep(run: RunConfig) -> list[Point]:
    """What is to be measured; the pass over every page comes first."""
    c = run.calibrate
    policies, sizes = c.policies or (run.schedule.policy,), c.page_tokens or (run.rollout.page_tokens,)
    budgets = sorted(c.budget_tokens) or default_budgets(run, max(sizes))
    points = [Point(policy, size, budget) for policy in policies for size in sizes for budget in budgets]
    if c.contexts == 'sparse_samples':
        return points
    return [Point(policies[0], sizes[0], 0), *points]


def default_budgets(run: RunConfig, page_tokens: int) -> list[int]:
    """Tokens, ascending: half of the longest sequence, a quarter and so on, in whole pages."""
    longest = run.rollout.max_prompt_tokens + run.rollout.max_response_tokens
    return sorted({max(longest >> i, page_tokens) // page_tokens * page_tokens for i in range(1, DEFAULT_BUDGETS + 1)})


def settings(run: RunConfig, parts: Parts, kernels: str) -> dict[str, Any]:
    """All that decides what a point gives."""
    c, r, s = run.calibrate, run.rollout, run.schedule
    sampled = {
        'seed': run.seed,
        'forced_lengths': c.forced_lengths,
        'prompts': c.prompts and _file_hash(c.prompts),
        'data': None if c.prompts else dataclasses.asdict(run.data) | {'cache_dir': ''},
        'tokenizer': dataclasses.asdict(run.tokenizer),
    }
    return {
        'model': run.model.path or 'random weights',
        'model_hash': model_hash(run.model, run.seed),
        'dtype': run.model.compute_dtype,
        'param_dtype': run.model.param_dtype,
        'temperature': r.temperature,
        'kernels': kernels,
        'contexts': origin(run),
        'sequences': c.sequences,
        'max_prompt_tokens': r.max_prompt_tokens,
        'response_tokens': r.max_response_tokens,
        'bin_width_tokens': run.mismatch.bin_width_tokens,
        'reserved_first_pages': s.reserved_first_pages,
        'reserved_last_pages': s.reserved_last_pages,
        'dense_layers': list(parts.schedule.dense_layers),
        **({'texts': _file_hash(c.texts)} if c.texts else sampled),
    }


def _file_hash(path: str) -> str:
    return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()


class Measured:
    """What is measured so far, and what measures the rest; the model is read when the first point needs it."""

    def __init__(self, parts: Parts, results: Results, console: Console):
        self.parts, self.run, self.results, self.console = parts, parts.run, results, console
        self.contexts: Contexts
        self.floor: Tokens | None = None  # of the dense sampler
        self._dense: list[np.ndarray] | None = None
        self._passes: Passes | None = None
        self._engines: dict[tuple[str, int], Engine] = {}
        self._weights: nnx.State | None = None
        self._seconds: list[float] = []

    # ------------------------------------------------------------------ contexts

    def prepare(self, given: Contexts | None, requests: list[Request]) -> None:
        """The sequences: texts as they are, or samples of the dense policy, a group of slots at a time."""
        if given is not None:
            self.contexts = given
            self.results.keep_contexts(0, given, None)
        else:
            slots, parts, floors = self.run.rollout.slots, [], []
            for number, start in enumerate(range(0, len(requests), slots)):
                contexts, floor = self.results.contexts(number) or self._draw_dense(number, requests, start)
                assert floor is not None
                floors.append(dataclasses.replace(floor, sequence=floor.sequence + sum(map(len, parts))))
                parts.append(contexts)
            self.contexts, self.floor = Contexts.joined(parts), Tokens.joined(floors)
        self._free_sampler()
        if self.contexts.left_out:
            what = 'texts were too short or too long' if given is not None else 'answers ended with their first token'
            self.console.warn(f'{self.contexts.left_out} {what}, and are left out')
        if len(self.contexts) < 2:
            raise ConfigError(
                'calibrate.sequences: fewer than two of them have more than a token; set calibrate.forced_lengths=True '
                'or give other prompts'
            )

    def _draw_dense(self, number: int, requests: list[Request], start: int) -> tuple[Contexts, Tokens]:
        schedule = self.schedule(Point(self.run.schedule.policy, self.run.rollout.page_tokens, 0))
        group = requests[start : start + self.run.rollout.slots]
        contexts, hidden = self._draw(schedule, group, sparse=False, done=start, total=len(requests))
        if not len(contexts):
            raise ConfigError(
                'calibrate.forced_lengths=False: all answers of a group end with their first token; set it to True'
            )
        floor = self.passes.sampled(contexts, self._dense_of(contexts), hidden, self._shown('scoring'))
        self.results.keep_contexts(number, contexts, floor)
        return contexts, floor

    def _draw(
        self, schedule: Schedule, requests: list[Request], *, sparse: bool, done: int, total: int
    ) -> tuple[Contexts, list[np.ndarray]]:
        """Sequences and the hidden states of their sampler."""
        key = schedule.policy.value, schedule.page_tokens
        if key not in self._engines:
            self._free_sampler()  # there is room for one pool
            self.console.status('compiling', 'the sampler')
            self._engines[key] = self._engine(schedule)
        engine = self._engines[key]
        engine.schedule = schedule
        if self._weights is None:
            self._weights = engine.weights(self.passes.params)
        began = time.perf_counter()

        def show(progress: Progress) -> None:
            tokens, seconds = progress.tokens, time.perf_counter() - began
            longest = len(requests) * self.run.rollout.max_response_tokens
            left = seconds / max(tokens, 1) * (longest - tokens)
            detail = f'{tokens:,} tokens, {tokens / seconds:,.0f} tokens/s, at most {_clock(left)} left'
            self.console.status('sampling', detail, done=done + progress.finished, total=total, unit='sequences')

        responses = engine.generate(
            self._weights,
            requests,
            run_key=jax.random.key(self.run.seed),
            step=0,
            sampling=Sampling(self.run.rollout.temperature, sparse=sparse, keep_hidden=True),
            on_progress=show,
        )
        return calibrate_contexts.of_samples(requests, responses)

    def _engine(self, schedule: Schedule) -> Engine:
        rollout = self.run.rollout
        pool = rollout.pool_pages * rollout.page_tokens // schedule.page_tokens
        rollout = dataclasses.replace(rollout, page_tokens=schedule.page_tokens)
        rollout = dataclasses.replace(rollout, pool_pages=max(pool, rollout.pages_per_sequence) if pool else 0)
        never = (self.parts.shape.vocab_size,)  # no token has that number
        return Engine(
            self.parts.sampler_graph,
            self.parts.shape,
            self.parts.mesh,
            rollout,
            schedule,
            never if self.run.calibrate.forced_lengths else self.parts.encoder.end_ids,
            self.run.model.compute_dtype,
            may_widen=True,  # budgets change from point to point
        )

    def _free_sampler(self) -> None:
        self._engines.clear()
        self._weights = None

    # ------------------------------------------------------------------ points

    def point(self, point: Point, number: int, total: int) -> None:
        """Measures a point, unless it is there, and shows its row."""
        self.console.begin_step(number)
        began = time.perf_counter()
        tokens = self.results.tokens(point.name)
        if tokens is None:
            tokens = self._measure(self.schedule(point))
            self.results.keep_tokens(point.name, tokens)
            self._seconds.append(time.perf_counter() - began)
        left = middle.median(self._seconds[-3:]) * (total - number) if self._seconds else math.nan
        self.console.row(number, self._row(point, tokens) | {'seconds': time.perf_counter() - began, 'left': left})

    def schedule_tokens(self, name: str, schedule: Schedule) -> Tokens:
        """What a schedule as a whole gives."""
        tokens = self.results.tokens(name)
        if tokens is None:
            tokens = self._measure(schedule)
            self.results.keep_tokens(name, tokens)
        return tokens

    def schedule(self, point: Point, budget_Z: tuple[int, ...] = ()) -> Schedule:
        """The schedule of a point, or with other budgets; always with as many bins, so that budgets compile nothing."""
        run, r = self.run, self.run.rollout
        bins = (r.max_prompt_tokens + r.max_response_tokens) // run.mismatch.bin_width_tokens + 1
        budget = point.budget_tokens // point.page_tokens or EVERY_PAGE
        filled = (*budget_Z, *budget_Z[-1:] * (bins - len(budget_Z))) if budget_Z else (budget,) * bins
        return Schedule(
            kind='fixed',
            page_tokens=point.page_tokens,
            bin_width_tokens=run.mismatch.bin_width_tokens,
            reserved_first=run.schedule.reserved_first_pages,
            reserved_last=run.schedule.reserved_last_pages,
            dense_layers=tuple(run.schedule.dense_layers),
            budget_pages=filled,
            policy=SelectionPolicy(point.policy),
        )

    @property
    def passes(self) -> Passes:
        if self._passes is None:
            self.console.status('reading the model')
            self._passes = Passes(self.parts, self.parts.start_params())
        return self._passes

    def _measure(self, schedule: Schedule) -> Tokens:
        if self.run.calibrate.contexts == 'sparse_samples':
            parts, slots = [], self.run.rollout.slots
            requests = calibrate_contexts.make_requests(self.run, self.parts.encoder)
            for start in range(0, len(requests), slots):
                group = requests[start : start + slots]
                contexts, hidden = self._draw(schedule, group, sparse=True, done=start, total=len(requests))
                if len(contexts):
                    tokens = self.passes.sampled(contexts, self._dense_of(contexts), hidden, self._shown('scoring'))
                    parts.append(dataclasses.replace(tokens, sequence=tokens.sequence + start))
            return Tokens.joined(parts)
        if self._dense is None:
            self._dense = self._dense_of(self.contexts)
        return self.passes.sparse(self.contexts, self._dense, schedule, self._shown('sparse pass'))

    def _dense_of(self, contexts: Contexts) -> list[np.ndarray]:
        return self.passes.dense(contexts, self._shown('dense pass'))

    def _shown(self, what: str) -> Callable[[int, int], None]:
        self.console.status(what)
        return lambda done, total: self.console.status(what, done=done, total=total, unit='sequences')

    def _row(self, point: Point, tokens: Tokens) -> dict[str, Any]:
        m = self.run.mismatch
        found = statistics(tokens, m.bin_width_tokens, m.min_count)
        alpha = found['all']['alpha']
        worst = min((b['alpha']['p05'] for b in found['bins'] if b['enough']), default=[math.nan] * 3)
        schedule = self.schedule(point)
        read = kv_read_fraction(schedule, self.parts.shape.layers, tokens.length, pages_read(schedule, tokens.length))
        return {
            'policy': point.policy,
            'page_tokens': point.page_tokens,
            'budget_tokens': point.budget_tokens or 'all',
            'p05': alpha['p05'][0],
            'worst': worst[0],
            'worst_low': worst[1],
            'p01': alpha['p01'][0],
            'mean': alpha['mean'][0],
            'kv_read': read,
        }


# ---------------------------------------------------------------------- what it comes to


def finished(
    run: RunConfig, parts: Parts, measured: Measured, points: list[Point], facts: dict[str, Any]
) -> dict[str, Any]:
    """Everything that calibration.json holds beside the settings."""
    width, least = run.mismatch.bin_width_tokens, run.mismatch.min_count

    def figures(tokens: Tokens, schedule: Schedule) -> dict[str, Any]:
        found, bin_ = statistics(tokens, width, least), tokens.length // width
        cost = {
            'layers': parts.shape.layers,
            'kv_heads': parts.shape.kv_heads,
            'head_dim': parts.shape.head_dim,
            'value_bytes': np.dtype(jax.numpy.dtype(run.model.compute_dtype)).itemsize,
        }
        of = lambda length: _known(kv_bytes_per_token(schedule, **cost, length_tokens=length))
        found['all']['kv_bytes_per_token'] = of(tokens.length)
        for z, bin_figures in enumerate(found['bins']):
            bin_figures['kv_bytes_per_token'] = of(tokens.length[bin_ == z])
        read = pages_read(schedule, tokens.length)
        found['kv_read_fraction'] = kv_read_fraction(schedule, parts.shape.layers, tokens.length, read)
        return found

    floor = None if measured.floor is None else statistics(measured.floor, width, least)
    swept = []
    for point in points:
        tokens = measured.results.tokens(point.name)
        assert tokens is not None
        swept.append(dataclasses.asdict(point) | {'every_page': not point.budget_tokens})
        swept[-1] |= figures(tokens, measured.schedule(point))
    schedules: dict[str, Any] = {}
    chosen: list[dict[str, Any]] = []
    for policy, page in dict.fromkeys((point.policy, point.page_tokens) for point in points):
        own = policy == run.schedule.policy and page == run.rollout.page_tokens
        name = SCHEDULE if own else f'{SCHEDULES}/{policy}_page{page}.json'
        group = [f for f in swept if (f['policy'], f['page_tokens']) == (policy, page) and not f['every_page']]
        schedule, choice, tokens, missed = chosen_schedule(run, measured, Point(policy, page, 0), group)
        found = figures(tokens, schedule)
        describes = description(run, measured, choice, missed, found)
        schedules[name] = to_file(schedule) | {CALIBRATION_FIELD: describes}
        chosen.append(
            {
                'file': name,
                'policy': policy,
                'page_tokens': page,
                'budget_pages': list(choice.budget_Z),
                'unmet_bins': list(choice.unmet),
                'unknown_bins': list(choice.unknown),
                'missed_bins': missed,
                **found,
            }
        )
    return {
        'facts': {
            **facts,
            'jax': jax.__version__,
            'command': f'python -m sparrow_jax.calibrate {shlex.join(sys.argv[1:])}',
            'tokens': measured.contexts.tokens,
            'sequences_measured': len(measured.contexts),
            'target_p05': run.calibrate.target_p05,
            'min_count': least,
        },
        'dense_floor': floor,
        'points': swept,
        'chosen': chosen,
        'schedules': schedules,
    }


def chosen_schedule(
    run: RunConfig, measured: Measured, point: Point, group: list[dict[str, Any]]
) -> tuple[Schedule, Choice, Tokens, list[int]]:
    """The budgets of a policy and a page size, measured together; the bins that miss the target all the same.

    A token's keys come from tokens before it, whose budgets are smaller than its own in a schedule and equal to it in a
    point. So the schedule is measured as a whole, and where it misses the target its budgets are raised.
    """
    target, m = run.calibrate.target_p05, run.mismatch
    budget_R = [figures['budget_tokens'] // point.page_tokens for figures in group]
    lows = [[_low(b) for b in figures['bins']] for figures in group]
    bins = max(map(len, lows))
    lows = [[*row, *[math.nan] * (bins - len(row))] for row in lows]
    choice = smallest_budgets(budget_R, lows, target)
    for attempt in range(RAISES + 1):
        schedule = measured.schedule(point, choice.budget_Z)
        digest = hashlib.sha256(json.dumps(choice.budget_Z).encode()).hexdigest()[:12]
        measured.console.status('measuring the schedule', f'{point.policy}, pages of {point.page_tokens}')
        tokens = measured.schedule_tokens(f'{point.policy}_page{point.page_tokens}_schedule_{digest}', schedule)
        found = statistics(tokens, m.bin_width_tokens, m.min_count)['bins']
        missed = [z for z, b in enumerate(found) if _low(b) < target and choice.budget_Z[z] < EVERY_PAGE]
        if not missed or attempt == RAISES:
            break
        choice = raised(choice, budget_R, missed)
    return dataclasses.replace(schedule, budget_pages=choice.budget_Z), choice, tokens, missed


def description(
    run: RunConfig, measured: Measured, choice: Choice, missed: list[int], found: dict[str, Any]
) -> dict[str, Any]:
    """What a schedule file says of where its budgets come from; the first four fields are what a run must share."""
    width, settings_ = run.mismatch.bin_width_tokens, measured.results.settings
    ranges = lambda bins: [[z * width, (z + 1) * width] for z in bins]
    return {
        'model': settings_['model'],
        'model_hash': settings_['model_hash'],
        'dtype': settings_['dtype'],
        'temperature': settings_['temperature'],
        'target_p05': run.calibrate.target_p05,
        'contexts': origin(run),
        'how': HOW[origin(run)],
        'tokens': measured.contexts.tokens,
        'sequences': len(measured.contexts),
        'measured_up_to_tokens': int(measured.contexts.measured_lengths().max()),
        'kernels': settings_['kernels'],
        'p05': [b['alpha']['p05'] if b['enough'] else None for b in found['bins']],
        'no_budget_suffices': ranges(choice.unmet),
        'misses_the_target': ranges(missed),
        'too_little_known': ranges(choice.unknown),
    }


def table(found: dict[str, Any]) -> list[str]:
    """For a person: p05 by length at every point, the floor above, the schedules below."""
    target = found['facts']['target_p05']
    lines = [f'p05 of alpha by cached length, with the interval of two standard errors; target {target:g}']
    bins = max((f['bins'] for f in found['points']), key=len)
    cell = lambda b: '-' if not b['enough'] else '{:.3f} [{:.3f} {:.3f}]'.format(*b['alpha']['p05'])
    row = lambda name, figures: f'{name:<32}' + ''.join(f'{cell(b):>23}' for b in figures['bins'])
    lines.append(f'{"":<32}' + ''.join(f'{b["from"]:>16,}-{b["to"]:<6,}' for b in bins))
    if found['dense_floor']:
        lines.append(row('dense sampler (floor)', found['dense_floor']))
    for f in found['points']:
        budget = 'every page' if f['every_page'] else f'{f["budget_tokens"]:,} tokens'
        lines.append(row(f'{f["policy"]}, page {f["page_tokens"]}, {budget}', f))
    for f in found['chosen']:
        lines.append(row(f'{f["policy"]}, page {f["page_tokens"]}, schedule', f))
    for f in found['chosen']:
        pages = ' '.join('all' if budget >= EVERY_PAGE else str(budget) for budget in f['budget_pages'])
        lines.append(f'{f["file"]}: {pages} pages, {f["kv_read_fraction"]:.1%} of the KV cache read')
        at = lambda z: f'{bins[z]["from"]:,}-{bins[z]["to"]:,}'
        for z in f['unmet_bins']:
            lines.append(f'  no measured budget holds {target:g} at {at(z)} cached tokens: every page is read there')
        for z in f['missed_bins']:
            lines.append(f'  the schedule as a whole misses {target:g} at {at(z)} cached tokens; give larger budgets')
        for z in f['unknown_bins']:
            lines.append(f'  too few tokens at {at(z)} cached tokens; its budget is that of a neighbour')
    return lines


def _low(figures: dict[str, Any]) -> float:
    """The lower bound of a bin's p05; NaN where too little is known."""
    return figures['alpha']['p05'][1] if figures['enough'] else math.nan


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _clock(seconds: float) -> str:
    return f'{int(seconds) // 60}:{int(seconds) % 60:02}'


if __name__ == '__main__':
    commands.run(calibrate)
