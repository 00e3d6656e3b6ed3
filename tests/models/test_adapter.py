"""The adapter: off it leaves no trace, on it equals a merged float32 model, and bfloat16 does not eat it (trap 14)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import SMALL, causal_attend

from sparrow_jax.config import ConfigError
from sparrow_jax.models.adapter import TARGETS, AdapterSpec, adapter_axes, adapter_parameter_count, init_adapter
from sparrow_jax.models.decoder import add_low_rank, init_decoder, layer_weights

SHAPE = dataclasses.replace(SMALL, layers=2)
# Large enough for XLA to leave out roundings to bfloat16, other ones in each graph, unless AS_WRITTEN forbids it.
FUSED = dataclasses.replace(SMALL, layers=1, d_model=64, query_heads=9, kv_heads=3, head_dim=64, d_ff=96)
AS_WRITTEN = {'xla_allow_excess_precision': False}
SPEC = AdapterSpec(rank=4, alpha=6.0)
TOKENS_BT = np.random.RandomState(0).randint(0, SHAPE.vocab_size, (2, 9))
ON_BT, OFF_BT = jnp.ones((2, 9), bool), jnp.zeros((2, 9), bool)


def run_hidden(graphdef, params, adapter=None, scale_BT=None, attend=causal_attend, tokens_BT=TOKENS_BT, start=0):
    tokens_BT = jnp.asarray(tokens_BT)
    positions_BT = jnp.broadcast_to(start + jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return nnx.merge(graphdef, params).hidden(tokens_BT, positions_BT, attend, adapter, scale_BT)


jitted_hidden = jax.jit(run_hidden, static_argnums=0)


@functools.cache
def model(compute_dtype=jnp.float32, shape=SHAPE, **options):
    return init_decoder(shape, seed=0, compute_dtype=compute_dtype, **options)


@functools.cache
def trained_adapter(spec=SPEC, shape=SHAPE):
    """An adapter whose b is no longer zero; its additions are about a third of the outputs."""
    adapter = init_adapter(shape, spec, seed=1)
    keys = iter(jax.random.split(jax.random.key(2), 100))
    for layer in adapter:
        for pair in layer.values():
            pair['b'] = 0.1 * jax.random.normal(next(keys), pair['b'].shape)
    return adapter


def merged(params, adapter, spec):
    """The weights with the additions in them, in float32."""
    params = jax.tree.map(lambda x: x, params)
    for i, layer in enumerate(adapter):
        for name, pair in layer.items():
            product = jnp.tensordot(pair['a'], pair['b'], axes=1, precision='highest')
            box = params['layers'][i][name]
            params['layers'][i][name] = box.replace(box[...] + spec.alpha / spec.rank * product)
    return params


def test_bfloat16_merge_loses_a_third_of_a_small_change_and_the_factors_keep_it():
    rng = np.random.RandomState(0)
    d, rank = 256, 8
    w_DF = jnp.asarray(rng.normal(0, 0.02, (d, d)), jnp.bfloat16)
    a_Dr, b_rF = rng.normal(0, d**-0.5, (d, rank)), rng.normal(0, 1, (rank, d))
    b_rF *= 1e-4 / np.std(a_Dr @ b_rF)
    delta_DF = a_Dr @ b_rF
    merged_DF = (w_DF.astype(jnp.float32) + delta_DF).astype(jnp.bfloat16)
    kept_DF = np.asarray(merged_DF, np.float64) - np.asarray(w_DF, np.float64)
    assert 0.25 < np.mean(kept_DF == 0) < 0.4  # a third of the weights do not move at all
    x_BTD = jnp.asarray(rng.normal(0, 1, (1, 64, d)), jnp.bfloat16)
    exact_BTF = np.asarray(x_BTD, np.float64) @ delta_DF
    error_of = lambda got_BTF: np.linalg.norm(got_BTF - exact_BTF) / np.linalg.norm(exact_BTF)
    assert 0.25 < error_of(np.asarray(x_BTD, np.float64) @ kept_DF) < 0.45
    factors = (jnp.asarray(a_Dr, jnp.float32), jnp.asarray(b_rF, jnp.float32), jnp.ones((1, 64)))
    alone_BTF = add_low_rank('btd,df->btf', x_BTD, jnp.zeros((1, 64, d), jnp.bfloat16), *factors)
    assert error_of(np.asarray(alone_BTF, np.float64)) < 0.01  # bfloat16 operands: 2^-9 each
    # Rounding of the sum to bfloat16 is noise without a direction: along the change, all of it arrives.
    y_BTF = jnp.einsum('btd,df->btf', x_BTD, w_DF)
    gained_BTF = np.asarray(add_low_rank('btd,df->btf', x_BTD, y_BTF, *factors), np.float64) - np.asarray(y_BTF)
    assert abs(np.vdot(gained_BTF, exact_BTF) / np.vdot(exact_BTF, exact_BTF) - 1) < 0.02


@pytest.mark.parametrize(
    ('shape', 'sizes', 'dtype'),
    [(SHAPE, (2, 9), jnp.float32), (SHAPE, (2, 9), jnp.bfloat16), (FUSED, (4, 128), jnp.bfloat16)],
)
def test_off_or_untrained_is_bit_equal_to_no_adapter_and_compiles_once(shape, sizes, dtype):
    graphdef, params = model(dtype, shape, param_dtype=dtype)
    tokens_BT = np.random.RandomState(0).randint(0, shape.vocab_size, sizes)
    compiled = functools.partial(jax.jit, compiler_options=AS_WRITTEN if dtype == jnp.bfloat16 else None)
    plain = compiled(lambda params: run_hidden(graphdef, params, tokens_BT=tokens_BT))(params)
    traced = []

    def attend(layer, *qkv):
        traced.append(layer)
        return causal_attend(layer, *qkv)

    adapted = compiled(lambda *args: run_hidden(graphdef, *args, attend=attend, tokens_BT=tokens_BT))
    adapter, untrained = trained_adapter(shape=shape), init_adapter(shape, SPEC, seed=1)
    broken = jax.tree.map(lambda x: x * jnp.nan, adapter)
    on, off = SPEC.scale_at(jnp.ones(sizes, bool)), SPEC.scale_at(jnp.zeros(sizes, bool))
    for same in (adapted(params, adapter, off), adapted(params, broken, off), adapted(params, untrained, on)):
        np.testing.assert_array_equal(same, plain)
    assert np.abs(adapted(params, adapter, on) - plain).max() > 0.1
    assert traced == list(range(shape.layers))


def test_only_targets_cost_products():
    graphdef, params = model()
    count = lambda *args: str(jax.make_jaxpr(lambda *args: run_hidden(graphdef, *args))(*args)).count('dot_general')
    plain = count(params)
    assert plain == SHAPE.layers * (len(TARGETS) + 2)  # 2: scores and values of causal_attend
    spec = AdapterSpec(4, 6.0, ('q', 'down'))
    assert count(params, init_adapter(SHAPE, spec, 0), spec.scale_at(ON_BT)) == plain + SHAPE.layers * 2 * 2


def check_equals_merged(adapter, spec):
    graphdef, params = model()
    hidden_BTD = jitted_hidden(graphdef, params, adapter, spec.scale_at(ON_BT))
    expected_BTD = jitted_hidden(graphdef, merged(params, adapter, spec))
    np.testing.assert_allclose(hidden_BTD, expected_BTD, rtol=0, atol=1e-5)
    assert np.abs(expected_BTD - jitted_hidden(graphdef, params)).max() > 1e-2


@pytest.mark.parametrize('targets', [TARGETS, ('k', 'o', 'up')])
def test_equals_the_merged_float32_model(targets):
    spec = AdapterSpec(3, 6.0, targets)
    check_equals_merged(trained_adapter(spec), spec)


@pytest.mark.parametrize('name', TARGETS)
def test_each_target_alone_equals_the_merged_float32_model(name):
    silent = lambda pair: {'a': pair['a'], 'b': jnp.zeros_like(pair['b'])}  # the same compiled function for each name
    adapter = [{n: p if n == name else silent(p) for n, p in layer.items()} for layer in trained_adapter()]
    check_equals_merged(adapter, SPEC)


def test_places_outside_the_mask_equal_the_plain_model():
    graphdef, params = model()
    plain_BTD = jitted_hidden(graphdef, params)
    mask_BT = OFF_BT.at[1, 4:7].set(True)
    hidden_BTD = jitted_hidden(graphdef, params, trained_adapter(), SPEC.scale_at(mask_BT))
    np.testing.assert_array_equal(hidden_BTD[0], plain_BTD[0])
    np.testing.assert_array_equal(hidden_BTD[1, :4], plain_BTD[1, :4])
    # From place 7 on the adapter is off again, but the keys before are the adapter's.
    assert np.all(np.abs(hidden_BTD - plain_BTD)[1, 4:].max(axis=-1) > 1e-2)


def test_masked_pass_equals_plain_prompt_then_adapted_response():
    graphdef, params = model()
    adapter, prompt = trained_adapter(), 5

    @jax.jit
    def in_two_parts(params, adapter):
        cache = {}

        def keep(layer, q_BTHA, k_BTKA, v_BTKA):
            cache[layer] = (q_BTHA, k_BTKA, v_BTKA)
            return causal_attend(layer, q_BTHA, k_BTKA, v_BTKA)

        def extend(layer, *new):
            rows = [jnp.concatenate(pair, axis=1) for pair in zip(cache[layer], new, strict=True)]
            return causal_attend(layer, *rows)[:, prompt:]

        first = run_hidden(graphdef, params, attend=keep, tokens_BT=TOKENS_BT[:, :prompt])
        scale_BT = SPEC.scale_at(ON_BT[:, prompt:])
        response = TOKENS_BT[:, prompt:]
        second = run_hidden(graphdef, params, adapter, scale_BT, attend=extend, tokens_BT=response, start=prompt)
        return jnp.concatenate([first, second], axis=1)

    whole_BTD = jitted_hidden(graphdef, params, adapter, SPEC.scale_at(ON_BT.at[:, :prompt].set(False)))
    np.testing.assert_allclose(in_two_parts(params, adapter), whole_BTD, rtol=0, atol=1e-5)


def loss(params, adapter, scale_BT, graphdef):
    return jnp.mean(run_hidden(graphdef, params, adapter, scale_BT)[..., :7] ** 2)


def merged_loss(params, adapter):
    return loss(merged(params, adapter, SPEC), None, None, model()[0])


gradient = {argnum: jax.jit(jax.grad(loss, argnum), static_argnums=3) for argnum in (0, 1, (0, 1))}
merged_gradient = jax.jit(jax.grad(merged_loss, (0, 1)))


@pytest.mark.parametrize(('remat', 'argnums'), [(False, (0, 1)), (True, 0), (True, 1)])
def test_gradients_equal_those_of_the_merged_model(remat, argnums):
    """Of weights and adapter together, and of each while the other is frozen."""
    graphdef, params = model(remat=remat)
    arguments = (params, trained_adapter(), SPEC.scale_at(ON_BT), graphdef)
    found = gradient[argnums](*arguments)
    both = merged_gradient(params, trained_adapter())
    expected = both if argnums == (0, 1) else both[argnums]
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert all(np.abs(g).max() > 1e-4 for g in jax.tree.leaves(both[1]))
    assert ('remat' in str(jax.make_jaxpr(gradient[argnums], static_argnums=3)(*arguments))) == remat


def test_gradients_of_a_fresh_and_of_a_switched_off_adapter():
    graphdef, params = model(remat=True)
    fresh = gradient[1](params, init_adapter(SHAPE, SPEC, seed=1), SPEC.scale_at(ON_BT), graphdef)
    for layer in fresh:
        assert all(np.all(pair['a'] == 0) and np.abs(pair['b']).max() > 1e-4 for pair in layer.values())
    off = gradient[1](params, trained_adapter(), SPEC.scale_at(OFF_BT), graphdef)
    assert all(np.all(g == 0) for g in jax.tree.leaves(off))


def test_sizes_axes_count_and_start():
    adapter, axes = init_adapter(SHAPE, SPEC, seed=1), adapter_axes(SHAPE, SPEC)
    weights = layer_weights(SHAPE)
    assert len(adapter) == len(axes) == SHAPE.layers
    for layer, names in zip(adapter, axes, strict=True):
        assert set(layer) == set(names) == set(TARGETS)
        for name, pair in layer.items():
            assert pair['a'].shape[:-1] + pair['b'].shape[1:] == weights[name].sizes
            assert names[name]['a'][:-1] + names[name]['b'][1:] == weights[name].axes
            assert names[name]['a'][-1] == names[name]['b'][0] == 'rank'
            assert pair['a'].shape[-1] == pair['b'].shape[0] == SPEC.rank
            assert np.prod(pair['a'].shape[:-1]) == weights[name].fan_in
            assert 0.7 < np.std(pair['a']) * weights[name].fan_in ** 0.5 < 1.3
            assert not np.any(pair['b'])
    leaves = jax.tree.leaves(adapter)
    assert {x.dtype for x in leaves} == {np.dtype(np.float32)}
    assert sum(x.size for x in leaves) == adapter_parameter_count(SHAPE, SPEC)
    assert np.any(adapter[0]['q']['a'] != adapter[1]['q']['a'])
    assert np.any(adapter[0]['q']['a'] != init_adapter(SHAPE, SPEC, seed=2)[0]['q']['a'])
    narrow = jax.eval_shape(lambda: init_adapter(SHAPE, SPEC, seed=1, dtype=jnp.bfloat16))
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {np.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'rank': 0}, r'distill\.rank=0'),
        ({'alpha': 0.0}, r'distill\.alpha=0\.0'),
        ({'alpha': float('nan')}, r'distill\.alpha=nan'),
        ({'targets': ()}, r'distill\.targets=\(\)'),
        ({'targets': ('q', 'q_proj')}, 'q_proj.*one or more of q, k, v'),
        ({'targets': ('q', 'q')}, 'each once'),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SPEC, **change)


def test_rank_above_the_smaller_side_is_refused():
    kv_width = SHAPE.kv_heads * SHAPE.head_dim
    init_adapter(SHAPE, AdapterSpec(kv_width, 1.0), seed=0)
    with pytest.raises(ConfigError, match=f'smaller side of k, {kv_width}'):
        init_adapter(SHAPE, AdapterSpec(kv_width + 1, 1.0), seed=0)


def test_adapter_without_scale_or_for_another_depth_is_refused():
    graphdef, params = model()
    for scale_BT in (None, ON_BT):
        with pytest.raises(TypeError, match='scale_at'):
            jitted_hidden(graphdef, params, trained_adapter(), scale_BT)
    with pytest.raises(ValueError, match='shorter'):
        jitted_hidden(graphdef, params, trained_adapter()[:1], SPEC.scale_at(ON_BT))
