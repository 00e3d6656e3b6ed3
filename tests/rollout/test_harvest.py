"""Finished rows are read late, while the next segment runs; what `Progress` says of slots, pages and parked ones."""

import itertools

import numpy as np
import pytest
from sampler_setup import MAX_PROMPT, MAX_RESPONSE, PAGES, Sampler, assert_same, make_requests

from sparrow_jax.rollout import harvest
from sparrow_jax.rollout.engine import Progress

REQUESTS = make_requests(samples=2)


def test_reading_late_or_at_once_gives_the_same(sampler, monkeypatch):
    late = sampler(REQUESTS)
    monkeypatch.setattr(harvest, 'WAITING_BYTES', 0)
    at_once = sampler(REQUESTS)
    assert_same(at_once, late, atol=0)
    for a, b in zip(at_once, late, strict=True):
        np.testing.assert_array_equal(a.hidden, b.hidden)
        assert a.hidden.shape == (len(a.tokens), sampler.engine.shape.d_model)


def test_no_more_waits_than_a_limit_allows(sampler, monkeypatch):
    """Rows are cut out as long as they fit; the one that goes beyond makes all be read."""
    waiting: list[int] = []
    take = harvest.Harvest.take

    def counted(self, *arguments):
        take(self, *arguments)
        waiting.append(len(self._waiting))

    monkeypatch.setattr(harvest.Harvest, 'take', counted)
    sampler(make_requests((9,) * 8, limit=3))
    assert max(waiting) > 2
    row_bytes = MAX_RESPONSE * (3 + sampler.engine.shape.d_model) * 4
    monkeypatch.setattr(harvest, 'WAITING_BYTES', 2 * row_bytes)
    waiting.clear()
    sampler(make_requests((9,) * 8, limit=3))
    assert max(waiting) == 2


@pytest.fixture(scope='module')
def crowded(model):
    return Sampler(model, slots=8, pool_pages=2 * PAGES, segment_steps=4)


def test_progress_tells_who_runs_who_waits_and_what_they_hold(crowded):
    requests = make_requests((MAX_PROMPT, MAX_PROMPT, 3, 17, 20, 24, 24, 9, 24, 23), limit=MAX_RESPONSE)
    seen: list[Progress] = []
    lengths: dict[int, int] = {}

    def on_tokens(index, tokens):
        lengths[index] = lengths.get(index, 0) + len(tokens)

    def on_progress(state):
        seen.append(state)
        assert state.tokens == sum(lengths.values()), 'tokens of parked sequences count, too'

    responses = crowded(requests, on_tokens=on_tokens, on_progress=on_progress)
    assert any(state.parked for state in seen)
    for before, state in itertools.pairwise(seen):
        assert before.finished + state.running + state.parked <= state.total == len(requests)
        assert state.running <= 8
        assert 0 <= state.pages <= 2 * PAGES
        assert state.pages >= state.running > 0
        assert before.parks <= state.parks
        assert before.prefill_s <= state.prefill_s
    last = seen[-1]
    assert (last.finished, last.parked) == (len(requests), 0)
    assert last.running == last.finished - seen[-2].finished
    assert last.tokens == sum(len(response.tokens) for response in responses)
    assert last.parks >= max(state.parked for state in seen) > 0
    assert last.prefill_s > seen[0].prefill_s > 0
