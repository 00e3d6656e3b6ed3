"""Scores as integers of the same order, in which the best pages are found by counting; for all platforms."""

import jax
import jax.numpy as jnp
from jax import lax


def ordered(score: jax.Array) -> jax.Array:
    """int32 in the order of float32 scores; 0 and -0 are equal. Every finite score lies above the lowest int32."""
    score = jnp.where(score == 0, 0.0, score)
    bits = lax.bitcast_convert_type(score, jnp.int32)
    # The bits of floats are in order but for the negative ones, which grow away from zero.
    return bits ^ lax.shift_right_logical(lax.shift_right_arithmetic(bits, 31), 1)
