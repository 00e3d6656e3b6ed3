"""Drawing one token against NumPy: log-probs, temperatures, kept sets, keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparrow_jax.rollout.sampling import BLOCK_TOKENS, draw, draw_noise, sample_keys

COUNT, VOCABULARY = 5000, 10
jitted_keys = jax.jit(sample_keys)


@jax.jit
def jitted_draw(logits_BV, key_B2, position_B, temperature, top_p=None):
    return draw(logits_BV, draw_noise(key_B2, position_B, logits_BV.shape[1]), temperature, top_p)


def draw_many(logits_V, temperature=1.0, top_p=None, position=0):
    """COUNT tokens and log-probs from one row of logits, each with a key of its own."""
    padded_V = [*logits_V, *[-np.inf] * (VOCABULARY - len(logits_V))]  # one shape compiles once
    logits_BV = jnp.broadcast_to(jnp.asarray(padded_V, jnp.float32), (COUNT, VOCABULARY))
    key_B2 = jitted_keys(jax.random.key(1), 0, jnp.arange(COUNT), jnp.zeros(COUNT, jnp.int32))
    position_B = jnp.full(COUNT, position, jnp.int32)
    top_p = top_p if top_p is None else jnp.float32(top_p)
    token_B, logp_B = jitted_draw(logits_BV, key_B2, position_B, jnp.float32(temperature), top_p)
    return np.asarray(token_B), np.asarray(logp_B)


def softmax(logits_V, temperature=1.0):
    weight_V = np.exp(np.asarray(logits_V, np.float64) / temperature)
    return weight_V / weight_V.sum()


def kept(logits_V, temperature, top_p):
    """The smallest set of likeliest tokens with probability of at least top_p."""
    p_V = softmax(logits_V, temperature)
    chosen, total = set(), 0.0
    for token in sorted(range(len(p_V)), key=lambda v: -p_V[v]):
        if total >= top_p:
            break
        chosen.add(token)
        total += p_V[token]
    return chosen


def test_literal_log_prob_at_a_temperature():
    """z = [2, 1, 0, -1] at T = 0.5: token 1 has -2.1451; raw it would be -1.4402, divided by T -2.8804."""
    token_B, logp_B = draw_many([2.0, 1, 0, -1], temperature=0.5)
    assert set(token_B.tolist()) >= {0, 1}
    np.testing.assert_allclose(logp_B[token_B == 1], -2.1451, rtol=0, atol=5e-5)
    np.testing.assert_allclose(logp_B, np.log(softmax([2.0, 1, 0, -1], 0.5))[token_B], rtol=0, atol=1e-6)


@pytest.mark.parametrize('temperature', [0.6, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    logits_V = [1.5, -0.5, 0.0, 1.0, -2.0]
    token_B, _ = draw_many(logits_V, temperature)
    p_V = softmax(logits_V, temperature)
    deviation_V = np.bincount(token_B, minlength=5) / COUNT - p_V
    assert (np.abs(deviation_V) < 4 * np.sqrt(p_V * (1 - p_V) / COUNT)).all()


@pytest.mark.parametrize('vocabulary', [2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 50])
def test_frequencies_are_the_softmax_over_blocks_of_the_vocabulary(vocabulary):
    """Most of the weight on a few tokens at both ends of blocks, one block far below, the last one partly filled."""
    rng = np.random.default_rng(3)
    logits_V = rng.standard_normal(vocabulary)
    likely = [0, BLOCK_TOKENS - 1, BLOCK_TOKENS, vocabulary - 1]
    logits_V[likely] += [7.0, 6.0, 7.5, 8.0]
    logits_V[BLOCK_TOKENS + 1 : 2 * BLOCK_TOKENS - 1] -= 200
    logits_BV = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (COUNT, vocabulary))
    key_B2 = jitted_keys(jax.random.key(2), 0, jnp.arange(COUNT), jnp.zeros(COUNT, jnp.int32))
    token_B, logp_B = jitted_draw(logits_BV, key_B2, jnp.zeros(COUNT, jnp.int32), jnp.float32(1))
    p_V = softmax(logits_V)
    np.testing.assert_allclose(logp_B, np.log(p_V)[np.asarray(token_B)], rtol=0, atol=1e-5)
    share_V = np.bincount(token_B, minlength=vocabulary) / COUNT
    assert len(share_V) == vocabulary
    deviation_V = np.abs(share_V - p_V)[likely]
    assert (deviation_V < 4 * np.sqrt(p_V * (1 - p_V) / COUNT)[likely]).all()
    rest = np.setdiff1d(np.arange(vocabulary), likely)
    expected = p_V[rest].sum()
    assert abs(share_V[rest].sum() - expected) < 4 * np.sqrt(expected * (1 - expected) / COUNT)
    assert len(np.unique(np.asarray(token_B)[np.isin(token_B, rest)])) > 30


def test_temperature_0_takes_the_largest_logit_and_scores_it_at_temperature_1():
    logits_V = np.random.default_rng(0).standard_normal(VOCABULARY)
    token_B, logp_B = draw_many(logits_V, temperature=0.0)
    assert set(token_B.tolist()) == {int(logits_V.argmax())}
    np.testing.assert_allclose(logp_B, np.log(softmax(logits_V).max()), rtol=0, atol=1e-6)


def test_temperature_0_takes_the_first_of_equal_logits():
    token_B, _ = draw_many([0.0, 3, 3, 1], temperature=0.0)
    assert set(token_B.tolist()) == {1}


@pytest.mark.parametrize('temperature', [0.7, 1.0])
@pytest.mark.parametrize('top_p', [1e-6, 0.3, 0.55, 0.8, 0.95])
def test_top_p_draws_from_the_smallest_likely_set(temperature, top_p):
    logits_V = [1.0, 2.0, -1.0, 0.5, 1.5, -3.0]
    expected = kept(logits_V, temperature, top_p)
    token_B, logp_B = draw_many(logits_V, temperature, top_p)
    assert set(token_B.tolist()) == expected
    assert top_p > 0.9 or len(expected) < len(logits_V)
    # Within the set the odds stay; the recorded log-prob is that of the full softmax.
    p_V = softmax(logits_V, temperature)
    inside_V = np.where(np.isin(np.arange(6), list(expected)), p_V, 0)
    np.testing.assert_allclose(np.bincount(token_B, minlength=6) / COUNT, inside_V / inside_V.sum(), rtol=0, atol=0.04)
    np.testing.assert_allclose(logp_B, np.log(p_V)[token_B], rtol=0, atol=1e-6)


def test_top_p_keeps_all_tokens_that_are_equally_likely_at_its_edge():
    token_B, _ = draw_many([2.0, 0.0, 0.0, 0.0, -5.0], top_p=0.75)
    assert set(token_B.tolist()) == {0, 1, 2, 3}


def test_the_position_in_the_response_changes_the_draw():
    first, second = (draw_many(np.zeros(VOCABULARY), position=position)[0] for position in (0, 1))
    assert 0.85 < (first != second).mean() < 0.95  # independent draws differ nine times in ten


def test_keys_of_prompts_samples_and_steps_are_distinct():
    prompt_B, sample_B = np.divmod(np.arange(32), 8)
    step_3, step_4 = (
        np.asarray(sample_keys(jax.random.key(0), step, jnp.asarray(prompt_B), jnp.asarray(sample_B)))
        for step in (3, 4)
    )
    assert len({tuple(key) for key in (*step_3, *step_4)}) == 64
    alone = np.asarray(sample_keys(jax.random.key(0), 3, jnp.asarray([2]), jnp.asarray([5])))
    np.testing.assert_array_equal(alone[0], step_3[2 * 8 + 5])
