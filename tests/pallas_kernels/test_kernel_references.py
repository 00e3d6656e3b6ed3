"""The JAX references against float64 NumPy over every entry of the case lists."""

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
