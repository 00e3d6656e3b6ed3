"""How far the sparse sampler is from the dense policy, per token and in the tail.

Distributions come from the learner's LM-head pass over kept hidden states (`learner.heads`); results go to the
metrics `sparse/*`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparrow_jax.sparsity.tail import histogram

TAIL = 0.05  # the quantile that decides stability
TOP_K = 20  # entries of the paper's truncated estimate


def acceptance(logp_dense_V: jax.Array, logp_actor_V: jax.Array) -> jax.Array:
    """alpha = sum over the vocabulary of min(p_dense, p_actor): the chance that a token of one policy is accepted by
    the other.

    Args:
        logp_dense_V, logp_actor_V: float32 log-probabilities, any leading axes, normalized over the last.

    Returns:
        float32 in [0, 1], the leading axes' shape; 1 means equal distributions.
    """
    return jnp.minimum(jnp.exp(jnp.minimum(logp_dense_V, logp_actor_V)).sum(axis=-1), 1.0)


def acceptance_top_k(logp_dense_V: jax.Array, logp_actor_V: jax.Array, k: int = TOP_K) -> jax.Array:
    """The paper's estimate of alpha from the k most likely tokens of each policy: the sum of min(p, q) over tokens
    in both lists.

    A lower bound of `acceptance`: far below it on flat distributions. Arguments and result as there.
    """
    k = min(k, logp_dense_V.shape[-1])
    _, dense_ids = lax.top_k(logp_dense_V, k)
    actor_top, actor_ids = lax.top_k(logp_actor_V, k)
    dense_there = jnp.take_along_axis(logp_dense_V, actor_ids, axis=-1)
    shared = (actor_ids[..., :, None] == dense_ids[..., None, :]).any(axis=-1)
    return jnp.where(shared, jnp.exp(jnp.minimum(actor_top, dense_there)), 0).sum(axis=-1)


def lower_quantile(values: np.ndarray, quantile: float = TAIL) -> float:
    """The quantile by the rule "lower": the largest value v such that at most a share `quantile` of the values lies
    strictly before it.

    With n sorted values it is values[floor(quantile * (n - 1))]. NaN for no values. No interpolation: 100 tokens, 5
    of them at 0.2, give 0.2.
    """
    values = np.asarray(values, np.float64)
    if values.size == 0:
        return float('nan')
    return float(np.quantile(values, quantile, method='lower'))


@dataclasses.dataclass(frozen=True)
class TailSummary:
    """p05, p01, mean and histogram (`tail.histogram`) of alpha over all tokens; p05 of each bin of cached length that
    holds enough of them.
    """

    p05: float
    p01: float
    mean: float
    tokens: int
    bins: dict[tuple[int, int], float]
    bins_too_small: int
    histogram_X: np.ndarray


def summarize(alpha: np.ndarray, length_tokens: np.ndarray, bin_width_tokens: int, min_count: int) -> TailSummary:
    """Summarizes measured tokens.

    Args:
        alpha: float [tokens], acceptance of each.
        length_tokens: int [tokens], cached tokens when each was sampled.
        bin_width_tokens: width of the length bins.
        min_count: a bin of fewer tokens is left out and counted in `bins_too_small`: with few tokens the quantile is
            noise.
    """
    bins, small = {}, 0
    index = length_tokens // bin_width_tokens
    for i in np.unique(index):
        inside = alpha[index == i]
        if inside.size < min_count:
            small += 1
        else:
            bins[int(i) * bin_width_tokens, (int(i) + 1) * bin_width_tokens] = lower_quantile(inside)
    mean = float(np.mean(alpha, dtype=np.float64)) if alpha.size else float('nan')
    p05, p01 = lower_quantile(alpha), lower_quantile(alpha, 0.01)
    return TailSummary(p05, p01, mean, int(alpha.size), bins, small, histogram(alpha))
