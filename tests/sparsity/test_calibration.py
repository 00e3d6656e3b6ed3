"""What alphas say by length: quantiles and their intervals by hand and by drawing, budgets from lower bounds."""

import json
import math

import numpy as np
import pytest

from sparrow_jax.sparsity.calibration import (
    Tokens,
    mean_estimate,
    quantile_estimate,
    raised,
    smallest_budgets,
    statistics,
)
from sparrow_jax.sparsity.schedules import EVERY_PAGE
from sparrow_jax.sparsity.tail import CELLS

NAN = math.nan


def tokens_of(alpha, length, sequence):
    alpha = np.asarray(alpha, np.float32)
    return Tokens(alpha, alpha / 2, np.asarray(length, np.int32), np.asarray(sequence, np.int32))


def test_the_quantile_is_the_lower_one_and_its_interval_counts_sequences_not_tokens():
    """Two sequences of 100 tokens, all bad ones (10 of 200) in one of them: share 0.05, its error over sequences is
    sqrt(2 / 1 (25 + 25)) / 200 = 0.05, so that the interval goes from quantile 0 to quantile 0.15."""
    values = np.concatenate([np.full(10, 0.2), np.linspace(0.5, 1, 190)])
    estimate = quantile_estimate(values, np.repeat([0, 1], 100), 0.05)
    assert estimate.value == 0.2  # values[floor(0.05 x 199)] = values[9]
    assert (estimate.low, estimate.high) == (0.2, values[29])
    # Spread evenly over the sequences the same values are certain.
    even = quantile_estimate(values, np.arange(200) % 2, 0.05)
    assert (even.low, even.high) == (0.2, 0.2)


def test_the_smallest_value_is_not_certain():
    """Of 20 tokens the 5th percentile is the least one; that nothing lies below it proves nothing."""
    estimate = quantile_estimate(np.linspace(0.8, 1, 20), np.repeat(np.arange(4), 5), 0.05)
    assert estimate.value == 0.8
    assert estimate.high > 0.8


def test_equal_values_are_certain():
    estimate = quantile_estimate(np.ones(60), np.repeat(np.arange(3), 20), 0.05)
    assert (estimate.value, estimate.low, estimate.high) == (1, 1, 1)


def test_one_sequence_has_no_interval():
    estimate = quantile_estimate(np.linspace(0, 1, 50), np.zeros(50, int), 0.05)
    assert estimate.value > 0
    assert math.isnan(estimate.low)
    assert math.isnan(mean_estimate(np.ones(3), np.zeros(3)).high)


@pytest.mark.parametrize('spread', [0.0, 1.0])
def test_the_interval_holds_the_truth_about_as_often_as_two_errors_should(spread):
    """Sequences with a tail of their own: were tokens taken for independent, the interval would hold it rarely."""
    rng = np.random.default_rng(0)
    draw = lambda sequences: (
        1 - np.exp(rng.normal(-3, 1, (sequences, 200)) + spread * rng.standard_normal((sequences, 1)))
    )
    truth = np.quantile(draw(20_000), 0.05)
    inside = []
    for _ in range(200):
        estimate = quantile_estimate(draw(30).ravel(), np.repeat(np.arange(30), 200), 0.05)
        inside.append(estimate.low <= truth <= estimate.high)
    assert 0.88 < np.mean(inside) <= 1


def test_statistics_are_by_length_and_json():
    rng = np.random.default_rng(1)
    alpha, sequence = 1 - rng.beta(1, 20, 600), np.repeat(np.arange(6), 100)
    length = np.tile(np.arange(5, 105), 6)
    found = json.loads(json.dumps(statistics(tokens_of(alpha, length, sequence), 50, min_count=100), allow_nan=False))
    assert [(b['from'], b['to'], b['tokens'], b['enough']) for b in found['bins']] == [
        (0, 50, 270, True),
        (50, 100, 300, True),
        (100, 150, 30, False),
    ]
    second = np.sort(alpha[(length >= 50) & (length < 100)])
    assert found['bins'][1]['alpha']['p05'][0] == pytest.approx(second[math.floor(0.05 * 299)])
    assert found['bins'][1]['top20']['mean'][0] == pytest.approx(second.mean() / 2)
    assert found['all']['alpha']['p01'][0] < found['all']['alpha']['p10'][0]
    histogram = found['all']['alpha']['histogram']
    assert sum(histogram['counts']) == 600
    assert max(histogram['cells']) < CELLS
    assert found['all']['alpha']['beta']['ks'] < 0.06  # the truth is a Beta distribution
    assert statistics(tokens_of([], [], []), 50, 1) == {
        'all': {'tokens': 0, 'sequences': 0, 'enough': False},
        'bins': [],
    }


def test_a_single_sequence_is_not_enough():
    found = statistics(tokens_of(np.ones(40), np.arange(40), np.zeros(40)), 50, min_count=10)
    assert not found['bins'][0]['enough']
    assert found['bins'][0]['alpha']['p05'] == [1.0, None, None]


def test_budgets_are_the_smallest_that_reach_the_target_and_ascend():
    lows = [[0.90, 0.70, 0.95, 0.2], [0.95, 0.85, 0.96, 0.3], [0.99, 0.90, 0.99, 0.4]]
    choice = smallest_budgets([4, 8, 16], lows, 0.85)
    # The third bin would do with 4, but longer sequences never read less; no budget holds the fourth.
    assert choice.budget_Z == (4, 8, 8, EVERY_PAGE)
    assert (choice.unmet, choice.unknown) == ((3,), ())


def test_bins_of_which_nothing_is_known_follow_their_neighbours():
    choice = smallest_budgets([4, 8], [[NAN, 0.7, NAN], [NAN, 0.9, NAN]], 0.85)
    assert choice.budget_Z == (8, 8, 8)
    assert (choice.unmet, choice.unknown) == ((), (0, 2))
    assert smallest_budgets([4], [[NAN]], 0.85).budget_Z == (EVERY_PAGE,)


def test_a_schedule_that_misses_is_raised_by_a_rung_at_a_time():
    choice = smallest_budgets([4, 8, 16], [[0.9, 0.8, 0.1], [0.9, 0.9, 0.9], [0.9, 0.9, 0.9]], 0.85)
    assert choice.budget_Z == (4, 8, 8)
    higher = raised(choice, [4, 8, 16], [1])
    assert higher.budget_Z == (4, 16, 16)
    assert raised(higher, [4, 8, 16], [2]).budget_Z == (4, 16, EVERY_PAGE)
    assert raised(higher, [4, 8, 16], [2]).unmet == (2,)
