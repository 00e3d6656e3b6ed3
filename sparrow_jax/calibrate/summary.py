"""What a calibration comes to: the content of its files, and lines for a person."""

import dataclasses
import hashlib
import json
import math
import shlex
import sys
from typing import Any

import jax
import jax.numpy as jnp

from sparrow_jax.assembly import Parts
from sparrow_jax.calibrate.measured import Measured
from sparrow_jax.calibrate.results import HOW, SCHEDULE, SCHEDULES, Point, origin
from sparrow_jax.config import RunConfig
from sparrow_jax.sparsity.calibration import Choice, Tokens, bin_tails, raised, smallest_budgets, statistics
from sparrow_jax.sparsity.cost import kv_bytes_per_token, kv_read_fraction, pages_read
from sparrow_jax.sparsity.schedules import CALIBRATION_FIELD, EVERY_PAGE, Schedule, to_file

RAISES = 3  # of a schedule that misses its target as a whole


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
            'value_bytes': jnp.dtype(run.model.compute_dtype).itemsize,
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
        tails = bin_tails(tokens, m.bin_width_tokens, m.min_count)
        missed = [z for z, tail in enumerate(tails) if tail is not None and tail.low < target]
        # Where every page is read already, it is the keys that shorter, sparse lengths have left behind.
        sparse = [z for z, budget in enumerate(choice.budget_Z) if budget < EVERY_PAGE]
        raisable = {max(z for z in sparse if z <= bin_) for bin_ in missed if sparse and sparse[0] <= bin_}
        if not raisable or attempt == RAISES:
            break
        choice = raised(choice, budget_R, sorted(raisable))
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
    floor = found['dense_floor'] or next(f for f in found['points'] if f['every_page'])
    for b in floor['bins']:
        if b['enough'] and b['alpha']['p05'][0] < target:
            lines.append(
                f'  {target:g} is above the floor at {b["from"]:,}-{b["to"]:,} cached tokens: numerical differences '
                f'alone cost as much; set calibrate.target_p05 below {b["alpha"]["p05"][0]:.3f}'
            )
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
