"""Fixtures of the decoder's tests."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import golden_cases
from tiny_models import SMALL, write_checkpoint

from sparrow_jax.models.decoder import init_decoder


@pytest.fixture
def small():
    """(shape, graphdef, params) of a random float32 model whose norm scales are not all 1."""
    graphdef, params = init_decoder(SMALL, seed=0, compute_dtype=jnp.float32)
    keys = iter(jax.random.split(jax.random.key(1), 100))
    params = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape) if x.ndim == 1 else x, params)
    return SMALL, graphdef, params


@pytest.fixture
def untied_checkpoint(tmp_path):
    """(folder, config, tensors) of the tiny untied Qwen3 model of golden_cases."""
    config = golden_cases.CASES['qwen3_untied_g4']
    tensors = golden_cases.weights(config)
    return write_checkpoint(tmp_path / 'untied', config, tensors), config, tensors
