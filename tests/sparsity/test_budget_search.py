"""The best fixed budgets, from made-up measurements."""

import numpy as np
import pytest

from sparrow_jax.sparsity.budget_search import crossing, least_budgets, rungs

NAN = float('nan')


def test_rungs_double():
    assert rungs(4, 148) == [4, 8, 16, 32, 64, 128]
    assert rungs(4, 4) == [4]


@pytest.mark.parametrize('need', [5.0, 11.3, 64.0, 90.0])
def test_a_logarithmic_curve_is_found_again(need):
    budgets = rungs(4, 148)
    tails = [[0.9 + 0.14 * np.log2(b / need)] for b in budgets]
    [found] = least_budgets([[b] for b in budgets], tails, 0.9, [148])
    assert found == np.ceil(need - 1e-6)


def test_limits_order_and_bins_without_tokens():
    budgets = [[4, 4, 4, 4, 4], [8, 8, 8, 8, 8], [16, 16, 16, 16, 16]]
    tails = [[0.9, 0.5, NAN, 0.1, NAN], [0.95, 0.6, NAN, 0.2, NAN], [1.0, 0.9, NAN, 0.3, NAN]]
    # Met at the smallest; met at the largest; follows the one before; never met: all pages; the same.
    np.testing.assert_array_equal(least_budgets(budgets, tails, 0.9, [12, 32, 64, 96, 128]), [4, 16, 16, 96, 96])


def test_noise_that_falls_is_smoothed_and_equal_budgets_are_averaged():
    budgets, tails = [[4], [8], [16], [8]], [[0.7], [0.86], [0.84], [0.82]]
    [found] = least_budgets(budgets, tails, 0.84, [64])
    assert found == 8
    # Beyond a bin's pages all budgets are one.
    [found] = least_budgets([[4], [8], [16]], [[0.7], [0.8], [0.9]], 0.85, [8])
    assert found == 8


def test_what_a_target_costs_between_and_outside_of_the_measured_costs():
    cost, p05 = np.asarray([100.0, 400.0, 1600.0]), np.asarray([0.6, 0.8, 0.9])
    assert crossing(cost, p05, 0.7) == pytest.approx(200)  # half way in the logarithm
    assert crossing(cost, p05, 0.9) == pytest.approx(1600)
    assert np.isnan(crossing(cost, p05, 0.95))
    assert crossing(cost, p05, 0.6) == -np.inf
    assert np.isnan(crossing(cost, np.full(3, NAN), 0.5))
