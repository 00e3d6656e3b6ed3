"""The LM head over long rows, in chunks: log-probs, entropy and acceptance without ever holding [B, T, V].

Final hidden states come from the dense policy's forward pass (and, kept by the sampler, from the rollout); numbers
per token go to the losses and to the mismatch statistics.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sparrow_jax.sparsity.mismatch import acceptance, acceptance_top_k

Logits = Callable[[jax.Array], jax.Array]  # [..., D] -> float32 [..., V]


def token_logps(
    logits: Logits, hidden_BTD: jax.Array, target_BT: jax.Array, temperature: float, chunk_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution.

    Args:
        logits: the decoder's head. hidden_BTD: final hidden states. target_BT: int32.
        temperature: the sampling temperature, so that sampler and learner speak of the same distribution.
        chunk_tokens: tokens, over all rows, whose logits are held at once; need not divide anything.

    Returns:
        logp_BT, never positive, and entropy_BT (nats), float32. Differentiable; the logits are computed again in the
        backward pass.
    """

    def chunk(hidden_BtD, target_Bt):
        logp_BtV = jax.nn.log_softmax(logits(hidden_BtD) / temperature, axis=-1)
        logp_Bt = jnp.take_along_axis(logp_BtV, target_Bt[..., None], axis=-1)[..., 0]
        return jnp.minimum(logp_Bt, 0.0), -(jnp.exp(logp_BtV) * logp_BtV).sum(axis=-1)

    return _over_chunks(chunk, (hidden_BTD, target_BT), chunk_tokens)


def token_acceptance(
    logits: Logits, dense_BTD: jax.Array, actor_BTD: jax.Array, temperature: float, chunk_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Exact alpha and the paper's top-20 estimate for every token, from the final hidden states of both policies.

    Arguments as in `token_logps`; returns two float32 arrays [B, T]. No gradient is meant to flow.
    """

    def chunk(dense_BtD, actor_BtD):
        dense_BtV = jax.nn.log_softmax(logits(dense_BtD) / temperature, axis=-1)
        actor_BtV = jax.nn.log_softmax(logits(actor_BtD) / temperature, axis=-1)
        return acceptance(dense_BtV, actor_BtV), acceptance_top_k(dense_BtV, actor_BtV)

    return _over_chunks(chunk, (dense_BTD, actor_BTD), chunk_tokens)


def _over_chunks(function: Callable, arrays: tuple[jax.Array, ...], chunk_tokens: int):
    """Applies `function` to slices along T, one after another; the result does not depend on the chunk size."""
    B, T = arrays[0].shape[:2]
    size = min(max(chunk_tokens // B, 1), T)
    chunks = -(-T // size)

    def split(array):
        padded = jnp.pad(array, ((0, 0), (0, chunks * size - T)) + ((0, 0),) * (array.ndim - 2))
        return padded.reshape(B, chunks, size, *array.shape[2:]).swapaxes(0, 1)

    def step(_, slices):
        return None, jax.checkpoint(function)(*slices)

    _, outputs = lax.scan(step, None, tuple(map(split, arrays)))
    join = lambda out: out.swapaxes(0, 1).reshape(B, chunks * size, *out.shape[3:])[:, :T]
    return jax.tree.map(join, outputs)
