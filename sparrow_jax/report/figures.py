"""From a run's logs to the numbers that a page draws: plain lists and mappings, ready for JSON."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparrow_jax.report.logs import Run, histogram_of
from sparrow_jax.sparsity.tail import CELLS, TAIL_TOP, fit_beta_tail, gap_edges

RECENT = 10  # measured steps that "lately" means
TAIL_BARS = 20  # of the tail's histogram
SAMPLED_STEPS = 12  # of each run, whose answers are shown
SAMPLES_A_STEP = 8  # of all runs together
PROMPT_CHARACTERS = 2000
COMPLETION_CHARACTERS = 4000
_TOLD_STEPS = 8  # that are named one by one

P05_BIN = re.compile(r'sparse/alpha_p05/bin_(\d+)_(\d+)$')
BUDGET_BIN = re.compile(r'sparse/budget_pages/bin_(\d+)_(\d+)$')


def figures(runs: Sequence[Run], points: int, sampled_steps: int = SAMPLED_STEPS) -> dict[str, Any]:
    """Everything that is drawn.

    Args:
        points: of each curve at most; a longer one is drawn as means over as many steps as it takes, the same for all.
        sampled_steps: of each run whose answers are shown.
    """
    longest = max(int(run.steps[-1] - run.steps[0]) + 1 for run in runs)
    width = -(-longest // points)
    answers = -(-SAMPLES_A_STEP // len(runs))
    return {'width': width, 'runs': [_run_figures(run, width, sampled_steps, answers) for run in runs]}


def _run_figures(run: Run, width: int, sampled_steps: int, answers: int) -> dict[str, Any]:
    # The buckets' steps are shared by all curves; one whose metrics are rare has gaps.
    bucket = run.steps // width
    first = np.concatenate([[True], bucket[1:] != bucket[:-1]])
    starts = np.flatnonzero(first)
    ends = np.concatenate([starts[1:], [len(run.steps)]]) - 1
    return {
        'name': run.name,
        'target': _number(run.setting('controller.target_p05')),
        'correct': _number(run.setting('reward.correct_threshold')),
        'steps': [[int(run.steps[a]), int(run.steps[b])] for a, b in zip(starts, ends, strict=True)],
        'series': {name: _curve(name, values, starts, width) for name, values in sorted(run.metrics.items())},
        'lengths': by_length(run),
        'budgets': [[low, high, name] for low, high, name in bins(run, BUDGET_BIN)],
        'alpha': alpha_figures(run),
        'evaluations': evaluations(run),
        'samples': samples(run, sampled_steps, answers),
    }


def _curve(name: str, values: np.ndarray, starts: np.ndarray, width: int) -> dict[str, list[float | None]]:
    """Mean of each bucket and, where one holds several steps, the least and the greatest in it."""
    if width > 1 and name.startswith('timing_s/'):
        values = np.nan_to_num(values)  # what a step did not do took it no time: else a rare evaluation would look long
    there = np.isfinite(values)
    count = np.add.reduceat(there.astype(int), starts)
    total = np.add.reduceat(np.where(there, values, 0), starts)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    if width == 1:
        return {'v': _short(mean)}
    low = np.minimum.reduceat(np.where(there, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(there, values, -np.inf), starts)
    return {'v': _short(mean), 'lo': _short(low), 'hi': _short(high)}


def bins(run: Run, pattern: re.Pattern[str]) -> list[tuple[int, int, str]]:
    """Low and high end, in tokens, and name of the metrics of length bins, ascending."""
    found = ((match, name) for name in run.metrics if (match := pattern.match(name)))
    return sorted((int(match[1]), int(match[2]), name) for match, name in found)


def by_length(run: Run) -> dict[str, Any] | None:
    """p05 of each length bin, as a mean over the first and over the last measured steps."""
    named = bins(run, P05_BIN)
    if not named:
        return None
    table = np.stack([run.metrics[name] for _, _, name in named])
    measured = np.flatnonzero(np.isfinite(table).any(axis=0))
    if not measured.size:
        return None
    count = min(RECENT, -(-len(measured) // 2))

    def mean(chosen: np.ndarray) -> list[float | None]:
        part = table[:, chosen]
        there = np.isfinite(part)
        return _short(np.where(there, part, 0).sum(axis=1) / np.where(there.any(axis=1), there.sum(axis=1), np.nan))

    first, last = measured[:count], measured[-count:]
    return {
        'bins': [[low, high] for low, high, _ in named],
        'first': mean(first) if len(measured) > 1 else None,
        'first_steps': [int(run.steps[first[0]]), int(run.steps[first[-1]])],
        'last': mean(last),
        'last_steps': [int(run.steps[last[0]]), int(run.steps[last[-1]])],
    }


def alpha_figures(run: Run) -> dict[str, Any] | None:
    """The distribution of alpha over the last measured steps, and the Beta distribution of its tail."""
    counts_X, steps = np.zeros(CELLS, np.int64), []
    for step in list(run.histograms.begins)[-RECENT:]:
        for row in run.histograms.rows(step, 1):
            tokens_X = histogram_of(row)
            if tokens_X is not None:
                counts_X += tokens_X
                steps.append(step)
    tokens = int(counts_X.sum())
    if not tokens:
        return None
    gap = gap_edges()
    further_X = np.cumsum(counts_X[::-1])[::-1] / tokens  # tokens at least as far from 1 as a cell's nearer edge
    shown = slice(None, None, 4)
    edges = np.linspace(0, TAIL_TOP, TAIL_BARS + 1)
    fit = fit_beta_tail(counts_X)
    return {
        'steps': [steps[0], steps[-1]],
        'tokens': tokens,
        'gap': _short(gap[:-1][shown]),
        'further': _short(further_X[shown]),
        'edges': _short(edges),
        'bars': _short(_tail_bars(counts_X, edges)),
        'fit': None if fit is None else _short(np.diff(fit.cdf(edges))),
        'a': None if fit is None else _one(fit.a),
        'b': None if fit is None else _one(fit.b),
        'ks': None if fit is None else _one(fit.ks),
        'share': _one(float((counts_X[CELLS // 2 :]).sum() / tokens)),
    }


def _tail_bars(counts_X: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Share of the tail's tokens between edges in alpha, each cell's being spread evenly over it."""
    alpha = 1 - gap_edges()[::-1]
    below = np.concatenate([[0], np.cumsum(counts_X[::-1])])
    reached = np.interp(edges, alpha, below)
    return np.diff(reached) / max(reached[-1], 1)


def samples(run: Run, most_steps: int, of_step: int) -> list[dict[str, Any]]:
    """At most so many answers of each of some steps, which spread evenly from the first to the last."""
    steps = sorted(run.samples.begins)
    places = np.unique(np.linspace(0, len(steps) - 1, min(most_steps, len(steps))).round().astype(int))
    shown = []
    for step in (steps[i] for i in places):
        for row in run.samples.rows(step, of_step):
            shown.append(
                {
                    'step': step,
                    'prompt': _cut(row.get('prompt'), PROMPT_CHARACTERS),
                    'completion': _cut(row.get('completion'), COMPLETION_CHARACTERS),
                    'answer': _cut(row.get('answer'), PROMPT_CHARACTERS),
                    'reward': _number(row.get('reward')),
                    'finish_reason': _cut(row.get('finish_reason'), PROMPT_CHARACTERS),
                    'tokens': _number(row.get('tokens')),
                }
            )
    return shown


def evaluations(run: Run) -> list[dict[str, Any]]:
    """What the evaluate command found: step, sampler, accuracy and its standard error."""
    found = []
    for row in run.evaluations:
        sampler = str(row.get('sampler'))
        accuracy, error = (_number(row.get(f'{sampler}/accuracy{end}')) for end in ('', '_stderr'))
        if accuracy is not None:
            found.append({'step': row['step'], 'sampler': sampler, 'accuracy': accuracy, 'stderr': error or 0.0})
    return found


def recent(run: Run, name: str, count: int = RECENT) -> float | None:
    """Mean of a metric over the last steps that have it; None where none has."""
    values = run.values(name)[1][-count:]
    return float(values.mean()) if values.size else None


def last(run: Run, name: str) -> float | None:
    values = run.values(name)[1]
    return float(values[-1]) if values.size else None


def told_steps(steps: Sequence[int]) -> str:
    """'step 3', 'steps 3, 8 and 11', or some of them."""
    if len(steps) > _TOLD_STEPS:
        return f'steps {steps[0]:,}, {steps[1]:,}, … {steps[-1]:,} ({len(steps)} times)'
    named = [f'{step:,}' for step in steps]
    return f'steps {", ".join(named[:-1])} and {named[-1]}' if len(named) > 1 else f'step {named[0]}'


def _cut(value: Any, most: int) -> str:
    """The text's beginning and end."""
    text = '' if value is None else str(value)
    if len(text) > most:
        head = most * 2 // 3
        text = f'{text[:head]}\n… {len(text) - most:,} characters left out …\n{text[head - most :]}'
    return text


def _number(value: Any) -> float | None:
    return _one(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _one(number: float) -> float | None:
    return float(f'{number:.6g}') if math.isfinite(number) else None


def _short(numbers: np.ndarray) -> list[float | None]:
    """Six digits, which no eye tells from all of them; None for what is not finite."""
    return [_one(number) for number in numbers.tolist()]
