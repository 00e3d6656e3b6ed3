"""sparse_decode and dense_decode on TPU: interpreted strictly against the definition, and compiled for real chips.

The interpreter makes copies as late as it may, fills memory with NaN and looks for races.
"""

import dataclasses
import functools

import aot
import jax
import jax.numpy as jnp
import jitted_operations
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the race detector's verdict has no public name
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import page_stream_tpu, tuning_tpu
from pallas_kernels.dense_decode import cases as dense_cases
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.implementation import HEAD_DIMS, Implementation
from pallas_kernels.sparse_decode import cases as sparse_cases
from pallas_kernels.sparse_decode import kernel_tpu as sparse_tpu
from pallas_kernels.sparse_decode import sparse_decode

# A case takes two seconds, nearly all of them to compile; these repeat what others of their operation show.
REPETITIONS = {
    'sparse_decode': {
        'mha_a64',
        'g2_a64_c128',
        'g8_a128_c32',
        'g5_a64_c16_all_pages',
        'bf16_g2_a128_c16',
        'bf16_g8_a64_c32',
        'bf16_g4_a128_c64',
    },
    'dense_decode': {
        'g4_a128_c16',
        'g8_a128_c32',
        'g2_a128_c8',
        'g5_a64_c16',
        'chunk_of_5',
        'bf16_g2_a128_c16',
        'bf16_g5_a128_c64',
        'bf16_g4_a64_c128',
    },
}
CASES = [
    pytest.param(op, case, id=f'{op}-{case.name}', marks=[pytest.mark.verify] if case.name in REPETITIONS[op] else [])
    for op, module in {'dense_decode': dense_cases, 'sparse_decode': sparse_cases}.items()
    for case in module.CASES
    if case.head_dim in HEAD_DIMS
]
SPARSE = {case.name: case for case in sparse_cases.CASES}


def interpreted(function, *arguments, **options):
    result = np.asarray(function(*arguments, **options))
    assert not interpret_pallas_call.races.races_found
    return result


def run(op, arguments):
    """With float32 results, whatever the cache holds."""
    function = getattr(jitted_operations, op)
    implementation = Implementation.MOSAIC_TPU_INTERPRETED
    return interpreted(function, **arguments, implementation=implementation, out_dtype='float32')


def in_float32(arguments):
    return {
        name: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for name, x in arguments.items()
    }


@pytest.mark.parametrize(('op', 'case'), CASES)
def test_kernel_is_the_definition_whatever_unused_memory_holds(op, case):
    """float32: sums in another order. bfloat16: softmax weights rounded to 8 bits, against attention in float32."""
    o = run(op, case.arguments(free=np.nan))
    expected = np.asarray(getattr(jitted_operations, op)(**in_float32(case.arguments())))
    largest = np.abs(expected).max()
    if case.dtype == 'float32':
        np.testing.assert_allclose(o, expected, rtol=0, atol=1e-5 * largest)
    else:
        np.testing.assert_allclose(o, expected, rtol=0, atol=2e-3 * largest)
        rounded = o.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_allclose(rounded, expected, rtol=0, atol=5e-3 * largest)
        assert np.sqrt(np.mean((o - expected) ** 2)) < 2e-3 * np.sqrt(np.mean(expected**2))
    np.testing.assert_array_equal(o, run(op, case.arguments(free=np.inf)))


def physical(case, free=np.nan, junk=0):
    """Arguments whose ids are physical pages, the sequence's newest at the end of every list."""
    arguments = {name: np.array(value) for name, value in case.arguments(free=free).items()}
    ids_BKM, table_BN = arguments['ids_BKM'], arguments.pop('table_BN')
    for b, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        if count:
            ids_BKM[b, :, : count - 1] = np.minimum(
                ids_BKM[b, :, : count - 1], max(-(-length // case.page_tokens) - 2, 0)
            )
            ids_BKM[b, :, count - 1] = -(-length // case.page_tokens) - 1
            ids_BKM[b] = np.take(table_BN[b], ids_BKM[b], mode='clip')
        ids_BKM[b, :, count:] = junk
    return {**arguments, 'table_BN': None}


def test_physical_ids_with_junk_beyond_the_count_and_nothing_to_read():
    case = SPARSE['g5_a64_c16_all_pages']
    o = run('sparse_decode', physical(case))
    expected = np.asarray(jitted_operations.sparse_decode(**physical(case)))
    np.testing.assert_allclose(o, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for junk in (-7, 1 << 30):
        np.testing.assert_array_equal(run('sparse_decode', physical(case, junk=junk)), o)
    none = {'count_B': np.asarray([0, 1, 6], np.int32), 'length_B': np.asarray([111, 0, 90], np.int32)}
    none_read = run('sparse_decode', physical(case) | none)
    assert not none_read[:2].any()
    np.testing.assert_array_equal(none_read[2], o[2])
    # What other sequences have in the same buffers stays theirs, even if it is no number.
    broken = physical(case)
    broken['pages_KPCE'][:, broken['ids_BKM'][0, 0]] = np.nan
    np.testing.assert_array_equal(run('sparse_decode', broken)[1:], o[1:])


def test_results_do_not_depend_on_tiles_programs_and_cores():
    """One page a tile and two buffers, so that every copy is waited for; programs of one KV head, on two cores."""
    case = SPARSE['bf16_g5_a128_c8']
    arguments = case.arguments(free=np.nan)
    blocks = dataclasses.replace(tuning_tpu.INTERPRETED, tile_tokens=8, least_tiles=2, most_tiles=2, program_units=1)
    launch = page_stream_tpu.Launch(blocks, cores=2, interpret=True)
    function = functools.partial(sparse_tpu.sparse_decode, out_dtype=jnp.float32, interpret=True, launch=launch)
    o_BHA = interpreted(jax.jit(function), **arguments)
    np.testing.assert_allclose(o_BHA, run('sparse_decode', arguments), rtol=0, atol=2e-3)


@pytest.mark.parametrize('forgotten', ['pages', 'lists'])
def test_a_forgotten_wait_does_not_pass(monkeypatch, forgotten):
    """What the other tests rest on: a missing wait shows, as a race, a wrong result or a page that does not exist."""
    stream = page_stream_tpu.Stream
    if forgotten == 'pages':
        monkeypatch.setattr(stream, 'wait', lambda self, *_: self.state[page_stream_tpu._READ_BUFFER])
    else:
        copy = stream.list_copy
        monkeypatch.setattr(stream, 'list_copy', lambda self, step: NeverWaited(copy(self, step)))
    arguments = SPARSE['g4_a128_c16'].arguments()
    expected = np.asarray(jitted_operations.sparse_decode(**arguments))
    function = functools.partial(sparse_tpu.sparse_decode, out_dtype=jnp.float32, interpret=True)
    try:
        right = np.allclose(jax.jit(function)(**arguments), expected, rtol=0, atol=0.1)
        passes = right and not interpret_pallas_call.races.races_found
    except jax.errors.JaxRuntimeError as error:
        passes = 'Out-of-bounds read' not in str(error)
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert not passes


class NeverWaited:
    def __init__(self, copy):
        self.start = copy.start

    def wait(self):
        pass


def compile_for(chip, op, *, queries=1, sequences=32, kv_heads=8, group, head_dim, page_tokens, pages, pool, dtype):
    """Through the public function, from shapes alone; of sparse_decode, with physical ids."""
    shape = jax.ShapeDtypeStruct
    heads = kv_heads * group
    pool_KPCE = shape((kv_heads, pool, page_tokens, 2 * head_dim), dtype)
    per_sequence_B = shape((sequences,), jnp.int32)
    options = {'implementation': Implementation.MOSAIC_TPU}
    if op == 'dense_decode':
        function = functools.partial(dense_decode, **options)
        q_BTHA = shape((sequences, queries, heads, head_dim), dtype)
        return aot.compile_for_tpu(
            function, chip, q_BTHA, pool_KPCE, shape((sequences, pages), jnp.int32), per_sequence_B
        )
    function = lambda q, pool, ids, count, length: sparse_decode(q, pool, None, ids, count, length, **options)
    ids_BKM = shape((sequences, kv_heads, pages), jnp.int32)
    q_BHA = shape((sequences, heads, head_dim), dtype)
    return aot.compile_for_tpu(function, chip, q_BHA, pool_KPCE, ids_BKM, per_sequence_B, per_sequence_B)


def production(op, group, head_dim, page_tokens, pages, **others):
    return {
        'op': op,
        'group': group,
        'head_dim': head_dim,
        'page_tokens': page_tokens,
        'pages': pages,
        'pool': 32768,
        'dtype': 'bfloat16',
    } | others


@pytest.mark.parametrize(
    ('chip', 'sizes'),
    [
        ('v5e', production('dense_decode', 4, 128, 16, 4096)),
        ('v5p', production('sparse_decode', 5, 128, 8, 256)),
        ('v6e', production('sparse_decode', 2, 64, 64, 1024, sequences=256)),
        ('tpu7x', production('dense_decode', 2, 128, 64, 2048, queries=64)),
    ],
)
def test_real_compilers_take_production_sizes(chip, sizes):
    assert compile_for(chip, **sizes)


@pytest.mark.verify
@pytest.mark.parametrize('chip', aot.TPU_CHIPS)
@pytest.mark.parametrize(
    'sizes',
    [
        production('sparse_decode', 2, 128, 16, 256),
        production('sparse_decode', 4, 64, 8, 1024, sequences=256),
        production('sparse_decode', 1, 128, 128, 256, pool=8192),
        production('sparse_decode', 8, 128, 32, 64, dtype='float32', pool=8192),
        production('sparse_decode', 5, 64, 16, 64, dtype='float32', kv_heads=3, sequences=17),
        production('dense_decode', 5, 128, 8, 2048),
        production('dense_decode', 5, 64, 8, 2048, queries=33, dtype='float32', pool=16384),
        production('dense_decode', 8, 128, 16, 2048, queries=256),
    ],
    ids=lambda sizes: '-'.join(map(str, sizes.values())),
)
def test_real_compilers_take_other_sizes(chip, sizes):
    assert compile_for(chip, **sizes)
