"""What a target of p05 costs: page sizes, selection policies, and budgets by length.

Between measured budgets p05 is taken to be linear in the logarithm of the cost (`budget_search.crossing`). The interval
of a budget goes from what the upper bounds of p05 would cost to what the lower ones would. Where page sizes or policies
are compared, intervals come from drawing sequences with replacement: all were measured on the same ones, so that their
ratios are known better than each by itself.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from sparrow_jax.analysis.inputs import Calibration, ClosedLoop, Group, Interval, Lacking, Swept
from sparrow_jax.sparsity.budget_search import crossing
from sparrow_jax.sparsity.mismatch import TAIL

NAN = float('nan')
LEAST_BINS = 3  # that a power law is fitted to
CERTAIN = 0.95  # of a fit's interval
DRAWS = 200  # of sequences
DRAWN = (2.5, 97.5)  # percentiles over them


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
            f'{target:g}': _side_by_side(
                {name: best[target] for name, best in source.best.items()}, dict.fromkeys(source.best)
            )
            for target in shared
        },
    }


def budget_by_length(source: Calibration, targets: Sequence[float]) -> dict[str, Any]:
    """The budget that each length needs for each target, with a power law through them.

    budget = factor * length^exponent, least squares in logarithms over the bins whose budget lies between measured
    ones; and at each length budget ~ (1 - p05)^-eta, between two targets.
    """
    group, lengths = source.main_group, source.lengths
    if len(group) < 2:
        raise Lacking('has a single budget; calibrate with several in calibrate.budget_tokens')
    budget = lambda swept, _: float(swept.point.budget_tokens)
    found: dict[str, Any] = {}
    for target in targets:
        rows: list[dict[str, Any]] = []
        for z in sorted(lengths):
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
    of_bin = lambda swept, z, part: {
        'bin': z,
        'from': part.low,
        'to': part.high,
        'share': share(swept, z),
        'bytes': part.bytes,
        'p05': part.alpha.p05,
    }
    of_point = lambda swept: {
        'budget_tokens': swept.point.budget_tokens,
        'share': swept.share,
        'p05': swept.all.alpha.p05,
        'bins': [of_bin(swept, z, part) for z, part in swept.bins.items() if z in lengths],
    }
    curves = [{'of': name, 'points': list(map(of_point, group))} for name, group in groups.items()]
    found = {}
    bins = [z for z in lengths if all(any(z in swept.bins for swept in group) for group in groups.values())]
    tails = {name: [_drawn_tails(source, swept, bins) for swept in group] for name, group in groups.items()}
    for target in targets:
        costs = {name: {z: at_target(group, z, target, share)[0] for z in bins} for name, group in groups.items()}
        known = [z for z in bins if all(math.isfinite(costs[name][z]) for name in groups)]
        # Every bin counts with what a dense sampler reads there.
        weight_Z = np.asarray([source.main_group[0].bins[z].tokens * lengths[z] for z in known])
        weight_Z = weight_Z / weight_Z.sum() if known else weight_Z
        value = {name: float(weight_Z @ [costs[name][z] for z in known]) if known else NAN for name in groups}
        drawn = {
            name: weight_Z @ [_drawn_costs(group, z, target, share, tails[name]) for z in known] if known else None
            for name, group in groups.items()
        }
        found[f'{target:g}'] = {
            **_side_by_side(value, drawn),
            'bins_counted': known,
            'bins_measured': len(bins),
            'bins_outside_the_measured_budgets_of_some': [z for z in bins if z not in known],
            'least_by_bin': {z: min(groups, key=lambda name: costs[name][z]) for z in known},
        }
    return {'curves': curves, 'targets': found}


def _drawn_tails(source: Calibration, swept: Swept, bins: Sequence[int]) -> dict[int, np.ndarray]:
    """p05 of a point in each bin, float [DRAWS], over sequences drawn with replacement: for all points the same."""
    tokens, width = source.tokens(swept), source.bin_width_tokens
    ids = np.unique(tokens['sequence'])
    counts_DS = np.zeros((DRAWS, int(ids.max()) + 1), np.int64)
    counts_DS[:, ids] = np.random.default_rng(0).multinomial(len(ids), np.full(len(ids), 1 / len(ids)), DRAWS)
    bin_ = tokens['length'] // width
    found = {}
    for z in filter(swept.bins.__contains__, bins):
        alpha, sequence = tokens['alpha'][bin_ == z], tokens['sequence'][bin_ == z]
        order = np.argsort(alpha)
        below_DN = np.cumsum(counts_DS[:, sequence[order]], axis=1)
        # The rule "lower", as in `lower_quantile`.
        first_D = (below_DN > TAIL * (below_DN[:, -1:] - 1)).argmax(axis=1)
        found[z] = alpha[order][first_D]
    return found


def _drawn_costs(
    group: Group, z: int, target: float, cost: Any, tails: Sequence[Mapping[int, np.ndarray]]
) -> list[float]:
    """What a target costs in a bin, over the draws; the smallest or the largest measured cost where it lies outside."""
    there = [i for i, swept in enumerate(group) if z in swept.bins]
    cost_R = np.asarray([cost(group[i], z) for i in there])
    found = [crossing(cost_R, p05_R, target) for p05_R in np.stack([tails[i][z] for i in there], axis=1)]
    return [float(cost_R[-1]) if math.isnan(c) else max(c, float(cost_R[0])) for c in found]


def _side_by_side(value: Mapping[Any, float], drawn: Mapping[Any, np.ndarray | None]) -> dict[str, Any]:
    """The share that each reads, and the ratio of every two, with intervals where there are draws."""

    def interval(middle: float, draws: np.ndarray | None) -> Interval:
        low, high = (NAN, NAN) if draws is None else np.percentile(draws, DRAWN).tolist()
        return middle, low, high

    def ratio(a: Any, b: Any) -> Interval:
        of, to = drawn[a], drawn[b]
        return interval(value[a] / value[b], None if of is None or to is None else of / to)

    pairs = [(a, b) for a, b in itertools.permutations(value, 2) if math.isfinite(value[a] + value[b])]
    return {
        'shares': [{'of': name, 'share': interval(value[name], drawn[name])} for name in value],
        'ratios': [{'of': a, 'to': b, 'ratio': ratio(a, b)} for a, b in pairs],
        'least': min(value, key=lambda name: value[name]) if pairs else None,
    }


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
    """Between the same two targets at every length: the outermost that lie between measured budgets in enough bins."""
    budgets = {t: {r['bin']: r['budget_tokens'][0] for r in found[f'{t:g}']['bins']} for t in targets}
    known = [t for t in targets if sum(map(math.isfinite, budgets[t].values())) >= LEAST_BINS]
    if len(known) < 2:
        return []
    low, high = known[0], known[-1]
    etas = []
    for row in found[f'{low:g}']['bins']:
        small, large = budgets[low][row['bin']], budgets[high][row['bin']]
        if math.isfinite(small) and math.isfinite(large):
            eta = math.log(large / small) / math.log((1 - low) / (1 - high))
            etas.append({'bin': row['bin'], 'length': row['length'], 'eta': eta, 'between': [low, high]})
    return etas


def _why(value: float) -> str | None:
    if math.isfinite(value):
        return None
    return 'the largest measured budget misses it' if math.isnan(value) else 'the smallest measured budget reaches it'


def _distinct(source: Calibration, name: str, other: str, value: Any) -> list[Any]:
    """Values of a field of the points that have a given other one, every-page points aside."""
    points: list[Swept] = [swept for swept in source.swept if not swept.every_page]
    return list(dict.fromkeys(getattr(s.point, name) for s in points if getattr(s.point, other) == value))
