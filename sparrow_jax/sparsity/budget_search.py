"""The best fixed schedule: the least budget of each length bin that holds p05 at a target, from measured rollouts.

Each rollout had one budget in each bin and gave one p05 of each. Pure functions of NumPy arrays; Z: length bins, R:
rollouts.
"""

import math
from collections.abc import Sequence

import numpy as np


def rungs(least_pages: int, most_pages: int) -> list[int]:
    """Budgets to begin with: `least_pages`, doubled until there are no more pages."""
    found = [least_pages]
    while found[-1] * 2 <= most_pages:
        found.append(found[-1] * 2)
    return found


def least_budgets(
    budget_RZ: Sequence[Sequence[int]], p05_RZ: Sequence[Sequence[float]], target: float, most_Z: Sequence[int]
) -> np.ndarray:
    """int [Z], ascending: the least whole budgets whose p05 is at least the target.

    Between measured budgets p05 is taken to be linear in the logarithm of the budget, and to fall nowhere. A bin that
    misses the target at its largest measured budget gets all its pages; one that meets it at its smallest gets that.

    Args:
        budget_RZ: pages. p05_RZ: NaN where the bin has too few tokens.
        target: of p05.
        most_Z: pages of the longest sequence of each bin.
    """
    budgets, tails = np.asarray(budget_RZ, float), np.asarray(p05_RZ, float)
    found = [_least(budgets[:, z], tails[:, z], target, int(most)) for z, most in enumerate(most_Z)]
    # A bin of which nothing is known follows the one before.
    known = [pages if pages is not None else 0 for pages in found]
    return np.minimum(np.maximum.accumulate(known), np.maximum.accumulate(np.asarray(most_Z, int)))


def _least(budget_R: np.ndarray, p05_R: np.ndarray, target: float, most: int) -> int | None:
    there_R = np.isfinite(p05_R)
    if not there_R.any():
        return None
    # A budget beyond the bin's pages is the same as all of them.
    budget_R, p05_R = np.minimum(budget_R[there_R], most), p05_R[there_R]
    pages = np.unique(budget_R)
    mean = np.asarray([p05_R[budget_R == b].mean() for b in pages])
    found = crossing(np.maximum(pages, 0.5), mean, target)
    if math.isnan(found):
        return most
    return int(pages[0]) if found == -math.inf else int(np.ceil(found - 1e-6))


def crossing(cost_R: np.ndarray, p05_R: np.ndarray, target: float) -> float:
    """What p05 = target costs: p05 is taken to be linear in the logarithm of the cost, and to fall nowhere.

    Args:
        cost_R: positive, ascending: budgets, or bytes. p05_R: measured there.
        target: of p05.

    Returns:
        NaN where the largest cost misses the target, minus infinity where the smallest reaches it.
    """
    rising = np.maximum.accumulate(p05_R)
    if not rising[-1] >= target:
        return math.nan
    upper = int(np.argmax(rising >= target))
    if upper == 0:
        return -math.inf
    low, high = np.log(cost_R[upper - 1 : upper + 1])
    share = (target - rising[upper - 1]) / (rising[upper] - rising[upper - 1])
    return float(np.exp(low + share * (high - low)))
