"""A response depends on its own request only: not on slots, pages, batches, segments, company or order."""

import numpy as np
import pytest
from sampler_setup import MAX_PROMPT, MAX_RESPONSE, PAGES, Sampler, assert_same, make_requests

REQUESTS = make_requests(samples=2)


@pytest.fixture(scope='module')
def responses(sampler):
    return sampler(REQUESTS)


def test_eight_slots_and_a_pool_for_two(small_pool, responses):
    assert_same(small_pool(REQUESTS), responses)


def test_requests_in_another_order(sampler, responses):
    order = np.random.default_rng(0).permutation(len(REQUESTS))
    assert_same(sampler([REQUESTS[i] for i in order]), [responses[i] for i in order])


def test_alone_or_beside_others(sampler, responses):
    for i in (0, 5, len(REQUESTS) - 1):
        assert_same(sampler([REQUESTS[i]]), [responses[i]])


@pytest.fixture(scope='module')
def crowded(model):
    """Pages for two longest sequences, given out four tokens at a time."""
    return Sampler(model, slots=8, pool_pages=2 * PAGES, segment_steps=4)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_who_runs_out_of_pages_leaves_and_comes_back_with_the_same_tokens(crowded, sampler, temperature):
    """Several begin, and the youngest give way to the oldest. None is cut."""
    requests = make_requests((MAX_PROMPT, MAX_PROMPT, 3, 17, 20, 24, 24, 9, 24, 23), limit=MAX_RESPONSE)
    parks = crowded.engine.parks
    running: set[int] = set()
    segments: list[set[int]] = []

    def on_progress(_):
        segments.append(set(running))
        running.clear()

    responses = crowded(
        requests, temperature=temperature, on_tokens=lambda i, _: running.add(i), on_progress=on_progress
    )
    assert crowded.engine.parks > parks
    assert_same(responses, sampler(requests, temperature=temperature))
    assert segments[0] >= {0, 1, 2}
    finished = {i: max(n for n, segment in enumerate(segments) if i in segment) for i in range(len(requests))}
    assert finished[0] < len(segments) - 1
    # Somebody was there, then not, then again.
    away = [segments[[i in s for s in segments].index(True) : finished[i]] for i in range(1, len(requests))]
    assert any(i not in segment for i, between in enumerate(away, start=1) for segment in between)


def test_samples_of_a_prompt_and_steps_differ(sampler, responses):
    texts = {tuple(response.tokens.tolist()) for response in responses if len(response.tokens) > 3}
    assert len(texts) == sum(len(response.tokens) > 3 for response in responses)
    for change in ({'step': 4}, {'seed': 6}):
        other = sampler(REQUESTS, **change)
        same = [a.tokens.tolist() == b.tokens.tolist() for a, b in zip(other, responses, strict=True)]
        assert np.mean(same) < 0.3
    assert_same(sampler(REQUESTS), responses, atol=0)


def test_samples_of_a_prompt_share_its_pages(model, sampler):
    """Eight samples of three full prompt pages and one page each run at once in 11 pages, where apart they need 32."""
    tight = Sampler(model, slots=8, pool_pages=11, segment_steps=8)
    requests = make_requests((MAX_PROMPT,), limit=8, samples=8)
    running: set[int] = set()
    segments: list[set[int]] = []

    def on_progress(_):
        segments.append(set(running))
        running.clear()

    responses = tight(requests, on_tokens=lambda i, _: running.add(i), on_progress=on_progress)
    assert segments[0] == set(range(8))
    assert_same(responses, [sampler([request])[0] for request in requests])


def test_a_slot_s_second_sequence_grows_into_the_pages_of_the_first(model, sampler):
    """One slot and no more pages than one sequence fills: the second gets the first one's pages, in the same places."""
    alone = Sampler(model, slots=1, pool_pages=PAGES, prefill_rows=1, segment_steps=4)
    requests = make_requests((9, 9, 9), limit=MAX_RESPONSE)
    assert_same(alone(requests), sampler(requests))
