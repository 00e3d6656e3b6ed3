"""Corrections for tokens that the sampler drew from another distribution than the dense policy's. Pure functions.

Each has the arguments of `tis` and returns what a token's loss is multiplied by, without a gradient. w_t =
exp(logp_dense - logp_actor) at token t; `low` and `high` are learner.correction_low and correction_high.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparrow_jax.learner.sequences import sequence_mean


def uncorrected(gap_BT: jax.Array, mask_BT: jax.Array, segment_BT: jax.Array, low: float, high: float) -> jax.Array:
    """1. Arguments as in `tis`."""
    del mask_BT, segment_BT, low, high
    return jnp.ones_like(gap_BT)


def tis(gap_BT: jax.Array, mask_BT: jax.Array, segment_BT: jax.Array, low: float, high: float) -> jax.Array:
    """min(w_t, high): truncated importance sampling (Sparrow, section on training; IMPALA, arXiv 1802.01561).

    Args:
        gap_BT: float32 log w_t, 0 where mask_BT is. mask_BT: 1 for response tokens. segment_BT: as in `Rows`.
        low, high: limits of the weights; what a correction does not use may be anything.

    Returns:
        float32 [B, T]; what stands at masked places is of no use.
    """
    del mask_BT, segment_BT, low
    return jnp.minimum(jnp.exp(gap_BT), high)


def token_mask(gap_BT: jax.Array, mask_BT: jax.Array, segment_BT: jax.Array, low: float, high: float) -> jax.Array:
    """w_t where w_t <= high, else 0: masked importance sampling, token by token. Arguments as in `tis`."""
    del low
    return icepop(gap_BT, mask_BT, segment_BT, 0.0, high)


def icepop(gap_BT: jax.Array, mask_BT: jax.Array, segment_BT: jax.Array, low: float, high: float) -> jax.Array:
    """w_t where low <= w_t <= high, else 0 (IcePop: Ling Team, "Every Step Evolves", arXiv 2510.18855; its limits are
    0.5 and 5). Arguments as in `tis`.
    """
    del mask_BT, segment_BT
    weight_BT = jnp.exp(gap_BT)
    return jnp.where((weight_BT >= low) & (weight_BT <= high), weight_BT, 0.0)


def sequence_mask(gap_BT: jax.Array, mask_BT: jax.Array, segment_BT: jax.Array, low: float, high: float) -> jax.Array:
    """1 for all tokens of a response where low <= exp(mean over its tokens of log w_t) <= high, else 0.

    The geometric mean and not the product, which over thousands of tokens is 0 or infinite whatever the sampler. The
    kept responses are not weighted. Arguments as in `tis`.
    """
    mean_BT = jnp.exp(sequence_mean(gap_BT, mask_BT, segment_BT))
    return ((mean_BT >= low) & (mean_BT <= high)).astype(gap_BT.dtype)


Correction = Callable[[jax.Array, jax.Array, jax.Array, float, float], jax.Array]
CORRECTIONS: dict[str, Correction] = {
    'none': uncorrected,
    'tis': tis,
    'token_mask': token_mask,
    'sequence_mask': sequence_mask,
    'icepop': icepop,
}
