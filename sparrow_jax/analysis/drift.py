"""Does p05 at a fixed budget move while a policy is trained? Numbers of the picture, from a run's logs."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from sparrow_jax.analysis.alphas import SHOWN_CELLS
from sparrow_jax.analysis.inputs import Lacking
from sparrow_jax.report.logs import Run, histogram_of
from sparrow_jax.run_outcomes import arm_of
from sparrow_jax.sparsity.tail import CELLS, gap_edges

FIXED = ('fixed', 'published', 'file')  # kinds of schedules whose budgets stay
LEAST_STEPS = 6  # with a p05, for a slope
CERTAIN = 0.95  # that no bin of a run that does not drift is said to
PART = 4  # first and last quarter of the steps, whose distributions are laid over each other
_BIN = re.compile(r'sparse/alpha_p05/bin_(\d+)_(\d+)')


def training(source: Run, targets: Sequence[float]) -> dict[str, Any]:
    """p05 of each length bin over the steps, with the slope of a straight line through it.

    Steps have prompts of their own, so that their errors count as independent. With B bins the interval of a slope is
    that of 1 - 0.05 / B: all of them hold together with 95%.

    Raises:
        Lacking: budgets that moved, a sampler that was trained, too few steps.
    """
    del targets
    kind = source.setting('schedule.kind')
    if kind not in FIXED:
        raise Lacking(f'has schedule.kind={kind!r}, not a fixed budget ({", ".join(FIXED)})')
    if source.setting('distill.enabled'):
        raise Lacking('trained an adapter of its sampler (distill.enabled), so that p05 moves by itself')
    steps, acted = source.values('guard/acted')
    if acted.any():
        raise Lacking(f'changed its budgets at step {steps[acted > 0][0]} (guard.action)')
    series = {
        tuple(map(int, match.groups())): source.values(name)
        for name in source.metrics
        if (match := _BIN.fullmatch(name))
    }
    long = {edges: values for edges, values in sorted(series.items()) if len(values[0]) >= LEAST_STEPS}
    if not long:
        raise Lacking(f'has no length bin with p05 in at least {LEAST_STEPS} steps')
    certain = 1 - (1 - CERTAIN) / len(long)
    bins = [{'from': low, 'to': high, **_slope(*values, certain)} for (low, high), values in long.items()]
    drifting = [one for one in bins if not one['slope'][1] <= 0 <= one['slope'][2]]
    return {
        'schedule': arm_of(source),
        'page_tokens': source.setting('rollout.page_tokens'),
        'model': source.setting('model.path'),
        'steps': int(source.steps[-1]),
        'bins': bins,
        'bins_with_too_few_steps': [list(edges) for edges in sorted(series) if edges not in long],
        'all_lengths': _slope(*source.values('sparse/alpha_p05'), CERTAIN),
        'drifts': bool(drifting),
        'says': _sentence(bins, drifting),
        'distribution': _distributions(source),
    }


def _slope(steps: np.ndarray, values: np.ndarray, certain: float) -> dict[str, Any]:
    fit = stats.linregress(steps.astype(float), values)
    half = stats.t.ppf((1 + certain) / 2, len(steps) - 2) * fit.stderr
    slope = [float(fit.slope), float(fit.slope - half), float(fit.slope + half)]
    run = float(steps[-1] - steps[0])
    return {
        'steps': steps.tolist(),
        'p05': values.tolist(),
        'slope': slope,
        'intercept': float(fit.intercept),
        'change': [run * one for one in slope],
        'certain': certain,
    }


def _sentence(bins: Sequence[dict[str, Any]], drifting: Sequence[dict[str, Any]]) -> str:
    said = lambda one: '{:+.3f} ({:+.3f} to {:+.3f}) at {:,} to {:,}'.format(*one['change'], one['from'], one['to'])
    if drifting:
        return f'p05 drifts over the run, in {len(drifting)} of {len(bins)} bins: {"; ".join(map(said, drifting))}'
    widest = max(bins, key=lambda one: one['change'][2] - one['change'][1])
    return f'no bin of {len(bins)} drifts beyond its noise; the least certain change over the run is {said(widest)}'


def _distributions(source: Run) -> dict[str, Any] | None:
    """Of 1 - alpha, over the first and the last steps; None without readable histograms."""
    rows = [
        (step, counts)
        for step in source.histograms.begins
        for row in source.histograms.rows(step, 1)
        if (counts := histogram_of(row)) is not None and counts.sum()
    ]
    number = len(rows) // PART
    if not number:
        return None
    found: dict[str, Any] = {'gap_edges': gap_edges()[::SHOWN_CELLS].tolist()}
    for name, some in (('first', rows[:number]), ('last', rows[-number:])):
        counts_X = np.sum([counts for _, counts in some], axis=0)
        shown = counts_X.reshape(CELLS // SHOWN_CELLS, SHOWN_CELLS).sum(axis=1) / counts_X.sum()
        found[name] = {'steps': [some[0][0], some[-1][0]], 'share_of_tokens': shown.tolist()}
    return found
