"""landmark_update on TPU: interpreted strictly against the definition, bit by bit, and compiled for real chips.

The interpreter makes copies as late as it may, fills memory with NaN and looks for races.
"""

import functools
import math
import re

import aot
import jax
import jax.numpy as jnp
import jitted_operations
import numpy as np
import pytest
from interpreted_tpu import interpreted
from jitted_operations import over

from pallas_kernels.implementation import HEAD_DIMS, Implementation
from pallas_kernels.landmark_update import kernel_tpu, landmark_update
from pallas_kernels.landmark_update.cases import CASES, Case
from pallas_kernels.landmark_update.tuning import Blocks


def kernel(arguments, **options):
    return interpreted(functools.partial(kernel_tpu.landmark_update, interpret=True, **options), **arguments)


def assert_same_bits(results, expected):
    for result, array in zip(results, expected, strict=True):
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(result).view(np.uint8), np.asarray(array).view(np.uint8))


# What they show is in all_idle, a128_c16_n8 (landmarks of whole tiles) and bf16_a64_c16 (of none).
REPETITIONS = {'a128_c16', 'a64_c32', 'a64_c128', 'bf16_a128_c8', 'bf16_a128_c64_n8', 'bf16_a64_c8_n40'}


@over([case for case in CASES if case.head_dim in HEAD_DIMS], REPETITIONS)
def test_kernel_is_the_definition_whatever_unused_memory_holds(case):
    arguments = case.arguments(free=np.nan)
    assert_same_bits(kernel(arguments)(**arguments), jitted_operations.landmark_update(**arguments))


WAITING = Case(
    'waiting', 2, 64, 8, 16, (15, 20, 47, 127, 100, 7, 31, 63, 0), (True,) * 4 + (False,) + (True,) * 4, 'bfloat16'
)


@pytest.mark.parametrize(('buffers', 'cores'), [pytest.param(1, 1, marks=pytest.mark.verify), (3, 2)])
def test_buffers_are_taken_again_once_they_are_written_from(buffers, cores):
    """More sequences than buffers; two cores share the sequences unevenly."""
    arguments = WAITING.arguments(free=np.nan)
    run = kernel(arguments, blocks=Blocks(buffer_bytes=1 << 20, most_buffers=buffers), cores=cores)
    assert_same_bits(run(**arguments), jitted_operations.landmark_update(**arguments))


def test_sums_are_made_in_token_order_and_tokens_rounded_before():
    """Keys from 1e-3 to 1e5; tokens in float32 for a bfloat16 pool, landmarks in float32 to show every bit."""
    case = Case('order', 2, 64, 16, 8, (127, 15, 31), (True,) * 3, 'bfloat16')
    rng = np.random.default_rng(0)
    arguments = case.arguments()

    def spread(x, dtype):
        return jnp.asarray(rng.standard_normal(x.shape) * 10.0 ** rng.integers(-3, 6, x.shape), dtype)

    arguments |= {name: spread(arguments[name], jnp.float32) for name in ('k_BKA', 'v_BKA')}
    arguments['pages_KPCE'] = spread(arguments['pages_KPCE'], jnp.bfloat16)
    arguments['landmark_BKNA'] = arguments['landmark_BKNA'].astype(jnp.float32)
    results = kernel(arguments)(**arguments)
    assert_same_bits(results, jitted_operations.landmark_update(**arguments))
    keys_KCA = np.asarray(results[0][:, arguments['table_BN'][0, 7], :, :64], np.float32)
    backwards_KA = functools.reduce(np.add, keys_KCA.swapaxes(0, 1)[::-1]) / np.float32(16)
    assert (np.asarray(results[1][0, :, 7]) != backwards_KA).any(), 'any order would do'


def compile_for(chip, B, K, N, A, C, P, dtype='bfloat16'):
    token_BKA = jax.ShapeDtypeStruct((B, K, A), dtype)
    return aot.compile_for_tpu(
        functools.partial(landmark_update, implementation=Implementation.MOSAIC_TPU),
        chip,
        jax.ShapeDtypeStruct((K, P, C, 2 * A), dtype),
        jax.ShapeDtypeStruct((B, K, N, A), dtype),
        token_BKA,
        token_BKA,
        jax.ShapeDtypeStruct((B, N), jnp.int32),
        jax.ShapeDtypeStruct((B,), jnp.int32),
        jax.ShapeDtypeStruct((B,), jnp.bool_),
        donate_argnums=(0, 1),
    )


def assert_in_place(compiled):
    """Pool and landmarks are the results' own memory, and nothing of their size is made on the way."""
    text = compiled.as_text()
    assert 'tpu_custom_call' in text
    aliases = re.search(r'input_output_alias=\{(.*?)\}, entry', text)
    assert aliases
    assert re.findall(r'\{(\d)\}: \((\d), ', aliases[1]) == [('0', '0'), ('1', '1')]
    largest = max(shape.size for shape in jax.tree.leaves(compiled.out_info))
    copied = [shape for shape in re.findall(r'= \(?\w+\[([\d,]+)\]\S* copy(?:-start)?\(', text)]
    assert all(math.prod(map(int, shape.split(','))) < largest / 16 for shape in copied)
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


@pytest.mark.parametrize('chip', aot.TPU_CHIPS)
def test_compiles_at_sizes_of_production_and_copies_nothing(chip):
    assert_in_place(compile_for(chip, 32, 8, 2048, 128, 16, 1 << 16))


@pytest.mark.verify
@pytest.mark.parametrize(
    'sizes',
    [(64, 8, 4096, 128, 8, 1 << 17), (16, 8, 1919, 64, 128, 1 << 12), (5, 3, 400, 64, 32, 1 << 12, 'float32')],
    ids=lambda sizes: '-'.join(map(str, sizes)),
)
def test_compiles_at_the_ends_of_what_it_takes(sizes):
    """The smallest and largest pages, landmarks that do not end with a tile, an odd number of heads, float32."""
    assert_in_place(compile_for('v5e', *sizes))
