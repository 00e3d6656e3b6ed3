"""Drawing the next token.

Logits come from the decoder, keys from the engine; the token goes into the next decode step.
"""

import jax
import jax.numpy as jnp


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
    logp_BV = jax.nn.log_softmax(scaled_BV, axis=-1)
    keys_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(key_data_B2), position_B)
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:], jnp.float32))(keys_B)
    choice_BV = logp_BV if top_p is None else _nucleus(logp_BV, top_p)
    token_B = jnp.argmax(jnp.where(greedy, logp_BV, choice_BV + noise_BV), axis=-1).astype(jnp.int32)
    return token_B, jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0]


def _nucleus(logp_BV: jax.Array, top_p: jax.Array) -> jax.Array:
    """-inf for tokens outside the smallest set of most likely tokens with probability >= top_p."""
    ordered_BV = jnp.sort(logp_BV, axis=-1, descending=True)
    before_BV = jnp.cumsum(jnp.exp(ordered_BV), axis=-1) - jnp.exp(ordered_BV)
    kept_BV = before_BV < top_p
    threshold_B1 = jnp.min(jnp.where(kept_BV, ordered_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logp_BV >= threshold_B1, logp_BV, -jnp.inf)
