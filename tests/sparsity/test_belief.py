"""The belief about budgets, against conditioning of Gaussians and isotonic regression in plain NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparrow_jax.sparsity import belief as beliefs
from sparrow_jax.sparsity.belief import SLOPE, Measurement, aged, first, ordered, updated

BINS, PROBES, CONFIDENCE = 5, 4, 2.0
_updated = jax.jit(updated)
_ordered = jax.jit(ordered, static_argnames='confidence')


def measured(ratio, in_force, variance=0.01):
    """A measurement of the bins whose ratio is not None."""
    there = np.asarray([r is not None for r in ratio])
    values = np.asarray([np.nan if r is None else r for r in ratio], np.float32)
    blank = lambda a: np.where(there, np.asarray(a, np.float32), np.nan).astype(np.float32)
    return Measurement(values, blank(in_force), blank(np.full(BINS, variance)), there)


def likeliest(expected, spread, ratio, variance):
    """x, normal around `expected`, given a ratio with the mean exp(x) and the variance `variance` exp(x); and the
    curvature of its density there. On a grid."""
    x = np.linspace(-12, 6, 400_001)
    energy = (x - expected) ** 2 / 2 / spread + (np.exp(x) - ratio * x) / variance
    best = x[energy.argmin()]
    return best, 1 / spread + np.exp(best) / variance


@pytest.mark.parametrize('ratio', [0.9, 1.2])
def test_an_update_conditions_the_gaussian_on_what_was_seen(ratio):
    """One bin after the other, with a slope that is known."""
    belief = first(BINS, PROBES)
    covariance = np.asarray(belief.covariance_EE, np.float64)
    covariance[BINS, BINS] = 1e-9
    belief = dataclasses.replace(belief, covariance_EE=jnp.asarray(covariance, jnp.float32))
    need = np.log([4.0, 8, 16, 20, 30]).astype(np.float32)
    in_force = need + np.float32(0.05)
    given = [None, ratio, None, 0.95, 1.15]
    new, needs = _updated(belief, need, measured(given, in_force), CONFIDENCE)

    mean = np.append(need, [math.log(SLOPE), belief.lean]).astype(np.float64)
    for z in (1, 3, 4):
        row = np.zeros(BINS + 2)
        row[[z, BINS, -1]] = SLOPE, SLOPE * (mean[z] - in_force[z]), 1
        expected, seen = SLOPE * (mean[z] - in_force[z]) + mean[-1], covariance @ row
        spread = row @ seen
        x, precision = likeliest(expected, spread, given[z], 0.01)
        noise = 1 / (precision - 1 / spread)
        # What the measurement is worth by itself; far from the target it is worth less.
        value = x + (x - expected) / spread * noise
        noise += (beliefs.CURVATURE * x) ** 2
        mean += seen / (spread + noise) * (value - expected)
        covariance = covariance - np.outer(seen, seen) / (spread + noise)
    np.testing.assert_allclose(needs, mean[:BINS], atol=5e-4)
    np.testing.assert_allclose(new.lean, mean[-1], atol=5e-4)
    np.testing.assert_allclose(new.covariance_EE, covariance, atol=1e-3)


@pytest.mark.parametrize('spread', [0.01, 1.0, 20.0])
@pytest.mark.parametrize('ratio', [0.0, 0.02, 0.5, 1.0, 2.0, 15.0])
def test_the_likeliest_share_is_found(ratio, spread):
    expected, variance = 0.3, 0.05
    value, noise = beliefs._of_a_line(jnp.float32(ratio), variance, jnp.float32(expected), jnp.float32(spread))
    x, precision = likeliest(expected, spread, ratio, variance)
    noise -= (beliefs.CURVATURE * x) ** 2
    assert noise == pytest.approx(variance / math.exp(x), rel=0.02)
    assert (expected / spread + value / noise) / (1 / spread + 1 / noise) == pytest.approx(x, abs=0.01)
    assert 1 / spread + 1 / noise == pytest.approx(precision, rel=0.02)


def test_shares_average_and_not_their_logarithms():
    """A bin in whose two halves 0.2 and 1.8 twentieths are below the target is on target."""
    belief, need = first(BINS, 100), np.zeros(BINS, np.float32)
    for _ in range(10):
        belief, need = _updated(belief, need, measured([1.0] + [None] * 4, need), CONFIDENCE)
    for _ in range(20):
        for ratio in (0.2, 1.8):
            belief, need = _updated(belief, need, measured([ratio] + [None] * 4, np.zeros(BINS), 1.0), CONFIDENCE)
    assert abs(need[0]) < 0.02


def test_nothing_seen_changes_nothing():
    belief, need = first(BINS, PROBES), np.log([4.0, 8, 16, 20, 30]).astype(np.float32)
    new, needs = _updated(belief, need, measured([None] * BINS, need), CONFIDENCE)
    np.testing.assert_array_equal(needs, need)
    np.testing.assert_array_equal(new.covariance_EE, belief.covariance_EE)
    assert new.log_slope == belief.log_slope
    assert new.lean == belief.lean


@pytest.mark.parametrize('slope', [1.5, 3.0, 6.0])
def test_it_learns_the_slope_and_finds_the_need(slope):
    need = np.zeros(BINS, np.float32)
    belief, truth = first(BINS, 100), 1.8
    for _ in range(12):
        ratio = math.exp(slope * (truth - need[2]))
        belief, need = _updated(belief, need, measured([None, None, ratio, None, None], need, 1e-4), CONFIDENCE)
    assert need[2] == pytest.approx(truth, abs=0.03)
    assert abs(float(belief.log_slope) - math.log(slope)) < 0.6 * abs(math.log(slope / SLOPE)) + 0.2


def test_bins_that_nobody_reached_follow_their_neighbours():
    need = np.zeros(BINS, np.float32)
    _, needs = _updated(first(BINS, PROBES), need, measured([None, math.exp(0.6), None, None, None], need), CONFIDENCE)
    assert needs[1] == pytest.approx(0.2, abs=0.05)
    assert needs[4] > 0.8 * needs[1]


def test_a_surprise_makes_it_learn_again():
    """After many measurements that agree, one that is far away moves the need as far as a move goes."""
    belief, need = first(BINS, 100), np.zeros(BINS, np.float32)
    for _ in range(20):
        belief, need = _updated(belief, need, measured([1.0] + [None] * 4, need), CONFIDENCE)
    _, little = _updated(belief, need, measured([1.1] + [None] * 4, need), CONFIDENCE)
    _, far = _updated(belief, need, measured([12.0] + [None] * 4, need), CONFIDENCE)
    assert abs(little[0]) < 0.05
    assert far[0] > 0.9 * beliefs.LARGEST_MOVE


def test_other_sequences_lean_elsewhere():
    belief, need = first(BINS, PROBES), np.zeros(BINS, np.float32)
    variance = beliefs.SEQUENCE_SPREAD**2 / PROBES
    assert belief.lean == pytest.approx(-variance / 2)  # the mean share is that of all
    seen, _ = _updated(belief, need, measured([1.3] * BINS, need), CONFIDENCE)
    assert seen.lean > belief.lean
    old = aged(seen, PROBES)
    assert old.lean == belief.lean
    assert old.covariance_EE[-1, -1] == pytest.approx(variance)
    assert not np.asarray(old.covariance_EE[-1, :-1]).any()
    assert (np.diagonal(old.covariance_EE)[:BINS] > np.diagonal(seen.covariance_EE)[:BINS]).all()


def test_accelerators_do_not_round_its_products():
    """Their default keeps 10 bits of a float32 or fewer."""
    need = np.zeros(BINS, np.float32)
    text = _updated.lower(first(BINS, PROBES), need, measured([1.3] * BINS, need), CONFIDENCE).as_text()
    products = [line for line in text.splitlines() if 'dot_general' in line]
    assert products
    assert all('precision = [HIGHEST, HIGHEST]' in line for line in products)


def pooled(values, weights):
    """Isotonic regression by pooling adjacent violators."""
    blocks = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            v, w, n = blocks.pop()
            total = blocks[-1][1] + w
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + v * w) / total, total, blocks[-1][2] + n]
    return np.concatenate([[v] * n for v, _, n in blocks])


def independent(variance):
    covariance = np.diag(np.append(variance, [1, 1])).astype(np.float32)
    return dataclasses.replace(first(BINS, PROBES), covariance_EE=jnp.asarray(covariance))


@pytest.mark.parametrize('seed', range(5))
def test_order_is_isotonic_regression(seed):
    rng = np.random.default_rng(seed)
    variance = 10.0 ** rng.uniform(-4, 1, BINS)
    need = rng.normal(0, 1, BINS).astype(np.float32)
    anyhow = 1e6  # standard deviations: no bin is known
    np.testing.assert_allclose(
        _ordered(independent(variance), need, anyhow), pooled(need, 1 / variance), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(_ordered(independent(variance), np.sort(need), CONFIDENCE), np.sort(need), rtol=1e-6)


def test_order_does_not_hold_down_a_bin_that_is_known_to_need_more():
    """However many longer bins need less, each as well known."""
    need = np.zeros(BINS, np.float32)
    need[0] = 2.0
    ordered = np.asarray(_ordered(independent(np.full(BINS, 0.01)), need, CONFIDENCE))
    np.testing.assert_allclose(ordered, 2.0 - CONFIDENCE * 0.1, rtol=1e-5)
