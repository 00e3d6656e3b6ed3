"""Loads checkpoints onto meshes of simulated devices and prints what came out as JSON; for `test_sharded_loading`.

python sharded_loading.py load MESHES CHECKPOINTS [COORDINATOR PROCESS]   (of two processes)
python sharded_loading.py peak MESH CHECKPOINT
"""

import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from sparrow_jax.models import weights
from sparrow_jax.models.decoder import abstract_decoder, logical_axes
from sparrow_jax.parallel import mesh as meshes


def placed(path, sizes, param_dtype=jnp.float32):
    """The abstract parameters of a checkpoint with the learner's shardings on a mesh of (data, fsdp, tensor)."""
    mesh = jax.make_mesh(sizes, meshes.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    _, params = abstract_decoder(weights.read_shape(path), param_dtype=param_dtype)
    axes = jax.tree.leaves(logical_axes(params), is_leaf=lambda x: isinstance(x, tuple))
    shardings = [
        meshes.weight_sharding(mesh, names, x.shape, meshes.LEARNER_RULES)
        for names, x in zip(axes, jax.tree.leaves(params), strict=True)
    ]
    leaves = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x, sharding in zip(jax.tree.leaves(params), shardings, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def distinct(array):
    """The shards of this process, each of the same numbers once."""
    return list({str(shard.index): shard.data for shard in array.addressable_shards}.values())


def memory_behind(array):
    """Bytes of what an array is a view of: its own, unless more was read than is returned."""
    while getattr(array, 'base', None) is not None:
        array = array.base
    return memoryview(array).nbytes if isinstance(array, bytes | bytearray) else array.nbytes


def load(path, sizes):
    abstract = placed(path, sizes)
    whole = weights.load_params(path, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract))
    read, read_slice = [], weights._read_slice

    def counted(*args):
        part = read_slice(*args)
        read.append(memory_behind(part) // part.itemsize)
        return part

    weights._read_slice = counted
    params = weights.load_params(path, abstract)
    weights._read_slice = read_slice
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True))
    return {
        'equal': all(
            shard.data.dtype == b.dtype and np.array_equal(shard.data, np.asarray(b)[shard.index])
            for a, b in pairs
            for shard in a.addressable_shards
        ),
        'devices': jax.device_count(),
        'placed': [a.sharding for a, _ in pairs] == [x.sharding for x in jax.tree.leaves(abstract)],
        'cut': sum(not a.sharding.is_fully_replicated for a, _ in pairs),
        'read': sum(read),
        'held': sum(part.size for a, _ in pairs for part in distinct(a)),
        'all': sum(math.prod(b.shape) for _, b in pairs),
    }


def peak(path, sizes):
    """Bytes by which the resident memory of this process grew at most, and those that its devices hold afterwards."""
    abstract = placed(path, sizes, jnp.bfloat16)
    jax.block_until_ready([jax.device_put(np.zeros(8), device) for device in jax.devices()])
    pathlib.Path('/proc/self/clear_refs').write_text('5')  # the peak so far is forgotten
    before = resident('VmRSS')
    params = jax.block_until_ready(weights.load_params(path, abstract))
    held = sum(shard.data.nbytes for a in jax.tree.leaves(params) for shard in a.addressable_shards)
    return {'grown': resident('VmHWM') - before, 'held': held}


def resident(field):
    lines = pathlib.Path('/proc/self/status').read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == '__main__':
    what, sizes, paths, *process = sys.argv[1:]
    if process:
        jax.distributed.initialize(process[0], 2, int(process[1]))
    run = {'load': load, 'peak': peak}[what]
    found = {
        f'{pathlib.Path(path).name} {mesh}': run(path, tuple(map(int, mesh.split(','))))
        for path in paths.split(':')
        for mesh in sizes.split(':')
    }
    json.dump(found, sys.stdout)
