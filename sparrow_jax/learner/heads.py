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


def distill_terms(
    logits: Logits,
    sparse_BTD: jax.Array,
    dense_BTD: jax.Array,
    target_BT: jax.Array,
    loss_of_tokens: Callable[..., jax.Array],
    arrays_BT: tuple[jax.Array, ...],
    temperature: float,
    chunk_tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A loss of the sparse policy beside the dense one, differentiated in the same pass of the head that computes it.

    A token's loss depends on its own hidden state alone, so that the gradient of a chunk is whole when the chunk is
    done: no logits are made a second time, and a backward pass can start from the hidden states.

    Args:
        logits, target_BT, temperature, chunk_tokens: as in `token_logps`.
        sparse_BTD, dense_BTD: final hidden states of both policies, for one head.
        loss_of_tokens: (logp_Bt, kl_Bt, *slices of arrays_BT) -> the loss summed over these tokens.
        arrays_BT: what else the loss depends on.

    Returns:
        gradient_BTD of the loss for the sparse policy's hidden states, in their dtype; float32 [B, T]: the sparse
        policy's log-probs of the targets, KL(sparse || dense) over the whole vocabulary in nats, and alpha. Nothing is
        to be differentiated again.
    """

    def chunk(sparse_BtD, dense_BtD, target_Bt, *arrays_Bt):
        dense_BtV = jax.nn.log_softmax(logits(dense_BtD) / temperature, axis=-1)

        def loss(sparse_BtD):
            sparse_BtV = jax.nn.log_softmax(logits(sparse_BtD) / temperature, axis=-1)
            logp_Bt = jnp.minimum(jnp.take_along_axis(sparse_BtV, target_Bt[..., None], axis=-1)[..., 0], 0.0)
            kl_Bt = (jnp.exp(sparse_BtV) * (sparse_BtV - dense_BtV)).sum(axis=-1)
            alpha_Bt = acceptance(dense_BtV, lax.stop_gradient(sparse_BtV))
            return loss_of_tokens(logp_Bt, kl_Bt, *arrays_Bt), (logp_Bt, kl_Bt, alpha_Bt)

        gradient_BtD, terms = jax.grad(loss, has_aux=True)(sparse_BtD)
        return gradient_BtD, *terms

    return _over_chunks(chunk, (sparse_BTD, dense_BTD, target_BT, *arrays_BT), chunk_tokens)


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
