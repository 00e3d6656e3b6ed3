"""Arguments that do not fit each other are refused by name, before anything runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import checks
from pallas_kernels.dense_decode import cases as dense_cases
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.implementation import Implementation, check_machine, kernel_module
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
    refuse('dense_decode', {'q_BTHA': q_BTHA[:, :0]}, 'q_BTHA', '(T) must not be empty')
    refuse('dense_decode', {'q_BTHA': jnp.tile(q_BTHA, (1, 257, 1, 1))}, 'q_BTHA', '257 queries')


def test_more_pages_to_read_than_there_are_is_refused():
    ids_BKM = OPS['sparse_decode'][1]['ids_BKM']
    refuse('sparse_decode', {'ids_BKM': jnp.tile(ids_BKM, (1, 1, 3))}, 'ids_BKM', 'there are 12')


@pytest.mark.parametrize('op', list(OPS))
def test_a_kernel_that_does_not_take_the_heads_is_refused(op):
    refuse(op, {'implementation': Implementation.MOSAIC_TPU}, 'heads of 64 or 128, not of 32')


@pytest.mark.parametrize('op', [op for op in OPS if op != 'sparse_prefill'])
def test_an_implementation_may_be_a_plain_name(op):
    function, arguments = OPS[op]
    given = function(**arguments, implementation='reference')
    jax.tree.map(np.testing.assert_array_equal, given, function(**arguments))
    refuse(op, {'implementation': 'cuda'}, "implementation='cuda'", 'reference, mosaic_gpu, mosaic_tpu')


@pytest.mark.parametrize('op', list(OPS))
def test_there_is_no_kernel_of_another_name(op):
    with pytest.raises(ValueError, match=f"{op}: implementation='cuda'"):
        kernel_module(op, 'cuda')


@pytest.mark.parametrize('name', ['mosaic_gpu', 'mosaic_tpu'])
def test_a_kernel_of_another_machine_is_refused(name):
    q_BHA = jnp.zeros((1, 2, 64))
    with pytest.raises(ValueError, match=f"page_select: implementation='{name}' runs on a .*; the arrays are on a cpu"):
        page_select(
            q_BHA,
            jnp.zeros((1, 2, 8, 64)),
            *(jnp.ones(1, jnp.int32) for _ in range(2)),
            page_tokens=8,
            max_pages=8,
            reserved_first=1,
            reserved_last=1,
            implementation=name,
        )
    check_machine('op', Implementation(f'{name}_interpreted'), q_BHA)
    jax.eval_shape(lambda x: check_machine('op', Implementation(name), x), q_BHA)  # compiled elsewhere, perhaps


@pytest.mark.parametrize(('op', 'name'), ARRAYS)
def test_an_empty_axis_is_refused(op, name):
    array = OPS[op][1][name]
    for axis in range(array.ndim):
        refuse(op, {name: jax.lax.slice_in_dim(array, 0, 0, axis=axis)})


def test_no_sequence_at_all_is_refused():
    arguments = OPS['sparse_decode'][1]
    none = {name: value[:0] for name, value in arguments.items() if name != 'pages_KPCE'}
    refuse('sparse_decode', none, 'q_BHA', '(B) must not be empty')


@pytest.mark.parametrize(('op', 'name'), ARRAYS)
def test_what_is_no_jax_array_is_refused(op, name):
    array = np.asarray(OPS[op][1][name])
    refuse(op, {name: array}, name, 'must be a jax array, got ndarray')
    refuse(op, {name: array.tolist()}, name, 'must be a jax array, got list')


@pytest.mark.parametrize('op', ['dense_decode', 'sparse_decode'])
@pytest.mark.parametrize('dtype', [jnp.int32, 'half a float'])
def test_a_result_that_is_no_float_is_refused(op, dtype):
    refuse(op, {'out_dtype': dtype}, 'out_dtype')


def test_page_counts_are_whole_numbers():
    for name in ('max_pages', 'reserved_first', 'reserved_last'):
        refuse('page_select', {name: 6.0}, f'{name}=6.0: must be a whole number')
    for op in ('page_select', 'sparse_prefill'):
        for page_tokens in (8.0, '8'):
            refuse(op, {'page_tokens': page_tokens}, f'pages hold {page_tokens!r} tokens')


def test_shapes_are_bound_letter_by_letter():
    assert checks.check_shapes('op', {'a': (jnp.zeros((3, 2, 5)), 'B2C'), 'b': (jnp.zeros((5,)), 'C')}) == {
        'B': 3,
        'C': 5,
    }
    with pytest.raises(ValueError, match=r'op: a has shape \(3, 4, 5\); axis 1 \(2\) must be 2'):
        checks.check_shapes('op', {'a': (jnp.zeros((3, 4, 5)), 'B2C')})
    with pytest.raises(ValueError, match=r'op: b .* axis 0 \(C\) must be 5'):
        checks.check_shapes('op', {'a': (jnp.zeros((3, 2, 5)), 'B2C'), 'b': (jnp.zeros((6,)), 'C')})
