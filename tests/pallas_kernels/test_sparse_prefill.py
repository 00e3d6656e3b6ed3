"""Teacher-forced sparse attention: the sampler's own operations token by token, float64 NumPy, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference
import pytest
from jitted_operations import over

from pallas_kernels.implementation import Implementation
from pallas_kernels.landmark_update import landmark_update
from pallas_kernels.page_select import page_select
from pallas_kernels.page_select.policies import SelectionPolicy
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.sparse_prefill import PAGE_MASK, blocked, cases, reference, sparse_prefill
from pallas_kernels.sparse_prefill.selection import LEAST, contest, key_tile, pack, page_landmarks, unpack

CASES = {case.name: case for case in cases.CASES}
STATICS = ('page_tokens', 'reserved_first', 'reserved_last')
QUICKLY = {'xla_backend_optimization_level': 0}  # compiling takes longer than running
# Gradients compile for seconds for each shape; what is particular to these shows without, or in the others.
REPETITIONS = {'tiles', 'bf16_mha_a128_c32', 'g5_a64_c16_no_first_page'}
FLOAT32_CASES = [case for case in cases.CASES if case.dtype == 'float32']
# Of the largest value. float32: sums of some hundred products. bfloat16: weights, their gradients and the results are
# rounded to 8 bits.
TOLERANCE = {'float32': 1e-5, 'bfloat16': 5e-3}


def as_numpy(arguments):
    return {name: np.asarray(value) if isinstance(value, jax.Array) else value for name, value in arguments.items()}


def of_padding(case):
    return np.arange(case.tokens) >= np.asarray(case.lengths)[:, None]


@functools.partial(jax.jit, static_argnames=STATICS, compiler_options=QUICKLY)
def with_gradients(q_BTHA, k_BTKA, v_BTKA, length_B, budget_BT, do_BTHA, **statics):
    """The result and the gradients of q, k, v."""
    attend = lambda q, k, v: sparse_prefill(q, k, v, length_B, budget_BT, **statics)
    o_BTHA, transposed = jax.vjp(attend, q_BTHA, k_BTKA, v_BTKA)
    return o_BTHA, *transposed(do_BTHA)


@functools.partial(jax.jit, static_argnames='page_tokens', compiler_options=QUICKLY)
def reference_with_gradients(q_BTHA, k_BTKA, v_BTKA, read_BKTN, do_BTHA, *, page_tokens):
    """The same from the definition in float32, the pages given."""
    attend = lambda q, k, v: reference.attend(q, k, v, read_BKTN, page_tokens=page_tokens, out_dtype=jnp.float32)
    o_BTHA, transposed = jax.vjp(attend, *(x.astype(jnp.float32) for x in (q_BTHA, k_BTKA, v_BTKA)))
    return o_BTHA, *transposed(do_BTHA.astype(jnp.float32))


page_mask = jax.jit(blocked.page_mask, static_argnames=(*STATICS, 'policy'), compiler_options=QUICKLY)


def pages_of(arguments, policy=SelectionPolicy.BLOCK_MEAN):
    """bool [B, K, T, N] that the blocked path reads."""
    arguments = dict(arguments)
    arguments.pop('v_BTKA')
    k_BTKA = arguments.pop('k_BTKA')
    landmark_BKNA = page_landmarks(k_BTKA, arguments['page_tokens'], policy)
    mask_BKWT = page_mask(landmark_BKNA=landmark_BKNA, **arguments, policy=policy)
    return np.asarray(unpack(mask_BKWT, landmark_BKNA.shape[2])).swapaxes(2, 3)


def random_like(x, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(x.shape), x.dtype)


def assert_close(actual, expected, tolerance):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@functools.cache
def numpy_pages(name):
    arguments = as_numpy(CASES[name].arguments())
    del arguments['v_BTKA']
    return numpy_reference.prefill_pages(**arguments)


@over(cases.CASES)
def test_the_definition_chooses_by_sorting_every_querys_pages(case):
    arguments = case.arguments()
    del arguments['v_BTKA']
    read_BKTN = jax.jit(reference.chosen_pages, static_argnames=STATICS)(**arguments)
    np.testing.assert_array_equal(read_BKTN, numpy_pages(case.name))


@over(cases.CASES, REPETITIONS)
def test_results_and_gradients_are_those_of_the_definition(case):
    arguments = case.arguments()
    q_BTHA, k_BTKA, v_BTKA = (arguments[name] for name in ('q_BTHA', 'k_BTKA', 'v_BTKA'))
    do_BTHA = random_like(q_BTHA)
    do_BTHA = jnp.where(of_padding(case)[:, :, None, None], 0, do_BTHA)
    results = with_gradients(**arguments, do_BTHA=do_BTHA)
    expected = reference_with_gradients(
        q_BTHA, k_BTKA, v_BTKA, numpy_pages(case.name), do_BTHA, page_tokens=case.page_tokens
    )
    for result, of_definition in zip(results, expected, strict=True):
        assert result.dtype == jnp.dtype(case.dtype)
        assert_close(result, of_definition, TOLERANCE[case.dtype])


@over(FLOAT32_CASES)
def test_the_definition_is_attention_over_lists_of_tokens(case):
    arguments = as_numpy(case.arguments())
    q_BTHA, k_BTKA, v_BTKA = (arguments[name] for name in ('q_BTHA', 'k_BTKA', 'v_BTKA'))
    read_BKTN = numpy_pages(case.name)
    o_BTHA, *_ = reference_with_gradients(
        q_BTHA, k_BTKA, v_BTKA, read_BKTN, random_like(q_BTHA), page_tokens=case.page_tokens
    )
    expected_BTHA = numpy_reference.prefill_attention(q_BTHA, k_BTKA, v_BTKA, read_BKTN, case.page_tokens)
    assert_close(o_BTHA, expected_BTHA, 2e-6)


@pytest.mark.parametrize(
    'name', ['small', 'small_ties', 'small_budget_0', 'tiles', 'bf16_g8_a64_c8_ties', 'g5_a64_c16_no_first_page']
)
def test_the_same_pages_are_chosen(name):
    case = CASES[name]
    read_BKTN = pages_of(case.arguments())
    np.testing.assert_array_equal(read_BKTN, numpy_pages(name))
    # The budgets decide: there are queries that read all pages, and queries that do not.
    all_KTN = np.broadcast_to(np.tri(case.tokens)[:, :: case.page_tokens] == 1, read_BKTN[0].shape)
    assert (read_BKTN[0] <= all_KTN).all()
    assert (read_BKTN[0] != all_KTN).any()


@pytest.mark.parametrize('policy', ['quest', 'group_softmax'])
@pytest.mark.parametrize('name', ['small', 'tiles'])
def test_the_pages_of_other_policies_are_chosen(name, policy):
    case = CASES[name]
    read_BKTN = pages_of(case.arguments(), SelectionPolicy(policy))
    arguments = as_numpy(case.arguments())
    del arguments['v_BTKA']
    np.testing.assert_array_equal(read_BKTN, numpy_reference.prefill_pages(**arguments, policy=policy))
    assert (read_BKTN != numpy_pages(name)).any()


@pytest.mark.parametrize('policy', ['quest', 'group_softmax'])
def test_a_policy_without_kernels_is_refused_unless_its_pages_are_chosen_otherwise(policy):
    arguments = CASES['small'].arguments()
    kernels = Implementation.MOSAIC_GPU_INTERPRETED
    with pytest.raises(ValueError, match=f"policy='{policy}' has no kernels; use implementation='reference'"):
        sparse_prefill(**arguments, policy=policy, implementation=kernels)
    attend = jax.jit(sparse_prefill, static_argnames=(*STATICS, 'policy'), compiler_options=QUICKLY)
    read_BKTN = pages_of(arguments, SelectionPolicy(policy))
    q_BTHA, k_BTKA, v_BTKA = (arguments[name] for name in ('q_BTHA', 'k_BTKA', 'v_BTKA'))
    expected_BTHA, *_ = reference_with_gradients(
        q_BTHA, k_BTKA, v_BTKA, read_BKTN, random_like(q_BTHA), page_tokens=CASES['small'].page_tokens
    )
    assert_close(attend(**arguments, policy=policy), expected_BTHA, TOLERANCE['float32'])


def decode_token_by_token(case):
    """The sampler's operations over a cache whose pages lie scattered; o_BTHA and the pages read, bool [B, K, T, N]."""
    arguments = case.arguments()
    q_BTHA, k_BTKA, v_BTKA = (arguments[name] for name in ('q_BTHA', 'k_BTKA', 'v_BTKA'))
    B, T, K, A = k_BTKA.shape
    N, C = case.pages, case.page_tokens
    places = np.random.default_rng(5).permutation(np.arange(1, B * N + 1)).reshape(B, N)
    table_BN = jnp.asarray(places, jnp.int32)

    def step(state, token):
        pages_KPCE, landmark_BKNA = state
        t, q_BHA, k_BKA, v_BKA, budget_B = token
        write_B = t < arguments['length_B']
        position_B = jnp.full(B, t)
        pages_KPCE, landmark_BKNA = landmark_update(
            pages_KPCE, landmark_BKNA, k_BKA, v_BKA, table_BN, position_B, write_B
        )
        ids_BKM, count_B = page_select(
            q_BHA,
            landmark_BKNA,
            position_B + 1,
            jnp.minimum(budget_B, N),
            page_tokens=C,
            max_pages=N,
            reserved_first=case.reserved_first,
            reserved_last=case.reserved_last,
        )
        o_BHA = sparse_decode(q_BHA, pages_KPCE, table_BN, ids_BKM, count_B, position_B + 1)
        read_BKN = jax.nn.one_hot(ids_BKM, N, dtype=bool).any(axis=2) & write_B[:, None, None]
        return (pages_KPCE, landmark_BKNA), (jnp.where(write_B[:, None, None], o_BHA, 0), read_BKN)

    empty = jnp.full((K, B * N + 1, C, 2 * A), jnp.nan), jnp.full((B, K, N, A), jnp.nan)
    tokens = (jnp.arange(T), *(x.swapaxes(0, 1) for x in (q_BTHA, k_BTKA, v_BTKA, arguments['budget_BT'])))
    _, (o_TBHA, read_TBKN) = jax.jit(functools.partial(jax.lax.scan, step))(empty, tokens)
    return o_TBHA.swapaxes(0, 1), read_TBKN.transpose(1, 2, 0, 3)


@pytest.mark.parametrize('name', ['small', 'small_ties'])
def test_it_is_what_the_sampler_computes_token_by_token(name):
    case = CASES[name]
    decoded_BTHA, decoded_BKTN = decode_token_by_token(case)
    np.testing.assert_array_equal(pages_of(case.arguments()), decoded_BKTN)
    o_BTHA, *_ = with_gradients(**case.arguments(), do_BTHA=jnp.zeros_like(decoded_BTHA))
    np.testing.assert_allclose(o_BTHA, decoded_BTHA, rtol=0, atol=1e-5)


def test_gradients_are_finite_differences():
    """Along random directions, of float64 NumPy with the pages held."""
    case = CASES['small']
    arguments = case.arguments()
    at = [np.asarray(arguments[name], np.float64) for name in ('q_BTHA', 'k_BTKA', 'v_BTKA')]
    do_BTHA = random_like(arguments['q_BTHA'])
    _, *gradients = with_gradients(**arguments, do_BTHA=do_BTHA)

    def loss(q_BTHA, k_BTKA, v_BTKA):
        o_BTHA = numpy_reference.prefill_attention(q_BTHA, k_BTKA, v_BTKA, numpy_pages('small'), case.page_tokens)
        return (o_BTHA * np.asarray(do_BTHA, np.float64)).sum()

    rng = np.random.default_rng(6)
    for i, gradient in enumerate(gradients):
        direction = rng.standard_normal(at[i].shape)
        ahead, behind = (
            loss(*(x + sign * 1e-5 * direction if n == i else x for n, x in enumerate(at))) for sign in (1, -1)
        )
        slope = (np.asarray(gradient, np.float64) * direction).sum()
        assert slope == pytest.approx((ahead - behind) / 2e-5, rel=1e-4)


def test_enough_budget_is_dense_attention_and_the_gradients_of_it():
    """As many pages beside the reserved ones as there are, or one more than are left: the same."""
    case = CASES['small']
    arguments = case.arguments() | {'length_B': jnp.full(3, case.tokens, jnp.int32)}
    shapes = {name: arguments[name] for name in ('q_BTHA', 'k_BTKA', 'v_BTKA')}
    q_BTHA, k_BTKA, v_BTKA = (random_like(x, seed) for seed, x in enumerate(shapes.values()))
    do_BTHA = random_like(q_BTHA)
    dense = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    o_BTHA, transposed = jax.vjp(dense, q_BTHA, k_BTKA, v_BTKA)
    expected = o_BTHA, *transposed(do_BTHA)
    enough = case.pages - case.reserved_first - case.reserved_last
    tokens = {'q_BTHA': q_BTHA, 'k_BTKA': k_BTKA, 'v_BTKA': v_BTKA}
    for budget in (enough, case.pages, np.iinfo(np.int32).max):
        budgets = {'budget_BT': jnp.full((3, case.tokens), budget, jnp.int32)}
        for result, of_dense in zip(
            with_gradients(**arguments | tokens | budgets, do_BTHA=do_BTHA), expected, strict=True
        ):
            assert_close(result, of_dense, 2e-6)
    short = {'budget_BT': jnp.full((3, case.tokens), enough - 1, jnp.int32)}
    o_BTHA, *_ = with_gradients(**arguments | tokens | short, do_BTHA=do_BTHA)
    left_out_T = np.abs(np.asarray(o_BTHA - expected[0])).max(axis=(0, 2, 3)) > 1e-3
    assert left_out_T.any()
    assert not left_out_T[: (case.pages - 1) * case.page_tokens].any()


def test_a_negative_budget_is_none():
    """A row of fewer pages than are reserved records less than those."""
    arguments = CASES['small_budget_0'].arguments()
    less = arguments | {'budget_BT': jnp.minimum(arguments['budget_BT'], -2)}
    none = arguments | {'budget_BT': jnp.zeros_like(arguments['budget_BT'])}
    np.testing.assert_array_equal(pages_of(less), pages_of(none))
    assert pages_of(less)[0].sum(axis=-1).max() == 3


@pytest.mark.parametrize('name', ['small', 'small_ties', 'small_budget_0'])
@pytest.mark.parametrize('free', [np.nan, np.inf])
def test_padding_is_never_seen(name, free):
    """Neither in queries, keys and values nor in the gradient that comes back from later layers."""
    case = CASES[name]
    clean = case.arguments()
    padding_BT = of_padding(case)
    do_BTHA = random_like(clean['q_BTHA'])
    spoilt_do_BTHA = jnp.where(padding_BT[:, :, None, None], free, do_BTHA)
    arguments = case.arguments(free=free)
    assert not np.isfinite(arguments['k_BTKA']).all()
    spoilt = with_gradients(**arguments, do_BTHA=spoilt_do_BTHA)
    for result, expected in zip(spoilt, with_gradients(**clean, do_BTHA=do_BTHA), strict=True):
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(np.asarray(result)[padding_BT], 0)


def test_later_tokens_change_nothing():
    """A shorter row is the longer one's start: pages, landmarks and blocks depend on earlier tokens alone."""
    case = CASES['tiles_ties']
    arguments = case.arguments()
    o_BTHA, *_ = with_gradients(**arguments, do_BTHA=random_like(arguments['q_BTHA']))
    short = arguments | {'length_B': jnp.asarray([257, 100], jnp.int32)}
    short_BTHA, *_ = with_gradients(**short, do_BTHA=random_like(arguments['q_BTHA']))
    np.testing.assert_array_equal(short_BTHA[0, :257], o_BTHA[0, :257])
    np.testing.assert_array_equal(short_BTHA[1, :100], o_BTHA[1, :100])


def test_no_gradient_flows_through_the_choice():
    """Where a page is not read, its keys have been in a landmark only, and their gradient is 0."""
    case = CASES['small_budget_0']
    arguments = case.arguments()
    do_BTHA = random_like(arguments['q_BTHA']).at[:, :-1].set(0)
    _, _, dk_BTKA, _ = with_gradients(**arguments, do_BTHA=do_BTHA)
    reads_N = pages_of(arguments)[0, 0, -1]
    assert reads_N.sum() == 3
    assert arguments['budget_BT'][0, -1] == 0
    reads_T = reads_N.repeat(case.page_tokens)[: case.tokens]
    assert (np.asarray(dk_BTKA)[0, ~reads_T] == 0).all()
    assert (np.asarray(dk_BTKA)[0, reads_T] != 0).any(axis=-1).all()


def test_a_policy_of_checkpoint_can_keep_the_choice():
    """Else it would be made a second time, and two scores that are nearly equal might change places."""
    arguments = CASES['small'].arguments()
    statics = {name: arguments.pop(name) for name in STATICS}
    q_BTHA = arguments.pop('q_BTHA')

    def choices(policy):
        layer = jax.checkpoint(lambda q: sparse_prefill(q, **arguments, **statics).sum(), policy=policy)
        return str(jax.make_jaxpr(jax.grad(layer))(q_BTHA)).count('bitcast_convert_type')

    assert choices(jax.checkpoint_policies.save_only_these_names(PAGE_MASK)) == 1
    assert choices(jax.checkpoint_policies.nothing_saveable) == 2


def test_memory_grows_with_the_length():
    """Not with its square, which the bit mask alone does, at a bit for 128 scores here."""

    def temporary(tokens):
        shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)
        q_BTHA = shape(1, tokens, 1, 16)
        compiled = with_gradients.lower(
            q_BTHA,
            q_BTHA,
            q_BTHA,
            shape(1, dtype=jnp.int32),
            shape(1, tokens, dtype=jnp.int32),
            q_BTHA,
            page_tokens=128,
            reserved_first=1,
            reserved_last=2,
        ).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary(4096), temporary(8192)
    assert long < 2.2 * short
    assert long < 8192**2 / 4, 'a tenth of one [T, T] float32'


def test_pages_that_do_not_compete_come_last():
    score_N1 = jnp.asarray([-np.inf, -3.5, 0.0, 2])[:, None]
    key_N = np.asarray(contest(score_N1, score_N1 > -1))[:, 0]
    assert (key_N[:2] == LEAST).all()
    assert (key_N[2:] > LEAST).all()


def test_masks_are_packed_32_pages_a_word():
    read_NT = np.random.default_rng(7).random((2, 96, 5)) < 0.5
    mask_WT = np.asarray(pack(jnp.asarray(read_NT)))
    assert mask_WT.shape == (2, 3, 5)
    assert mask_WT.dtype == np.int32
    for n in (0, 31, 32, 77):
        np.testing.assert_array_equal(mask_WT.view(np.uint32)[:, n // 32] >> n % 32 & 1, read_NT[:, n])
    np.testing.assert_array_equal(unpack(jnp.asarray(mask_WT), 77), read_NT[:, :77])


def test_a_tile_has_all_its_pages_in_one_word():
    for page_tokens in (8, 16, 32, 64, 128):
        pages = key_tile(page_tokens) // page_tokens
        assert 32 % pages == 0


def test_reserved_pages_that_make_no_sense_are_refused():
    arguments = CASES['small'].arguments()
    with pytest.raises(ValueError, match='sparse_prefill: reserved_first=-1'):
        sparse_prefill(**arguments | {'reserved_first': -1})
    with pytest.raises(ValueError, match='sparse_prefill: reserved_last=0'):
        sparse_prefill(**arguments | {'reserved_last': 0})
    with pytest.raises(ValueError, match='sparse_prefill: pages hold 12 tokens'):
        sparse_prefill(**arguments | {'page_tokens': 12})
    with pytest.raises(ValueError, match='sparse_prefill: v_BTKA must have the dtype of q_BTHA'):
        sparse_prefill(**arguments | {'v_BTKA': arguments['v_BTKA'].astype(jnp.bfloat16)})
    three = {name: jnp.zeros((3, 77, 3, 32)) for name in ('k_BTKA', 'v_BTKA')}
    with pytest.raises(ValueError, match='sparse_prefill: q has 4 heads, not a multiple of the 3'):
        sparse_prefill(**arguments | three)
