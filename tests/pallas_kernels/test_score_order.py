"""Scores as integers: the order of every float, one key for both zeros."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.score_order import ordered


def test_integers_are_in_the_order_of_the_scores():
    rng = np.random.default_rng(0)
    finite = np.sort(rng.standard_normal(200) * 10.0 ** rng.integers(-30, 30, 200)).astype(np.float32)
    key_N = np.asarray(jax.jit(ordered)(jnp.asarray([-np.inf, *finite, np.inf], jnp.float32)))
    assert key_N.dtype == np.int32
    assert (np.diff(key_N.astype(np.int64)) > 0).all()
    assert key_N.min() > np.iinfo(np.int32).min


def test_the_sign_of_zero_decides_nothing():
    """It seldom survives a sum, so that no test of a whole operation would show it."""
    negative, minus_zero, zero, positive = np.asarray(ordered(jnp.asarray([-1e-30, -0.0, 0.0, 1e-30], jnp.float32)))
    assert negative < minus_zero == zero < positive
