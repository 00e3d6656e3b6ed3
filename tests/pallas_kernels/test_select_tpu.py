"""page_select on TPU: interpreted strictly against the definition, and compiled for real chips.

The interpreter makes copies as late as it may, fills memory with NaN and looks for races.
"""

import dataclasses
import functools

import aot
import jax
import jax.numpy as jnp
import jitted_operations
import numpy as np
import numpy_reference
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpreted_tpu import interpreted

from pallas_kernels.implementation import HEAD_DIMS, Implementation
from pallas_kernels.page_select import kernel_tpu, page_select
from pallas_kernels.page_select.cases import CASES, Case
from pallas_kernels.page_select.tuning import TPU

# A case takes seconds, nearly all of them to compile; these repeat what the others, the ring and the sorts show.
REPETITIONS = {
    'mha_a64_ties',
    'bf16_g2_a128_c16',
    'g8_a128_c32_ties',
    'g5_a64_c16_ties',
    'bf16_g8_a64_c32_ties',
    'bf16_whole_chunks',
    'huge_budget',
}
OPTIONS = ('page_tokens', 'max_pages', 'reserved_first', 'reserved_last')


def with_table(case, arguments):
    """A page table of its own for every sequence, and numbers that need all of an int32."""
    rng = np.random.default_rng(1)
    places = rng.choice(1 << 31, (len(case.lengths), case.pages), replace=False)
    return arguments | {'table_BN': jnp.asarray(places, jnp.int32)}


def kernel(arguments, **options):
    """The interpreted kernel, compiled for these arguments; takes their arrays."""
    fixed = {name: arguments[name] for name in OPTIONS}
    arrays = {name: value for name, value in arguments.items() if name not in OPTIONS}
    arrays.setdefault('table_BN', None)
    run = interpreted(functools.partial(kernel_tpu.page_select, **fixed, interpret=True, **options), **arrays)
    return lambda arguments: run(**{name: arguments.get(name) for name in arrays})


def assert_same(results, expected):
    for result, array in zip(results, expected, strict=True):
        assert result.dtype == jnp.int32
        np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize(
    ('case', 'physical'),
    [
        pytest.param(
            case,
            i % 2 == 0,
            id=f'{case.name}-{"physical" if i % 2 == 0 else "logical"}',
            marks=[pytest.mark.verify] if case.name in REPETITIONS else [],
        )
        for i, case in enumerate(case for case in CASES if case.head_dim in HEAD_DIMS)
    ],
)
def test_kernel_is_the_definition_whatever_unused_memory_holds(case, physical):
    """Not exact cases, too: their scores are apart by more than sums in another order differ."""
    add = functools.partial(with_table, case) if physical else lambda arguments: arguments
    run = kernel(add(case.arguments()))
    for seed, free in enumerate((np.nan, np.inf)):
        arguments = add(case.arguments(seed, free))
        assert_same(run(arguments), jitted_operations.page_select(**arguments))
    # A finished sequence may stand one token beyond the cache.
    arguments['length_B'] = arguments['length_B'].at[0].set(case.pages * case.page_tokens + 1)
    others = [array[1:] for array in run(arguments)]
    assert_same(others, [array[1:] for array in jitted_operations.page_select(**arguments)])


RING = Case(
    'ring', 4, 1, 64, 8, 300, 40, 1, 2, (2400, 2391, 0, 1024, 2056, 1201, 616, 1000), (20, 5, 3, 9, 37, 100, 4, 0),
    'bfloat16', True,
)  # fmt: skip


def test_chunks_pass_through_the_ring():
    """Groups of two sequences: chunks are copied ahead across groups, up to the last of what a core takes, and an
    empty sequence is passed over. The second group is short: half the keys are looked at."""
    arguments = with_table(RING, RING.arguments(free=np.nan))
    blocks = dataclasses.replace(TPU, chunk_pages=128, most_buffers=3, rows=8, narrowest=128)
    assert_same(kernel(arguments, blocks=blocks, cores=2)(arguments), jitted_operations.page_select(**arguments))


SMALL = Case('small', 3, 1, 64, 8, 13, 9, 1, 2, (1, 1, 1), (0, 0, 0), 'bfloat16', True)


def small(q_BHA, landmark_BKNA, length_B, budget_B):
    return {
        'q_BHA': jnp.asarray(q_BHA, jnp.float32),
        'landmark_BKNA': jnp.asarray(landmark_BKNA, jnp.bfloat16),
        'length_B': jnp.asarray(length_B, jnp.int32),
        'budget_B': jnp.asarray(budget_B, jnp.int32),
    }


@pytest.fixture(scope='module')
def small_kernel():
    arguments = SMALL.arguments()
    return kernel(arguments | {'q_BHA': arguments['q_BHA'].astype(jnp.float32)})


@settings(max_examples=15, deadline=None, derandomize=True, phases=(Phase.generate,))  # shrinking takes minutes
@given(data=st.data())
def test_kernel_is_a_sort_by_score_and_page(small_kernel, data):
    """Scores out of a few whole numbers, so that nearly all are tied."""
    B, K, N, A = 3, SMALL.kv_heads, SMALL.pages, SMALL.head_dim
    length_B = data.draw(st.lists(st.integers(1, N * 8), min_size=B, max_size=B), 'lengths')
    budget_B = data.draw(st.lists(st.integers(0, N) | st.just((1 << 31) - 1), min_size=B, max_size=B), 'budgets')
    values = data.draw(st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0]), min_size=1, max_size=5), 'scores')
    score_BKN = np.random.default_rng(data.draw(st.integers(0, 1 << 20), 'seed')).choice(values, (B, K, N))
    q_BHA = np.zeros((B, K, A), np.float32)
    q_BHA[..., 3] = 1
    landmark_BKNA = np.zeros((B, K, N, A), np.float32)
    landmark_BKNA[..., 3] = score_BKN
    unfilled_BN = (np.arange(N) + 1) * 8 > np.asarray(length_B)[:, None]
    expected = numpy_reference.page_select(
        q_BHA, landmark_BKNA, length_B, budget_B, **{name: SMALL.arguments()[name] for name in OPTIONS}
    )
    landmark_BKNA = np.where(unfilled_BN[:, None, :, None], np.nan, landmark_BKNA)
    assert_same(small_kernel(small(q_BHA, landmark_BKNA, length_B, budget_B)), expected)


def test_bfloat16_landmarks_meet_the_mean_query_in_float32(small_kernel):
    """Pages apart by the last bits of a float32 query: rounded to bfloat16, or to a sum of two, they would be tied."""
    q_BHA, landmark_BKNA = np.zeros((3, 3, 64)), np.zeros((3, 3, 13, 64))
    q_BHA[..., :2] = 1, 1 + 2**-22
    landmark_BKNA[:, :, 4, 0] = landmark_BKNA[:, :, 9, 1] = 1
    ids_BKM, _ = small_kernel(small(q_BHA, landmark_BKNA, [13 * 8] * 3, [1] * 3))
    np.testing.assert_array_equal(ids_BKM[..., :4], np.broadcast_to([0, 9, 11, 12], (3, 3, 4)))


def compile_for(chip, B, K, group, N, A, M, dtype='bfloat16'):
    select = functools.partial(
        page_select,
        page_tokens=16,
        max_pages=M,
        reserved_first=1,
        reserved_last=2,
        implementation=Implementation.MOSAIC_TPU,
    )
    number_B = jax.ShapeDtypeStruct((B,), jnp.int32)
    return aot.compile_for_tpu(
        select,
        chip,
        jax.ShapeDtypeStruct((B, K * group, A), dtype),
        jax.ShapeDtypeStruct((B, K, N, A), dtype),
        number_B,
        number_B,
        jax.ShapeDtypeStruct((B, N), jnp.int32),
    )


@pytest.mark.parametrize('chip', aot.TPU_CHIPS)
def test_compiles_at_sizes_of_production(chip):
    compiled = compile_for(chip, 32, 8, 2, 2048, 128, 256)
    assert 'tpu_custom_call' in compiled.as_text()
    # Nothing the size of the landmarks is made on the way.
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


@pytest.mark.verify
@pytest.mark.parametrize(
    'sizes',
    [(64, 8, 4, 4096, 128, 512), (16, 1, 8, 1919, 64, 64), (5, 3, 5, 37, 64, 7, 'float32')],
    ids=lambda sizes: '-'.join(map(str, sizes)),
)
def test_compiles_at_the_ends_of_what_it_takes(sizes):
    """The most pages, one KV head, rests of chunks, odd numbers of heads, float32."""
    assert 'tpu_custom_call' in compile_for('v5e', *sizes).as_text()
