"""sparse_decode and dense_decode on TPU: interpreted strictly against the definition, and compiled for real chips.

The interpreter makes copies as late as it may, fills memory with NaN and looks for races.
"""

import functools

import jax
import jax.numpy as jnp
import jitted_operations
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the race detector's verdict has no public name
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import paged_flash_tpu, tuning_tpu
from pallas_kernels.dense_decode import cases as dense_cases
from pallas_kernels.implementation import HEAD_DIMS, Implementation
from pallas_kernels.sparse_decode import cases as sparse_cases
from pallas_kernels.sparse_decode import kernel_tpu as sparse_tpu

CASES = [
    pytest.param(op, case, id=f'{op}-{case.name}')
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


def test_physical_ids_and_junk_beyond_the_count():
    case = SPARSE['g5_a64_c16_all_pages']
    o = run('sparse_decode', physical(case))
    expected = np.asarray(jitted_operations.sparse_decode(**physical(case)))
    np.testing.assert_allclose(o, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for junk in (-7, 1 << 30):
        np.testing.assert_array_equal(run('sparse_decode', physical(case, junk=junk)), o)


def test_nothing_read_gives_zeros():
    case = SPARSE['g4_a128_c16']
    arguments = physical(case)
    arguments['count_B'] = np.asarray([0, 2, 1], np.int32)
    arguments['length_B'] = np.asarray([100, 0, 3], np.int32)
    o_BHA = run('sparse_decode', arguments)
    assert not o_BHA[:2].any()
    assert np.abs(o_BHA[2]).min() > 0


@pytest.mark.parametrize('cores', [1, 2])
def test_results_do_not_depend_on_tiles_programs_and_cores(cores):
    """One page a tile and two buffers, which every copy has to wait for; and programs of one KV head each."""
    case = SPARSE['bf16_g5_a128_c8']
    arguments = case.arguments(free=np.nan)
    blocks = tuning_tpu.Blocks(
        **{**vars(tuning_tpu.INTERPRETED), 'tile_tokens': 8, 'tiles_held': 2, 'program_units': 1}
    )
    launch = paged_flash_tpu.Launch(blocks, cores, interpret=True)
    function = functools.partial(sparse_tpu.sparse_decode, out_dtype=jnp.float32, interpret=True, launch=launch)
    o_BHA = interpreted(jax.jit(function), **arguments)
    np.testing.assert_allclose(o_BHA, run('sparse_decode', arguments), rtol=0, atol=2e-3)


@pytest.mark.parametrize('forgotten', ['pages', 'lists'])
def test_a_forgotten_wait_does_not_pass(monkeypatch, forgotten):
    """What the other tests rest on: a missing wait shows, as NaN, as a race, or as a page that does not exist."""
    stream = paged_flash_tpu._Stream
    if forgotten == 'pages':
        monkeypatch.setattr(stream, 'wait', lambda self, *_: self.state[paged_flash_tpu._READ_BUFFER])
    else:
        copy = stream.list_copy
        monkeypatch.setattr(stream, 'list_copy', lambda self, step: NeverWaited(copy(self, step)))
    function = functools.partial(sparse_tpu.sparse_decode, out_dtype=jnp.float32, interpret=True)
    try:
        o_BHA = np.asarray(jax.jit(function)(**SPARSE['g4_a128_c16'].arguments()))
        seen = 'race' if interpret_pallas_call.races.races_found else 'NaN' if np.isnan(o_BHA).any() else None
    except jax.errors.JaxRuntimeError as error:
        seen = next(line for line in str(error).splitlines() if 'Out-of-bounds read' in line)
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert seen


class NeverWaited:
    def __init__(self, copy):
        self.start = copy.start

    def wait(self):
        pass
