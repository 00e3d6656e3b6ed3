"""The controller: what it counts, against plain NumPy, and where it arrives, in a made-up world."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparrow_jax.sparsity.controller import CELLS, Control, budgets, cell, count, move, renew, start, tail, widen
from sparrow_jax.sparsity.mismatch import lower_quantile

WIDTH, BINS, PROBES, CHUNK = 2000, 4, 4, 256
CONTROL = Control(target=0.86, bin_width_tokens=WIDTH, min_count=2000, urgent_count=500)
MOST = jnp.asarray([(i + 1) * WIDTH // 16 for i in range(BINS)], jnp.int32)
_count = jax.jit(count, static_argnames='control')
_move = jax.jit(move, static_argnames='control')


def counted(rows, control=CONTROL, probes=PROBES, controller=None):
    """A controller that saw (alpha, length) lists, one a finished sequence."""
    controller = controller or start(np.full(BINS, 64), probes)
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
    one_alone = tail(counted(even[:1]).counts, CONTROL)
    assert not one_alone.under_Z[0]


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
    assert np.isnan(tail(controller.counts, CONTROL).p05_Z).all()
    moved = _move(controller, CONTROL, MOST)
    for before, after in zip(jax.tree.leaves(controller), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_move_empties_the_bin_and_waits_for_new_tokens():
    alpha = np.full(2500, 0.7, np.float32)
    controller = counted([(alpha[:1250], np.zeros(1250, int)), (alpha[:1250], np.zeros(1250, int))])
    p05 = float(tail(controller.counts, CONTROL).p05_Z[0])
    assert p05 == pytest.approx(0.7, abs=0.01)
    moved = _move(controller, CONTROL, MOST)
    assert 125 >= moved.budget_Z[0] > 110  # twice as much or all that there is
    assert (np.diff(moved.budget_Z) >= 0).all()
    assert moved.budget_Z[1] > 110  # longer bins follow
    np.testing.assert_array_equal(moved.moves_Z, 1)
    np.testing.assert_array_equal(moved.p05_Z, np.asarray([p05, -1, -1, -1], np.float32))
    assert not np.asarray(moved.counts.histogram_ZX).any()
    again = _move(moved, CONTROL, MOST)
    np.testing.assert_array_equal(again.budget_Z, moved.budget_Z)


def test_few_tokens_raise_a_budget_but_never_lower_it():
    def after(value, tokens):
        rows = [(np.full(tokens // 4, value, np.float32), np.zeros(tokens // 4, int))] * 4
        return float(_move(counted(rows), CONTROL, MOST).budget_Z[0])

    assert after(0.5, 400) == 64
    assert after(0.5, 600) > 100
    assert after(0.99, 1900) == 64
    assert after(0.99, 2000) == pytest.approx(32, rel=0.1)  # a move halves at most


def test_tokens_are_answered_at_the_budget_that_they_were_sampled_with():
    """A bin whose budget was moved by another's measurement between its tokens."""
    on_target = np.where(np.arange(1000) % 20 == 0, 0.5, 0.95).astype(np.float32)
    controller = counted([(on_target, np.zeros(1000, int))])
    controller = dataclasses.replace(controller, budget_Z=jnp.full(BINS, 16.0))
    full = counted([(on_target, np.zeros(1000, int))] * 2, controller=controller)
    expected = 1000 * np.log(64) + 2000 * np.log(16)
    assert full.counts.log_pages_Z[0] == pytest.approx(expected, rel=1e-5)
    moved = _move(full, CONTROL, MOST)
    # A twentieth is below at 25.4 pages on (geometric) average, so that 16 are too few.
    assert moved.budget_Z[0] == pytest.approx(float(np.exp(expected / 3000)), rel=0.03)


def test_a_bin_that_no_budget_satisfies_goes_dense():
    controller = start(np.full(BINS, 64), PROBES)
    for _ in range(6):
        full = [(np.full(2000, 0.3, np.float32), np.full(2000, 3 * WIDTH, int))] * 2
        controller = _move(counted(full, controller=controller), CONTROL, MOST)
    assert budgets(controller)[3] == MOST[3]
    assert (np.asarray(controller.budget_Z[:3]) <= np.asarray(MOST[:3])).all()


@pytest.mark.parametrize(('budget', 'alpha'), [(1, 0.99), (int(MOST[0]), 0.5)])
def test_a_bin_that_no_budget_brings_to_its_target_moves_no_other(budget, alpha):
    begin = np.asarray([budget, 200, 250, 300])
    seen = counted([(np.full(2500, alpha, np.float32), np.zeros(2500, int))] * 2, controller=start(begin, PROBES))
    moved = _move(seen, CONTROL, MOST)
    np.testing.assert_array_equal(moved.budget_Z, begin)
    assert moved.p05_Z[0] == pytest.approx(alpha, abs=0.02)
    assert not np.asarray(moved.counts.histogram_ZX).any()


def test_widening_doubles_and_forgets():
    controller = _move(counted([(np.full(2500, 0.7, np.float32), np.zeros(2500, int))]), CONTROL, MOST)
    wider = widen(controller, np.asarray(MOST))
    np.testing.assert_allclose(wider.budget_Z, np.minimum(2 * controller.budget_Z, MOST))
    fresh = start(np.ones(BINS), PROBES)
    np.testing.assert_array_equal(wider.belief.covariance_EE, fresh.belief.covariance_EE)


def test_cells_cover_every_alpha():
    alpha = jnp.asarray([1.0, 1 - 1e-9, 0.5, 0.0, -0.1, 1.1])
    cells = np.asarray(cell(alpha))
    assert cells[0] == cells[1] == cells[5] == 0
    assert cells[3] == cells[4] == CELLS - 1
    assert (np.diff(np.asarray(cell(jnp.linspace(0, 1, 1000)))) <= 0).all()


class World:
    """Sequences of one step after the other, all of a length, whose alphas follow a curve of p05 over pages and length.

    A sequence has a nature that its tokens share, and neighbouring tokens are alike: spreads as measured on
    SmolLM2-135M. What a token needs grows with its length, so that the tokens of a bin differ. 1 - p05 of all sequences
    at a length is `gap05`.
    """

    NATURE, NEIGHBOURS, TAIL_EXPONENT = 0.15, 0.15, 0.33

    def __init__(self, seed, curve, tokens_per_page):
        self.rng, self.curve, self.tokens_per_page = np.random.default_rng(seed), curve, tokens_per_page

    def gap05(self, pages, length, target):
        few = length / self.tokens_per_page / np.maximum(pages, 0.5)
        of_curve = {
            'power': (1 - target) * few ** (1 / 1.5),  # the published tables
            'logarithmic': 1 - target + 0.2 * np.log(few),  # SmolLM2: p05 grows by a constant with every doubling
        }
        return np.clip(of_curve[self.curve], 1e-5, 0.95)

    def step(self, controller, control, most, probes):
        """A rollout under the controller; returns it and p05 of each bin, as all sequences would show it."""
        controller = renew(controller)
        spread = self.rng.normal(0, self.NATURE, (probes, 1))
        pooled = np.exp(-0.5 * (self.NATURE**2 + self.NEIGHBOURS**2) / self.TAIL_EXPONENT)
        gaps = [[] for _ in range(BINS)]
        for first in range(PROMPT, BINS * control.bin_width_tokens, STEP_CHUNK):
            z = first // control.bin_width_tokens
            pages = int(budgets(controller)[z]) + control.reserved_pages
            gap05 = self.gap05(pages, first + STEP_CHUNK / 2, control.target)
            gaps[z].append(gap05)
            local_P1 = self.rng.normal(0, self.NEIGHBOURS, (probes, 1))
            share = np.maximum(self.rng.random((probes, STEP_CHUNK)), 1e-9) / 0.05
            gap = gap05 * pooled * np.exp(spread + local_P1) * share**-self.TAIL_EXPONENT
            alpha = (1 - np.minimum(gap, 1)).astype(np.float32)
            length = np.full(alpha.shape, first, np.int32)
            last = np.full(probes, first + STEP_CHUNK == BINS * control.bin_width_tokens)
            controller = _count(controller, control, alpha, length, np.ones(alpha.shape, bool), last)
            controller = _move(controller, control, most)
        # Shares average, and they go with a power of the gap.
        power = 1 / self.TAIL_EXPONENT
        return controller, 1 - np.asarray([np.mean(np.power(g, power)) ** (1 / power) for g in gaps])


PROMPT, STEP_CHUNK = 256, 128  # tokens
STEP_CONTROL = Control(target=0.86, bin_width_tokens=512, min_count=500, urgent_count=250, reserved_pages=3)
STEP_MOST = jnp.asarray([64, 128, 192, 256], jnp.int32)
TOKENS_PER_PAGE = 24  # that a page read is enough for
BEST_Z = np.asarray([384, 768, 1280, 1792]) / TOKENS_PER_PAGE - 3


@pytest.mark.parametrize('curve', ['power', 'logarithmic'])
@pytest.mark.parametrize('wrong', [1 / 8, 1, 8])
def test_it_arrives_within_three_steps_from_budgets_8_times_too_small_or_too_large(curve, wrong):
    """Also from one budget for all lengths, which is wrong by another factor everywhere; eight probes."""
    errors = []
    for seed in range(10):
        world = World(seed, curve, TOKENS_PER_PAGE)
        begin_Z = np.minimum(np.maximum(BEST_Z * wrong, 1), np.asarray(STEP_MOST)) if wrong != 1 else np.full(BINS, 24)
        controller, of_steps = start(begin_Z, 8), []
        for _ in range(5):
            controller, p05_Z = world.step(controller, STEP_CONTROL, STEP_MOST, probes=8)
            of_steps.append(p05_Z - STEP_CONTROL.target)
            assert (np.diff(budgets(controller)) >= 0).all()
        errors.append(of_steps)
    errors = np.abs(errors)  # [seeds, steps, bins]
    assert (errors[:, 2:] <= 0.02).mean() >= 0.9
    assert errors[:, 2:].max() <= 0.05
    assert np.mean(errors[:, 4]) < 0.01


def test_it_follows_a_policy_that_changes_suddenly():
    world = World(3, 'power', TOKENS_PER_PAGE)
    controller = start(BEST_Z, 8)
    for _ in range(4):
        controller, _ = world.step(controller, STEP_CONTROL, STEP_MOST, probes=8)
    world.tokens_per_page = TOKENS_PER_PAGE / 3
    for _ in range(4):
        controller, p05_Z = world.step(controller, STEP_CONTROL, STEP_MOST, probes=8)
    np.testing.assert_allclose(p05_Z, STEP_CONTROL.target, atol=0.03)
