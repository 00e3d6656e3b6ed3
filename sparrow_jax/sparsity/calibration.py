"""What measured alphas say: quantiles with confidence by length, and the budgets that follow from them.

Pure functions of NumPy arrays. Tokens of one sequence hang together, so that errors are taken over whole sequences.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparrow_jax.sparsity.mismatch import TAIL, lower_quantile
from sparrow_jax.sparsity.schedules import EVERY_PAGE
from sparrow_jax.sparsity.tail import fit_beta_tail, histogram

QUANTILES = {'p01': 0.01, 'p05': TAIL, 'p10': 0.10}
ERRORS = 2.0  # standard errors on either side that count as certain
ESTIMATES = ('alpha', 'top20')


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Measured tokens, in the order of their sequences.

    Attributes:
        alpha, top20: float32 [tokens], exact acceptance and the paper's estimate of it.
        length: int32, cached tokens when each is drawn, the current one included.
        sequence: int32, the one that each belongs to.
    """

    alpha: np.ndarray
    top20: np.ndarray
    length: np.ndarray
    sequence: np.ndarray

    def of(self, chosen: np.ndarray) -> 'Tokens':
        return Tokens(*(array[chosen] for array in (self.alpha, self.top20, self.length, self.sequence)))

    @classmethod
    def joined(cls, parts: Sequence['Tokens']) -> 'Tokens':
        fields = [f.name for f in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number and the interval of `ERRORS` standard errors around it; NaN where one sequence is all there is."""

    value: float
    low: float
    high: float


def quantile_estimate(values: np.ndarray, sequence: np.ndarray, quantile: float) -> Estimate:
    """A quantile by the rule "lower", with its interval (Woodruff's): the quantiles at q - e and q + e, e being
    `ERRORS` standard errors of the share of values up to the estimate.

    With S sequences of n_s values, k_s of them below the estimate (those equal to it count in part, so that all are a
    share q), the variance of the share is S / (S - 1) sum (k_s - q n_s)^2 / (sum n)^2, as in `controller.tail`.

    Args:
        values: float [tokens]. sequence: int [tokens]. quantile: in (0, 1).
    """
    value = lower_quantile(values, quantile)
    below, equal = values < value, values == value
    missing = quantile * len(values) - below.sum()
    n_S, k_S = _by_sequence(sequence, below + equal * np.clip(missing / max(equal.sum(), 1), 0, 1))
    error = _standard_error(n_S, k_S)
    if math.isnan(error):
        return Estimate(value, math.nan, math.nan)
    low, high = max(quantile - ERRORS * error, 0.0), min(quantile + ERRORS * error, 1.0)
    return Estimate(value, lower_quantile(values, low), lower_quantile(values, high))


def mean_estimate(values: np.ndarray, sequence: np.ndarray) -> Estimate:
    """The mean over all values; arguments as in `quantile_estimate`."""
    values = np.asarray(values, np.float64)
    n_S, sum_S = _by_sequence(sequence, values)
    mean, error = float(values.mean()) if values.size else math.nan, _standard_error(n_S, sum_S)
    return Estimate(mean, mean - ERRORS * error, mean + ERRORS * error)


def bin_tails(tokens: Tokens, bin_width_tokens: int, min_count: int) -> list[Estimate | None]:
    """p05 of each length bin up to the longest; None for fewer than `min_count` tokens, or those of one sequence."""
    parts = _by_bin(tokens, bin_width_tokens)
    return [quantile_estimate(part.alpha, part.sequence, TAIL) if _enough(part, min_count) else None for part in parts]


def statistics(tokens: Tokens, bin_width_tokens: int, min_count: int) -> dict[str, Any]:
    """Of all tokens and of each length bin up to the longest, as a JSON object.

    'enough' says whether there are `min_count` tokens, of more than one sequence.
    """

    def of(part: Tokens) -> dict[str, Any]:
        sequences = np.unique(part.sequence).size
        described = {name: _described(getattr(part, name), part.sequence) for name in ESTIMATES} if sequences else {}
        enough = _enough(part, min_count)
        return {'tokens': int(part.length.size), 'sequences': sequences, 'enough': enough, **described}

    edges = lambda z: {'from': z * bin_width_tokens, 'to': (z + 1) * bin_width_tokens}
    bins = [{**edges(z), **of(part)} for z, part in enumerate(_by_bin(tokens, bin_width_tokens))]
    return {'all': of(tokens), 'bins': bins}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A budget for each length bin.

    Attributes:
        budget_Z: pages, ascending; `EVERY_PAGE` from the first bin on that no budget brings to the target.
        unmet: those bins. unknown: bins of which too little is known; they follow the ones before, the first ones the
            first that is known.
    """

    budget_Z: tuple[int, ...]
    unmet: tuple[int, ...]
    unknown: tuple[int, ...]


def smallest_budgets(budget_R: Sequence[int], low_RZ: Sequence[Sequence[float]], target: float) -> Choice:
    """The smallest measured budget of each bin at which p05 reaches the target with confidence.

    Args:
        budget_R: pages, ascending.
        low_RZ: lower bound of p05 at each budget in each bin; NaN where too little is known.
        target: of p05.
    """
    lows = np.asarray(low_RZ, float)
    need_Z: list[int | None] = []
    for low_R in lows.T:
        known = [budget for budget, low in zip(budget_R, low_R, strict=True) if not math.isnan(low)]
        reach = [budget for budget, low in zip(budget_R, low_R, strict=True) if low >= target]
        need_Z.append(min(reach) if reach else EVERY_PAGE if known else None)
    first = next((need for need in need_Z if need is not None), EVERY_PAGE)
    filled = [first if need is None and z == 0 else need or 0 for z, need in enumerate(need_Z)]
    return Choice(
        tuple(int(budget) for budget in np.maximum.accumulate(filled)),
        unmet=tuple(z for z, need in enumerate(need_Z) if need == EVERY_PAGE),
        unknown=tuple(z for z, need in enumerate(need_Z) if need is None),
    )


def raised(choice: Choice, budget_R: Sequence[int], missed: Sequence[int]) -> Choice:
    """The next larger measured budgets in the bins that missed the target, every page beyond the largest."""
    larger = lambda budget: min((b for b in budget_R if b > budget), default=EVERY_PAGE)
    budget_Z = [larger(b) if z in missed else b for z, b in enumerate(choice.budget_Z)]
    budget_Z = [int(b) for b in np.maximum.accumulate(budget_Z)]
    full = {z for z in missed if budget_Z[z] == EVERY_PAGE}
    return dataclasses.replace(choice, budget_Z=tuple(budget_Z), unmet=tuple(sorted({*choice.unmet, *full})))


def _by_bin(tokens: Tokens, bin_width_tokens: int) -> list[Tokens]:
    bin_ = tokens.length // bin_width_tokens
    return [tokens.of(bin_ == z) for z in range(int(bin_.max()) + 1 if bin_.size else 0)]


def _enough(part: Tokens, min_count: int) -> bool:
    return part.length.size >= min_count and np.unique(part.sequence).size > 1


def _described(values: np.ndarray, sequence: np.ndarray) -> dict[str, Any]:
    estimates = {name: quantile_estimate(values, sequence, quantile) for name, quantile in QUANTILES.items()}
    counts_X = histogram(values)
    beta, cells = fit_beta_tail(counts_X), np.nonzero(counts_X)[0]
    return {
        'mean': _listed(mean_estimate(values, sequence)),
        **{name: _listed(estimate) for name, estimate in estimates.items()},
        'beta': dataclasses.asdict(beta) if beta else None,
        'histogram': {'cells': cells.tolist(), 'counts': counts_X[cells].tolist()},
    }


def _listed(estimate: Estimate) -> list[float | None]:
    return [None if math.isnan(x) else float(x) for x in dataclasses.astuple(estimate)]


def _by_sequence(sequence: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _, index = np.unique(sequence, return_inverse=True)
    return np.bincount(index).astype(float), np.bincount(index, np.asarray(values, np.float64))


def _standard_error(n_S: np.ndarray, k_S: np.ndarray) -> float:
    S, N = len(n_S), n_S.sum()
    if S < 2:
        return math.nan
    return float(np.sqrt(S / (S - 1) * ((k_S - k_S.sum() / N * n_S) ** 2).sum()) / N)
