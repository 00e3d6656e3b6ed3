"""The sampler with an adapter: it acts on response tokens of the sparse sampler, and on nothing else."""

import dataclasses

import jax
import numpy as np
import pytest
from sampler_setup import (
    DENSE_LAYERS,
    FUSED_SHAPE,
    PAGES,
    SHAPE,
    TIGHT,
    Sampler,
    assert_same,
    make_adapter,
    make_model,
    make_requests,
    rollout_config,
)

from configs import base
from sparrow_jax.config import resolve
from sparrow_jax.learner.distill import Distiller
from sparrow_jax.learner.rows import Sample
from sparrow_jax.parallel.transfer import read

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


def test_the_teacher_forced_pass_gives_the_log_probs_that_were_recorded(sampler, adapted, plain):
    """With the adapter, and with the pages that each token read: those of another budget give others."""
    config = base.get_config()
    config.model.path, config.model.compute_dtype = 'given', 'float32'
    config.schedule.dense_layers = DENSE_LAYERS
    config.distill.update(rank=4, alpha=6.0, targets=('q', 'v', 'down'))
    run = dataclasses.replace(resolve(config), rollout=rollout_config())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), sampler.weights)
    distiller = Distiller(
        SHAPE, abstract, sampler.engine.mesh, run, sampler.schedule, sampler.engine.kernels, learner_attention='xla'
    )
    adapter = make_adapter()

    def gap(responses, changed_pages=0):
        samples = [
            Sample(np.asarray(q.prompt_ids), r.tokens, r.logp, pages_read=r.pages_read + changed_pages)
            for q, r in zip(REQUESTS, responses, strict=True)
        ]
        gaps = []
        for rows in distiller.rows(samples):
            logp_BT = read(distiller.score(sampler.weights, adapter.factors, distiller.device(rows)))
            gaps.append(np.abs(logp_BT - rows.logp_actor_BT)[rows.mask_BT > 0])
        return np.concatenate(gaps)

    assert max(r.pages_read.max() for r in adapted) < PAGES - 1  # some are left out
    assert gap(adapted).max() < 1e-5
    assert gap(adapted, changed_pages=1).max() > 1e-3
    assert gap(plain).max() > 0.1


def test_the_dense_sampler_is_the_weights_alone(sampler):
    with_one = sampler(REQUESTS, sparse=False, adapter=make_adapter())
    assert_same(with_one, sampler(REQUESTS, sparse=False), atol=0)


@pytest.mark.slow
def test_the_fused_step_adds_the_same():
    """Its definitions in JAX; targets that one kernel multiplies together with others, and one that stands alone."""
    model, adapter, drawn = make_model(FUSED_SHAPE), make_adapter(FUSED_SHAPE, ('q', 'v', 'o', 'up', 'down')), []
    for fused in (False, True):
        sampler = Sampler(model, TIGHT, shape=FUSED_SHAPE, kernels='reference', slots=2)
        functions = sampler.engine.functions
        functions.statics = dataclasses.replace(functions.statics, fused=fused)
        drawn.append(sampler(REQUESTS, adapter=adapter))
    assert_same(*drawn, atol=1e-4)
    assert not np.array_equal(sampler(REQUESTS)[0].logp, drawn[1][0].logp)
