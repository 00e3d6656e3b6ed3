"""How alpha is distributed: numbers of the pictures about skew, length, the top-20 estimate and the floor.

Each function takes a calibration and returns what a JSON file may hold. Intervals are [value, low, high], as
`calibration.json` has them: two standard errors over sequences.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from sparrow_jax.analysis.inputs import Calibration, Described, Interval, Lacking, Part, Swept
from sparrow_jax.sparsity.tail import CELLS, LEAST_GAP, TAIL_CELLS, gap_edges

SHOWN_CELLS = 8  # of a histogram in one of a picture
JOINT_CELLS = 16  # of exact alpha, under the top-20 estimate
LEAST_OF_CELL = 50  # tokens, below which a quantile of a cell is noise
BAND = (5, 50, 95)  # percentiles of the estimate at a given exact alpha


def skew(source: Calibration, targets: Sequence[float]) -> dict[str, Any]:
    """The distribution of 1 - alpha at every budget, and how far its mean and its p05 move over the budgets."""
    del targets
    rows = [_skew_of(swept) for swept in source.main_group]
    if source.every_page:
        rows.append(_skew_of(source.every_page))
    swept = source.main_group
    spans = {name: float(np.ptp([getattr(s.all.alpha, name)[0] for s in swept])) for name in ('mean', 'p05')}
    return {
        **_which(source),
        'gap_edges': gap_edges()[::SHOWN_CELLS].tolist(),
        'budgets': rows,
        'span_over_budgets': spans,
        'p05_span_over_mean_span': spans['p05'] / spans['mean'] if spans['mean'] else float('nan'),
    }


def by_length(source: Calibration, targets: Sequence[float]) -> dict[str, Any]:
    """p05 by cached length at every budget, and how strongly alpha and p05 hang on length."""
    lines: list[dict[str, Any]] = []
    for swept in [*source.main_group, *filter(None, [source.every_page])]:
        tokens = source.tokens(swept)
        lines.append(
            {
                'budget_tokens': swept.point.budget_tokens or None,
                'bins': [_bin(z, part, part.alpha.p05) for z, part in swept.bins.items()],
                'correlation_of_alpha_with_length': _correlation(tokens['length'], tokens['alpha']),
            }
        )
    sparse = [line for line in lines if line['budget_tokens']]
    bins = [b for line in sparse for b in line['bins'] if b['bin'] in source.lengths]
    pairs = [(source.lengths[b['bin']], b['p05'][0]) for b in bins]
    pooled = [source.tokens(swept) for swept in source.main_group]
    return {
        **_which(source),
        'targets': list(targets),
        'mean_length_of_bins': source.lengths,
        'budgets': lines,
        'floor': _floor_bins(source, 'p05'),
        'over_all_budgets': {
            'correlation_of_alpha_with_length': _correlation(*(_joined(pooled, name) for name in ('length', 'alpha'))),
            'correlation_of_bin_p05_with_length': _correlation(*np.asarray(pairs).T),
        },
    }


def top20(source: Calibration, targets: Sequence[float]) -> dict[str, Any]:
    """Exact alpha beside the estimate from 20 tokens: over budgets, by length, and at given exact alphas."""
    del targets
    group = source.main_group
    rows: list[dict[str, Any]] = [
        {
            'budget_tokens': swept.point.budget_tokens,
            'alpha_p05': swept.all.alpha.p05,
            'alpha_mean': swept.all.alpha.mean,
            'top20_p05': swept.all.top20.p05,
            'top20_mean': swept.all.top20.mean,
            'p05_difference_by_bin': _differences(source, swept.bins),
        }
        for swept in group
    ]
    pooled = [source.tokens(swept) for swept in group]
    exact, estimate = _joined(pooled, 'alpha'), _joined(pooled, 'top20')
    floor = None
    if source.floor:
        whole, bins = source.floor
        floor = {
            'alpha_p05': whole.alpha.p05,
            'top20_p05': whole.top20.p05,
            'first_bin_alpha_p05': bins[min(bins)].alpha.p05 if bins else None,
            'first_bin_top20_p05': bins[min(bins)].top20.p05 if bins else None,
            'p05_difference_by_bin': _differences(source, bins),
        }
    p05s = [[row[f'{kind}_p05'][0] for row in rows] for kind in ('alpha', 'top20')]
    return {
        **_which(source),
        'budgets': rows,
        'floor': floor,
        'rank_correlation_over_budgets': float(stats.spearmanr(*p05s).statistic) if len(rows) > 2 else float('nan'),
        'share_of_tokens_above_exact': float(np.mean(estimate > exact)),
        'at_exact_alpha': _joint(exact, estimate),
    }


def floor(source: Calibration, targets: Sequence[float]) -> dict[str, Any]:
    """What numbers alone cost: the dense sampler, and a pass over every page, against the dense pass."""
    every = source.every_page
    kinds: dict[str, tuple[Part, Mapping[int, Part]]] = {}
    if source.floor:
        kinds['dense sampler'] = source.floor
    if every:
        kinds['pass over every page'] = every.all, every.bins
    if not kinds:
        raise Lacking('neither a dense sampler nor a pass over every page was measured')
    found: dict[str, Any] = {}
    for name, (whole, bins) in kinds.items():
        below = 1 - whole.alpha.p05[0]
        found[name] = {
            'alpha_p05': whole.alpha.p05,
            'alpha_mean': whole.alpha.mean,
            'top20_p05': whole.top20.p05,
            'lost_of_p05': below,
            'share_of_what_a_target_allows': {f'{t:g}': below / (1 - t) for t in targets},
            'bins': [
                {**_bin(z, part, part.alpha.p05), 'mean': part.alpha.mean, 'top20_p05': part.top20.p05}
                for z, part in bins.items()
            ],
        }
    return {**_which(source), 'device': str(source.facts.get('device', '')), 'floors': found}


def share_above(described: Described) -> float:
    """Of the tokens, whose alpha is above `TAIL_TOP`."""
    return float(described.counts_X[: CELLS - TAIL_CELLS].sum() / described.counts_X.sum())


def _skew_of(swept: Swept) -> dict[str, Any]:
    alpha, counts_X = swept.all.alpha, swept.all.alpha.counts_X
    shown = counts_X.reshape(-1, SHOWN_CELLS).sum(axis=1) / counts_X.sum()
    return {
        'budget_tokens': swept.point.budget_tokens or None,
        'mean': alpha.mean,
        'p01': alpha.p01,
        'p05': alpha.p05,
        'p10': alpha.p10,
        'share_above_0.999': share_above(alpha),
        'tail': None
        if alpha.beta is None
        else {'a': alpha.beta.a, 'b': alpha.beta.b, 'ks': alpha.beta.ks, 'variance': _tail_variance(counts_X)},
        'share_of_tokens': shown.tolist(),
    }


def _tail_variance(counts_X: np.ndarray) -> float:
    """Of alpha among the tokens below `TAIL_TOP`, from the middles of the cells."""
    edges = gap_edges()
    gap, tail = ((edges[1:] + edges[:-1]) / 2)[CELLS - TAIL_CELLS :], counts_X[CELLS - TAIL_CELLS :]
    return float(np.average((gap - np.average(gap, weights=tail)) ** 2, weights=tail))


def _differences(source: Calibration, bins: Mapping[int, Part]) -> list[dict[str, Any]]:
    """How far the estimate's p05 lies below the exact one."""
    of = lambda part: part.alpha.p05[0] - part.top20.p05[0]
    return [{'bin': z, 'length': source.lengths.get(z), 'difference': of(part)} for z, part in bins.items()]


def _joint(exact: np.ndarray, estimate: np.ndarray) -> list[dict[str, Any]]:
    edges = np.concatenate([[0], LEAST_GAP ** (1 - np.arange(1, JOINT_CELLS + 1) / JOINT_CELLS)])
    cell = np.clip(np.searchsorted(edges, 1 - exact.astype(np.float64), side='right') - 1, 0, JOINT_CELLS - 1)
    found = []
    for x in range(JOINT_CELLS):
        inside = estimate[cell == x]
        if inside.size >= LEAST_OF_CELL:
            gap = float(np.median(1 - exact[cell == x].astype(np.float64)))
            low, middle, high = (1 - np.percentile(inside, BAND)).tolist()
            found.append({'gap_exact': gap, 'gap_top20': [middle, high, low], 'tokens': int(inside.size)})
    return found


def _floor_bins(source: Calibration, name: str) -> list[dict[str, Any]]:
    if not source.floor:
        return []
    return [_bin(z, part, getattr(part.alpha, name)) for z, part in source.floor[1].items()]


def _bin(number: int, part: Part, p05: Interval) -> dict[str, Any]:
    return {'bin': number, 'from': part.low, 'to': part.high, 'tokens': part.tokens, 'p05': list(p05)}


def _which(source: Calibration) -> dict[str, Any]:
    return {'policy': source.main[0], 'page_tokens': source.main[1], 'model': source.facts.get('model')}


def _joined(parts: Sequence[Mapping[str, np.ndarray]], name: str) -> np.ndarray:
    return np.concatenate([part[name] for part in parts])


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    if len(one) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return float('nan')
    return float(np.corrcoef(one.astype(np.float64), other.astype(np.float64))[0, 1])
