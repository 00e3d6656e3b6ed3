"""How responses end and what is refused: end tokens, limits, empty lists, lengths that do not fit; streaming."""

import dataclasses

import numpy as np
import pytest
from sampler_setup import END_IDS, MAX_PROMPT, MAX_RESPONSE, PAGES, Sampler, assert_same, make_requests, prompt_of

from sparrow_jax.config import ConfigError
from sparrow_jax.rollout.engine import Progress
from sparrow_jax.rollout.pool import Request

REQUESTS = make_requests(samples=2)
SEED = 6  # one of the first tokens ends its response


@pytest.fixture(scope='module')
def responses(sampler):
    return sampler(REQUESTS, seed=SEED)


def test_every_end_token_ends_a_response_and_nothing_follows_it(responses):
    for response in responses:
        ends = np.isin(response.tokens, END_IDS)
        assert not ends[:-1].any()
        assert ends[-1] == (response.finish_reason == 'stop')
        assert response.finish_reason == 'stop' or len(response.tokens) == MAX_RESPONSE
    assert {int(response.tokens[-1]) for response in responses if response.finish_reason == 'stop'} == set(END_IDS)
    assert {response.finish_reason for response in responses} == {'stop', 'length'}


def test_the_end_token_counts_though_it_equals_the_padding(responses):
    """Unused places of the token arrays hold 0, which is an end id too: lengths decide, not ids."""
    stopped = [response for response in responses if response.tokens[-1] == 0]
    assert stopped
    for response in stopped:
        assert response.finish_reason == 'stop'
        assert np.count_nonzero(response.tokens == 0) == 1
        assert len(response.tokens) == len(response.logp) == len(response.pages_read)


def test_an_end_token_at_the_limit_is_a_stop(sampler, responses):
    stopped = [i for i, r in enumerate(responses) if r.finish_reason == 'stop' and len(r.tokens) > 1]
    exact = [dataclasses.replace(REQUESTS[i], limit_tokens=len(responses[i].tokens)) for i in stopped]
    assert_same(sampler(exact, seed=SEED), [responses[i] for i in stopped])
    for i, cut in zip(
        stopped,
        sampler([dataclasses.replace(r, limit_tokens=r.limit_tokens - 1) for r in exact], seed=SEED),
        strict=True,
    ):
        assert cut.finish_reason == 'length'
        np.testing.assert_array_equal(cut.tokens, responses[i].tokens[:-1])


def test_a_limit_of_one_token(sampler, responses):
    requests = [dataclasses.replace(request, limit_tokens=1) for request in REQUESTS]
    for one, response in zip(sampler(requests, seed=SEED), responses, strict=True):
        assert one.tokens.tolist() == response.tokens[:1].tolist()
        assert one.pages_read.tolist() == [0]
        assert one.finish_reason == ('stop' if one.tokens[0] in END_IDS else 'length')
    firsts = {int(response.tokens[0]) for response in responses}
    assert firsts & set(END_IDS), 'no response ends with its first token'


def test_no_requests_no_responses(sampler):
    assert sampler([]) == []


@pytest.mark.parametrize(
    ('prompt', 'limit', 'named'),
    [
        (MAX_PROMPT + 1, 1, 'rollout.max_prompt_tokens=24'),
        (0, 1, 'rollout.max_prompt_tokens=24'),
        (1, MAX_RESPONSE + 1, 'rollout.max_response_tokens=40'),
        (1, 0, 'rollout.max_response_tokens=40'),
    ],
)
def test_lengths_that_do_not_fit_are_refused(sampler, prompt, limit, named):
    fine = Request(prompt_of(0, 3), 0, 0, 1)
    with pytest.raises(ConfigError, match=named):
        sampler([fine, Request(prompt_of(1, prompt), 1, 0, limit)])


def test_a_request_larger_than_the_pool_is_refused_and_does_not_wait_for_ever(model):
    sampler = Sampler(model, pool_pages=PAGES)
    sampler.engine.pool_pages = PAGES - 1  # the configuration refuses this at start
    with pytest.raises(ConfigError, match=r'rollout\.pool_pages=7: one request needs 8 pages'):
        sampler([Request(prompt_of(0, MAX_PROMPT), 0, 0, MAX_RESPONSE)])


def test_slots_split_evenly_over_data_shards(model, monkeypatch):
    monkeypatch.setattr('sparrow_jax.parallel.mesh.batch_shards', lambda _: 3)
    with pytest.raises(ConfigError, match=r'rollout\.slots=4: must be a multiple of the 3 data shards'):
        Sampler(model)


def test_tokens_stream_in_order_and_progress_counts_them(sampler, responses):
    streams: dict[int, list[int]] = {}
    progress: list[Progress] = []

    def on_tokens(index, tokens):
        streams.setdefault(index, []).extend(tokens.tolist())

    def on_progress(state):
        assert state.tokens == sum(len(stream) for stream in streams.values())
        progress.append(state)

    sampler(REQUESTS, seed=SEED, on_tokens=on_tokens, on_progress=on_progress)
    assert {i: response.tokens.tolist() for i, response in enumerate(responses)} == streams
    finished = [state.finished for state in progress]
    assert finished == sorted(finished)
    assert finished[0] < finished[-1] == progress[-1].total == len(REQUESTS)
