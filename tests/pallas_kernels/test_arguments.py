"""Arguments that do not fit each other are refused by name, before anything runs."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import checks
from pallas_kernels.dense_decode import cases as dense_cases
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.implementation import Implementation
from pallas_kernels.landmark_update import cases as landmark_cases
from pallas_kernels.landmark_update import landmark_update
from pallas_kernels.page_select import cases as select_cases
from pallas_kernels.page_select import page_select
from pallas_kernels.sparse_decode import cases as sparse_cases
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.sparse_prefill import cases as prefill_cases
from pallas_kernels.sparse_prefill import sparse_prefill

OPS = {
    'dense_decode': (dense_decode, dense_cases.CASES[0].arguments()),
    'sparse_decode': (sparse_decode, sparse_cases.CASES[0].arguments()),
    'page_select': (page_select, select_cases.CASES[0].arguments()),
    'landmark_update': (landmark_update, landmark_cases.CASES[0].arguments()),
    'sparse_prefill': (sparse_prefill, prefill_cases.CASES[0].arguments()),
}
ARRAYS = [
    (op, name) for op, (_, arguments) in OPS.items() for name, value in arguments.items() if not isinstance(value, int)
]


def refuse(op, changes, *named):
    function, arguments = OPS[op]
    with pytest.raises(ValueError, match=op) as error:
        function(**arguments | changes)
    for name in named:
        assert name in str(error.value)


@pytest.mark.parametrize(('op', 'name'), ARRAYS)
def test_a_missing_axis_is_refused(op, name):
    array = OPS[op][1][name]
    refuse(op, {name: array[0]}, name)


@pytest.mark.parametrize(('op', 'name'), ARRAYS)
def test_one_sequence_or_head_too_many_is_refused(op, name):
    """The leading axis, B (K for the pool), has to be the same everywhere."""
    array = OPS[op][1][name]
    refuse(op, {name: jnp.concatenate([array, array[:1]])})


@pytest.mark.parametrize(('op', 'name'), ARRAYS)
def test_another_dtype_is_refused(op, name):
    array = OPS[op][1][name]
    wrong = jnp.float32 if jnp.issubdtype(array.dtype, jnp.integer) else jnp.int32
    refuse(op, {name: array.astype(wrong)}, name)


@pytest.mark.parametrize(('op', 'name'), [('dense_decode', 'q_BTHA'), ('sparse_decode', 'q_BHA')])
def test_queries_of_another_precision_than_the_pool_are_refused(op, name):
    refuse(op, {name: OPS[op][1][name].astype(jnp.bfloat16)}, name, 'pages_KPCE')


@pytest.mark.parametrize('op', ['dense_decode', 'sparse_decode', 'landmark_update'])
@pytest.mark.parametrize('page_tokens', [4, 12, 256])
def test_a_page_size_that_no_kernel_has_is_refused(op, page_tokens):
    shape = OPS[op][1]['pages_KPCE'].shape
    refuse(op, {'pages_KPCE': jnp.zeros((*shape[:2], page_tokens, shape[3]))}, f'{page_tokens} tokens')


def test_page_select_refuses_sizes_that_lose_reserved_pages():
    refuse('page_select', {'page_tokens': 24}, '24 tokens')
    refuse('page_select', {'reserved_first': -1}, 'reserved_first=-1')
    refuse('page_select', {'reserved_last': 0}, 'reserved_last=0')
    refuse('page_select', {'reserved_first': 1, 'reserved_last': 2, 'max_pages': 2}, 'max_pages=2')
    refuse('page_select', {'max_pages': 0}, 'max_pages=0')


@pytest.mark.parametrize(
    ('op', 'name'), [('dense_decode', 'q_BTHA'), ('sparse_decode', 'q_BHA'), ('page_select', 'q_BHA')]
)
def test_query_heads_that_do_not_divide_into_groups_are_refused(op, name):
    refuse(op, {name: OPS[op][1][name][..., :3, :]}, '3 heads', '2 KV heads')


def test_dense_decode_takes_1_to_256_queries():
    q_BTHA = OPS['dense_decode'][1]['q_BTHA']
    refuse('dense_decode', {'q_BTHA': q_BTHA[:, :0]}, 'q_BTHA', '0 queries')
    refuse('dense_decode', {'q_BTHA': jnp.tile(q_BTHA, (1, 257, 1, 1))}, 'q_BTHA', '257 queries')


def test_more_pages_to_read_than_there_are_is_refused():
    ids_BKM = OPS['sparse_decode'][1]['ids_BKM']
    refuse('sparse_decode', {'ids_BKM': jnp.tile(ids_BKM, (1, 1, 3))}, 'ids_BKM', 'there are 12')


@pytest.mark.parametrize('op', list(OPS))
def test_a_kernel_that_does_not_take_the_heads_is_refused(op):
    refuse(op, {'implementation': Implementation.MOSAIC_TPU}, 'heads of 64 or 128, not of 32')


def test_shapes_are_bound_letter_by_letter():
    assert checks.check_shapes('op', {'a': (np.zeros((3, 2, 5)), 'B2C'), 'b': (np.zeros((5,)), 'C')}) == {
        'B': 3,
        'C': 5,
    }
    with pytest.raises(ValueError, match=r'op: a has shape \(3, 4, 5\); axis 1 \(2\) must be 2'):
        checks.check_shapes('op', {'a': (np.zeros((3, 4, 5)), 'B2C')})
    with pytest.raises(ValueError, match=r'op: b .* axis 0 \(C\) must be 5'):
        checks.check_shapes('op', {'a': (np.zeros((3, 2, 5)), 'B2C'), 'b': (np.zeros((6,)), 'C')})
