"""Drawing the next token.

Logits come from the decoder, keys from the engine; the token goes into the next decode step.
"""

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_TOKENS = 256  # of the vocabulary: about the root of a large one, so that blocks and tokens of one are few


def sample_keys(run_key: jax.Array, step: int, prompt_B: jax.Array, sample_B: jax.Array) -> jax.Array:
    """One key a sample, folded from (run key, step, prompt, sample): it does not depend on slot, shard or arrival.

    Args:
        run_key: a typed key. step: of the run.
        prompt_B, sample_B: int32, the prompt's number in the step and the sample's within the prompt.

    Returns:
        key data, uint32 [B, 2].
    """
    step_key = jax.random.fold_in(run_key, step)
    fold = jax.vmap(lambda prompt, sample: jax.random.fold_in(jax.random.fold_in(step_key, prompt), sample))
    return jax.random.key_data(fold(prompt_B, sample_B))


def draw(
    logits_BV: jax.Array,
    key_data_B2: jax.Array,
    position_B: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Samples from softmax(logits / temperature), or takes the largest logit at temperature 0.

    Args:
        logits_BV: float32.
        key_data_B2: key data of each sample; position_B: int32, folded in, the index of the token in its response.
        temperature: float32 scalar; 0 = greedy.
        top_p: None = the full softmax; else float32 scalar: only the most likely tokens whose probability sums to it
            are drawn (the first that reaches the sum included, and whatever is as likely as that one). For evaluation.

    Returns:
        token_B int32 and its log-prob, float32, under log_softmax(logits / temperature) over the full vocabulary (at
        temperature 0: under temperature 1).
    """
    greedy = temperature <= 0
    scaled_BV = logits_BV / jnp.where(greedy, 1.0, temperature)
    best_B = jnp.argmax(scaled_BV, axis=-1).astype(jnp.int32)
    top_B1 = jnp.take_along_axis(scaled_BV, best_B[:, None], axis=-1)
    weight_Bn = _weights_of_blocks(scaled_BV, top_B1)
    logp_BV = scaled_BV - (top_B1 + jnp.log(weight_Bn.sum(axis=-1, keepdims=True)))
    keys_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(key_data_B2), position_B)
    if top_p is not None:
        scaled_BV = _nucleus(logp_BV, top_p)
        weight_Bn = _weights_of_blocks(scaled_BV, jnp.max(scaled_BV, axis=-1, keepdims=True))
    drawn_B = _draw(scaled_BV, weight_Bn, keys_B)
    token_B = jnp.where(greedy, best_B, drawn_B)
    return token_B, jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0]


def _draw(logits_BV: jax.Array, weight_Bn: jax.Array, keys_B: jax.Array) -> jax.Array:
    """int32 tokens from softmax(logits): first a block of the vocabulary by its weight, then a token of that block.

    Noise for every token of the vocabulary would take longer to make than the logits themselves.
    """
    V = logits_BV.shape[1]
    block_keys, token_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys_B), 1, 0)
    block_B = _likeliest(jnp.log(weight_Bn), block_keys)
    tokens_BW = block_B[:, None] * BLOCK_TOKENS + jnp.arange(BLOCK_TOKENS)
    inside_BW = jnp.take_along_axis(logits_BV, jnp.minimum(tokens_BW, V - 1), axis=-1)
    inside_B = _likeliest(jnp.where(tokens_BW < V, inside_BW, -jnp.inf), token_keys)
    return (block_B * BLOCK_TOKENS + inside_B).astype(jnp.int32)


def _weights_of_blocks(logits_BV: jax.Array, top_B1: jax.Array) -> jax.Array:
    """Sum of exp(logit - top) over each block of the vocabulary."""
    B, V = logits_BV.shape
    weight_BV = jnp.pad(jnp.exp(logits_BV - top_B1), ((0, 0), (0, -V % BLOCK_TOKENS)))
    # The barrier keeps XLA from making a second pass over the vocabulary out of the sum of these sums.
    return lax.optimization_barrier(weight_BV.reshape(B, -1, BLOCK_TOKENS).sum(axis=-1))


def _likeliest(logits_BN: jax.Array, keys_B: jax.Array) -> jax.Array:
    """Index of the largest logit after Gumbel noise: a draw from their softmax."""
    noise_BN = jax.vmap(lambda key: jax.random.gumbel(key, logits_BN.shape[1:], jnp.float32))(keys_B)
    return jnp.argmax(logits_BN + noise_BN, axis=-1)


def _nucleus(logp_BV: jax.Array, top_p: jax.Array) -> jax.Array:
    """-inf for tokens outside the smallest set of most likely tokens with probability >= top_p."""
    ordered_BV = jnp.sort(logp_BV, axis=-1, descending=True)
    before_BV = jnp.cumsum(jnp.exp(ordered_BV), axis=-1) - jnp.exp(ordered_BV)
    kept_BV = before_BV < top_p
    threshold_B1 = jnp.min(jnp.where(kept_BV, ordered_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logp_BV >= threshold_B1, logp_BV, -jnp.inf)
