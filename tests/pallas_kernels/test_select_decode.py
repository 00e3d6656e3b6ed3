"""Choice and attention in one kernel against the two operations one after the other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import lower_for_h200
from jitted_operations import over

from pallas_kernels.implementation import HEAD_DIMS, Implementation
from pallas_kernels.page_select.cases import CASES, Case
from pallas_kernels.random_cache import random_pool
from pallas_kernels.select_decode import kernel_gpu, select_decode

WITH_KERNELS = [case for case in CASES if case.head_dim in HEAD_DIMS]
# The interpreter wants to see every barrier waited for to its end: no more tiles than stages.
INTERPRETED = (
    Case('two_tiles', 2, 2, 64, 16, 20, 8, 1, 2, (320, 141, 16), (5, 3, 1), 'float32', False),
    Case('two_tiles_ties', 1, 5, 128, 16, 12, 10, 1, 1, (192, 100), (8, 5), 'bfloat16', True),
)
STATIC = ('max_pages', 'reserved_first', 'reserved_last', 'landmarks_at_rest', 'implementation')
jitted = jax.jit(select_decode, static_argnames=STATIC)


def arguments_of(case, free=np.nan):
    given = case.arguments(free=free)
    pages_KPCE, table_BN = random_pool(
        np.random.default_rng(1),
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_tokens=case.page_tokens,
        pages=case.pages,
        lengths=case.lengths,
        dtype=case.dtype,
        free=free,
    )
    del given['page_tokens']
    return given | {'pages_KPCE': jnp.asarray(pages_KPCE), 'table_BN': jnp.asarray(table_BN)}


def one_kernel_takes(case):
    arguments = arguments_of(case)
    arrays = (arguments[name] for name in ('q_BHA', 'pages_KPCE', 'landmark_BKNA'))
    return kernel_gpu.is_faster(*arrays, case.max_pages)


def assert_same_attention(case, implementation, **options):
    arguments = arguments_of(case) | options
    assert one_kernel_takes(case)
    expected = np.asarray(jitted(**arguments), np.float64)
    actual = np.asarray(jitted(**arguments, implementation=implementation), np.float64)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol={'float32': 2e-5, 'bfloat16': 2e-2}[case.dtype])


FITTING = [case for case in WITH_KERNELS if one_kernel_takes(case)]
# More than half of the multiprocessors: smaller tiles.
MANY = [
    dataclasses.replace(case, name=f'{case.name}_many', lengths=case.lengths * 3, budgets=case.budgets * 3)
    for case in CASES
    if case.name == 'bf16_whole_chunks'
]


def test_one_kernel_takes_all_but_wide_heads_in_float32():
    left = [case for case in WITH_KERNELS if case not in FITTING]
    assert FITTING
    assert left
    assert all((case.dtype, case.head_dim) == ('float32', 128) for case in left)


@over(INTERPRETED, {'two_tiles'})
def test_interpreted_kernel_attends_to_the_pages_that_it_chose(case):
    assert_same_attention(case, Implementation.MOSAIC_GPU_INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize('at_rest', [False, True])
@over([*FITTING, *MANY])
def test_kernel_attends_to_the_pages_that_it_chose(case, at_rest):
    assert_same_attention(case, Implementation.MOSAIC_GPU, landmarks_at_rest=at_rest)


def lowered(sequences, kv_heads=8, max_pages=64, cached=jnp.bfloat16):
    """Text for an H200, with caches of 2,048 pages."""
    shape = lambda *sizes, dtype=cached: jax.ShapeDtypeStruct(sizes, dtype)
    run = functools.partial(
        select_decode,
        max_pages=max_pages,
        reserved_first=1,
        reserved_last=2,
        landmarks_at_rest=True,
        implementation=Implementation.MOSAIC_GPU,
    )
    return lower_for_h200(
        run,
        shape(sequences, 2 * kv_heads, 128),
        shape(kv_heads, 4096, 16, 256),
        shape(sequences, kv_heads, 2048, 128),
        shape(sequences, 2048, dtype=jnp.int32),
        shape(sequences, dtype=jnp.int32),
        shape(sequences, dtype=jnp.int32),
    ).as_text()


@pytest.mark.parametrize('sequences', [8, 16])
def test_one_kernel_runs_while_each_pair_has_a_multiprocessor(sequences):
    """With tiles for few pairs, and with those for more."""
    text = lowered(sequences)
    assert text.count('mosaic_gpu_v2') == 1


def test_tiles_are_wide_for_few_pairs_and_smaller_for_more_and_for_long_tables():
    def sizes(sequences, pages):
        q, pool, landmarks = (
            jax.ShapeDtypeStruct(s, jnp.bfloat16)
            for s in ((sequences, 16, 128), (8, 64, 16, 256), (sequences, 8, pages, 128))
        )
        plan = kernel_gpu._parts(q, pool, landmarks, max_pages=64)[1]
        return plan.tile, plan.stages

    assert sizes(8, 2048) == (128, 2)
    assert sizes(9, 2048) == (64, 3)
    assert sizes(9, 16384) == (64, 2)


@pytest.mark.parametrize(
    'sizes', [{'sequences': 17}, {'sequences': 8, 'max_pages': 513}, {'sequences': 8, 'cached': jnp.float32}]
)
def test_two_kernels_run_where_one_is_no_gain_or_too_large(sizes):
    assert lowered(**sizes).count('mosaic_gpu_v2') == 2


def test_arguments_are_checked_as_those_of_the_two_operations():
    arguments = arguments_of(WITH_KERNELS[0])
    with pytest.raises(ValueError, match='page_select: length_B must'):
        select_decode(
            **arguments | {'length_B': arguments['length_B'].astype(jnp.float32)}, implementation='mosaic_gpu'
        )
    with pytest.raises(ValueError, match='sparse_decode: q_BHA must'):
        select_decode(**arguments | {'pages_KPCE': arguments['pages_KPCE'].astype(jnp.bfloat16)})
