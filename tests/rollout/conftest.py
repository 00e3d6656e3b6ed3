"""Engines that several test files sample from; made once, as each takes seconds to compile."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'pallas_kernels'))
from sampler_setup import PAGES, TIGHT, Sampler, make_model

from sparrow_jax.rollout.engine import Sampling


@pytest.fixture(scope='session')
def model():
    return make_model()


@pytest.fixture(scope='session')
def sampler(model):
    """Four slots, room for every budget, final hidden states kept."""
    return Sampler(model, keep_hidden=True)


@pytest.fixture(scope='session')
def small_pool(model):
    """Eight slots, but pages for two longest sequences only. Its segment is compiled ahead, so that it can be read."""
    sampler = Sampler(model, TIGHT, slots=8, pool_pages=2 * PAGES, prefill_rows=3, segment_steps=13)
    engine, sampling = sampler.engine, Sampling(1.0)
    segment = engine.functions.segment(sampling).lower(
        sampler.weights, *engine.functions.fresh(False)(), engine.values(sampling)
    )
    engine.functions.compiled['segment', engine.functions.variant(sampling), engine.layout.slots] = segment.compile()
    return sampler
