"""Which code runs the operations: said with its reason, and refused by name where it does not fit."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from pallas_kernels import implementation
from pallas_kernels.implementation import Implementation, choose, why_unfit


def device(platform, capability='0', kind='some chip'):
    return SimpleNamespace(platform=platform, compute_capability=capability, device_kind=kind)


def test_a_platform_gets_its_kernels_and_the_others_the_definitions(monkeypatch):
    monkeypatch.setattr(implementation, 'FIRST_JAX_WITHOUT_GPU_KERNELS', (99,))
    assert choose(device('tpu'))[0] is Implementation.MOSAIC_TPU
    assert choose(device('gpu', '9.0'))[0] is Implementation.MOSAIC_GPU
    assert choose(device('gpu', '10.0'))[0] is Implementation.MOSAIC_GPU
    chosen, why = choose(device('gpu', '8.0', 'NVIDIA A100'))
    assert chosen is Implementation.REFERENCE
    assert why.startswith('NVIDIA A100 has compute capability 8.0')
    assert choose(device('cpu')) == (Implementation.REFERENCE, 'there are no kernels for cpu')


def test_a_jax_that_cannot_compile_the_kernels_is_told_apart(monkeypatch):
    monkeypatch.setattr(implementation, 'FIRST_JAX_WITHOUT_GPU_KERNELS', (0, 1))
    chosen, why = choose(device('gpu', '9.0'))
    assert chosen is Implementation.REFERENCE
    assert 'compile with jax 0.10.2 to 0.11' in why
    with pytest.raises(ValueError, match='sparse_decode: the GPU kernels compile with jax'):
        implementation.kernel_module('sparse_decode', Implementation.MOSAIC_GPU)
    assert implementation.kernel_module('sparse_decode', Implementation.MOSAIC_GPU_INTERPRETED)
    assert choose(device('tpu'))[0] is Implementation.MOSAIC_TPU


@pytest.mark.parametrize(
    ('head_dim', 'group', 'dtype', 'named'),
    [
        (32, 2, jnp.bfloat16, 'heads of 64 or 128, not of 32'),
        (128, 16, jnp.bfloat16, '1 to 8 query heads a KV head, not 16'),
        (128, 2, jnp.float16, 'a cache in bfloat16 or float32, not in float16'),
    ],
)
def test_a_cache_that_no_kernel_takes_is_named(head_dim, group, dtype, named):
    assert named in why_unfit(head_dim, group, dtype)


@pytest.mark.parametrize('head_dim', [64, 128])
@pytest.mark.parametrize('group', [1, 2, 4, 5, 8])
@pytest.mark.parametrize('dtype', ['float32', jnp.bfloat16])
def test_published_shapes_fit(head_dim, group, dtype):
    assert why_unfit(head_dim, group, dtype) is None


def test_platform_and_interpretation_are_read_off_the_name():
    assert [i.platform for i in Implementation] == [None, 'gpu', 'tpu', 'gpu', 'tpu']
    assert [i for i in Implementation if i.interpreted] == [
        Implementation.MOSAIC_GPU_INTERPRETED,
        Implementation.MOSAIC_TPU_INTERPRETED,
    ]
