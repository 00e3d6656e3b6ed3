"""page_select for GPUs against its definition: interpreted, lowered for an H200, and on a GPU where there is one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference
import pytest
from aot import lower_for_h200
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jitted_operations import over, page_select

from pallas_kernels.implementation import HEAD_DIMS, Implementation
from pallas_kernels.page_select import kernel_gpu, lanes_gpu
from pallas_kernels.page_select.cases import CASES
from pallas_kernels.page_select.tuning import HOPPER, HOPPER_MANY, HopperBlocks
from pallas_kernels.pallas_gpu import kernel, layout_cast, load

FITTING = [case for case in CASES if case.head_dim in HEAD_DIMS]
# The interpreter compiles each for seconds; what the others add is in the random choices below, which compile once.
INTERPRETED = ('g4_a128_c16', 'bf16_g8_a64_c32_ties', 'huge_budget')


def random_table(case, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.permutation(len(case.lengths) * case.pages).reshape(-1, case.pages) + 1, jnp.int32)


def assert_same_choice(arguments, implementation, table_BN=None):
    expected = page_select(**arguments, table_BN=table_BN)
    actual = page_select(**arguments, table_BN=table_BN, implementation=implementation)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@over([case for case in FITTING if case.name in INTERPRETED], {'g4_a128_c16'})
def test_interpreted_kernel_chooses_the_same_pages(case):
    assert_same_choice(case.arguments(free=np.nan), Implementation.MOSAIC_GPU_INTERPRETED)


@pytest.fixture(scope='module')
def small_blocks():
    """The kernel with chunks so small that there are several, at sizes that are compiled once."""
    return functools.partial(
        kernel_gpu.page_select,
        page_tokens=8,
        max_pages=150,
        reserved_first=1,
        reserved_last=2,
        interpret=True,
        blocks=HopperBlocks(warpgroups=1, held_bytes=1, chunk_pages=128, digit_bits=3),
    )


def random_choice(seed, *, ties):
    """Arguments of `small_blocks` for sequences of random lengths and budgets, and what NumPy chooses."""
    rng = np.random.default_rng(seed)
    B, K, N, A, C = 2, 1, 200, 64, 8
    length_B = rng.integers(1, N * C + 1, B)
    budget_B = rng.integers(0, N if seed % 2 else 20, B)
    q_BHA = rng.integers(-1, 2, (B, 2 * K, A)) * 2.0
    landmark_BKNA = rng.integers(-1, 2, (B, K, N, A)) * (rng.random((B, K, N, A)) < 0.02) if ties else None
    if landmark_BKNA is None:  # whole numbers, so that every score is exact, and hardly any two are the same
        landmark_BKNA = rng.integers(-128, 129, (B, K, N, A))
    chosen_BKM, count_B = numpy_reference.page_select(
        q_BHA,
        landmark_BKNA,
        length_B,
        budget_B,
        page_tokens=C,
        max_pages=150,
        reserved_first=1,
        reserved_last=2,
    )
    unfilled_BN = (np.arange(N) + 1) * C > length_B[:, None]
    landmark_BKNA = np.where(unfilled_BN[:, None, :, None], np.nan, landmark_BKNA)
    table_BN = rng.permutation(B * N).reshape(B, N) + 1
    arguments = (
        jnp.asarray(q_BHA, jnp.bfloat16),
        jnp.asarray(landmark_BKNA, jnp.bfloat16),
        jnp.asarray(length_B, jnp.int32),
        jnp.asarray(budget_B, jnp.int32),
        jnp.asarray(table_BN, jnp.int32),
    )
    physical_BKM = np.take_along_axis(np.pad(table_BN, ((0, 0), (0, 1)))[:, None], chosen_BKM, axis=2)
    return arguments, physical_BKM, count_B


@pytest.mark.parametrize('ties', [False, True], ids=['no_ties', 'ties'])
@pytest.mark.parametrize('seed', range(4))
def test_random_choices_are_those_of_numpy(small_blocks, seed, ties):
    """Several chunks of scores, fewer pages than places for ids, physical ids, landmarks of NaN where none is made."""
    arguments, ids_BKM, count_B = random_choice(seed, ties=ties)
    actual_BKM, actual_B = small_blocks(*arguments)
    np.testing.assert_array_equal(actual_BKM, ids_BKM)
    np.testing.assert_array_equal(actual_B, count_B)


def sized(sequences, kv_heads, group, head_dim, pages, dtype='bfloat16'):
    B, K, N, A = sequences, kv_heads, pages, head_dim
    shape = jax.ShapeDtypeStruct
    return (
        shape((B, K * group, A), jnp.bfloat16),
        shape((B, K, N, A), dtype),
        shape((B,), jnp.int32),
        shape((B,), jnp.int32),
        shape((B, N), jnp.int32),
    )


@pytest.mark.parametrize(
    ('sizes', 'max_pages'),
    [
        ((32, 8, 2, 128, 1024), 259),
        pytest.param((16, 8, 4, 128, 4096), 512, marks=pytest.mark.verify),
        pytest.param((64, 4, 8, 64, 500), 67, marks=pytest.mark.verify),
        ((16, 8, 2, 128, 2048, 'float32'), 259),
    ],
    ids=str,
)
def test_production_sizes_lower_for_an_h200(sizes, max_pages):
    options = {'page_tokens': 16, 'max_pages': max_pages, 'reserved_first': 1, 'reserved_last': 2, 'interpret': False}
    lowered = lower_for_h200(functools.partial(kernel_gpu.page_select, **options), *sized(*sizes))
    assert lowered.as_text().count('@mosaic_gpu') == 1


@pytest.mark.gpu
@pytest.mark.parametrize('physical', [False, True], ids=['logical', 'physical'])
@over(FITTING)
def test_kernel_chooses_the_same_pages(case, physical):
    arguments = case.arguments(free=np.nan)
    assert_same_choice(arguments, Implementation.MOSAIC_GPU, random_table(case) if physical else None)


@pytest.mark.gpu
@pytest.mark.parametrize('ties', [False, True], ids=['no_ties', 'ties'])
@pytest.mark.parametrize('seed', range(20))
@pytest.mark.parametrize(
    'blocks',
    [HOPPER, HOPPER_MANY, HopperBlocks(1, 1, 128, 1), HopperBlocks(4, 96 << 10, 256, 3)],
    ids=str,
)
def test_random_choices_on_a_gpu_are_those_of_numpy(small_blocks, blocks, seed, ties):
    arguments, ids_BKM, count_B = random_choice(seed, ties=ties)
    actual_BKM, actual_B = small_blocks(*arguments, interpret=False, blocks=blocks)
    np.testing.assert_array_equal(actual_BKM, ids_BKM)
    np.testing.assert_array_equal(actual_B, count_B)


@pytest.mark.gpu
@pytest.mark.parametrize('head_dim', [64, 128])
@pytest.mark.parametrize(('sequences', 'pages'), [(32, 1024), (16, 4096), (64, 509)])
def test_production_choices_are_the_best_up_to_rounding(sequences, pages, head_dim):
    """A page left out scores no more than the worst page chosen, but for float32 rounding; twice the same choice."""
    rng = np.random.default_rng(pages)
    B, K, G, N, A, C, M = sequences, 8, 2, pages, head_dim, 16, 128
    q_BHA = jnp.asarray(rng.standard_normal((B, K * G, A)), jnp.bfloat16)
    landmark_BKNA = jnp.asarray(rng.standard_normal((B, K, N, A)), jnp.bfloat16)
    length_B = jnp.asarray(rng.integers(1, N * C + 1, B), jnp.int32)
    budget_B = jnp.full(B, 100, jnp.int32)
    options = {'page_tokens': C, 'max_pages': M, 'reserved_first': 1, 'reserved_last': 2}
    select = functools.partial(page_select, implementation=Implementation.MOSAIC_GPU, **options)
    ids_BKM, count_B = map(np.asarray, select(q_BHA, landmark_BKNA, length_B, budget_B))
    np.testing.assert_array_equal(ids_BKM, select(q_BHA, landmark_BKNA, length_B, budget_B)[0])
    mean_BKA = np.asarray(q_BHA, np.float64).reshape(B, K, G, A).mean(axis=2)
    score_BKN = np.einsum('bka,bkna->bkn', mean_BKA, np.asarray(landmark_BKNA, np.float64))
    for b in range(B):
        existing = -(-int(length_B[b]) // C)
        assert count_B[b] == min(existing, 103)
        for k in range(K):
            chosen = ids_BKM[b, k, : count_B[b]]
            assert (np.diff(chosen) > 0).all()
            assert (ids_BKM[b, k, count_B[b] :] == N).all()
            reserved = [0, *range(max(existing - 2, 0), existing)]
            assert np.isin(reserved, chosen).all()
            left = np.setdiff1d(np.arange(existing), chosen)
            others = np.setdiff1d(chosen, reserved)
            if len(left) and len(others):
                assert score_BKN[b, k, left].max() <= score_BKN[b, k, others].min() + 1e-4


def lanes_at_work(size, *, interpret):
    """A kernel of flags (0 or 1), places (all different, below twice the size) and a source of twice the size.

    Gives ranks among ones and among zeros, the source at the places, the ranks put to the places, and the sums.
    """
    out = jax.ShapeDtypeStruct((size,), jnp.int32)

    def body(flag_ref, place_ref, source_ref, ranks_ref, taken_ref, put_ref, sums_ref, words_ref):
        flag_N, place_N = (load(r, layout=lanes_gpu.by_warp(size), optimized=False) for r in (flag_ref, place_ref))
        (ones_N, zeros_N), (ones, zeros) = lanes_gpu.count_before([flag_N, 1 - flag_N], words_ref.at[0])
        (places,) = lanes_gpu.total([place_N], words_ref.at[1])
        lanes_gpu.put(
            ranks_ref, layout_cast(lax.iota(jnp.int32, size), lanes_gpu.by_warp(size)), ones_N - 999 * zeros_N
        )
        lanes_gpu.put(
            taken_ref,
            layout_cast(lax.iota(jnp.int32, size), lanes_gpu.by_warp(size)),
            lanes_gpu.take(source_ref, place_N),
        )
        lanes_gpu.put(put_ref, place_N, ones_N)
        sums_ref[0], sums_ref[1], sums_ref[2] = ones, zeros, places

    return kernel(
        body,
        out_type=(out, out, jax.ShapeDtypeStruct((2 * size,), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)),
        grid=(1,),
        grid_names=('block',),
        scratch_types=(plgpu.SMEM((2, 2, lanes_gpu.WARPS), jnp.int32),),
        name='lanes',
        interpret=interpret,
    )


def lane_operands(size):
    rng = np.random.default_rng(size)
    flag_N, place_N = rng.integers(0, 2, size), rng.permutation(2 * size)[:size]
    return [jnp.asarray(x, jnp.int32) for x in (flag_N, place_N, rng.integers(-9, 9, 2 * size))]


@pytest.mark.parametrize('size', [pytest.param(128, marks=pytest.mark.verify), 512])
def test_lanes_interpreted(size):
    flag_N, place_N, source_S = operands = lane_operands(size)
    ranks_N, taken_N, put_S, sums = jax.jit(lanes_at_work(size, interpret=True))(*operands)
    ones_N = np.cumsum(flag_N) - flag_N
    np.testing.assert_array_equal(ranks_N, ones_N - 999 * (np.arange(size) - ones_N))
    np.testing.assert_array_equal(taken_N, source_S[place_N])
    np.testing.assert_array_equal(put_S[place_N], ones_N)
    assert sums.tolist() == [flag_N.sum(), size - flag_N.sum(), place_N.sum()]
    lower_for_h200(lanes_at_work(size, interpret=False), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize('size', [128, 256, 1024])
def test_lanes_do_what_the_interpreted_forms_say(size):
    """On the GPU and in JAX: counts, ranks, reads and writes by index."""
    operands = lane_operands(size)
    actual, expected = (jax.jit(lanes_at_work(size, interpret=i))(*operands) for i in (False, True))
    place_N = operands[1]
    for a, b in zip(actual, expected, strict=True):
        if a.size > size:  # the other places are never written
            a, b = a[place_N], b[place_N]
        np.testing.assert_array_equal(a, b)
