"""Engines that several test files sample from; made once, as each takes seconds to compile."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'pallas_kernels'))
from sampler_setup import PAGES, TIGHT, Sampler, make_model


@pytest.fixture(scope='session')
def model():
    return make_model()


@pytest.fixture(scope='session')
def sampler(model):
    """Four slots, room for every budget, final hidden states kept."""
    return Sampler(model, keep_hidden=True)


@pytest.fixture(scope='session')
def small_pool(model):
    """Eight slots, but pages for two longest sequences only."""
    return Sampler(model, TIGHT, slots=8, pool_pages=2 * PAGES, prefill_rows=3, segment_steps=13)
