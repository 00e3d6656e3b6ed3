"""The sampler under every selection policy, against NumPy and against itself; what it keeps of each page."""

import jax
import numpy as np
import pytest
import teacher_forced
from sampler_setup import ALL, MIXED, PAGE, TIGHT, WIDE_SHAPE, Sampler, assert_same, make_model
from sampler_setup import make_requests as requests_of
from teacher_forced import log_softmax

import sparrow_jax.rollout.functions as functions_module
from pallas_kernels.implementation import Implementation
from pallas_kernels.page_select.policies import SelectionPolicy

REQUESTS = requests_of((24, 1, 16, 17, 9))
OTHERS = [policy for policy in SelectionPolicy if policy is not SelectionPolicy.BLOCK_MEAN]


@pytest.fixture(scope='module')
def samplers(model, sampler):
    """One for each policy; that of the default is shared with other files."""
    return {SelectionPolicy.BLOCK_MEAN: sampler} | {
        policy: Sampler(model, keep_hidden=True, policy=policy) for policy in OTHERS
    }


@pytest.fixture(scope='module')
def watched(model):
    """A sampler under 'quest' that decodes token by token, and copies of cache and slots after each of its calls."""
    sampler, seen = Sampler(model, policy='quest', segment_steps=1), []

    def watch(name):
        make = getattr(sampler.engine.functions, name)

        def made(*which):
            function = make(*which)

            def call(*args):
                cache, slots = function(*args)
                seen.append((name, jax.tree.map(np.array, (cache, slots))))
                return cache, slots

            return call

        setattr(sampler.engine.functions, name, made)

    watch('prefill')
    watch('segment')
    sampler(REQUESTS, budgets=TIGHT)
    return seen


def picked(logits_TV, response):
    return np.take_along_axis(log_softmax(logits_TV), response.tokens[:, None], axis=1)[:, 0]


@pytest.mark.parametrize('policy', OTHERS)
def test_log_probs_are_those_of_pages_chosen_by_hand(model, samplers, policy):
    """Whole responses against NumPy, as for the default policy in test_engine_forward."""
    for request, response in zip(REQUESTS, samplers[policy](REQUESTS, budgets=MIXED), strict=True):
        logits_TV = teacher_forced.sparse(model, request, response, MIXED, policy)
        np.testing.assert_allclose(response.logp, picked(logits_TV, response), rtol=0, atol=1e-5)


@pytest.mark.parametrize('policy', OTHERS)
def test_pages_chosen_by_another_policy_give_other_log_probs(model, samplers, policy):
    """The comparison above would notice."""
    responses = samplers[policy](REQUESTS, budgets=MIXED)
    for other in set(SelectionPolicy) - {policy}:
        differences = [
            np.abs(picked(teacher_forced.sparse(model, request, response, MIXED, other), response) - response.logp)
            for request, response in zip(REQUESTS, responses, strict=True)
        ]
        assert np.concatenate(differences).max() > 0.1, other


@pytest.mark.parametrize('policy', OTHERS)
def test_a_budget_of_all_pages_equals_dense_sampling(sampler, samplers, policy):
    dense = sampler(REQUESTS, sparse=False)
    assert_same(samplers[policy](REQUESTS, budgets=ALL), dense)
    tight = samplers[policy](REQUESTS, budgets=TIGHT)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(tight, dense, strict=True))


def test_quest_keeps_the_extremes_of_every_page_that_is_full(watched):
    """After each prefill and each token, in every layer and slot."""
    made = {'prefill': 0, 'segment': 0}
    known = {}
    for name, (cache, slots) in watched:
        for slot in np.flatnonzero(slots.active_B):
            full = int(slots.length_B[slot]) // PAGE
            for layer, (pages_KPCE, landmark_BKNW) in enumerate(zip(cache.pages, cache.landmarks, strict=True)):
                A = pages_KPCE.shape[-1] // 2
                assert landmark_BKNW.shape[-1] == 2 * A
                keys_KNCA = pages_KPCE[:, slots.table_BN[slot, :full], :, :A]
                expected_KNW = np.concatenate([keys_KNCA.min(axis=2), keys_KNCA.max(axis=2)], axis=-1)
                np.testing.assert_array_equal(landmark_BKNW[slot, :, :full], expected_KNW)
                key = (layer, slots.key_B2[slot].tobytes())
                made[name] += full - known.get(key, 0)
                known[key] = full
    layers = len(watched[0][1][0].pages)
    assert made['prefill'] >= 4 * layers  # sequences that go on after their first token
    assert made['segment'] >= 8 * layers


def test_quest_takes_landmarks_twice_as_wide_and_the_others_do_not(samplers):
    width = {
        policy: sampler.engine.functions.fresh(True)()[0].landmarks[-1].shape[-1]
        for policy, sampler in samplers.items()
    }
    assert width == {'block_mean': 16, 'quest': 32, 'group_softmax': 16}


@pytest.fixture(scope='module')
def wide_model():
    return make_model(WIDE_SHAPE)


@pytest.mark.parametrize('policy', OTHERS)
def test_kernels_are_left_out_of_selection_alone_and_the_engine_says_so(wide_model, monkeypatch, policy):
    monkeypatch.setattr(functions_module, 'choose', lambda _: (Implementation.MOSAIC_GPU, 'some chip'))
    engine = Sampler(wide_model, shape=WIDE_SHAPE, policy=policy).engine
    assert engine.kernels is Implementation.MOSAIC_GPU
    assert engine.why_kernels == (
        f'some chip; schedule.policy={policy} has no kernels, JAX definitions choose its pages; '
        'landmarks other than means are not written by the fused kernels'
    )
    assert engine.functions.statics.kernels is Implementation.MOSAIC_GPU
    assert engine.functions.statics.selection_kernels is Implementation.REFERENCE
    engine = Sampler(wide_model, shape=WIDE_SHAPE).engine
    assert 'policy' not in engine.why_kernels
    assert engine.functions.statics.selection_kernels is Implementation.MOSAIC_GPU


def sample_wide(wide_model, policy, **rollout):
    limits = {'slots': 1, 'prefill_rows': 1, 'max_prompt_tokens': 24, 'max_response_tokens': 8, 'segment_steps': 4}
    sampler = Sampler(wide_model, budgets=TIGHT, shape=WIDE_SHAPE, policy=policy, **limits | rollout)
    return sampler, sampler(requests_of((22,), limit=5))


@pytest.mark.slow
@pytest.mark.parametrize('policy', OTHERS)
def test_interpreted_attention_kernels_beside_the_definitions_of_selection(wide_model, policy):
    sampler, responses = sample_wide(wide_model, policy, kernels='mosaic_tpu_interpreted')
    assert sampler.engine.functions.statics.kernels is Implementation.MOSAIC_TPU_INTERPRETED
    assert_same(responses, sample_wide(wide_model, policy, kernels='reference')[1])


@pytest.mark.gpu
@pytest.mark.parametrize('policy', OTHERS)
def test_attention_kernels_of_this_machine_beside_the_definitions_of_selection(wide_model, policy):
    sampler, responses = sample_wide(wide_model, policy, max_response_tokens=40)
    assert sampler.engine.functions.statics.kernels.platform
    assert sampler.engine.functions.statics.selection_kernels is Implementation.REFERENCE
    assert_same(responses, sample_wide(wide_model, policy, max_response_tokens=40, kernels='reference')[1], atol=1e-4)
