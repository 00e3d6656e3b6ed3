"""sparse_prefill's GPU kernels: interpreted here, lowered for an H200, and run on a GPU where there is one."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import lower_for_h200
from jitted_operations import over

from pallas_kernels.implementation import Implementation, why_unfit
from pallas_kernels.sparse_prefill import blocked, kernel_gpu, reference, selection_gpu, sparse_prefill
from pallas_kernels.sparse_prefill.attention import masked_attention
from pallas_kernels.sparse_prefill.cases import CASES, Case
from pallas_kernels.sparse_prefill.selection import mean_query, pack, padded, page_landmarks, unpack
from pallas_kernels.sparse_prefill.tiles_gpu import ROWS, TILE, WARPGROUPS, Lists, Plan

STATICS = ('page_tokens', 'reserved_first', 'reserved_last')
FITTING = [case for case in CASES if why_unfit(case.head_dim, case.group, case.dtype) is None]
# Of the largest value. Weights, their gradients and the results are rounded to 8 bits.
OUTPUT, ROUNDED_OUTPUT, GRADIENT = 2e-3, 5e-3, 1e-2
# Before 0.11 the interpreter takes several times as long.
SLOW_INTERPRETER = jax.__version_info__ < (0, 11)


def steps_of(module, **options):
    return SimpleNamespace(
        forward=functools.partial(module.forward, **options), backward=functools.partial(module.backward, **options)
    )


def operands(sequences, tokens, kv_heads, group, head_dim, page_tokens, seed=0, density=0.3):
    """q, k, v, the pages that are read, bool [B, K, T, N], and a gradient.

    The newest page is always read but in the last fifth of the tokens, which read nothing; no query after the first
    128 tokens reads the first page.
    """
    rng = np.random.default_rng(seed)
    B, T, K, A, C = sequences, tokens, kv_heads, head_dim, page_tokens
    q_BTHA, do_BTHA = rng.standard_normal((2, B, T, K * group, A))
    k_BTKA, v_BTKA = rng.standard_normal((2, B, T, K, A))
    newest_T1, page_N = np.arange(T)[:, None] // C, np.arange(-(-T // C))
    read_BKTN = (rng.random((B, K, T, len(page_N))) < density) & (page_N <= newest_T1) | (page_N == newest_T1)
    read_BKTN[:, :, T - T // 5 :] = False
    read_BKTN[:, :, TILE:, 0] = False
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q_BTHA, k_BTKA, v_BTKA)]
    return *arrays, jnp.asarray(read_BKTN), jnp.asarray(do_BTHA, jnp.bfloat16)


def packed(read_BKTN):
    return pack(padded(read_BKTN.swapaxes(2, 3), 2, 32))


def assert_close(result, expected, tolerance):
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def assert_attention(steps, q_BTHA, k_BTKA, v_BTKA, read_BKTN, do_BTHA, page_tokens):
    """Result and gradients against float32 attention over the same pages."""
    attend = lambda q, k, v: reference.attend(q, k, v, read_BKTN, page_tokens=page_tokens, out_dtype=jnp.float32)
    o_BTHA, transposed = jax.vjp(attend, *(x.astype(jnp.float32) for x in (q_BTHA, k_BTKA, v_BTKA)))
    expected = o_BTHA, *transposed(do_BTHA.astype(jnp.float32))
    mask_BKWT = packed(read_BKTN)
    attend = lambda q, k, v: masked_attention(steps, page_tokens, jnp.float32, q, k, v, mask_BKWT)
    o_BTHA, transposed = jax.vjp(attend, q_BTHA, k_BTKA, v_BTKA)
    results = o_BTHA, *transposed(do_BTHA.astype(jnp.float32))
    for result, of_reference, tolerance in zip(results, expected, (OUTPUT, *[GRADIENT] * 3), strict=True):
        assert_close(result, of_reference, tolerance)
    nothing_T = ~np.asarray(read_BKTN).any(axis=(0, 1, 3))
    np.testing.assert_array_equal(np.asarray(results[0])[:, nothing_T], 0)
    np.testing.assert_array_equal(np.asarray(results[1], np.float32)[:, nothing_T], 0)


SIZES = [(1, 100, 1, 1, 64, 16)] if SLOW_INTERPRETER else [(1, 300, 1, 2, 64, 8), (1, 140, 2, 1, 128, 128)]


@pytest.mark.slow
@pytest.mark.parametrize('sizes', SIZES, ids=str)
def test_interpreted_attention(sizes):
    assert_attention(steps_of(kernel_gpu, interpret=True), *operands(*sizes), page_tokens=sizes[-1])


def chosen(case, page_mask, **options):
    """The mask of a case."""
    arguments = case.arguments()
    landmark_BKNA = page_landmarks(arguments['k_BTKA'], case.page_tokens)
    arguments = {name: arguments[name] for name in ('q_BTHA', 'length_B', 'budget_BT', *STATICS)}
    return np.asarray(page_mask(landmark_BKNA=landmark_BKNA, **arguments, **options))


@pytest.mark.slow
def test_interpreted_choice():
    """Ties, reserved pages, a prompt, queries of the padding, and the last block of queries not full."""
    case = Case('choice', 1, 2, 64, 8, 70, 1, 1, (66,), (11,), (4,), 'bfloat16', True)
    mask_BKWT = chosen(case, kernel_gpu.page_mask, interpret=True)
    np.testing.assert_array_equal(mask_BKWT, chosen(case, jax.jit(blocked.page_mask, static_argnames=STATICS)))


def test_lists_have_the_tiles_that_are_read_and_the_diagonal():
    plan = Plan(sequences=1, heads=2, kv_heads=1, head_dim=64, page_tokens=16, tokens=5 * TILE)
    read_NT = np.random.default_rng(1).random((40, 600)) < 0.001
    read_NT[:, 300:520] = False
    lists = Lists(plan, pack(padded(jnp.asarray(read_NT), 0, 32))[None, None])
    assert lists.mask_BKWT.shape[3] == plan.tokens
    read_SI = np.pad(read_NT.repeat(16, axis=0), ((0, 0), (0, 40))).reshape(5, TILE, 10, ROWS).any(axis=(1, 3))
    own_SI = np.arange(5)[:, None] == np.arange(10) // WARPGROUPS
    for (ids, counts), expected in (
        (lists.keys_of_queries(), (read_SI | own_SI).reshape(5, 5, WARPGROUPS).any(axis=2).T),
        (lists.queries_of_keys(), read_SI | own_SI),
    ):
        assert 0 < expected.mean() < 1
        for row, count, of_row in zip(ids[0, 0], counts[0, 0], expected, strict=True):
            np.testing.assert_array_equal(row[:count], np.flatnonzero(of_row))


def test_three_terms_are_the_mean_of_the_queries():
    q_BTHA = jnp.asarray(np.random.default_rng(2).standard_normal((1, 4, 10, 64)), jnp.bfloat16)
    mean_BKTA = mean_query(q_BTHA, 2).swapaxes(2, 3)
    terms_BKxTA = jax.jit(selection_gpu._terms)(mean_BKTA)
    assert terms_BKxTA.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(terms_BKxTA, np.float64).sum(axis=2), np.asarray(mean_BKTA, np.float64))


@pytest.mark.parametrize('step', ['page_mask', 'forward', 'backward'])
def test_float32_is_handed_to_the_jax_path(step, monkeypatch):
    q_BTHA, k_BTKA, landmark_BKNA = jnp.zeros((1, 20, 2, 64)), jnp.zeros((1, 20, 1, 64)), jnp.zeros((1, 1, 3, 64))
    row, integers = jnp.zeros((1, 2, 20)), jnp.zeros((1, 1, 1, 20), jnp.int32)
    arguments = {
        'page_mask': (q_BTHA, landmark_BKNA, jnp.zeros(1, jnp.int32), integers[0, 0]),
        'forward': (q_BTHA, k_BTKA, k_BTKA, integers),
        'backward': (q_BTHA, k_BTKA, k_BTKA, integers, row, row, q_BTHA),
    }[step]
    statics = dict(zip(STATICS, (8, 1, 2), strict=True)) if step == 'page_mask' else {'page_tokens': 8}
    monkeypatch.setattr(blocked, step, lambda *given, **named: (len(given), named))
    # Not the jitted function, which might have been traced before.
    handed = getattr(kernel_gpu, step).__wrapped__(*arguments, **statics, interpret=False)
    assert handed == (len(arguments), statics)


def public(implementation=Implementation.MOSAIC_GPU, **statics):
    """The result and the gradients of q, k, v, as a function of arrays."""

    def with_gradients(q_BTHA, k_BTKA, v_BTKA, length_B, budget_BT, do_BTHA):
        attend = lambda q, k, v: sparse_prefill(q, k, v, length_B, budget_BT, implementation=implementation, **statics)
        o_BTHA, transposed = jax.vjp(attend, q_BTHA, k_BTKA, v_BTKA)
        return o_BTHA, *transposed(do_BTHA)

    return with_gradients


def sized(sequences, tokens, heads, kv_heads, head_dim):
    shape = jax.ShapeDtypeStruct
    q_BTHA = shape((sequences, tokens, heads, head_dim), jnp.bfloat16)
    k_BTKA = shape((sequences, tokens, kv_heads, head_dim), jnp.bfloat16)
    integers = shape((sequences,), jnp.int32), shape((sequences, tokens), jnp.int32)
    return q_BTHA, k_BTKA, k_BTKA, *integers, q_BTHA


@pytest.mark.parametrize(
    ('sizes', 'page_tokens'),
    [((1, 16384, 16, 8, 128), 16), ((2, 1000, 10, 2, 64), 128), ((1, 20000, 8, 1, 128), 8)],
    ids=str,
)
def test_production_sizes_lower_for_an_h200(sizes, page_tokens):
    function = public(page_tokens=page_tokens, reserved_first=1, reserved_last=2)
    assert lower_for_h200(function, *sized(*sizes)).as_text().count('@mosaic_gpu') == 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    'sizes',
    [(1, 300, 2, 5, 64, 8), (2, 140, 2, 1, 128, 128), (1, 4096, 2, 2, 128, 16), (1, 1000, 1, 8, 64, 32)],
    ids=str,
)
def test_attention_on_a_gpu(sizes):
    assert_attention(steps_of(kernel_gpu, interpret=False), *operands(*sizes), page_tokens=sizes[-1])


@pytest.mark.gpu
@over(FITTING)
def test_cases_on_a_gpu(case):
    """Padding of NaN, against the JAX path in the precision of the case."""
    arguments = case.arguments(free=np.nan)
    statics = {name: arguments.pop(name) for name in STATICS}
    do_BTHA = jnp.asarray(np.random.default_rng(3).standard_normal(arguments['q_BTHA'].shape), case.dtype)
    results = jax.jit(public(**statics))(**arguments, do_BTHA=do_BTHA)
    expected = jax.jit(public(Implementation.REFERENCE, **statics))(**arguments, do_BTHA=do_BTHA)
    for result, of_jax, tolerance in zip(results, expected, (ROUNDED_OUTPUT, *[GRADIENT] * 3), strict=True):
        assert result.dtype == of_jax.dtype
        assert_close(result, of_jax, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ('group', 'head_dim', 'page_tokens', 'tokens'),
    [(2, 128, 16, 4096), (5, 64, 8, 700), (1, 128, 8, 9000), (3, 64, 8, 17000)],  # one group of pages, two, three
)
def test_exact_choices_on_a_gpu(group, head_dim, page_tokens, tokens):
    """Whole numbers: the same pages bit for bit, ties and all."""
    lengths, prompts = (tokens, tokens // 2 + 3), (tokens // 5, 0)
    case = Case('exact', 1, group, head_dim, page_tokens, tokens, 1, 2, lengths, prompts, (40, 9), 'bfloat16', True)
    page_mask = jax.jit(kernel_gpu.page_mask, static_argnames=(*STATICS, 'interpret'))
    expected = chosen(case, jax.jit(blocked.page_mask, static_argnames=STATICS))
    assert (expected[0, :, :, -1] != expected[0, :, :, tokens // 2]).any()
    np.testing.assert_array_equal(chosen(case, page_mask, interpret=False), expected)


@pytest.mark.gpu
def test_choices_on_a_gpu_are_the_best_up_to_rounding():
    case = Case('normal', 2, 2, 128, 16, 4096, 1, 2, (4096,), (50,), (64,), 'bfloat16', False)
    page_mask = jax.jit(kernel_gpu.page_mask, static_argnames=(*STATICS, 'interpret'))
    actual, expected = (
        np.asarray(unpack(jnp.asarray(mask_BKWT), case.pages))
        for mask_BKWT in (
            chosen(case, page_mask, interpret=False),
            chosen(case, jax.jit(blocked.page_mask, static_argnames=STATICS)),
        )
    )
    np.testing.assert_array_equal(actual.sum(axis=2), expected.sum(axis=2))
    assert (actual != expected).any(axis=2).mean() < 1e-2  # a page for another whose score is the same to 1e-6


@pytest.mark.gpu
def test_memory_on_a_gpu_is_linear_in_the_length():
    function = jax.jit(public(page_tokens=16, reserved_first=1, reserved_last=2))
    short, long = (
        function.lower(*sized(1, tokens, 16, 8, 128)).compile().memory_analysis().temp_size_in_bytes
        for tokens in (8192, 16384)
    )
    assert short < long < 2.2 * short
