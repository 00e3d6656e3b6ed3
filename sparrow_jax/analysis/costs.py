"""What a target of p05 costs: page sizes, selection policies, and budgets by length.

Between measured budgets p05 is taken to be linear in the logarithm of the cost (`budget_search.crossing`). An interval
goes from what the upper bounds of p05 would cost to what the lower ones would. All points of a calibration are measured on
the same sequences, so that intervals which overlap may still be told apart; the reverse does not happen.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from sparrow_jax.analysis.inputs import Calibration, ClosedLoop, Group, Interval, Lacking, Swept
from sparrow_jax.sparsity.budget_search import crossing

NAN = float('nan')
LEAST_BINS = 3  # that a power law is fitted to
CERTAIN = 0.95  # of a fit's interval


def page_sizes(source: Calibration, targets: Sequence[float]) -> dict[str, Any]:
    """Cost curves of every page size, and which one reads least at each target."""
    policy = source.main[0]
    groups = {page: source.group(policy, page) for page in _distinct(source, 'page_tokens', 'policy', policy)}
    if len(groups) < 2:
        [page] = groups
        raise Lacking(f'has pages of {page} tokens alone; calibrate with several sizes in calibrate.page_tokens')
    return {'policy': policy, **_compared(source, groups, targets)}


def policies(source: Calibration, targets: Sequence[float]) -> dict[str, Any]:
    """What every selection policy reads at the same p05."""
    page = source.main[1]
    groups = {policy: source.group(policy, page) for policy in _distinct(source, 'policy', 'page_tokens', page)}
    if len(groups) < 2:
        raise Lacking(f'has the policy {next(iter(groups))} alone; calibrate with several in calibrate.policies')
    return {'page_tokens': page, **_compared(source, groups, targets)}


def policies_of_loop(source: ClosedLoop, targets: Sequence[float]) -> dict[str, Any]:
    """The same, from the best fixed schedules of a closed loop, at the targets that it had."""
    del targets
    if len(source.best) < 2:
        raise Lacking('has best schedules of fewer than two policies; run --part=policies of closed_loop')
    shared = sorted(set.intersection(*(set(targets) for targets in source.best.values())))
    if not shared:
        raise Lacking('has no target for which every policy has a best schedule')
    return {
        'page_tokens': source.page_tokens,
        'targets': {
            f'{target:g}': _least({name: [best[target], NAN, NAN] for name, best in source.best.items()})
            for target in shared
        },
    }


def budget_by_length(source: Calibration, targets: Sequence[float]) -> dict[str, Any]:
    """The budget that each length needs for each target, with a power law through them.

    budget = factor * length^exponent, least squares in logarithms over the bins whose budget lies between measured ones;
    and at each length budget ~ (1 - p05)^-eta, between the outermost targets found there.
    """
    group, lengths = source.main_group, source.lengths
    if len(group) < 2:
        raise Lacking('has a single budget; calibrate with several in calibrate.budget_tokens')
    budget = lambda swept, _: float(swept.point.budget_tokens)
    found: dict[str, Any] = {}
    for target in targets:
        rows = []
        for z in _bins(group):
            value, low, high = at_target(group, z, target, budget)
            rows.append({'bin': z, 'length': lengths[z], 'budget_tokens': [value, low, high], 'why_not': _why(value)})
        found[f'{target:g}'] = {'bins': rows, **_power_law([(r['length'], r['budget_tokens'][0]) for r in rows])}
    if not any(math.isfinite(r['budget_tokens'][0]) for one in found.values() for r in one['bins']):
        raise Lacking('no target lies between measured budgets at any length; measure others, or give --targets')
    return {
        'policy': source.main[0],
        'page_tokens': source.main[1],
        'reserved_pages_counted': False,
        'measured_budgets': [swept.point.budget_tokens for swept in group],
        'targets': found,
        'eta': _etas(found, targets),
    }


def at_target(group: Group, z: int, target: float, cost: Any) -> Interval:
    """What a target costs in a length bin, with its interval.

    Args:
        group: budgets, ascending. cost: called with a point and the bin.

    Returns:
        Minus infinity where the smallest budget reaches the target, NaN where the largest misses it.
    """
    there = [swept for swept in group if z in swept.bins]
    costs = np.asarray([cost(swept, z) for swept in there])
    curve = lambda i: np.asarray([swept.bins[z].alpha.p05[i] for swept in there])
    value, high, low = (crossing(costs, curve(i), target) for i in range(3))
    return value, low, high


def _compared(source: Calibration, groups: Mapping[Any, Group], targets: Sequence[float]) -> dict[str, Any]:
    lengths, dense = source.lengths, source.dense_bytes
    share = lambda swept, z: swept.bins[z].bytes / (dense * lengths[z])
    curves = [
        {
            'of': name,
            'points': [
                {
                    'budget_tokens': swept.point.budget_tokens,
                    'share': swept.share,
                    'p05': swept.all.alpha.p05,
                    'bins': [
                        {
                            'bin': z,
                            'from': part.low,
                            'to': part.high,
                            'share': share(swept, z),
                            'bytes': part.bytes,
                            'p05': part.alpha.p05,
                        }
                        for z, part in swept.bins.items()
                        if z in lengths
                    ],
                }
                for swept in group
            ],
        }
        for name, group in groups.items()
    ]
    found = {}
    bins = [z for z in _bins(source.main_group) if all(z in _bins(group) for group in groups.values())]
    for target in targets:
        costs = {name: {z: at_target(group, z, target, share) for z in bins} for name, group in groups.items()}
        known = [z for z in bins if all(math.isfinite(costs[name][z][0]) for name in groups)]
        # Every bin counts with what a dense sampler reads there.
        weight = {z: source.main_group[0].bins[z].tokens * lengths[z] for z in known}
        total = sum(weight.values())
        whole = {
            name: [sum(weight[z] * costs[name][z][i] for z in known) / total if known else NAN for i in range(3)]
            for name in groups
        }
        found[f'{target:g}'] = {
            **_least(whole),
            'bins_counted': known,
            'bins_in_which_all_or_some_lie_outside_the_measured_budgets': [z for z in bins if z not in known],
            'least_by_bin': {z: min(groups, key=lambda name: costs[name][z][0]) for z in known},
        }
    return {'curves': curves, 'targets': found}


def _least(shares: Mapping[Any, Sequence[float]]) -> dict[str, Any]:
    """Which reads least, and which others are not certain to read more: intervals that touch, or are unknown."""
    rows = [{'of': name, 'share': [v if math.isfinite(v) else NAN for v in share]} for name, share in shares.items()]
    known = sorted((row for row in rows if math.isfinite(row['share'][0])), key=lambda row: row['share'][0])
    if not known:
        return {'shares': rows, 'least': None, 'not_told_apart_from_it': []}
    best, *others = known
    near = [row['of'] for row in others if not row['share'][1] > best['share'][2]]
    return {'shares': rows, 'least': best['of'], 'not_told_apart_from_it': near}


def _power_law(points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    known = [(length, budget) for length, budget in points if math.isfinite(budget)]
    if len(known) < LEAST_BINS:
        return {'exponent': [NAN, NAN, NAN], 'factor': NAN, 'bins_fitted': len(known)}
    fit = stats.linregress(*np.log(known).T)
    half = float(stats.t.ppf((1 + CERTAIN) / 2, len(known) - 2) * fit.stderr)
    return {
        'exponent': [float(fit.slope), float(fit.slope - half), float(fit.slope + half)],
        'factor': float(np.exp(fit.intercept)),
        'bins_fitted': len(known),
    }


def _etas(found: Mapping[str, Any], targets: Sequence[float]) -> list[dict[str, Any]]:
    etas = []
    for rows in zip(*(found[f'{target:g}']['bins'] for target in targets), strict=True):
        known = [
            (t, r['budget_tokens'][0])
            for t, r in zip(targets, rows, strict=True)
            if math.isfinite(r['budget_tokens'][0])
        ]
        if len(known) > 1:
            (low, small), (high, large) = known[0], known[-1]
            eta = math.log(large / small) / math.log((1 - low) / (1 - high))
            etas.append({'bin': rows[0]['bin'], 'length': rows[0]['length'], 'eta': eta, 'between': [low, high]})
    return etas


def _why(value: float) -> str | None:
    if math.isfinite(value):
        return None
    return 'the largest measured budget misses it' if math.isnan(value) else 'the smallest measured budget reaches it'


def _bins(group: Group) -> list[int]:
    return sorted(set(itertools.chain.from_iterable(swept.bins for swept in group)))


def _distinct(source: Calibration, name: str, other: str, value: Any) -> list[Any]:
    """Values of a field of the points that have a given other one, every-page points aside."""
    points: list[Swept] = [swept for swept in source.swept if not swept.every_page]
    return list(dict.fromkeys(getattr(s.point, name) for s in points if getattr(s.point, other) == value))
