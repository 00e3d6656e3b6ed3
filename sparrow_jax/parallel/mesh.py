"""The mesh of a run and where arrays lie on it.

Axes: `data` (rows and slots), `fsdp` (rows and slots too; the learner's weights are cut along it), `tensor` (heads,
feed-forward, vocabulary). XLA inserts the collectives; nothing here moves data by hand.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparrow_jax.config import ConfigError, ParallelConfig
from sparrow_jax.console import notice_once

AXES = ('data', 'fsdp', 'tensor')
BATCH_AXES = ('data', 'fsdp')  # axes over which rows and slots are split
LEARNER_RULES = {'vocab': 'tensor', 'embed': 'fsdp', 'heads': 'tensor', 'kv_heads': 'tensor', 'ffn': 'tensor'}
SAMPLER_RULES = {**LEARNER_RULES, 'embed': None}  # the sampler's weights are whole on every fsdp shard


def axis_sizes(config: ParallelConfig, devices: int) -> dict[str, int]:
    """Axis to size, for so many devices. Raises ConfigError when the sizes do not multiply to their number."""
    sizes = [config.data, config.fsdp, config.tensor]
    if sizes.count(-1) > 1:
        raise ConfigError('parallel: only one axis can be -1 (all remaining devices)')
    known = int(np.prod([s for s in sizes if s != -1]))
    if -1 in sizes and devices % known == 0:
        sizes[sizes.index(-1)] = devices // known
    if int(np.prod(sizes)) != devices:
        axes = ', '.join(f'parallel.{axis}={size}' for axis, size in zip(AXES, sizes, strict=True))
        raise ConfigError(f'{axes}: must multiply to the {devices} device{"s" if devices > 1 else ""} here')
    return dict(zip(AXES, sizes, strict=True))


def make_mesh(config: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over all devices, of all processes; over the given ones, which need not exist, to compile ahead of time.

    Raises ConfigError when the axis sizes do not multiply to their number.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(config, len(devices))
    shape, types = tuple(sizes.values()), (jax.sharding.AxisType.Auto,) * 3
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # fsdp 8 and tensor 8 on a 4 x 4 x 4 torus, of which each needs one axis and a half
        given = ', '.join(f'{axis} {size}' for axis, size in sizes.items())
        notice_once(f'parallel: {given} do not lie along whole axes of the slice: some collectives cross more links')
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=types)


def batch_shards(mesh: Mesh) -> int:
    """Over how many shards rows and slots are split."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis split over data and fsdp, the rest whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def weight_sharding(mesh: Mesh, axes: tuple[str, ...], sizes: tuple[int, ...], rules: dict[str, Any]) -> NamedSharding:
    """The sharding of one weight by its logical axis names.

    An axis that its mesh axis does not divide stays whole: KV heads are replicated where there are more tensor shards
    than heads.
    """
    spec = []
    for name, size in zip(axes, sizes, strict=True):
        mesh_axis = rules.get(name)
        spec.append(mesh_axis if mesh_axis and size % mesh.shape[mesh_axis] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))
