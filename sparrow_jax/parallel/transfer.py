"""Arrays between the host and a mesh that may reach over several processes.

Every process makes the same calls in the same order: those that read from other processes' devices, or gather from
other hosts, wait for them.
"""

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Host arrays, the same in every process, as arrays on the mesh.

    Args:
        tree: pytree of NumPy arrays, or of jax arrays that this process can read.
        sharding: of every leaf. On devices that exist for the compiler alone no array can lie: of the result then only
            the shape is of use.
    """
    if _holds_nothing(sharding):
        return jax.tree.map(jnp.asarray, tree)
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def put(leaf: Any) -> jax.Array:
        # Not `device_put`, which would gather the arrays of all processes to compare them.
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, tree)


def read(tree: Any) -> Any:
    """The same pytree with whole NumPy arrays, in every process."""
    far = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not _readable(x)]
    if far:
        sharding = far[0].sharding
        assert isinstance(sharding, NamedSharding)  # as every jitted function of this package leaves its results
        tree = _gather(sharding.mesh)(tree)
    return jax.device_get(tree)


def of_all(array: np.ndarray) -> np.ndarray:
    """[processes, ...]: the array (of the same shape and dtype in all) of every process, bit for bit."""
    if jax.process_count() == 1:
        return array[None]
    bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # JAX would make a float64 a float32
    gathered = np.asarray(multihost_utils.process_allgather(bits))
    return gathered.reshape(-1).view(array.dtype).reshape(-1, *array.shape)


def any_of_all(flag: bool) -> bool:
    """Whether it is True in any process."""
    return bool(of_all(np.asarray(flag)).any())


def same_in_all(text: str) -> bool:
    """Whether every process has the same text."""
    digests = of_all(np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8))
    return bool((digests == digests[0]).all())


def least(count: int | None) -> int | None:
    """The smallest count of any process; None, which stands for 'unknown', where one has None."""
    smallest = int(of_all(np.asarray(-1 if count is None else count)).min())
    return None if smallest < 0 else smallest


def _readable(array: jax.Array) -> bool:
    return array.is_fully_addressable or array.is_fully_replicated


@functools.cache
def _gather(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _holds_nothing(sharding: NamedSharding) -> bool:
    """Whether its devices are those of a named slice (`sparrow_jax.slices`), which JAX tells apart by their client."""
    return type(sharding.mesh.devices.flat[0].client).__name__.startswith('CompileOnly')
