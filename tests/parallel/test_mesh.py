"""Axis sizes that do not fit the devices, and where weights lie."""

import re

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from sparrow_jax import console
from sparrow_jax.config import ConfigError, ParallelConfig
from sparrow_jax.parallel.mesh import (
    AXES,
    LEARNER_RULES,
    SAMPLER_RULES,
    batch_sharding,
    batch_shards,
    make_mesh,
    weight_sharding,
)
from sparrow_jax.slices import parse_slice, slice_devices

MESH = AbstractMesh((2, 3, 4), AXES)


def test_the_remaining_devices_go_to_the_open_axis():
    count = jax.device_count()
    for open_axis in range(3):
        sizes = [1, 1, 1]
        sizes[open_axis] = -1
        mesh = make_mesh(ParallelConfig(*sizes))
        assert mesh.axis_names == AXES
        assert [mesh.shape[axis] for axis in AXES] == [count if i == open_axis else 1 for i in range(3)]


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        ((-1, -1, 1), 'parallel: only one axis can be -1'),
        ((7, 11, 13), 'parallel.data=7, parallel.fsdp=11, parallel.tensor=13: must multiply to the'),
        ((-1, 1, 997), 'parallel.data=-1, parallel.fsdp=1, parallel.tensor=997: must multiply to the'),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_mesh(ParallelConfig(*sizes))


def test_axes_that_share_one_of_the_torus_are_placed_all_the_same(capsys, monkeypatch):
    """Two axes of 8 on 4 x 4 x 4 chips: the case of the 32B model in docs/pods.md."""
    monkeypatch.setattr(console, '_told', set())
    devices = slice_devices(parse_slice('v5p:4x4x4'))
    mesh = make_mesh(ParallelConfig(1, 8, 8), devices)
    assert dict(mesh.shape) == {'data': 1, 'fsdp': 8, 'tensor': 8}
    assert len(set(mesh.devices.flat)) == 64
    assert 'fsdp 8, tensor 8 do not lie along whole axes' in capsys.readouterr().err
    make_mesh(ParallelConfig(1, 4, 16), devices)
    assert capsys.readouterr().err == ''


def test_rows_are_split_over_data_and_fsdp():
    assert batch_shards(MESH) == 6
    assert batch_sharding(MESH).shard_shape((12, 5)) == (2, 5)


@pytest.mark.parametrize(
    ('axes', 'sizes', 'learner', 'sampler'),
    [
        (('embed', 'heads', 'head_dim'), (6, 8, 5), ('fsdp', 'tensor', None), (None, 'tensor', None)),
        (('embed', 'kv_heads', 'head_dim'), (6, 2, 4), ('fsdp', None, None), (None, None, None)),  # 2 heads, 4 shards
        (('heads', 'head_dim', 'embed'), (4, 8, 7), ('tensor', None, None), ('tensor', None, None)),  # 7 over 3
        (('vocab', 'embed'), (50, 9), (None, 'fsdp'), (None, None)),  # 50 over 4
        (('embed', 'ffn'), (3, 4), ('fsdp', 'tensor'), (None, 'tensor')),
        (('norm',), (12,), (None,), (None,)),
    ],
)
def test_weights_are_cut_by_their_axis_names_and_whole_where_the_mesh_does_not_divide(axes, sizes, learner, sampler):
    assert weight_sharding(MESH, axes, sizes, LEARNER_RULES).spec == PartitionSpec(*learner)
    assert weight_sharding(MESH, axes, sizes, SAMPLER_RULES).spec == PartitionSpec(*sampler)
