"""Acceptance, its top-20 estimate, and the tail over tokens and length bins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparrow_jax.sparsity import mismatch
from sparrow_jax.sparsity.mismatch import lower_quantile, summarize

acceptance = jax.jit(mismatch.acceptance)
acceptance_top_k = jax.jit(mismatch.acceptance_top_k, static_argnames='k')


def flat():
    """200 equally likely tokens; the actor gives half of them .0004 more and the other half as much less.

    alpha = 1 - 100 * .0004 = .96. Of equals the first are taken, so the dense top 20 are tokens 0 to 19; 14 of them are
    raised and lead the actor's list, the others are not on it: 14 * .005 = .07.
    """
    dense_V = np.full(200, 0.005)
    raised_V = np.zeros(200, bool)
    raised_V[:14] = raised_V[20:106] = True
    return dense_V, dense_V + np.where(raised_V, 0.0004, -0.0004)


def peaked():
    """One token of .6, 19 of .019 and a tail of 180 that sums to .039; both lists hold the same 20 tokens.

    The actor moves .014 off the first token and .017 off half of the tail to the other half: alpha = 1 - .031 = .969,
    and the shared 20 read .961 - .014 = .947.
    """
    dense_V = np.concatenate([[0.6], np.full(19, 0.019), np.full(180, 0.039 / 180)])
    moved_V = np.concatenate([[-0.014], np.zeros(19), np.full(90, -0.017 / 90), np.full(90, 0.031 / 90)])
    return dense_V, dense_V + moved_V


@pytest.mark.parametrize(('pair', 'alpha', 'top20'), [(flat(), 0.96, 0.07), (peaked(), 0.969, 0.947)])
def test_the_top_20_estimate_is_a_lower_bound_that_flat_distributions_miss_by_far(pair, alpha, top20):
    dense_V, actor_V = pair
    np.testing.assert_allclose([dense_V.sum(), actor_V.sum()], 1, atol=1e-12)
    logp_dense_V, logp_actor_V = (jnp.log(jnp.asarray(p_V, jnp.float32)) for p_V in pair)
    np.testing.assert_allclose(acceptance(logp_dense_V, logp_actor_V), alpha, atol=1e-5)
    np.testing.assert_allclose(acceptance_top_k(logp_dense_V, logp_actor_V), top20, atol=1e-5)


def test_acceptance_by_hand_over_leading_axes():
    """min of (.5, .3, .2, 0) and (.2, .3, .1, .4) sums to .6; the two largest of each share token 0 or 1 alone."""
    dense_V, actor_V = jnp.log(jnp.array([0.5, 0.3, 0.2, 0.0])), jnp.log(jnp.array([0.2, 0.3, 0.1, 0.4]))
    dense_BV, actor_BV = jnp.stack([dense_V, actor_V, dense_V]), jnp.stack([actor_V, dense_V, dense_V])
    np.testing.assert_allclose(acceptance(dense_BV, actor_BV), [0.6, 0.6, 1.0], rtol=1e-6)
    # k = 2: lists {0, 1} and {3, 1}, shared token 1 with .3. k above V: all four.
    np.testing.assert_allclose(acceptance_top_k(dense_BV, actor_BV, k=2), [0.3, 0.3, 0.8], rtol=1e-6)
    np.testing.assert_allclose(acceptance_top_k(dense_BV, actor_BV, k=20), [0.6, 0.6, 1.0], rtol=1e-6)


def test_equal_distributions_never_read_above_one():
    logp_BV = jax.nn.log_softmax(3 * jax.random.normal(jax.random.key(0), (64, 5000)), axis=-1)
    alpha_B = np.asarray(acceptance(logp_BV, logp_BV))
    assert alpha_B.max() <= 1
    np.testing.assert_allclose(alpha_B, 1, atol=1e-5)


def test_random_distributions_against_numpy_and_the_bound():
    dense_BV, actor_BV = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(1), (2, 50, 300)), axis=-1)
    p_BV, q_BV = np.exp(np.asarray(dense_BV, np.float64)), np.exp(np.asarray(actor_BV, np.float64))
    np.testing.assert_allclose(acceptance(dense_BV, actor_BV), np.minimum(p_BV, q_BV).sum(-1), atol=1e-5)
    expected = []
    for p_V, q_V in zip(p_BV, q_BV, strict=True):
        shared = sorted(set(np.argsort(-p_V)[:20]) & set(np.argsort(-q_V)[:20]))
        expected.append(np.minimum(p_V, q_V)[shared].sum())
    np.testing.assert_allclose(acceptance_top_k(dense_BV, actor_BV), expected, atol=1e-5)


@pytest.mark.parametrize(
    ('low', 'high', 'expected'),
    [
        (5, 95, 0.2),  # linear interpolation would give .2 + .95 * .8 = .96
        (4, 96, 1.0),  # the fifth smallest counts: index floor(.05 * 99) = 4
        (1, 19, 0.2),  # index floor(.95) = 0
        (1, 20, 1.0),  # index floor(1.0) = 1
        (1, 0, 0.2),
    ],
)
def test_the_quantile_takes_the_lower_neighbour(low, high, expected):
    values = np.array([1.0] * high + [0.2] * low)
    assert lower_quantile(values) == expected
    assert (np.sort(values) < lower_quantile(values)).mean() <= 0.05


def test_the_quantile_of_nothing_is_nan():
    assert np.isnan(lower_quantile(np.array([])))


def test_summary_by_bins_of_cached_length():
    """Bins of 10: [0, 10) holds .5 .6 .7, [10, 20) .9 alone (too few), [30, 40) .2 .4."""
    alpha = np.array([0.9, 0.7, 0.2, 0.5, 0.4, 0.6], np.float32)
    length = np.array([19, 9, 30, 0, 39, 5])
    tail = summarize(alpha, length, bin_width_tokens=10, min_count=2)
    assert tail.tokens == 6
    assert tail.bins_too_small == 1
    assert list(tail.bins) == [(0, 10), (30, 40)]
    np.testing.assert_allclose(list(tail.bins.values()), [0.5, 0.2], rtol=1e-6)
    np.testing.assert_allclose([tail.p05, tail.mean], [0.2, 3.3 / 6], rtol=1e-6)


def test_summary_names_its_quantiles():
    """1/200, 2/200, ... 1: index floor(.05 * 199) = 9 and floor(.01 * 199) = 1."""
    alpha = np.random.default_rng(0).permutation(np.arange(1, 201)) / 200
    tail = summarize(alpha, np.zeros(200, int), 10, 1)
    np.testing.assert_allclose([tail.p05, tail.p01, tail.mean], [10 / 200, 2 / 200, 100.5 / 200], rtol=1e-12)


def test_summary_of_no_tokens():
    tail = summarize(np.zeros(0, np.float32), np.zeros(0, int), 10, 1)
    assert (tail.tokens, tail.bins, tail.bins_too_small) == (0, {}, 0)
    assert np.isnan([tail.p05, tail.p01, tail.mean]).all()
