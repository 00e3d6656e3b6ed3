"""Sampling token by token through pages, slots and segments gives what one forward pass over the row gives."""

import jax
import numpy as np
import pytest
import teacher_forced
from flax import nnx
from sampler_setup import (
    ALL,
    BIN_WIDTH,
    MIXED,
    PAGE,
    RESERVED_FIRST,
    RESERVED_LAST,
    TIGHT,
    assert_same,
    make_requests,
)
from teacher_forced import log_softmax

import sparrow_jax.rollout.functions as functions_module

REQUESTS = make_requests()


def picked(logits_TV, response, temperature=1.0):
    return np.take_along_axis(log_softmax(logits_TV, temperature), response.tokens[:, None], axis=1)[:, 0]


def cached_tokens(request, response):
    """Tokens in the cache, the current one included, when each response token but the first is drawn."""
    return len(request.prompt_ids) + np.arange(1, len(response.tokens))


@pytest.fixture(scope='module')
def dense_responses(sampler):
    return sampler(REQUESTS, sparse=False, temperature=0.6)


@pytest.fixture(scope='module')
def sparse_responses(sampler):
    return sampler(REQUESTS, budgets=MIXED)


def test_dense_log_probs_are_the_forward_passes_at_the_sampling_temperature(model, dense_responses):
    for request, response in zip(REQUESTS, dense_responses, strict=True):
        logits_TV = teacher_forced.dense(model, request, response)
        np.testing.assert_allclose(response.logp, picked(logits_TV, response, 0.6), rtol=0, atol=1e-5)


def test_log_probs_of_another_temperature_or_position_differ(model, dense_responses):
    """The comparison above would notice a raw log-prob, log-prob / T and a shift by one."""
    request, response = max(zip(REQUESTS, dense_responses, strict=True), key=lambda pair: len(pair[1].tokens))
    logits_TV = teacher_forced.dense(model, request, response)
    expected_T = picked(logits_TV, response, 0.6)
    for wrong_T in (picked(logits_TV, response), picked(logits_TV, response) / 0.6, np.roll(expected_T, 1)):
        assert np.median(np.abs(wrong_T - expected_T)) > 0.01


def test_greedy_tokens_are_the_forward_passes_largest_logits(model, sampler):
    for request, response in zip(REQUESTS, sampler(REQUESTS, sparse=False, temperature=0.0), strict=True):
        logits_TV = teacher_forced.dense(model, request, response)
        np.testing.assert_array_equal(response.tokens, logits_TV.argmax(axis=-1))
        np.testing.assert_allclose(response.logp, picked(logits_TV, response), rtol=0, atol=1e-5)


def test_sparse_log_probs_are_those_of_pages_chosen_by_hand(model, sparse_responses):
    """The whole sampler against NumPy: pages, landmarks of prefill and decode, budgets by length, reserved pages."""
    differences = []
    for request, response in zip(REQUESTS, sparse_responses, strict=True):
        logits_TV = teacher_forced.sparse(model, request, response, MIXED)
        np.testing.assert_allclose(response.logp, picked(logits_TV, response), rtol=0, atol=1e-5)
        differences += list(np.abs(picked(teacher_forced.dense(model, request, response), response) - response.logp))
    assert max(differences) > 0.1, 'no page was left out that mattered'


def test_a_budget_of_all_pages_equals_dense_sampling(sampler):
    responses = sampler(REQUESTS, budgets=ALL)
    assert_same(responses, sampler(REQUESTS, sparse=False))
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(responses, sampler(REQUESTS), strict=True))


@pytest.mark.parametrize('budget', [2, 3])
def test_sparse_sampling_is_dense_up_to_the_length_that_its_budget_covers(model, sampler, budget):
    """At budget - 1, budget and budget + 1 pages (the reserved ones come on top) nothing is left out; later it is."""
    covered = (budget + RESERVED_FIRST + RESERVED_LAST) * PAGE
    later = []
    for request, response in zip(REQUESTS, sampler(REQUESTS, budgets=(budget,) * 4), strict=True):
        difference_T = np.abs(picked(teacher_forced.dense(model, request, response), response) - response.logp)
        length_T = np.concatenate([[0], cached_tokens(request, response)])
        np.testing.assert_allclose(difference_T[length_T <= covered], 0, atol=1e-5)
        later += list(difference_T[length_T > covered])
    assert np.max(later) > 1e-3


def test_pages_read_are_recorded(sparse_responses, dense_responses):
    for request, sparse, dense in zip(REQUESTS, sparse_responses, dense_responses, strict=True):
        length_T = cached_tokens(request, sparse)
        budget_T = np.asarray(MIXED)[np.minimum(length_T // BIN_WIDTH, len(MIXED) - 1)]
        expected_T = np.minimum(-(-length_T // PAGE), budget_T + RESERVED_FIRST + RESERVED_LAST)
        np.testing.assert_array_equal(sparse.pages_read, [0, *expected_T])
        np.testing.assert_array_equal(dense.pages_read, [0, *-(-cached_tokens(request, dense) // PAGE)])


def test_kept_hidden_states_give_the_recorded_log_probs(model, sparse_responses):
    decoder = nnx.merge(*model)
    for response in sparse_responses:
        assert response.hidden.shape == (len(response.tokens), decoder.shape.d_model)
        logits_TV = decoder.logits(response.hidden)
        np.testing.assert_allclose(response.logp, picked(logits_TV, response), rtol=0, atol=1e-5)


def test_prompts_around_page_ends(model, sampler):
    requests = make_requests((1, 7, 8, 9, 15, 16, 17, 24), limit=12)
    for request, response in zip(requests, sampler(requests, budgets=TIGHT), strict=True):
        logits_TV = teacher_forced.sparse(model, request, response, TIGHT)
        np.testing.assert_allclose(response.logp, picked(logits_TV, response), rtol=0, atol=1e-5)


def test_nothing_relies_on_what_fresh_memory_holds(sampler, monkeypatch):
    """The cache starts as NaN, pool and landmarks: no bit of any response changes."""
    clean = sampler(REQUESTS)
    make_cache, made = functions_module.make_cache, []

    def unclean(*args, **kwargs):
        made.append(jax.tree.map(lambda x: x * np.nan, make_cache(*args, **kwargs)))
        return made[-1]

    monkeypatch.setattr(functions_module, 'make_cache', unclean)
    monkeypatch.delitem(sampler.engine.functions.compiled, ('fresh', True))  # compiled with the clean one
    assert_same(sampler(REQUESTS), clean, atol=0)
    assert len(made) == 1
