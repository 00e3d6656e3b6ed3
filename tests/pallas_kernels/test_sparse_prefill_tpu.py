"""sparse_prefill's TPU kernels: interpreted against the JAX path, and compiled for chips that are not here.

The interpreter makes copies as late as it may, fills memory with NaN and looks for races.
"""

import functools

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_tpu import interpreted

from pallas_kernels.implementation import Implementation
from pallas_kernels.sparse_prefill import blocked, kernel_tpu, sparse_prefill
from pallas_kernels.sparse_prefill.cases import Case
from pallas_kernels.sparse_prefill.selection import page_landmarks

STATICS = ('page_tokens', 'reserved_first', 'reserved_last')
CASES = (
    # Two blocks of keys, each a word of the mask, in two parts; many choices are decided by ties.
    Case('blocks_ties', 1, 2, 64, 16, 600, 1, 2, (590,), (20,), (5,), 'float32', True),
    Case('bf16_two_sequences', 2, 2, 128, 8, 100, 1, 1, (90, 73), (20, 0), (2, 3), 'bfloat16', False),
)
# Of the largest value: another order of summation, another rounding of weights to bfloat16.
TOLERANCE = {'float32': 2e-6, 'bfloat16': 2e-3}


def with_gradients(q_BTHA, k_BTKA, v_BTKA, length_B, budget_BT, do_BTHA, **options):
    attend = lambda q, k, v: sparse_prefill(q, k, v, length_B, budget_BT, **options)
    o_BTHA, transposed = jax.vjp(attend, q_BTHA, k_BTKA, v_BTKA)
    return o_BTHA, *transposed(do_BTHA)


def split(case, seed=0, free=0.0):
    """Arrays with a gradient of the result among them, and static arguments."""
    arguments = case.arguments(seed, free)
    statics = {name: arguments.pop(name) for name in STATICS}
    rng = np.random.default_rng(seed + 1)
    arguments['do_BTHA'] = jnp.asarray(rng.standard_normal(arguments['q_BTHA'].shape), case.dtype)
    return arguments, statics


@pytest.mark.parametrize('case', CASES, ids=lambda case: case.name)
def test_interpreted_kernels_are_the_jax_path(case):
    arguments, statics = split(case, free=np.nan)
    run = interpreted(
        functools.partial(with_gradients, **statics, implementation=Implementation.MOSAIC_TPU_INTERPRETED), **arguments
    )
    expected = jax.jit(functools.partial(with_gradients, **statics))(**arguments)
    for result, of_jax in zip(run(**arguments), expected, strict=True):
        assert result.dtype == of_jax.dtype
        result, of_jax = np.asarray(result, np.float64), np.asarray(of_jax, np.float64)
        np.testing.assert_allclose(result, of_jax, rtol=0, atol=TOLERANCE[case.dtype] * np.abs(of_jax).max())


def test_more_pages_than_one_chunk_of_them():
    """The search runs over the chunks that exist for a block of queries, and the mask has zeros beyond."""
    case = Case('chunks', 1, 1, 64, 8, 2200, 1, 2, (2190,), (0,), (40,), 'float32', True)
    arguments, statics = split(case)
    assert case.pages > kernel_tpu.PAGE_CHUNK
    landmark_BKNA = page_landmarks(arguments['k_BTKA'], case.page_tokens)
    arguments = {name: arguments[name] for name in ('q_BTHA', 'length_B', 'budget_BT')}
    arguments['landmark_BKNA'] = landmark_BKNA
    mask_BKWT = interpreted(functools.partial(kernel_tpu.page_mask, **statics, interpret=True), **arguments)(
        **arguments
    )
    np.testing.assert_array_equal(mask_BKWT, jax.jit(functools.partial(blocked.page_mask, **statics))(**arguments))


def compiled(chip, tokens, heads, kv_heads, head_dim, page_tokens, dtype):
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    q_BTHA, k_BTKA = array(1, tokens, heads, head_dim), array(1, tokens, kv_heads, head_dim)
    function = functools.partial(
        with_gradients,
        page_tokens=page_tokens,
        reserved_first=1,
        reserved_last=2,
        implementation=Implementation.MOSAIC_TPU,
    )
    integers = array(1, dtype='int32'), array(1, tokens, dtype='int32')
    return aot.compile_for_tpu(function, chip, q_BTHA, k_BTKA, k_BTKA, *integers, q_BTHA)


SHAPE = 16, 8, 128, 16, 'bfloat16'  # of Qwen3-1.7B


@pytest.mark.parametrize('chip', aot.TPU_CHIPS)
def test_they_compile(chip):
    """More heads and tokens only make XLA's transposes longer to compile."""
    assert compiled(chip, 1024, 2, 1, 128, 16, 'bfloat16').as_text().count('tpu_custom_call') == 4


@pytest.mark.verify
def test_memory_grows_with_the_length():
    """16K tokens take less than one head's scores would; twice as many take far from four times it.

    1.3 times with jax 0.10.2, 2.7 with 0.12: each compiler places temporaries otherwise.
    """
    short, long = (compiled('v5e', tokens, *SHAPE).memory_analysis().temp_size_in_bytes for tokens in (16384, 32768))
    assert short < 16384**2 * 4
    assert short < long < 3 * short


@pytest.mark.verify
@pytest.mark.parametrize('chip', [chip for chip in aot.TPU_CHIPS if chip != 'v5e'])
def test_they_compile_for_other_chips(chip):
    compiled(chip, 16384, *SHAPE)


@pytest.mark.verify
@pytest.mark.parametrize(
    'shape',
    [(4096, 16, 2, 64, 8, 'bfloat16'), (4096, 5, 1, 64, 64, 'float32'), (65536, 8, 8, 128, 8, 'bfloat16')],
    ids=str,
)
def test_they_compile_for_other_heads_groups_and_pages(shape):
    compiled('v5e', *shape)
