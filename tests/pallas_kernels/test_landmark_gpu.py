"""landmark_update for GPUs, bit by bit what its definition gives: interpreted, and on a GPU where there is one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import lower_for_h200
from jitted_operations import landmark_update, over

from pallas_kernels.implementation import HEAD_DIMS, Implementation
from pallas_kernels.landmark_update import kernel_gpu
from pallas_kernels.landmark_update.cases import CASES

FITTING = [case for case in CASES if case.head_dim in HEAD_DIMS]
# One of each dtype stays for the interpreter, one that writes nothing and one of the largest pages.
REPETITIONS = {'a128_c16', 'a64_c32', 'bf16_a128_c8', 'bf16_a64_c16', 'a128_c16_n8', 'bf16_a128_c64_n8'}


def assert_same_bits(arguments, implementation):
    """NaN is compared, too: what nobody writes keeps every bit."""
    expected = landmark_update(**arguments)
    actual = landmark_update(**arguments, implementation=implementation)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def sized(kv_heads, head_dim, page_tokens, pages, sequences, dtype):
    """Shapes of arguments, in order, for a pool with a page for every logical one."""
    B, K, N, A, C = sequences, kv_heads, pages, head_dim, page_tokens
    shape = jax.ShapeDtypeStruct
    return (
        shape((K, B * N + 1, C, 2 * A), dtype),
        shape((B, K, N, A), dtype),
        shape((B, K, A), jnp.bfloat16),
        shape((B, K, A), jnp.bfloat16),
        shape((B, N), jnp.int32),
        shape((B,), jnp.int32),
        shape((B,), jnp.bool_),
    )


@over(FITTING, REPETITIONS)
def test_interpreted_kernel_writes_the_same_bits(case):
    assert_same_bits(case.arguments(free=np.nan), Implementation.MOSAIC_GPU_INTERPRETED)


def test_an_idle_sequence_may_stand_beyond_the_cache():
    case = FITTING[0]
    arguments = case.arguments(free=np.nan)
    B = len(case.positions)
    arguments['position_B'] = jnp.full(B, case.pages * case.page_tokens, jnp.int32)
    arguments['write_B'] = jnp.zeros(B, bool)
    after = landmark_update(**arguments, implementation=Implementation.MOSAIC_GPU_INTERPRETED)
    for array, before in zip(after, (arguments['pages_KPCE'], arguments['landmark_BKNA']), strict=True):
        np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize(
    'sizes',
    [
        (8, 128, 16, 2048, 32, 'bfloat16'),
        (4, 64, 8, 512, 64, 'bfloat16'),
        pytest.param((1, 128, 128, 256, 16, 'bfloat16'), marks=pytest.mark.verify),
        (8, 128, 64, 512, 16, 'float32'),
    ],
    ids=str,
)
def test_production_sizes_lower_for_an_h200_in_place(sizes):
    text = lower_for_h200(functools.partial(kernel_gpu.landmark_update, interpret=False), *sized(*sizes)).as_text()
    call = next(line for line in text.splitlines() if 'mosaic_gpu' in line and 'custom_call' in line)
    aliases = call.split('output_operand_aliases')[1]
    assert aliases.count('operand_index = 4') == 1, 'the pool is not written in place'
    assert aliases.count('operand_index = 5') == 1, 'the landmarks are not written in place'


@pytest.mark.gpu
@over(FITTING)
def test_kernel_writes_the_same_bits(case):
    assert_same_bits(case.arguments(free=np.nan), Implementation.MOSAIC_GPU)


@pytest.mark.gpu
@pytest.mark.parametrize('page_tokens', [8, 16, 128])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_landmarks_are_bit_equal_over_many_sequences(page_tokens, dtype):
    """Keys of sizes from 1e-3 to 1e5, so that any other order of summation shows."""
    B, K, N, A, C = 48, 8, 5, 128, page_tokens
    rng = np.random.default_rng(page_tokens)
    pages = rng.standard_normal((K, B * N, C, 2 * A)) * 10.0 ** rng.integers(-3, 6, (K, B * N, C, 2 * A))
    page_B = rng.integers(0, N, B)
    arguments = {
        'pages_KPCE': jnp.asarray(pages, dtype),
        'landmark_BKNA': jnp.asarray(rng.standard_normal((B, K, N, A)), dtype),
        'k_BKA': jnp.asarray(rng.standard_normal((B, K, A)) * 1e3, dtype),
        'v_BKA': jnp.asarray(rng.standard_normal((B, K, A)), dtype),
        'table_BN': jnp.asarray(rng.permutation(B * N).reshape(B, N), jnp.int32),
        'position_B': jnp.asarray(page_B * C + np.where(rng.random(B) < 0.7, C - 1, rng.integers(0, C, B)), jnp.int32),
        'write_B': jnp.asarray(rng.random(B) < 0.8),
    }
    assert_same_bits(arguments, Implementation.MOSAIC_GPU)


@pytest.mark.gpu
def test_a_donated_pool_is_not_copied():
    shapes = sized(8, 128, 16, 64, 4, 'bfloat16')

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def two_steps(pages_KPCE, landmark_BKNA, k_BKA, v_BKA, table_BN, position_B, write_B):
        def step(i, caches):
            token = k_BKA, v_BKA, table_BN, position_B + i, write_B
            return kernel_gpu.landmark_update(*caches, *token, interpret=False)

        return jax.lax.fori_loop(0, 2, step, (pages_KPCE, landmark_BKNA))

    text = two_steps.lower(*shapes).compile().as_text()
    pool = ','.join(map(str, shapes[0].shape))
    copies = [line for line in text.splitlines() if pool in line and ('copy(' in line or 'copy-start' in line)]
    assert not copies, copies[0]
