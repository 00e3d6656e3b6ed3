"""Drawing the next token.

Logits come from the decoder, keys from the engine; the token goes into the next decode step.
"""

import dataclasses

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Noise:
    """Gumbel noise that decides one draw of each sample: for the blocks of the vocabulary and the tokens of one."""

    block_Bn: jax.Array  # float32
    token_BW: jax.Array  # float32


def draw_noise(key_data_B2: jax.Array, position_B: jax.Array, vocab_size: int) -> Noise:
    """Of each sample's draw at a position.

    Args:
        key_data_B2: key data of each sample; position_B: int32, folded in, the index of the token in its response.
        vocab_size: V.
    """

    def of_sample(key_data: jax.Array, position: jax.Array) -> Noise:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), position)
        block_key, token_key = jax.random.split(key)
        blocks = -(-vocab_size // BLOCK_TOKENS)
        return Noise(jax.random.gumbel(block_key, (blocks,)), jax.random.gumbel(token_key, (BLOCK_TOKENS,)))

    return jax.vmap(of_sample)(key_data_B2, position_B)


def segment_noise(key_data_B2: jax.Array, position_B: jax.Array, steps: int, vocab_size: int) -> Noise:
    """Of the draws of a segment, a row a step, where each step draws one token of each sample.

    Args:
        key_data_B2, vocab_size: as of `draw_noise`; position_B: of the first step's.
    """
    return jax.vmap(lambda step: draw_noise(key_data_B2, position_B + step, vocab_size))(jnp.arange(steps))


def noise_of_step(noise: Noise, step: jax.Array) -> Noise:
    """One row of `segment_noise`."""
    return jax.tree.map(lambda noise_SBN: lax.dynamic_index_in_dim(noise_SBN, step, keepdims=False), noise)


def draw(
    logits_BV: jax.Array, noise: Noise, temperature: jax.Array, top_p: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Samples from softmax(logits / temperature), or takes the largest logit at temperature 0.

    First a block of the vocabulary is drawn by its weight, then a token of that block: noise for every token of the
    vocabulary would take longer to make than the logits themselves.

    Args:
        logits_BV: float32.
        noise: of `draw_noise`.
        temperature: float32 scalar; 0 = greedy.
        top_p: None = the full softmax; else float32 scalar: only the most likely tokens whose probability sums to it
            are drawn (the first that reaches the sum included, and whatever is as likely as that one). For evaluation.

    Returns:
        token_B int32 and its log-prob, float32, under log_softmax(logits / temperature) over the full vocabulary (at
        temperature 0: under temperature 1).
    """
    V, greedy = logits_BV.shape[1], temperature <= 0
    temperature = jnp.where(greedy, 1.0, temperature)
    scaled_BV = logits_BV / temperature
    top_Bn, log_weight_Bn = _blocks(scaled_BV)
    log_total_B1 = jax.nn.logsumexp(log_weight_Bn, axis=-1, keepdims=True)
    if top_p is not None:
        scaled_BV = jnp.where(_nucleus(logits_BV, temperature, log_total_B1, top_p), scaled_BV, -jnp.inf)
        top_Bn, log_weight_Bn = _blocks(scaled_BV)
    block_B = jnp.argmax(jnp.where(greedy, top_Bn, log_weight_Bn + noise.block_Bn), axis=-1)
    tokens_BW = block_B[:, None] * BLOCK_TOKENS + jnp.arange(BLOCK_TOKENS)
    inside_BW = jnp.take_along_axis(scaled_BV, jnp.minimum(tokens_BW, V - 1), axis=-1)
    inside_BW = jnp.where(tokens_BW < V, inside_BW, -jnp.inf)
    inside_B = jnp.argmax(inside_BW + jnp.where(greedy, 0.0, noise.token_BW), axis=-1)
    drawn_B1 = jnp.take_along_axis(inside_BW, inside_B[:, None], axis=-1)
    return (block_B * BLOCK_TOKENS + inside_B).astype(jnp.int32), (drawn_B1 - log_total_B1)[:, 0]


def _blocks(logits_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each block of the vocabulary: the largest logit, and log(sum(exp(logits)))."""
    B, V = logits_BV.shape
    padded_BV = jnp.pad(logits_BV, ((0, 0), (0, -V % BLOCK_TOKENS)), constant_values=-jnp.inf)
    blocks_BnW = padded_BV.reshape(B, -1, BLOCK_TOKENS)
    top_Bn = blocks_BnW.max(axis=-1)
    finite_Bn = jnp.maximum(top_Bn, jnp.finfo(jnp.float32).min)  # a block may hold nothing
    weight_Bn = jnp.exp(blocks_BnW - finite_Bn[..., None]).sum(axis=-1)
    # The barrier keeps XLA from making further passes over the vocabulary out of what is computed from these.
    return lax.optimization_barrier((top_Bn, finite_Bn + jnp.log(weight_Bn)))


def _nucleus(logits_BV: jax.Array, temperature: jax.Array, log_total_B1: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which tokens are in the smallest set of most likely ones with probability >= top_p.

    Logits as they are given are compared: what is computed from them could be rounded in more than one way.
    """
    ordered_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    p_BV = jnp.exp(ordered_BV / temperature - log_total_B1)
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    return logits_BV >= jnp.min(jnp.where(before_BV < top_p, ordered_BV, jnp.inf), axis=-1, keepdims=True)
