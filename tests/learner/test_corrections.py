"""Corrections and sums along packed rows, against values worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparrow_jax import algorithm_checks
from sparrow_jax.learner.corrections import CORRECTIONS
from sparrow_jax.learner.sequences import running_sum, sequence_mean, sequence_sum

# Two responses of a row, with a prompt's place before each and padding behind: raw weights 4, 1/4, 2 and 1/2, 1.
SEGMENT_BT = jnp.array([[1, 1, 1, 1, 2, 2, 2, 0]])
MASK_BT = jnp.array([[0.0, 1, 1, 1, 0, 1, 1, 0]])
WEIGHT_BT = jnp.array([[1.0, 4, 0.25, 2, 1, 0.5, 1, 1]])


def test_every_configurable_correction_exists():
    assert tuple(CORRECTIONS) == algorithm_checks.CORRECTIONS


@pytest.mark.parametrize(
    ('name', 'low', 'high', 'expected'),
    [
        ('none', 0.0, 3.0, [1, 1, 1, 1, 1]),
        ('tis', 0.0, 3.0, [3, 0.25, 2, 0.5, 1]),
        ('tis', 0.0, np.inf, [4, 0.25, 2, 0.5, 1]),
        ('token_mask', 0.0, 3.0, [0, 0.25, 2, 0.5, 1]),
        ('token_mask', 0.0, 4.0, [4, 0.25, 2, 0.5, 1]),  # a weight at its limit stays
        ('icepop', 0.5, 3.0, [0, 0, 2, 0.5, 1]),
        # Geometric means: (4 / 4 * 2)^(1/3) = 1.26 and (1/2)^(1/2) = 0.707.
        ('sequence_mask', 0.7, 1.27, [1, 1, 1, 1, 1]),
        ('sequence_mask', 0.7, 1.25, [0, 0, 0, 1, 1]),
        ('sequence_mask', 0.72, 1.27, [1, 1, 1, 0, 0]),
    ],
)
def test_what_a_tokens_loss_is_multiplied_by(name, low, high, expected):
    factor_BT = CORRECTIONS[name](jnp.log(WEIGHT_BT) * MASK_BT, MASK_BT, SEGMENT_BT, low, high)
    np.testing.assert_allclose(factor_BT[MASK_BT > 0], expected, rtol=1e-6)


def test_running_sums_by_hand():
    """1, 2 + 1 * 1, 3 + 0 * 3, 4 + .5 * 3; and backward 4, 3 + .5 * 4 ... with each place's own share of the next."""
    x_BT, carry_BT = jnp.array([[1.0, 2, 3, 4]]), jnp.array([[9.0, 1, 0, 0.5]])
    np.testing.assert_allclose(running_sum(x_BT, carry_BT), [[1, 3, 3, 5.5]])
    carry_BT = jnp.array([[1.0, 0, 0.5, 9]])
    np.testing.assert_allclose(running_sum(x_BT, carry_BT, reverse=True), [[3, 2, 5, 4]])


def test_sums_and_means_of_sequences_by_hand():
    x_BT = jnp.array([[0.0, 1, 2, 4, 0, 8, 16, 0]])
    np.testing.assert_allclose(sequence_sum(x_BT, SEGMENT_BT), [[7, 7, 7, 7, 24, 24, 24, 0]])
    np.testing.assert_allclose(
        sequence_mean(x_BT, MASK_BT, SEGMENT_BT)[0, [0, 3, 6, 7]], [7 / 3, 7 / 3, 12, 0], rtol=1e-6
    )
    # Nothing kept: 0, not 0 / 0. And the gradient of a sum is 1 for each of its terms.
    np.testing.assert_array_equal(sequence_mean(x_BT * 0, MASK_BT * 0, SEGMENT_BT), np.zeros((1, 8)))
    gradient_BT = jax.grad(lambda x_BT: sequence_sum(x_BT, SEGMENT_BT)[0, 1])(x_BT)
    np.testing.assert_array_equal(gradient_BT, [[1, 1, 1, 1, 0, 0, 0, 0]])


def test_sums_of_sequences_against_numpy():
    rng = np.random.default_rng(0)
    segment_BT = np.sort(rng.integers(1, 9, (3, 50)), axis=1)
    x_BT = rng.normal(size=(3, 50)).astype(np.float32)
    expected_BT = [
        [x_T[segment_T == s].sum() for s in segment_T] for x_T, segment_T in zip(x_BT, segment_BT, strict=True)
    ]
    np.testing.assert_allclose(sequence_sum(jnp.asarray(x_BT), jnp.asarray(segment_BT)), expected_BT, atol=1e-5)
