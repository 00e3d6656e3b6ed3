"""Dense causal attention in blocks against float64 NumPy over the whole [T, T] mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparrow_jax.models.attention import QUERY_BLOCK, best_implementation, causal_attend, causal_attention
from sparrow_jax.models.splash import LANES, splash_attention, why_no_splash
from sparrow_jax.parallel.mesh import AXES

B, H, K, A = 2, 6, 2, 8
LONG = QUERY_BLOCK + 45  # one whole block and a part of another


def make_inputs(T):
    rng = np.random.default_rng(T)
    return [rng.normal(size=(B, T, heads, A)).astype(np.float32) for heads in (H, K, K)]


def make_segments(T):
    """Row 0: three sequences, the second across the edge of the first block; row 1: one sequence and padding."""
    segment_BT = np.ones((B, T), np.int32)
    segment_BT[0, T // 2 :] = 2
    segment_BT[0, T - T // 8 :] = 3
    segment_BT[1, T - T // 5 :] = 0
    return segment_BT


def reference(q_BTHA, k_BTKA, v_BTKA, segment_BT):
    q_BTHA, k_BTKA, v_BTKA = (x.astype(np.float64) for x in (q_BTHA, k_BTKA, v_BTKA))
    T = q_BTHA.shape[1]
    o_BTHA = np.zeros_like(q_BTHA)
    for h in range(H):
        k_BTA, v_BTA = k_BTKA[:, :, h // (H // K)], v_BTKA[:, :, h // (H // K)]
        score_BTS = q_BTHA[:, :, h] @ k_BTA.swapaxes(1, 2) / np.sqrt(A)
        seen_BTS = np.tril(np.ones((T, T), bool)) & (segment_BT[:, :, None] == segment_BT[:, None, :])
        weight_BTS = np.where(seen_BTS, np.exp(score_BTS - score_BTS.max(axis=-1, keepdims=True)), 0)
        o_BTHA[:, :, h] = weight_BTS / weight_BTS.sum(axis=-1, keepdims=True) @ v_BTA
    return o_BTHA


@pytest.mark.parametrize('T', [1, 5, QUERY_BLOCK, LONG])
@pytest.mark.parametrize('segments', [False, True])
def test_blocks_and_segments(T, segments):
    segment_BT = make_segments(T) if segments else None
    arrays = make_inputs(T)
    o_BTHA = jax.jit(causal_attention)(*arrays, segment_BT)
    expected_BTHA = reference(*arrays, np.ones((B, T)) if segment_BT is None else segment_BT)
    np.testing.assert_allclose(o_BTHA, expected_BTHA, rtol=0, atol=2e-6)


def test_attend_ignores_the_layer_and_takes_the_segments():
    segment_BT, arrays = make_segments(LONG), make_inputs(LONG)
    o_BTHA = jax.jit(lambda *qkv: causal_attend(jnp.asarray(segment_BT), 'xla')(1, *qkv))(*arrays)
    np.testing.assert_allclose(o_BTHA, reference(*arrays, segment_BT), rtol=0, atol=2e-6)


def test_gradients_stay_inside_the_past_of_the_segment():
    """A gradient at one query reaches exactly the keys and values that it sees."""
    segment_BT = jnp.asarray(make_segments(LONG))
    query = LONG - LONG // 8 - 1  # the last place of row 0's second segment, in the second block
    pick = lambda *qkv: (causal_attention(*qkv, segment_BT)[0, query] ** 2).sum()
    gradients = jax.jit(jax.grad(pick, argnums=(0, 1, 2)))(*make_inputs(LONG))
    q_T, k_T, v_T = (np.abs(np.asarray(g_BTHA)).max(axis=(0, 2, 3)) for g_BTHA in gradients)
    inside_T = np.arange(LONG) // (LONG // 2) * (np.arange(LONG) <= query) > 0
    np.testing.assert_array_equal(np.flatnonzero(q_T), [query])
    np.testing.assert_array_equal(k_T > 0, inside_T)
    np.testing.assert_array_equal(v_T > 0, inside_T)


def test_bfloat16_sums_in_float32():
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in make_inputs(LONG)]
    o_BTHA = jax.jit(causal_attention)(*arrays)
    assert o_BTHA.dtype == jnp.bfloat16
    exact_BTHA = reference(*(np.asarray(x, np.float32) for x in arrays), np.ones((B, LONG)))
    # The probabilities and the result are each rounded to 2^-9.
    np.testing.assert_allclose(np.asarray(o_BTHA, np.float64), exact_BTHA, rtol=2**-7, atol=2**-7)


def test_cudnn_with_segments_is_refused():
    with pytest.raises(ValueError, match='one sequence a row: segment_BT must be None'):
        causal_attend(jnp.ones((1, 4), jnp.int32), 'cudnn')


def test_without_a_gpu_the_plain_path_is_used():
    assert best_implementation('float32') == 'xla'
    if jax.default_backend() != 'gpu':
        assert best_implementation('bfloat16') == 'xla'


@pytest.mark.gpu
def test_cudnn_is_the_plain_path():
    arrays = [jnp.asarray(np.repeat(x, 8, axis=-1), jnp.bfloat16) for x in make_inputs(384)]  # head size 64
    plain_BTHA, cudnn_BTHA = (
        np.asarray(jax.jit(lambda *qkv, name=name: causal_attend(None, name)(0, *qkv))(*arrays), np.float64)
        for name in ('xla', 'cudnn')
    )
    # Both round probabilities and result to 2^-9.
    np.testing.assert_allclose(cudnn_BTHA, plain_BTHA, rtol=2**-7, atol=2**-6)


def test_splash_attention_is_the_same_function_with_the_same_gradients():
    """In its interpreter; where there are four devices, with rows over data shards and heads over tensor shards."""
    mesh_sizes = (1, 2, 2) if jax.device_count() >= 4 else (1, 1, 1)
    T, A = 2 * LANES, LANES
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=(B, T, heads, A)).astype(np.float32) * 0.3 for heads in (4, 2, 2)]
    segment_BT, weight_BTHA = jnp.asarray(make_segments(T)), rng.normal(size=(B, T, 4, A)).astype(np.float32)
    axis_types = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh(mesh_sizes, AXES, axis_types=axis_types, devices=jax.devices()[: int(np.prod(mesh_sizes))])

    def loss(attention):
        return lambda *qkv: (attention(*qkv, segment_BT) * weight_BTHA).sum()

    splash = functools.partial(splash_attention, mesh=mesh, interpret=True)
    for attention in (splash, causal_attention):
        found = jax.jit(jax.value_and_grad(loss(attention), argnums=(0, 1, 2)))(*arrays)
        if attention is splash:
            kept = found
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), kept, found)


@pytest.mark.parametrize(
    ('sizes', 'reason'),
    [((64, 8, 1, 256), 'heads of 64'), ((128, 8, 1, 200), '200 tokens'), ((128, 8, 16, 256), 'tensor=16')],
)
def test_rows_that_splash_attention_does_not_take(sizes, reason):
    assert reason in why_no_splash(*sizes)
    assert why_no_splash(128, 8, 8, 39_936) is None


def test_splash_attention_takes_packed_rows_on_a_mesh():
    with pytest.raises(ValueError, match='segment_BT and mesh'):
        causal_attend(None, 'splash')
