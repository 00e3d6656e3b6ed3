"""The decoder's own properties: parameters, padding, remat, dtypes, the attend interface."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import SMALL, causal_attend, jitted_logits, run_logits

from sparrow_jax.models.decoder import abstract_decoder, init_decoder, logical_axes, rms_norm, rotate

TOKENS_BT = np.random.RandomState(0).randint(0, SMALL.vocab_size, (2, 9))
TOLERANCE = 1e-5  # float32 logits of size 3, summed in another order for another batch shape
SHAPES = [
    SMALL,
    dataclasses.replace(SMALL, tie_embeddings=True),
    dataclasses.replace(SMALL, family='llama', kv_heads=6),
]


@pytest.mark.parametrize('shape', SHAPES)
def test_parameter_count_is_that_of_the_weights(shape):
    _, params = abstract_decoder(shape)
    assert sum(x.size for x in jax.tree.leaves(params)) == shape.parameter_count()


def test_tied_head_is_the_embedding():
    tied = dataclasses.replace(SMALL, tie_embeddings=True)
    graphdef, params = init_decoder(tied, seed=0, compute_dtype=jnp.float32)
    assert 'head' not in params
    untied_graphdef, untied = init_decoder(SMALL, seed=0, compute_dtype=jnp.float32)
    for name in ('embed', 'final_norm', 'layers'):
        untied[name] = params[name]
    untied['head'] = params['embed']
    expected = jitted_logits(graphdef, params, TOKENS_BT)
    np.testing.assert_array_equal(jitted_logits(untied_graphdef, untied, TOKENS_BT), expected)


def test_every_weight_names_its_axes():
    _, params = abstract_decoder(SMALL)
    axes = jax.tree.leaves(logical_axes(params), is_leaf=lambda x: isinstance(x, tuple))
    weights = jax.tree.leaves(params)
    assert len(axes) == len(weights)
    assert all(len(names) == weight.ndim for names, weight in zip(axes, weights, strict=True))


def test_abstract_decoder_matches_a_real_one():
    graphdef, params = init_decoder(SMALL, seed=0, param_dtype=jnp.bfloat16)
    abstract_graphdef, abstract = abstract_decoder(SMALL, param_dtype=jnp.bfloat16)
    assert graphdef == abstract_graphdef
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)


def test_norm_scales_stay_float32():
    _, params = abstract_decoder(SMALL, param_dtype=jnp.bfloat16)
    assert {(x.ndim == 1, x.dtype.name) for x in jax.tree.leaves(params)} == {(True, 'float32'), (False, 'bfloat16')}


@pytest.mark.parametrize('padding', [1, 7, 64])
def test_padding_at_the_end_changes_nothing(small, padding):
    _, graphdef, params = small
    padded_BT = np.pad(TOKENS_BT, ((0, 0), (0, padding)), constant_values=3)
    expected = jitted_logits(graphdef, params, TOKENS_BT)
    logits_BTV = jitted_logits(graphdef, params, padded_BT)[:, : TOKENS_BT.shape[1]]
    np.testing.assert_allclose(logits_BTV, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize('padding', [1, 7, 64])
def test_padding_at_the_start_changes_nothing_if_positions_follow(small, padding):
    _, graphdef, params = small
    length = TOKENS_BT.shape[1]
    padded_BT = np.pad(TOKENS_BT, ((0, 0), (padding, 0)), constant_values=3)
    positions_BT = jnp.maximum(jnp.arange(length + padding) - padding, 0) + jnp.zeros((2, 1), int)

    def attend(layer, q_BTHA, k_BTKA, v_BTKA):
        o_BTHA = causal_attend(layer, q_BTHA[:, padding:], k_BTKA[:, padding:], v_BTKA[:, padding:])
        return jnp.pad(o_BTHA, ((0, 0), (padding, 0), (0, 0), (0, 0)))

    @jax.jit
    def run(params):
        decoder = nnx.merge(graphdef, params)
        return decoder.logits(decoder.hidden(jnp.asarray(padded_BT), positions_BT, attend))[:, padding:]

    expected = jitted_logits(graphdef, params, TOKENS_BT)
    np.testing.assert_allclose(run(params), expected, rtol=0, atol=TOLERANCE)


def test_only_relative_positions_matter(small):
    _, graphdef, params = small
    run = jax.jit(
        lambda positions: nnx.merge(graphdef, params).hidden(jnp.asarray(TOKENS_BT), positions, causal_attend)
    )
    positions_BT = jnp.arange(9) + jnp.zeros((2, 1), int)
    near, far, stretched = run(positions_BT), run(positions_BT + 40), run(2 * positions_BT)
    # Angles of 48 rad are rounded to 4e-6.
    np.testing.assert_allclose(near, far, rtol=0, atol=5e-5)
    assert np.abs(near - stretched).max() > 1e-2


def test_remat_gives_the_same_loss_and_gradients():
    def loss(params, graphdef):
        return jnp.mean(jax.nn.log_softmax(run_logits(graphdef, params, TOKENS_BT))[..., 3])

    results = {}
    for remat in (False, True):
        graphdef, params = init_decoder(SMALL, seed=2, compute_dtype=jnp.float32, remat=remat)
        step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        results[remat] = step(params, graphdef)
        rematerialized = 'remat' in str(jax.make_jaxpr(step, static_argnums=1)(params, graphdef))
        assert rematerialized == remat
    assert abs(results[False][0] - results[True][0]) < 1e-6
    for plain, again in zip(*(jax.tree.leaves(results[remat][1]) for remat in (False, True)), strict=True):
        assert np.abs(plain).max() > 0
        np.testing.assert_allclose(plain, again, rtol=1e-5, atol=1e-7)


def test_gradients_agree_with_finite_differences(small):
    _, graphdef, params = small
    direction = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)

    def loss(step):
        moved = jax.tree.map(lambda x, d: x + step * d, params, direction)
        return jnp.mean(jax.nn.log_softmax(run_logits(graphdef, moved, TOKENS_BT))[..., 3])

    loss = jax.jit(loss)
    slope = jax.jit(jax.grad(loss))(0.0)
    # 1e-3 balances the float32 rounding of the loss against the third derivative.
    np.testing.assert_allclose(slope, (loss(1e-3) - loss(-1e-3)) / 2e-3, rtol=2e-2)


def test_attend_is_called_once_a_layer_in_order_with_unscaled_queries(small):
    shape, graphdef, params = small
    calls = []

    def attend(layer, q_BTHA, k_BTKA, v_BTKA):
        calls.append((layer, q_BTHA.shape, k_BTKA.shape, v_BTKA.shape))
        rms_H = jnp.sqrt(jnp.mean((q_BTHA / rms_scale(layer)) ** 2, axis=-1))
        # RoPE turns pairs and keeps lengths; only the norm scales' spread moves this off 1. Scaled queries would read
        # 0.35.
        assert 0.6 < rms_H.mean() < 1.6
        return causal_attend(layer, q_BTHA, k_BTKA, v_BTKA)

    def rms_scale(layer):
        return jnp.sqrt(jnp.mean(jax.tree.leaves(params['layers'][layer]['q_norm'])[0] ** 2))

    run_logits(graphdef, params, TOKENS_BT, attend)
    q, kv = (2, 9, shape.query_heads, shape.head_dim), (2, 9, shape.kv_heads, shape.head_dim)
    assert calls == [(layer, q, kv, kv) for layer in range(shape.layers)]


def test_attend_may_keep_keys_outside_without_remat(small):
    _, graphdef, params = small

    @jax.jit
    def prefill(params):
        kept = []

        def attend(layer, q_BTHA, k_BTKA, v_BTKA):
            kept.append(k_BTKA)
            return causal_attend(layer, q_BTHA, k_BTKA, v_BTKA)

        return run_logits(graphdef, params, TOKENS_BT, attend), kept

    logits_BTV, kept = prefill(params)
    assert len(kept) == SMALL.layers
    np.testing.assert_allclose(logits_BTV, jitted_logits(graphdef, params, TOKENS_BT), rtol=0, atol=TOLERANCE)


def test_bfloat16_compute_gives_float32_logits_near_the_exact_ones():
    exact_graphdef, params = init_decoder(SMALL, seed=0, compute_dtype=jnp.float32)
    graphdef, _ = abstract_decoder(SMALL, compute_dtype=jnp.bfloat16)
    logits_BTV = jitted_logits(graphdef, params, TOKENS_BT)
    assert logits_BTV.dtype == jnp.float32
    decoder = nnx.merge(graphdef, params)
    positions_BT = jnp.arange(9) + jnp.zeros((2, 1), int)
    assert decoder.hidden(jnp.asarray(TOKENS_BT), positions_BT, causal_attend).dtype == jnp.bfloat16
    error = np.abs(logits_BTV - jitted_logits(exact_graphdef, params, TOKENS_BT))
    assert 0 < error.max() < 0.1
    # Rounded to bfloat16 at the end, no logit would have bits below its eighth.
    assert np.any(logits_BTV != logits_BTV.astype(jnp.bfloat16).astype(jnp.float32))


def test_rms_norm_is_computed_in_float32():
    x = jnp.full((1, 4096), 3e-3, jnp.bfloat16).at[0, 0].set(200.0)
    y = rms_norm(x, jnp.ones(4096), 1e-6)
    assert y.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64) / np.sqrt(np.mean(np.asarray(x, np.float64) ** 2) + 1e-6)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8)


def test_rotate_turns_half_split_pairs():
    # Head dim 4: pairs are (0, 2) and (1, 3). A quarter turn of the first pair, none of the second.
    x_BTHA = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    cos_BTA, sin_BTA = jnp.array([[[0.0, 1.0]]]), jnp.array([[[1.0, 0.0]]])
    np.testing.assert_allclose(rotate(x_BTHA, cos_BTA, sin_BTA)[0, 0, 0], [-3.0, 2.0, 1.0, 4.0])
