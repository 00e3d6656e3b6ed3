"""Log-probs, entropy and acceptance of the chunked LM head against float64 NumPy over whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparrow_jax.learner.heads import token_acceptance, token_logps
from sparrow_jax.models.decoder import abstract_decoder
from sparrow_jax.models.shape import DecoderShape

B, T, D, V = 2, 7, 6, 30
RNG = np.random.default_rng(0)
HIDDEN_BTD = RNG.normal(size=(B, T, D)).astype(np.float32)
ACTOR_BTD = (HIDDEN_BTD + 0.3 * RNG.normal(size=(B, T, D))).astype(np.float32)
HEAD_VD = RNG.normal(size=(V, D)).astype(np.float32)
TARGET_BT = RNG.integers(0, V, (B, T)).astype(np.int32)
# Tokens over both rows: slices of 1, 2, 3 (does not divide 7), 7 and more than there are.
CHUNKS = [1, 4, 6, 14, 1000]


def log_softmax(logits_V):
    logits_V = np.asarray(logits_V, np.float64)
    shifted_V = logits_V - logits_V.max(axis=-1, keepdims=True)
    return shifted_V - np.log(np.exp(shifted_V).sum(axis=-1, keepdims=True))


def linear(head_VD):
    return lambda hidden_D: jnp.einsum('...d,vd->...v', hidden_D, head_VD, precision='highest')


@pytest.mark.parametrize(('temperature', 'expected'), [(0.5, -2.1451), (1.0, -1.4402), (0.6, -1.8747)])
def test_temperature_divides_the_logits(temperature, expected):
    """Token 1 of [2, 1, 0, -1]. T = .5: 2 - log(e^4 + e^2 + 1 + e^-2) = -2.1451; dividing the log-prob instead reads
    -2.8804, ignoring T -1.4402. T = .6: 1/.6 - log(e^(2/.6) + e^(1/.6) + 1 + e^(-1/.6))."""
    logits = lambda hidden: hidden
    hidden_BTD = jnp.array([[[2.0, 1.0, 0.0, -1.0]]])
    logp_BT, _ = token_logps(logits, hidden_BTD, jnp.array([[1]]), temperature, 8)
    np.testing.assert_allclose(logp_BT, [[expected]], atol=5e-5)


def test_entropy_literals():
    """Four equal logits: log 4. Probabilities 1/2, 1/4, 1/8, 1/8: 1.75 bits."""
    hidden_BTD = jnp.log(jnp.array([[[1.0, 1.0, 1.0, 1.0], [4.0, 2.0, 1.0, 1.0]]]))
    _, entropy_BT = token_logps(lambda hidden: hidden, hidden_BTD, jnp.zeros((1, 2), int), 1.0, 8)
    np.testing.assert_allclose(entropy_BT, [[1.386294, 1.75 * 0.693147]], rtol=1e-5)


@pytest.mark.parametrize('chunk_tokens', CHUNKS)
def test_log_probs_entropy_and_gradients_do_not_depend_on_the_chunks(chunk_tokens):
    """d logp / d logits = onehot - p and d H / d logits = -p (log p + H), over the temperature."""
    logp_weight_BT, entropy_weight_BT = np.random.default_rng(1).normal(size=(2, B, T)).astype(np.float32)

    def loss(hidden_BTD, head_VD):
        logp_BT, entropy_BT = token_logps(linear(head_VD), hidden_BTD, TARGET_BT, 0.7, chunk_tokens)
        return (logp_weight_BT * logp_BT + entropy_weight_BT * entropy_BT).sum(), (logp_BT, entropy_BT)

    gradients, (logp_BT, entropy_BT) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(HIDDEN_BTD, HEAD_VD)
    log_BTV = log_softmax(HIDDEN_BTD.astype(np.float64) @ HEAD_VD.T.astype(np.float64) / 0.7)
    p_BTV = np.exp(log_BTV)
    entropy_BT1 = -(p_BTV * log_BTV).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(logp_BT, np.take_along_axis(log_BTV, TARGET_BT[..., None], axis=-1)[..., 0], atol=1e-5)
    np.testing.assert_allclose(entropy_BT, entropy_BT1[..., 0], atol=1e-5)
    slope_BTV = logp_weight_BT[..., None] * (np.eye(V)[TARGET_BT] - p_BTV)
    slope_BTV = (slope_BTV - entropy_weight_BT[..., None] * p_BTV * (log_BTV + entropy_BT1)) / 0.7
    np.testing.assert_allclose(gradients[0], slope_BTV @ HEAD_VD, atol=2e-5)
    np.testing.assert_allclose(gradients[1], np.einsum('btv,btd->vd', slope_BTV, HIDDEN_BTD), atol=5e-5)


@pytest.mark.parametrize('chunk_tokens', [3, 1000])
def test_acceptance_of_both_hidden_states(chunk_tokens):
    alpha_BT, top20_BT = token_acceptance(linear(HEAD_VD), HIDDEN_BTD, ACTOR_BTD, 0.7, chunk_tokens)
    dense_BTV, actor_BTV = (
        np.exp(log_softmax(x.astype(np.float64) @ HEAD_VD.T.astype(np.float64) / 0.7)) for x in (HIDDEN_BTD, ACTOR_BTD)
    )
    np.testing.assert_allclose(alpha_BT, np.minimum(dense_BTV, actor_BTV).sum(axis=-1), atol=1e-5)
    assert np.all(top20_BT <= np.asarray(alpha_BT) + 1e-6)
    assert np.all(np.asarray(top20_BT) > 0.5)


def test_bfloat16_hidden_states_with_logits_near_32():
    """float32 logits: no log-prob is positive and none is off by the 0.25 that bfloat16 has between 32 and 64."""
    shape = DecoderShape('qwen3', 40, 16, 1, 2, 1, 8, 8, 1e4, 1e-6, True, 64)
    graphdef, params = abstract_decoder(shape, compute_dtype=jnp.bfloat16)
    # Every logit is 32 plus a small part of its own: the last component makes the 32, the others the small part.
    rng = np.random.default_rng(2)
    head_VD, hidden_BTD = 0.25 * rng.normal(size=(40, 16)), rng.normal(size=(2, 9, 16))
    head_VD[:, -1], hidden_BTD[..., -1] = 8, 4
    params['embed'].set_value(jnp.asarray(head_VD, jnp.float32))
    head_VD, hidden_BTD = head_VD.astype(jnp.bfloat16), hidden_BTD.astype(jnp.bfloat16)
    exact_BTV = hidden_BTD.astype(np.float64) @ head_VD.T.astype(np.float64)
    assert 25 < exact_BTV.min() < 32 < exact_BTV.max() < 40
    target_BT = exact_BTV.argmax(axis=-1)  # the likeliest token is the first to read above 0

    @jax.jit
    def run(temperature):
        # The head alone: the other weights stay abstract.
        return token_logps(nnx.merge(graphdef, params).logits, jnp.asarray(hidden_BTD), target_BT, temperature, 5)[0]

    def expected(logits_BTV, temperature):
        return np.take_along_axis(log_softmax(logits_BTV / temperature), target_BT[..., None], axis=-1)[..., 0]

    rounded_BTV = exact_BTV.astype(jnp.bfloat16).astype(np.float64)
    for temperature in (1.0, 0.05):
        logp_BT, exact_BT = run(temperature), expected(exact_BTV, temperature)
        # float32 steps of 4e-6 near 32, over the temperature.
        np.testing.assert_allclose(logp_BT, exact_BT, atol=2e-5 / temperature)
        assert np.all(np.asarray(logp_BT) <= 0)
        assert np.abs(expected(rounded_BTV, temperature) - exact_BT).max() > 0.05, 'bfloat16 logits would pass too'


def test_a_certain_token_is_never_positive():
    hidden_BTD = jnp.array([[[200.0, 0.0, -50.0, 1.0]]])
    logp_BT, entropy_BT = token_logps(lambda hidden: hidden, hidden_BTD, jnp.array([[0]]), 0.6, 8)
    assert logp_BT == 0
    np.testing.assert_allclose(entropy_BT, [[0.0]], atol=1e-6)
    gradient_BTD = jax.grad(lambda h: token_logps(lambda x: x, h, jnp.array([[0]]), 0.6, 8)[0].sum())(hidden_BTD)
    np.testing.assert_array_equal(gradient_BTD, np.zeros((1, 1, 4)))
