"""A response depends on its own request only: not on slots, pages, batches, segments, company or order."""

import dataclasses

import numpy as np
import pytest
from sampler_setup import MAX_PROMPT, MAX_RESPONSE, assert_same, make_requests

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


def test_a_request_waits_when_the_pool_is_a_page_short(small_pool, sampler):
    """Two longest sequences fill the pool; a third of a single page waits. None is cut, and tokens stay the same."""
    requests = make_requests((MAX_PROMPT, MAX_PROMPT, 3), limit=MAX_RESPONSE)
    requests[2] = dataclasses.replace(requests[2], limit_tokens=5)
    running: set[int] = set()
    segments: list[list[int]] = []

    def on_progress(_):
        segments.append(sorted(running))
        running.clear()

    responses = small_pool(requests, temperature=0.0, on_tokens=lambda i, _: running.add(i), on_progress=on_progress)
    assert_same(responses, sampler(requests, temperature=0.0))
    assert segments[0] == [0, 1]
    # Shorter ones need five pages each: three of them run at once.
    segments.clear()
    requests = make_requests((8,) * 3, limit=30)
    small_pool(requests, temperature=0.0, on_tokens=lambda i, _: running.add(i), on_progress=on_progress)
    assert segments[0] == [0, 1, 2]


def test_samples_of_a_prompt_and_steps_differ(sampler, responses):
    texts = {tuple(response.tokens.tolist()) for response in responses if len(response.tokens) > 3}
    assert len(texts) == sum(len(response.tokens) > 3 for response in responses)
    for change in ({'step': 4}, {'seed': 6}):
        other = sampler(REQUESTS, **change)
        same = [a.tokens.tolist() == b.tokens.tolist() for a, b in zip(other, responses, strict=True)]
        assert np.mean(same) < 0.3
    assert_same(sampler(REQUESTS), responses, atol=0)
