"""Memory that holds no token may hold anything: NaN there changes no bit of any result."""

import jax
import jitted_operations
import numpy as np
import pytest
from jitted_operations import over

from pallas_kernels.dense_decode import cases as dense_cases
from pallas_kernels.landmark_update import cases as landmark_cases
from pallas_kernels.page_select import cases as select_cases
from pallas_kernels.sparse_decode import cases as sparse_cases

CASES = [
    pytest.param(op, case, id=f'{op}-{case.name}')
    for op, module in {'dense_decode': dense_cases, 'sparse_decode': sparse_cases, 'page_select': select_cases}.items()
    for case in module.CASES
]


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
