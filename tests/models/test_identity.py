"""The hash of a model: the same numbers have the same one however they are stored, others another."""

import dataclasses

import numpy as np
import pytest
from tiny_models import SMALL, write_checkpoint

from configs import base
from sparrow_jax.config import ConfigError, resolve
from sparrow_jax.models.identity import model_hash
from sparrow_jax.models.layout import hf_slots


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    whole = {name: rng.standard_normal(slot.hf_sizes).astype(np.float32) for name, slot in hf_slots(SMALL).items()}
    # As bfloat16 holds them.
    return {name: (x.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, x in whole.items()}


def config(path='', **changes):
    c = base.get_config()
    c.model.path = str(path)
    for name, value in changes.items():
        c.model[name] = value
    if not path:
        c.model.random_weights = True
        c.model.shape.update(dataclasses.asdict(resolved_shape()))
    return resolve(c).model


def resolved_shape():
    c = base.get_config()
    base.smoke(c)
    return resolve(c).model.shape


def hash_of(path):
    return model_hash(config(path), 0)


def test_files_and_bits_make_no_difference_numbers_do(tmp_path):
    settings, numbers = SMALL.to_hf_config(), tensors()
    first = hash_of(write_checkpoint(tmp_path / 'one', settings, numbers))
    assert len(first) == 64
    assert hash_of(write_checkpoint(tmp_path / 'three', settings, numbers, shards=3)) == first
    assert hash_of(write_checkpoint(tmp_path / 'half', settings, numbers, bfloat16=True)) == first
    assert hash_of(write_checkpoint(tmp_path / 'other', settings, tensors(1))) != first
    trained = {name: x * np.float32(1.01) if 'layers.2.mlp.up' in name else x for name, x in numbers.items()}
    assert hash_of(write_checkpoint(tmp_path / 'trained', settings, trained)) != first


def test_random_weights_are_told_apart_by_shape_and_seed():
    model = config()
    assert model_hash(model, 3) == model_hash(model, 3)
    assert model_hash(model, 3) != model_hash(model, 4)
    wider = dataclasses.replace(model, shape=dataclasses.replace(model.shape, d_ff=model.shape.d_ff * 2))
    assert model_hash(wider, 3) != model_hash(model, 3)


def test_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match='no such checkpoint'):
        hash_of(tmp_path / 'absent')
