"""Ahead-of-time compilers for chips that this machine does not have.

TPU: the real Mosaic and XLA compilers, out of the libtpu wheel. GPU: lowering to Mosaic GPU's dialect for an H200,
which checks layouts and memory spaces; code generation needs the CUDA plugin of jax.
"""

import functools

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from pallas_kernels.implementation import FIRST_JAX_WITHOUT_GPU_KERNELS
from sparrow_jax.slices import parse_slice, slice_devices

TPU_CHIPS = {'v5e': 'v5e:2x2', 'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2', 'tpu7x': 'tpu7x:2x2x1'}


@functools.cache
def tpu_device(chip: str):
    """A device of a slice that is only described: nothing can run on it."""
    return slice_devices(parse_slice(TPU_CHIPS[chip]))[0]


def compile_for_tpu(function, chip: str, *arguments, donate_argnums=()):
    """Compiles a jitted or plain function for one chip; arguments are arrays or `jax.ShapeDtypeStruct`s."""
    device = tpu_device(chip)
    on = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), arguments)
    with jax.sharding.use_abstract_mesh(jax.sharding.Mesh([device], ('x',)).abstract_mesh):
        return jax.jit(function, donate_argnums=donate_argnums).lower(*shapes).compile()


def lower_for_h200(function, *arguments):
    """Lowers a function for an H200; arguments are arrays or `jax.ShapeDtypeStruct`s."""
    if jax.__version_info__ >= FIRST_JAX_WITHOUT_GPU_KERNELS:
        pytest.skip('the GPU kernels compile with jax before 0.12')
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    chip = AbstractDevice('NVIDIA H200', 132, 'gpu')
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ('x',), abstract_device=chip)):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=('cuda',))
