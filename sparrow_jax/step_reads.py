"""Bytes that decode steps of a given decoder read on one device, and what they take at best: for benches and plan.

`sparsity.cost` counts the bytes of one step; here stand the decoder's numbers and whole rollouts.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparrow_jax.models.decoder import abstract_decoder
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.rollout.head_shards import HeadShards
from sparrow_jax.sparsity.cost import decode_step_bytes, pages_read
from sparrow_jax.sparsity.schedules import Schedule


@functools.cache
def weight_bytes(shape: DecoderShape, dtype: jnp.dtype, tensor: int = 1) -> int:
    """Bytes of the weights that a device reads in every step: all but the rows of the embedding, if it is no head.

    Args:
        dtype: of the sampler's matrices; its norm scales are float32.
        tensor: shards that the weights are split over.
    """
    _, params = abstract_decoder(shape, param_dtype=dtype, compute_dtype=dtype)
    total = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(params))
    if not shape.tie_embeddings:
        total -= shape.vocab_size * shape.d_model * dtype.itemsize
    return total // tensor


def step_bytes(
    shape: DecoderShape,
    schedule: Schedule,
    dtype: jnp.dtype,
    *,
    sequences: int,
    length_tokens: Any,
    weight_bytes: int,
    tensor: int = 1,
) -> Any:
    """Bytes that one device reads in a step of so many sequences, all of one length (the current token included).

    length_tokens: a number, or an int64 array of several lengths; the result is likewise.
    """
    many = isinstance(length_tokens, np.ndarray)
    return decode_step_bytes(
        schedule,
        layers=shape.layers,
        kv_heads=HeadShards.of(shape, tensor).of_shard,
        head_dim=shape.head_dim,
        landmark_width=schedule.policy.landmark_width(shape.head_dim),
        value_bytes=dtype.itemsize,
        weight_bytes=weight_bytes,
        sequences=sequences,
        length_tokens=length_tokens,
        pages_read=pages_read(schedule, length_tokens) if many else schedule.pages_read(length_tokens),
    )


@dataclasses.dataclass(frozen=True)
class RolloutReads:
    """What the decode steps of a whole rollout must read on each device.

    Attributes:
        cache_bytes: pages and landmarks, of every token of every sequence under the schedule at its length.
        steps: the fewest that there can be: the longest sequence's, or all tokens over the slots where that is more.
        weight_bytes: read in each of them.
    """

    cache_bytes: int
    steps: int
    weight_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.cache_bytes + self.steps * self.weight_bytes


def rollout_reads(
    shape: DecoderShape,
    schedule: Schedule,
    dtype: jnp.dtype,
    *,
    prompt_tokens: int,
    response_tokens: Sequence[int],
    slots: int,
    shards: int = 1,
    tensor: int = 1,
) -> RolloutReads:
    """What sampling responses of these lengths reads at least.

    A response's first token comes from the prefill and is no decode step, so that one of T tokens has T - 1, over
    `prompt_tokens` + 1 cached tokens and more. Prefill, and what limits the pool sets to how many sequences decode
    together, are left out: both would only make the bound larger.

    Args:
        slots: of all data shards.
        shards: data shards that the responses are spread over, evenly at best.
        tensor: shards that weights and heads are split over.
    """
    longest = max(response_tokens)
    lengths = np.arange(prompt_tokens + 1, prompt_tokens + longest)
    of_step = step_bytes(shape, schedule, dtype, sequences=1, length_tokens=lengths, weight_bytes=0, tensor=tensor)
    of_steps = np.concatenate([[0], np.cumsum(of_step)])  # of the first so many steps
    steps_B = np.asarray(response_tokens, np.int64) - 1
    fewest = max(longest - 1, -(-int(steps_B.sum()) // slots))
    return RolloutReads(int(of_steps[steps_B].sum()) // shards, fewest, weight_bytes(shape, dtype, tensor))
