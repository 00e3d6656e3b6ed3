"""A sampler as unlike the others as can be gives the same responses, and one compilation serves all it is asked for.

One slot, harvested after every token; prompts padded to 136 or 264 tokens where the others pad to 24; top-p.
"""

import jax
import numpy as np
import pytest
from sampler_setup import ALL, MIXED, TIGHT, Sampler, assert_same, make_requests

from sparrow_jax.metrics import CompileCounter
from sparrow_jax.rollout.engine import Sampling

REQUESTS = make_requests(samples=2)
ALMOST_ALL = 1 - 2**-20  # top-p that leaves every token that the tiny model could draw


@pytest.fixture(scope='module')
def truncating(model):
    """(warmed up for sampling with top-p, what it said while it compiled)."""
    sampler = Sampler(model, slots=1, prefill_rows=1, segment_steps=1, max_prompt_tokens=264)
    compiled: list[str] = []
    sampler.engine.warm_up(sampler.weights, [Sampling(1.0, top_p=0.9)], compiled.append)
    return sampler, compiled


def test_nothing_compiles_after_warm_up(truncating):
    sampler, said = truncating
    assert said == ['sparse sampler']
    counts: list[int] = []
    with CompileCounter() as counter:
        counter.warmed_up()
        for temperature, top_p, budgets, lengths, limit in (
            (1.0, 0.9, ALL, (1,), 1),
            (0.0, 0.5, TIGHT, (136, 264, 8), 40),
            (0.6, 0.99, MIXED, (200, 3, 137, 24, 17, 5), 17),
            (2.5, 0.1, TIGHT, (), 5),
            (0.7, 0.9, MIXED, range(1, 80), 2),  # more requests than keys are made of at a time
        ):
            requests = make_requests(lengths, limit)
            counts.append(
                len(sampler(requests, temperature=temperature, top_p=top_p, budgets=budgets, step=len(counts)))
            )
        sampler(make_requests((5, 200)), top_p=0.9, on_tokens=lambda *_: None, on_progress=lambda _: None)
        assert counter.late == []
        jax.jit(lambda x: x + len(counts))(1)
        assert len(counter.late) == 1, 'the counter does not hear compilations'
    assert counts == [1, 3, 6, 0, 79]


def test_responses_are_those_of_four_slots_with_shorter_padding(sampler, truncating):
    assert sampler.engine.prefill_lengths == (24,)
    assert truncating[0].engine.prefill_lengths == (136, 264)
    for temperature in (0.0, 1.0):
        responses = truncating[0](REQUESTS, temperature=temperature, top_p=ALMOST_ALL)
        assert_same(responses, sampler(REQUESTS, temperature=temperature))


def test_top_p_reaches_the_sampler(sampler, truncating):
    """The least set is the likeliest token: greedy, whatever the temperature."""
    greedy = sampler(REQUESTS, temperature=0.0)
    for response, expected in zip(truncating[0](REQUESTS, top_p=1e-6), greedy, strict=True):
        np.testing.assert_array_equal(response.tokens, expected.tokens)
        np.testing.assert_allclose(response.logp, expected.logp, rtol=0, atol=1e-5)
