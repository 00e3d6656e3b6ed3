"""The JAX references over every entry of the case lists: against float64 NumPy, and with NaN in unused memory.

Memory that holds no token may hold anything: it changes no bit of any result. Both are in one file, so that a case
compiles once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jitted_operations
import numpy as np
import numpy_reference
import pytest
from jitted_operations import over

from pallas_kernels.dense_decode import cases as dense_cases
from pallas_kernels.landmark_update import cases as landmark_cases
from pallas_kernels.page_select import cases as select_cases
from pallas_kernels.sparse_decode import cases as sparse_cases

# float32: sums of at most 256 products of unit size. bfloat16: result and softmax weights are rounded to 8 bits.
TOLERANCE: dict[str, dict[str, Any]] = {
    'float32': {'rtol': 0, 'atol': 2e-6},
    'bfloat16': {'rtol': 2**-8, 'atol': 2**-8},
}
CASES = [
    pytest.param(op, case, id=f'{op}-{case.name}')
    for op, module in {'dense_decode': dense_cases, 'sparse_decode': sparse_cases, 'page_select': select_cases}.items()
    for case in module.CASES
]


def as_numpy(arguments):
    return {name: np.asarray(value) if isinstance(value, jax.Array) else value for name, value in arguments.items()}


@over(dense_cases.CASES)
def test_dense_decode_is_attention_over_all_tokens(case):
    arguments = case.arguments()
    o_BTHA = np.asarray(jitted_operations.dense_decode(**arguments))
    expected_BTHA = numpy_reference.dense_decode(**as_numpy(arguments))
    assert o_BTHA.dtype == jnp.dtype(case.dtype)
    np.testing.assert_allclose(o_BTHA.astype(np.float64), expected_BTHA, **TOLERANCE[case.dtype])


@over(sparse_cases.CASES)
def test_sparse_decode_is_attention_over_the_tokens_of_chosen_pages(case):
    arguments = case.arguments()
    o_BHA = np.asarray(jitted_operations.sparse_decode(**arguments))
    expected_BHA = numpy_reference.sparse_decode(**as_numpy(arguments))
    assert o_BHA.dtype == jnp.dtype(case.dtype)
    np.testing.assert_allclose(o_BHA.astype(np.float64), expected_BHA, **TOLERANCE[case.dtype])


@over(select_cases.CASES)
def test_page_select_is_a_sort_by_score_and_page(case):
    for seed in range(3):
        arguments = case.arguments(seed)
        ids_BKM, count_B = jitted_operations.page_select(**arguments)
        expected_ids_BKM, expected_count_B = numpy_reference.page_select(**as_numpy(arguments))
        np.testing.assert_array_equal(count_B, expected_count_B)
        np.testing.assert_array_equal(ids_BKM, expected_ids_BKM)


@over(landmark_cases.CASES)
def test_landmark_update_writes_the_token_and_the_mean_of_a_full_page(case):
    arguments = case.arguments()
    pages_KPCE, landmark_BKNA = map(np.asarray, jitted_operations.landmark_update(**arguments))
    expected_KPCE, expected_BKNA = numpy_reference.landmark_update(**as_numpy(arguments))
    np.testing.assert_array_equal(pages_KPCE, expected_KPCE)
    np.testing.assert_allclose(landmark_BKNA.astype(np.float64), expected_BKNA, **TOLERANCE[case.dtype])


@pytest.mark.parametrize('module', [dense_cases, sparse_cases, select_cases, landmark_cases])
def test_case_names_are_distinct(module):
    names = [case.name for case in module.CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize('module', [dense_cases, sparse_cases, select_cases])
def test_cases_cover_groups_head_sizes_page_sizes_and_dtypes(module):
    assert {case.group for case in module.CASES} == {1, 2, 4, 5, 8}
    assert {case.head_dim for case in module.CASES} == {32, 64, 128}
    assert {case.page_tokens for case in module.CASES} >= {8, 16, 32}
    assert {case.dtype for case in module.CASES} == {'float32', 'bfloat16'}
    assert any(length % case.page_tokens for case in module.CASES for length in case.lengths)


def test_exact_cases_hold_ties_that_decide():
    """Without ties across the budget's edge the sort's second key would go untested."""
    decided = []
    for case in select_cases.CASES:
        arguments = as_numpy(case.arguments())
        lower_first, _ = numpy_reference.page_select(**arguments)
        # Scores move by less than their distance, upwards with the page.
        arguments['landmark_BKNA'] = (
            arguments['landmark_BKNA']
            + 1e-7
            * np.sign(
                arguments['q_BHA'].astype(np.float64).reshape(*arguments['landmark_BKNA'].shape[:2], case.group, 1, -1)
            ).mean(axis=2)
            * np.arange(case.pages)[:, None]
        )
        if not np.array_equal(lower_first, numpy_reference.page_select(**arguments)[0]):
            decided.append(case)
    assert len(decided) >= 5
    assert all(case.exact for case in decided)


@pytest.mark.parametrize(('op', 'case'), CASES)
def test_what_unused_memory_holds_is_never_seen(op, case):
    """Unallocated pages, the rest of the last page, and landmarks of pages that are not full."""
    function = getattr(jitted_operations, op)
    clean_result = jax.tree.leaves(function(**case.arguments()))
    for free in (np.nan, np.inf):
        arguments = case.arguments(free=free)
        held = arguments['landmark_BKNA' if op == 'page_select' else 'pages_KPCE']
        if op != 'page_select' or any(length < case.pages * case.page_tokens for length in case.lengths):
            assert not np.isfinite(held).all(), 'nothing is unused'
        for clean, array in zip(clean_result, jax.tree.leaves(function(**arguments)), strict=True):
            np.testing.assert_array_equal(array, clean)


@over(sparse_cases.CASES)
def test_entries_beyond_the_count_are_never_looked_up(case):
    """Ids there may be any number, even outside the table."""
    arguments = case.arguments(free=np.nan)
    clean = jitted_operations.sparse_decode(**arguments)
    unused_BKM = np.arange(case.most_pages) >= np.asarray(case.counts)[:, None, None]
    for junk in (-5, 0, case.pages + 1000):
        ids_BKM = np.where(unused_BKM, junk, arguments['ids_BKM']).astype(np.int32)
        np.testing.assert_array_equal(jitted_operations.sparse_decode(**arguments | {'ids_BKM': ids_BKM}), clean)


@over(landmark_cases.CASES)
def test_landmark_update_overwrites_what_was_there(case):
    """Tokens and landmarks are written, never added to; everything else keeps its bits, NaN included."""
    before = case.arguments(free=np.nan)
    clean = jitted_operations.landmark_update(**case.arguments())
    unclean = jitted_operations.landmark_update(**before)
    ends = [p % case.page_tokens == case.page_tokens - 1 for p in case.positions]
    written = {'pages_KPCE': any(case.write), 'landmark_BKNA': any(np.logical_and(ends, case.write))}
    for (name, expected), a, b in zip(written.items(), map(np.asarray, clean), map(np.asarray, unclean), strict=True):
        unused, unused_before = np.isnan(b), np.isnan(np.asarray(before[name]))
        np.testing.assert_array_equal(a[~unused], b[~unused])
        assert not (unused & ~unused_before).any(), 'NaN spreads'
        assert (unused_before & ~unused).any() == expected
