"""The sampler with an adapter: it acts on response tokens of the sparse sampler, and on nothing else."""

import dataclasses

import numpy as np
import pytest
from sampler_setup import FUSED_SHAPE, TIGHT, Sampler, assert_same, make_adapter, make_model, make_requests

from sparrow_jax.models.adapter import TARGETS

REQUESTS = make_requests((22, 9, 13), limit=20)


@pytest.fixture(scope='module')
def plain(sampler):
    return sampler(REQUESTS)


@pytest.fixture(scope='module')
def adapted(sampler):
    return sampler(REQUESTS, adapter=make_adapter())


def test_an_adapter_that_has_not_learned_draws_the_same_tokens(sampler, plain):
    for a, b in zip(sampler(REQUESTS, adapter=make_adapter(strength=0.0)), plain, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logp, b.logp)


def test_the_first_token_is_that_of_the_weights_alone_and_later_ones_are_not(adapted, plain):
    for a, b in zip(adapted, plain, strict=True):
        assert (a.tokens[0], a.logp[0]) == (b.tokens[0], b.logp[0])
        np.testing.assert_array_equal(a.hidden[0], b.hidden[0])
        assert np.abs(a.hidden[1] - b.hidden[1]).max() > 0.05


def test_the_dense_sampler_is_the_weights_alone(sampler):
    with_one = sampler(REQUESTS, sparse=False, adapter=make_adapter())
    assert_same(with_one, sampler(REQUESTS, sparse=False), atol=0)


@pytest.mark.parametrize('targets', [TARGETS, ('k', 'o', 'up')], ids='-'.join)
def test_the_fused_step_adds_the_same(targets):
    """Its definitions in JAX, all sums of the kernels among them."""
    model, adapter, drawn = make_model(FUSED_SHAPE), make_adapter(FUSED_SHAPE, targets), []
    for fused in (False, True):
        sampler = Sampler(model, TIGHT, shape=FUSED_SHAPE, kernels='reference', slots=2)
        functions = sampler.engine.functions
        functions.statics = dataclasses.replace(functions.statics, fused=fused)
        drawn.append(sampler(REQUESTS, adapter=adapter))
    assert_same(*drawn, atol=1e-4)
    assert not np.array_equal(sampler(REQUESTS)[0].logp, drawn[1][0].logp)
