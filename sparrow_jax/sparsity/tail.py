"""The shape of alpha's distribution: counts in cells, and a Beta distribution for the tail below 0.999.

The paper's finding: most tokens agree almost exactly, and the rest follows a Beta distribution (Kolmogorov-Smirnov
distance under 0.04). NumPy and SciPy alone, so that what only reads logs does without JAX.
"""

import dataclasses

import numpy as np
from scipy import optimize, special

CELLS = 512  # of a histogram, uniform in log(1 - alpha); one is 2.7% of 1 - alpha
LEAST_GAP = 1e-6  # 1 - alpha below this counts as this
TAIL_TOP = 0.999  # alpha above which a token is no part of the tail
TAIL_CELLS = CELLS // 2  # the last ones, whose alphas are below TAIL_TOP: LEAST_GAP is (1 - TAIL_TOP)^2

_SHAPES = (1e-3, 1e6)  # that a and b may have
_LEAST_CHANCE = 1e-300  # of a cell: keeps the logarithm finite


@dataclasses.dataclass(frozen=True)
class BetaTail:
    """alpha / 0.999 of the tokens below 0.999 as a Beta distribution.

    Attributes:
        a, b: its shape parameters, of maximum likelihood.
        ks: the largest difference between its distribution function and that of the tokens, at the cells' edges.
        tokens: in the tail, by weight.
        share: of all tokens that are in the tail.
    """

    a: float
    b: float
    ks: float
    tokens: float
    share: float

    @property
    def mean(self) -> float:
        """Of alpha in the tail."""
        return TAIL_TOP * self.a / (self.a + self.b)

    @property
    def variance(self) -> float:
        """Of alpha in the tail; at most a quarter, where it is near 0 or near 1."""
        whole = self.a + self.b
        return TAIL_TOP**2 * self.a * self.b / (whole**2 * (whole + 1))

    def cdf(self, alpha: np.ndarray) -> np.ndarray:
        """Share of the tail's tokens that are at or below each alpha in [0, 1]."""
        return special.betainc(self.a, self.b, np.clip(alpha / TAIL_TOP, 0, 1))


def gap_edges() -> np.ndarray:
    """1 - alpha at the edges of the cells, float64 [CELLS + 1], ascending: the first cell holds the highest alphas."""
    return LEAST_GAP ** (1 - np.arange(CELLS + 1) / CELLS)


def histogram(alpha: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Tokens in each cell, int64 [CELLS] (float64 with weights).

    Args:
        alpha: any shape, in [0, 1].
        weights: of each alpha, its shape; 1 by default.
    """
    gap = np.clip(1 - np.asarray(alpha, np.float64), LEAST_GAP, 1).ravel()
    edges = gap_edges()
    edges[[0, -1]] = 0, 2  # rounding leaves no value outside
    return np.histogram(gap, edges, weights=None if weights is None else np.asarray(weights, np.float64).ravel())[0]


def fit_beta_tail(counts_X: np.ndarray) -> BetaTail | None:
    """The Beta distribution under which a histogram's tail is most likely.

    The likelihood is that of the cells, not of points in them, so that tokens at 0 or just below 0.999 cannot make it
    infinite.

    Args:
        counts_X: tokens (or weights) of each cell, [CELLS], as `histogram` returns them.

    Returns:
        None where fewer than two cells of the tail hold anything: no shape can be told from that.
    """
    counts_X = np.asarray(counts_X, np.float64)
    if counts_X.shape != (CELLS,):
        raise ValueError(f'a histogram of alpha has {CELLS} cells, not the shape {counts_X.shape}')
    tail_X = counts_X[CELLS - TAIL_CELLS :][::-1]  # alpha ascends
    tokens = tail_X.sum()
    if np.count_nonzero(tail_X) < 2:
        return None
    gap = gap_edges()[CELLS - TAIL_CELLS :][::-1]
    below, above = (1 - gap) / TAIL_TOP, (gap - gap[-1]) / TAIL_TOP  # above: 1 - below, exact near 0.999
    below[-1] = 1

    def loss(logs: np.ndarray) -> float:
        a, b = np.exp(logs)
        cdf, rest = special.betainc(a, b, below), special.betainc(b, a, above)
        chance_X = np.where(cdf[1:] < 0.5, np.diff(cdf), -np.diff(rest))  # the difference of the smaller numbers
        return -float(tail_X @ np.log(np.maximum(chance_X, _LEAST_CHANCE))) / tokens

    middle = (below[1:] + below[:-1]) / 2
    mean = tail_X @ middle / tokens
    variance = max(tail_X @ (middle - mean) ** 2 / tokens, 1e-9)
    whole = max(mean * (1 - mean) / variance - 1, 0.1)  # a + b of a Beta distribution with these moments
    low, high = np.log(_SHAPES)
    start = np.clip(np.log([mean * whole, (1 - mean) * whole]), low, high)
    # The simplex needs no gradient of betainc in a and b, which SciPy has not.
    found = optimize.minimize(loss, start, method='Nelder-Mead', bounds=[(low, high)] * 2, options={'xatol': 1e-5})
    a, b = np.exp(found.x)
    empirical = np.concatenate([[0], np.cumsum(tail_X)]) / tokens
    ks = np.abs(special.betainc(a, b, below) - empirical).max()
    return BetaTail(float(a), float(b), float(ks), float(tokens), float(tokens / counts_X.sum()))
