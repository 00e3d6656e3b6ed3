"""The last sequences of a rollout go on in fewer slots, and nothing that they say changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_setup import ALL, BIN_WIDTH, MIXED, PAGES, Sampler, assert_same, make_requests

from sparrow_jax.metrics import CompileCounter
from sparrow_jax.rollout.compaction import move_sequences, widths
from sparrow_jax.rollout.engine import Probing, Sampling
from sparrow_jax.sparsity.controller import Control

NEVER = Control(target=0.9, bin_width_tokens=BIN_WIDTH, min_count=10**9, urgent_count=10**9)
# Of all lengths, the longest ones last: they end up alone.
REQUESTS = [
    dataclasses.replace(request, limit_tokens=limit)
    for request, limit in zip(
        make_requests(samples=2), (40, 3, 5, 9, 12, 2, 40, 17, 1, 8, 4, 30, 2, 33, 6, 3, 40, 38), strict=True
    )
]


@pytest.mark.parametrize(
    ('slots', 'halvings', 'probes', 'found'),
    [(96, 4, 0, (96, 48, 24, 16, 8)), (7, 9, 0, (7, 4, 2, 1)), (8, 3, 2, (8, 4)), (8, 0, 0, (8,)), (1, 3, 0, (1,))],
)
def test_widths_are_halves_with_a_slot_beside_the_probes(slots, halvings, probes, found):
    assert widths(slots, halvings, probes) == found


def test_moved_rows_are_copied_whole_and_their_old_slots_idle(model):
    engine = Sampler(model, keep_hidden=True).engine
    cache, slots = engine.functions.fresh(True)()
    rng = np.random.default_rng(0)
    random = lambda x: jnp.asarray(
        rng.integers(0, 2, x.shape) if x.dtype == bool else rng.standard_normal(x.shape) * 99
    )
    cache, slots = jax.tree.map(lambda x: random(x).astype(x.dtype), (cache, slots))
    slots = dataclasses.replace(slots, active_B=jnp.asarray([False, True, True, True]))
    landmarks, moved = move_sequences(cache.landmarks, slots, jnp.asarray([3, 2, 2]), jnp.asarray([0, 2, 2]))
    came_from = np.asarray([3, 1, 2, 3])
    for field in dataclasses.fields(slots):
        old, new = (np.asarray(getattr(x, field.name)) for x in (slots, moved))
        if field.name == 'active_B':
            np.testing.assert_array_equal(new, [True, True, True, False])
        elif not field.name.startswith('probe'):
            np.testing.assert_array_equal(new, old[came_from], err_msg=field.name)
    for old, new in zip(cache.landmarks, landmarks, strict=True):
        np.testing.assert_array_equal(new, np.asarray(old)[came_from])


@pytest.fixture(scope='module')
def narrowing(model):
    return Sampler(model, slots=8, halvings=3, keep_hidden=True)


@pytest.mark.parametrize(('sparse', 'order'), [(True, 1), (True, -1), (False, 1)])
def test_responses_do_not_depend_on_the_widths(narrowing, sampler, sparse, order):
    """Whatever order they come in: `sampler` has half of the slots and never fewer."""
    seen, streamed, requests = [], {}, REQUESTS[::order]
    settings = {'budgets': MIXED, 'sparse': sparse}
    keep = lambda index, tokens: streamed.setdefault(index, []).extend(tokens.tolist())
    found = narrowing(requests, **settings, on_progress=seen.append, on_tokens=keep)
    expected = sampler(requests, **settings)
    assert_same(found, expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(one.hidden, other.hidden, atol=1e-5)
        assert streamed[i] == one.tokens.tolist()
    narrowest = {progress.slots for progress in seen}
    assert 8 in narrowest
    assert len(narrowest) > 1
    assert all(progress.running <= progress.slots for progress in seen)


def test_few_pages_keep_most_sequences_in_host_memory_and_the_segment_narrow(model, sampler):
    tight = Sampler(model, ALL, slots=8, halvings=3, pool_pages=2 * PAGES)
    requests, seen = make_requests(samples=2), []
    assert_same(tight(requests, budgets=MIXED, on_progress=seen.append), sampler(requests, budgets=MIXED))
    assert tight.engine.parks > 0
    assert {progress.slots for progress in seen if progress.parked} & {4, 2, 1}


def test_probes_keep_their_slots_and_nothing_compiles_late(model):
    def adaptively(halvings):
        sampler = Sampler(model, ALL, slots=8, halvings=halvings, probing=Probing(NEVER, probes=2))
        engine, seen = sampler.engine, []
        with CompileCounter() as counter:
            engine.warm_up(sampler.weights, [Sampling(1.0)])
            controller = engine.start_controller()
            counter.warmed_up()
            settings = {'run_key': jax.random.key(5), 'step': 3, 'sampling': Sampling(1.0)}
            found = engine.generate_adaptively(
                sampler.weights, REQUESTS, controller, **settings, on_progress=seen.append
            )
        assert counter.late == []
        return *found, {progress.slots for progress in seen}

    (narrow, measured, widths_seen), (wide, expected, _) = adaptively(3), adaptively(0)
    assert widths_seen == {8, 4}
    assert_same(narrow, wide)
    np.testing.assert_array_equal(measured.controller.counts.tokens_Z, expected.controller.counts.tokens_Z)
    histograms = [x.controller.counts.histogram_ZX for x in (measured, expected)]
    np.testing.assert_array_equal(*histograms)
