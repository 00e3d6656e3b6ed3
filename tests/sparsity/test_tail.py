"""The histogram of alpha and the Beta distribution of its tail."""

import numpy as np
import pytest

from sparrow_jax.sparsity.controller import cell
from sparrow_jax.sparsity.tail import CELLS, TAIL_TOP, fit_beta_tail, gap_edges, histogram


@pytest.mark.parametrize(('a', 'b'), [(0.3, 0.2), (2.0, 0.5), (5.0, 3.0), (0.6, 4.0), (300.0, 20.0)])
def test_a_beta_tail_is_found_again(a, b):
    random = np.random.default_rng(0)
    tail = TAIL_TOP * random.beta(a, b, 20_000)
    tail = tail[tail < TAIL_TOP - 1e-9]
    found = fit_beta_tail(histogram(np.concatenate([tail, 1 - random.uniform(0, 9e-4, 80_000)])))
    # The standard error of either parameter is 1% of it.
    assert [found.a, found.b] == pytest.approx([a, b], rel=0.05)
    assert found.ks < 0.012  # 1.6 / sqrt(20,000): one sample in a hundred is further off
    assert found.share == pytest.approx(0.2, abs=0.002)
    assert found.mean == pytest.approx(tail.mean(), rel=0.02)
    assert found.variance == pytest.approx(tail.var(), rel=0.05)


def test_a_tail_that_is_no_beta_distribution_is_said_to_be_far_from_it():
    two_lumps = np.random.default_rng(0).normal(np.repeat([0.3, 0.7], 5_000), 0.02)
    assert fit_beta_tail(histogram(two_lumps)).ks > 0.1


def test_weights_count_as_tokens():
    alpha = np.asarray([0.2, 0.5, 0.9, 0.9, 1.0])
    weighted = histogram(np.asarray([0.2, 0.5, 0.9, 1.0]), np.asarray([1, 1, 2, 1]))
    assert (histogram(alpha) == weighted).all()
    assert fit_beta_tail(weighted) == fit_beta_tail(histogram(alpha))


def test_tokens_at_either_end_leave_the_fit_finite():
    found = fit_beta_tail(histogram(np.asarray([0.0] * 50 + [0.99899] * 50)))
    assert 0 < found.a < 1
    assert 0 < found.b < 1


@pytest.mark.parametrize('alpha', [[], [1.0, 0.9999], [0.5, 0.5, 0.5]])
def test_without_two_cells_there_is_no_shape(alpha):
    assert fit_beta_tail(histogram(np.asarray(alpha))) is None


def test_cells_are_those_of_the_controller():
    gap = gap_edges()
    middles = 1 - np.sqrt(gap[1:] * gap[:-1])
    assert (np.asarray(cell(middles[64:])) == np.arange(64, CELLS)).all()  # float32 cannot tell apart those before
    counts = histogram(np.concatenate([middles, [0.0, 1.0]]))
    assert counts.sum() == CELLS + 2
    assert counts[0] == counts[-1] == 2


def test_another_number_of_cells_is_refused():
    with pytest.raises(ValueError, match='512 cells'):
        fit_beta_tail(np.ones(100))
