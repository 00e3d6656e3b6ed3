"""sparse_decode and dense_decode on Hopper: interpreted here, lowered for an H200, and run there (`-m gpu`)."""

import functools

import jax
import jax.numpy as jnp
import jitted_operations
import numpy as np
import pytest
from aot import lower_for_h200
from jitted_operations import over

from pallas_kernels.dense_decode import cases as dense_cases
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.dense_decode import kernel_gpu as dense_kernel
from pallas_kernels.implementation import Implementation, why_unfit
from pallas_kernels.sparse_decode import cases as sparse_cases
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.tuning_gpu import Blocks

GPU, INTERPRETED = Implementation.MOSAIC_GPU, Implementation.MOSAIC_GPU_INTERPRETED
OPS = {'sparse_decode': sparse_cases, 'dense_decode': dense_cases}
FITTING = [
    pytest.param(op, case, id=f'{op}-{case.name}')
    for op, module in OPS.items()
    for case in module.CASES
    if why_unfit(case.head_dim, case.group, case.dtype) is None
]
# Before 0.11 the interpreter takes up to a minute a case: one of each operation then, of both dtypes, with 3 queries.
FEW = {('sparse_decode', 'g8_a128_c32'), ('dense_decode', 'bf16_g8_a64_c32')}
INTERPRETED_CASES = [
    param for param in FITTING if jax.__version_info__ >= (0, 11) or (param.values[0], param.values[1].name) in FEW
]


def check(op, case, implementation):
    """Against float32 attention over the same cache; memory without tokens holds NaN."""
    function = getattr(jitted_operations, op)
    exact = {
        name: value.astype(jnp.float32) if jnp.issubdtype(value.dtype, jnp.floating) else value
        for name, value in case.arguments().items()
    }
    expected = np.asarray(function(**exact), np.float64)
    for out_dtype, largest, rms in (('float32', 2e-3, 2e-3), (case.dtype, 5e-3, 5e-3)):
        if case.dtype == 'float32':
            largest, rms = 1e-5, 1e-5
        o = function(**case.arguments(free=np.nan), implementation=implementation, out_dtype=out_dtype)
        assert o.dtype == jnp.dtype(out_dtype)
        error = (np.asarray(o, np.float64) - expected) / np.abs(expected).max()
        assert np.abs(error).max() < largest
        assert np.sqrt((error**2).mean()) < rms
        if implementation is INTERPRETED:
            return


@pytest.mark.slow
@pytest.mark.parametrize(('op', 'case'), INTERPRETED_CASES)
def test_interpreted(op, case):
    check(op, case, INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize(('op', 'case'), FITTING)
def test_on_a_gpu(op, case):
    check(op, case, GPU)


# Lowering takes about a second: the first ones always, the others with `make verify`.
SHAPES = [(2, 128, 16, 256), (5, 128, 8, 512), (1, 64, 64, 32), (4, 128, 16, 64), (8, 128, 32, 64), (3, 64, 128, 16)]
LAYOUTS = [(1, 2, 'bfloat16'), (256, 4, 'bfloat16'), (7, 5, 'float32')]
LAYOUTS += [(1, 2, 'float32'), (256, 4, 'float32'), (7, 5, 'bfloat16')]


def first_three(shapes):
    return [pytest.param(*shape, marks=[pytest.mark.verify] if i > 2 else []) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize(('group', 'head_dim', 'page_tokens', 'most_pages'), first_three(SHAPES))
def test_sparse_decode_lowers_for_an_h200(group, head_dim, page_tokens, most_pages):
    B, K, A, C, M = 32, 8, head_dim, page_tokens, most_pages
    arguments = (
        jax.ShapeDtypeStruct((B, K * group, A), jnp.bfloat16),
        jax.ShapeDtypeStruct((K, 4096, C, 2 * A), jnp.bfloat16),
        jax.ShapeDtypeStruct((B, K, M), jnp.int32),
        jax.ShapeDtypeStruct((B,), jnp.int32),
        jax.ShapeDtypeStruct((B,), jnp.int32),
    )

    def call(q_BHA, pages_KPCE, ids_BKM, count_B, length_B):
        return sparse_decode(q_BHA, pages_KPCE, None, ids_BKM, count_B, length_B, implementation=GPU)

    assert 'mosaic_gpu' in lower_for_h200(call, *arguments).as_text()


@pytest.mark.parametrize(('queries', 'group', 'dtype'), first_three(LAYOUTS))
def test_dense_decode_lowers_for_an_h200(queries, group, dtype):
    B, T, K, A, C, N = 8, queries, 8, 128, 16, 1024
    arguments = (
        jax.ShapeDtypeStruct((B, T, K * group, A), dtype),
        jax.ShapeDtypeStruct((K, 4096, C, 2 * A), dtype),
        jax.ShapeDtypeStruct((B, N), jnp.int32),
        jax.ShapeDtypeStruct((B,), jnp.int32),
    )
    call = lambda *arrays: dense_decode(*arrays, implementation=GPU)
    assert 'mosaic_gpu' in lower_for_h200(call, *arguments).as_text()


def check_split(interpret):
    """Lists that are read in parts of 64 tokens, the last ones of them empty for most sequences."""
    case = next(case for case in dense_cases.CASES if case.name == 'bf16_g8_a64_c32')
    arguments = case.arguments(free=np.nan)
    options = {'out_dtype': jnp.float32, 'interpret': interpret}
    call = jax.jit(functools.partial(dense_kernel.dense_decode, blocks=Blocks(64, 2, 64), **options))
    whole = jitted_operations.dense_decode(**case.arguments(), out_dtype='float32')
    np.testing.assert_allclose(call(**arguments), whole, rtol=0, atol=2e-3 * float(jnp.abs(whole).max()))


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason='the interpreter of jax before 0.11 takes minutes for it')
def test_parts_of_split_lists_are_combined():
    check_split(True)


@pytest.mark.gpu
def test_parts_of_split_lists_are_combined_on_a_gpu():
    check_split(False)


@pytest.mark.gpu
@over(sparse_cases.CASES)
def test_entries_beyond_the_count_are_never_looked_up_on_a_gpu(case):
    if why_unfit(case.head_dim, case.group, case.dtype):
        pytest.skip('no kernel takes heads of 32')
    arguments = case.arguments(free=np.nan)
    clean = jitted_operations.sparse_decode(**arguments, implementation=GPU)
    unused_BKM = np.arange(case.most_pages) >= np.asarray(case.counts)[:, None, None]
    for junk in (-5, case.pages + 1000):
        ids_BKM = jnp.asarray(np.where(unused_BKM, junk, arguments['ids_BKM']), jnp.int32)
        other = jitted_operations.sparse_decode(**arguments | {'ids_BKM': ids_BKM}, implementation=GPU)
        np.testing.assert_array_equal(other, clean)
