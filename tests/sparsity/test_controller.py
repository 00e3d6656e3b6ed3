"""The controller: what it counts, against plain NumPy, and where it arrives, in a made-up world."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparrow_jax.sparsity.controller import CELLS, Control, budgets, cell, count, move, start, tail
from sparrow_jax.sparsity.mismatch import lower_quantile

WIDTH, BINS, PROBES, CHUNK = 2000, 4, 4, 256
CONTROL = Control(target=0.86, bin_width_tokens=WIDTH, min_count=2000, urgent_count=500)
MOST = jnp.asarray([(i + 1) * WIDTH // 16 for i in range(BINS)], jnp.int32)
_count = jax.jit(count, static_argnames='control')
_move = jax.jit(move, static_argnames='control')


def counted(rows, control=CONTROL, probes=PROBES):
    """A controller that saw (alpha, length) lists, one a finished sequence."""
    controller = start(np.full(BINS, 64), probes)
    for alpha, length in rows:
        for first in range(0, len(alpha), CHUNK):
            here = slice(first, first + CHUNK)
            n = len(alpha[here])
            chunk = np.full((probes, CHUNK), np.nan, np.float32), np.zeros((probes, CHUNK), np.int32)
            measured = np.zeros((probes, CHUNK), bool)
            chunk[0][0, :n], chunk[1][0, :n], measured[0, :n] = alpha[here], length[here], True
            ended = np.arange(probes) == (0 if first + CHUNK >= len(alpha) else -1)
            controller = _count(controller, control, *chunk, measured, ended)
    return controller


def sequences(seed, number=12):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        n = int(rng.integers(50, 5000))
        alpha = 1 - 10.0 ** rng.uniform(-7, 0, n) * rng.uniform(0.2, 1)
        rows.append((alpha.astype(np.float32), np.arange(n) + int(rng.integers(0, 3000))))
    return rows


@pytest.mark.parametrize('seed', range(3))
def test_p05_is_the_lower_quantile_of_each_bin_to_a_cell(seed):
    rows = sequences(seed)
    seen = tail(counted(rows).counts, CONTROL)
    alpha, length = (np.concatenate([row[i] for row in rows]) for i in range(2))
    for z in range(BINS):
        inside = alpha[np.minimum(length // WIDTH, BINS - 1) == z]
        assert seen.tokens_Z[z] == len(inside)
        if len(inside):
            exact_gap = 1 - lower_quantile(inside)
            assert exact_gap <= (1 - seen.p05_Z[z]) * (1 + 1e-4) <= exact_gap * 1.029


def test_the_quantile_rule_is_lower():
    """100 tokens, 5 of them at 0.2: p05 is 0.2, not what lies between 0.2 and 1."""
    controller = counted([(np.asarray([0.2] * 5 + [1.0] * 95, np.float32), np.zeros(100, int))])
    assert tail(controller.counts, CONTROL).p05_Z[0] == pytest.approx(0.2, abs=0.8 * 0.028)
    controller = counted([(np.asarray([0.2] * 4 + [1.0] * 96, np.float32), np.zeros(100, int))])
    assert tail(controller.counts, CONTROL).p05_Z[0] == pytest.approx(1.0, abs=2e-6)


def test_confidence_takes_sequences_as_clusters():
    """The same tokens, dealt out evenly or all bad ones in one sequence."""
    bad, good = np.float32(0.5), np.float32(0.99)
    even = [(np.asarray([bad] * 8 + [good] * 92, np.float32), np.zeros(100, int))] * 10
    lumped = [(np.asarray([bad] * 80 + [good] * 20, np.float32), np.zeros(100, int))]
    lumped += [(np.full(100, good), np.zeros(100, int))] * 9
    seen_even, seen_lumped = (tail(counted(rows).counts, CONTROL) for rows in (even, lumped))
    assert seen_even.p05_Z[0] == seen_lumped.p05_Z[0]
    assert seen_even.under_Z[0]
    assert not seen_lumped.under_Z[0]
    assert not seen_even.over_Z[0]
    one_alone = tail(counted(even[:1]).counts, CONTROL)
    assert not one_alone.under_Z[0]
    assert not one_alone.over_Z[0]


@pytest.mark.parametrize('seed', range(3))
def test_the_error_is_that_of_a_ratio_over_clusters(seed):
    """Against the textbook formula, for open and finished sequences alike."""
    rows = [row for row in sequences(seed, 5) if len(row[0]) <= 10**6]
    rows = [(alpha[:200], np.zeros(len(alpha[:200]), int)) for alpha, _ in rows]
    n, k = (np.asarray([f(alpha) for alpha, _ in rows], float) for f in (len, lambda a: (a < CONTROL.target).sum()))
    share = k.sum() / n.sum()
    error = np.sqrt(len(n) / (len(n) - 1) * ((k - share * n) ** 2).sum()) / n.sum()
    z_edge = (share - 0.05) / error
    for confidence, under in ((z_edge * 0.99, z_edge > 0), (z_edge * 1.01, False)):
        if z_edge <= 0:
            continue
        control = dataclasses.replace(CONTROL, confidence=confidence)
        assert bool(tail(counted(rows, control).counts, control).under_Z[0]) == under


def test_what_was_not_measured_is_not_counted():
    nan = np.full((PROBES, CHUNK), np.nan, np.float32)
    length = np.full((PROBES, CHUNK), 10**6, np.int32)
    nothing, ended = np.zeros((PROBES, CHUNK), bool), np.ones(PROBES, bool)
    controller = _count(start(np.full(BINS, 64), PROBES), CONTROL, nan, length, nothing, ended)
    for leaf in jax.tree.leaves(controller.counts):
        assert not np.asarray(leaf).any()
    moved, seen = _move(controller, CONTROL, MOST)
    assert np.isnan(seen.p05_Z).all()
    np.testing.assert_array_equal(budgets(moved), 64)


def test_a_move_empties_the_bin_and_waits_for_new_tokens():
    alpha = np.full(2500, 0.7, np.float32)
    controller = counted([(alpha[:1250], np.zeros(1250, int)), (alpha[:1250], np.zeros(1250, int))])
    moved, seen = _move(controller, CONTROL, MOST)
    assert seen.p05_Z[0] == pytest.approx(0.7, abs=0.01)
    expected = 64 * ((1 - float(seen.p05_Z[0])) / 0.14) ** (1.5 * 0.7)
    assert moved.budget_Z[0] == pytest.approx(min(expected, 125))
    np.testing.assert_array_equal(moved.budget_Z, moved.budget_Z[0])  # longer bins have at least as much
    np.testing.assert_array_equal(moved.moves_Z, 1)
    again, _ = _move(moved, CONTROL, MOST)
    np.testing.assert_array_equal(again.budget_Z, moved.budget_Z)
    assert not np.asarray(moved.counts.histogram_ZX).any()


def test_few_tokens_raise_a_budget_but_never_lower_it():
    def after(value, tokens):
        rows = [(np.full(tokens // 4, value, np.float32), np.zeros(tokens // 4, int))] * 4
        return float(_move(counted(rows), CONTROL, MOST)[0].budget_Z[0])

    assert after(0.5, 400) == 64
    assert after(0.5, 600) == 125  # twice as many, or all there are
    assert after(0.99, 1900) == 64
    assert after(0.99, 2000) == 32


def test_a_bin_that_no_budget_satisfies_goes_dense():
    controller = start(np.full(BINS, 64), PROBES)
    for _ in range(4):
        full = [(np.full(2000, 0.3, np.float32), np.full(2000, 3 * WIDTH, int))] * 2
        controller = dataclasses.replace(counted(full), budget_Z=controller.budget_Z)
        controller, _ = _move(controller, CONTROL, MOST)
    assert controller.budget_Z[3] == MOST[3]
    assert controller.budget_Z[2] == 64


def test_cells_cover_every_alpha():
    alpha = jnp.asarray([1.0, 1 - 1e-9, 0.5, 0.0, -0.1, 1.1])
    cells = np.asarray(cell(alpha))
    assert cells[0] == cells[1] == cells[5] == 0
    assert cells[3] == cells[4] == CELLS - 1
    assert (np.diff(np.asarray(cell(jnp.linspace(0, 1, 1000)))) <= 0).all()


class World:
    """Sequences whose alphas follow the paper's tables: 1 - p05 = c(length) budget^(-1/eta), sequences differ."""

    def __init__(self, seed, eta):
        self.rng, self.eta = np.random.default_rng(seed), eta
        self.length = np.zeros(PROBES, int)
        self.limit = np.zeros(PROBES, int)
        self.nature = np.ones(PROBES)

    def best(self):
        """Budgets that hold 0.86: 20, 40, 60, 80 pages."""
        return 20.0 * np.arange(1, BINS + 1)

    def chunk(self, budget_pages):
        ended = self.length >= self.limit
        self.length[ended] = 0
        self.limit[ended] = self.rng.integers(3000, BINS * WIDTH, ended.sum())
        self.nature[ended] = np.exp(self.rng.normal(0, 0.1, ended.sum()))
        length = self.length[:, None] + np.arange(CHUNK)
        z = np.minimum(length // WIDTH, BINS - 1)
        gap05 = 0.14 * (self.best()[z] / np.asarray(budget_pages)[z]) ** (1 / self.eta)
        # A log-uniform gap whose upper 5% point is gap05.
        gap = gap05 * self.nature[:, None] * 10 ** (4 * (self.rng.random(length.shape) - 0.95))
        measured = length < self.limit[:, None]
        self.length += CHUNK
        alpha = (1 - np.minimum(gap, 1)).astype(np.float32)
        return alpha, length.astype(np.int32), measured, self.length >= self.limit


@pytest.mark.parametrize('eta', [1.2, 1.9])
@pytest.mark.parametrize('wrong', [1 / 8, 1, 8])
def test_it_arrives_from_budgets_8_times_too_small_or_too_large(eta, wrong):
    world = World(7, eta)
    controller = start(np.maximum(world.best() * wrong, 1), PROBES)
    for step in range(600):
        controller = _count(controller, CONTROL, *world.chunk(budgets(controller)))
        controller, _ = _move(controller, CONTROL, MOST)
        # p05 of the world at these budgets, not what the controller has seen.
        gap05 = 0.14 * (world.best() / np.asarray(budgets(controller))) ** (1 / eta)
        if step >= 400:
            np.testing.assert_allclose(1 - gap05, 0.86, rtol=0, atol=0.035)
    assert (np.asarray(controller.moves_Z) > 0).any()
