"""Sums along rows that hold several sequences, as scans of logarithmic depth. Pure functions."""

import jax
import jax.numpy as jnp
from jax import lax


def running_sum(x_BT: jax.Array, carry_BT: jax.Array, *, reverse: bool = False) -> jax.Array:
    """y_t = x_t + carry_t * y_{t-1}; with y_{t+1} in place of y_{t-1} when reversed. The first has none before it.

    Args:
        x_BT: float32. carry_BT: what each place takes of its neighbour: 0 ends a sequence.
    """

    def combine(near, far):
        (carry, x), (far_carry, far_x) = near, far
        return carry * far_carry, far_x + far_carry * x

    return lax.associative_scan(combine, (carry_BT, x_BT), reverse=reverse, axis=1)[1]


def sequence_sum(x_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """At every place the sum of x over the places of its row with the same segment id.

    Args:
        x_BT: float32, finite; 0 where a place is to be left out. segment_BT: int32; places of a segment are neighbours.

    Returns:
        float32 [B, T]. The gradient flows. Rounding depends on where the sequence lies, by an ulp or two.
    """
    same_BT = (segment_BT[:, 1:] == segment_BT[:, :-1]).astype(x_BT.dtype)
    before_BT = running_sum(x_BT, jnp.pad(same_BT, ((0, 0), (1, 0))))
    after_BT = running_sum(x_BT, jnp.pad(same_BT, ((0, 0), (0, 1))), reverse=True)
    return before_BT + after_BT - x_BT


def sequence_mean(x_BT: jax.Array, mask_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """At every place the mean of x over the kept places of its segment; 0 in a segment that keeps none.

    Arguments as in `sequence_sum`; x_BT is 0 where mask_BT is.
    """
    return sequence_sum(x_BT, segment_BT) / jnp.maximum(sequence_sum(mask_BT, segment_BT), 1.0)
