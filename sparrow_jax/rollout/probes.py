"""Probe slots: sequences that the dense policy follows while the sparse sampler draws them.

The first slots of every data shard are probes. Such a slot has a second page table into the same pool: the pages that
its prompt fills are the sampler's own, the rest are pages that the dense policy writes. After each segment the tokens
that it cached go through the dense policy once, as a chunk, and the two final hidden states of each give its exact
alpha. The counts move the budgets (`sparsity.controller`); the host sees none of it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sparrow_jax.models.decoder import Attend
from sparrow_jax.rollout.cache import Cache, Slots
from sparrow_jax.rollout.decode import SamplerStatics, attend_all
from sparrow_jax.sparsity.controller import Control, Controller, count, move
from sparrow_jax.sparsity.mismatch import acceptance

LOGITS_AT_ONCE = 64 << 20  # numbers, of each policy


def measure(
    graphdef: nnx.GraphDef,
    statics: SamplerStatics,
    control: Control,
    most_pages: tuple[int, ...],
    axes: tuple[str, ...],
    params: nnx.State,
    cache: Cache,
    slots: Slots,
    controller: Controller,
    temperature: jax.Array,
) -> tuple[Cache, Slots, Controller]:
    """Follows the probes' tokens of one segment, counts their alphas, and moves the budgets.

    Args:
        graphdef: of the decoder.
        statics, control: of sampler and controller.
        most_pages: of the longest sequence of each length bin.
        axes: mesh axes that slots are split over; every shard gets the same controller back.
        params: the sampler's weights.
        cache, slots: after the segment.
        controller: before it.
        temperature: of sampling.
    """
    P, T, _ = slots.probe_hidden_PTD.shape
    cache = Cache(list(cache.pages), list(cache.landmarks))
    decoder = nnx.merge(graphdef, params)
    end_P, active_P = slots.length_B[:P], slots.active_B[:P]
    new_P = end_P - slots.probe_length_P
    # A chunk ends with the newest cached token. What it holds before the new ones is computed and not used.
    position_PT = end_P[:, None] - T + jnp.arange(T)
    is_new_PT = position_PT >= slots.probe_length_P[:, None]
    prompt_P = end_P - slots.count_B[:P] + 1
    place_PT = jnp.clip(position_PT - prompt_P[:, None], 0, slots.tokens_BT.shape[1] - 1)
    token_PT = jnp.take_along_axis(slots.tokens_BT[:P], place_PT, axis=1)
    attend = _chunk_attend(cache, slots.probe_table_PN, position_PT, is_new_PT, jnp.where(new_P > 0, end_P, 1), statics)
    dense_PTD = decoder.hidden(token_PT, jnp.maximum(position_PT, 0), attend)
    step_PT = jnp.maximum(jnp.arange(T) - (T - new_P[:, None]), 0)  # of the segment, which drew from the hidden state
    actor_PTD = jnp.take_along_axis(slots.probe_hidden_PTD, step_PT[..., None], axis=1)
    alpha_PT = _alpha(decoder, dense_PTD, actor_PTD, temperature)

    seen = (alpha_PT, position_PT + 1, is_new_PT, (new_P > 0) & ~active_P)
    seen = jax.tree.map(lambda x: lax.all_gather(x, axes, axis=0, tiled=True), seen)
    controller = move(count(controller, control, *seen), control, jnp.asarray(most_pages, jnp.int32))
    return cache, dataclasses.replace(slots, probe_length_P=end_P), controller


def _chunk_attend(cache: Cache, table_PN, position_PT, is_new_PT, length_P, statics: SamplerStatics) -> Attend:
    """Writes the new tokens' keys and values into the dense cache, then attends to all of it."""
    C = statics.page_tokens
    column_PT = jnp.clip(position_PT // C, 0, table_PN.shape[1] - 1)
    page_PT = jnp.take_along_axis(table_PN, column_PT, axis=1)

    def attend(layer: int, q_PTHA: jax.Array, k_PTKA: jax.Array, v_PTKA: jax.Array) -> jax.Array:
        pool_KPCE = cache.pages[layer]
        k_PTKA, v_PTKA = (statics.heads.repeated(x_PTKA, axis=2) for x_PTKA in (k_PTKA, v_PTKA))
        kv_KPTE = jnp.concatenate([k_PTKA, v_PTKA], axis=-1).astype(pool_KPCE.dtype).transpose(2, 0, 1, 3)
        target_PT = jnp.where(is_new_PT, page_PT, pool_KPCE.shape[1])  # out of range: dropped
        cache.pages[layer] = pool_KPCE.at[:, target_PT, position_PT % C].set(kv_KPTE, mode='drop')
        return attend_all(q_PTHA, cache.pages[layer], table_PN, length_P, statics)

    return attend


def _alpha(decoder: Any, dense_PTD: jax.Array, actor_PTD: jax.Array, temperature: jax.Array) -> jax.Array:
    """Exact acceptance of each token, with as many distributions at once as `LOGITS_AT_ONCE` allows."""

    def logp(hidden_D: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(decoder.logits(hidden_D) / temperature, axis=-1)

    def of_token(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        return acceptance(*map(logp, pair))

    P, T, D = dense_PTD.shape
    vocab = jax.eval_shape(decoder.logits, dense_PTD[0, 0]).shape[-1]
    flat = dense_PTD.reshape(P * T, D), actor_PTD.reshape(P * T, D)
    return lax.map(of_token, flat, batch_size=min(max(LOGITS_AT_ONCE // vocab, 1), P * T)).reshape(P, T)
