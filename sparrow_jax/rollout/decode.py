"""Prefill and the decode segment: the two jitted functions of the sampler, and the two `attend` of the decoder in them.

Both take the cache and the slots and return them changed; the engine donates them. All lengths, budgets and
temperatures are values, so nothing compiles after each function's first call.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.implementation import Implementation
from pallas_kernels.landmark_update import landmark_update
from pallas_kernels.page_select import page_select
from pallas_kernels.page_select.policies import SelectionPolicy
from pallas_kernels.sparse_decode import sparse_decode
from sparrow_jax.models.attention import causal_attend
from sparrow_jax.models.decoder import Attend
from sparrow_jax.rollout.cache import Cache, Slots
from sparrow_jax.rollout.sampling import draw
from sparrow_jax.sparsity.schedules import budget_for_length


@dataclasses.dataclass(frozen=True)
class SamplerStatics:
    """What is fixed when the sampler is compiled.

    Attributes:
        page_tokens: C.
        max_pages: M, the most pages that a sparse layer reads.
        reserved_first, reserved_last: pages always read.
        bin_width_tokens: of the budgets' bins.
        dense_layers: layers that read every page; all of them for a dense sampler.
        end_ids: tokens that end a response.
        prefill_attention: implementation of `models.attention.causal_attend`.
        policy: how a sparse layer chooses its pages.
        kernels: what runs the attention of decode steps.
        truncate: whether top-p is applied (evaluation only).
    """

    page_tokens: int
    max_pages: int
    reserved_first: int
    reserved_last: int
    bin_width_tokens: int
    dense_layers: frozenset[int]
    end_ids: tuple[int, ...]
    prefill_attention: str
    policy: SelectionPolicy
    kernels: Implementation
    truncate: bool

    @property
    def selection_kernels(self) -> Implementation:
        """What runs page_select and landmark_update."""
        return self.policy.implementation(self.kernels)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Prompts:
    """Prompts to encode, one a row. A row whose slot is the number of slots is padding (never -1: that would wrap)."""

    tokens_RT: jax.Array  # int32, padded at the end
    length_R: jax.Array  # int32
    slot_R: jax.Array  # int32 slot that takes the sequence
    table_RN: jax.Array  # int32 pages given to it
    # int32 pages of its dense cache where the slot is a probe; a number that no page has where it is none
    probe_table_RN: jax.Array
    limit_R: jax.Array  # int32 most response tokens
    key_R2: jax.Array  # uint32 key data of the sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SamplingValues:
    """Numbers that may change from call to call."""

    budget_bins: jax.Array  # int32 [bins]
    temperature: jax.Array  # float32
    top_p: jax.Array  # float32, used when `truncate`


def prefill(
    graphdef: nnx.GraphDef,
    statics: SamplerStatics,
    params: nnx.State,
    cache: Cache,
    slots: Slots,
    prompts: Prompts,
    values: SamplingValues,
) -> tuple[Cache, Slots]:
    """Encodes prompts densely into their slots' pages and draws each first response token."""
    R, T = prompts.tokens_RT.shape
    cache = Cache(list(cache.pages), list(cache.landmarks))
    decoder = nnx.merge(graphdef, params)
    positions_RT = jnp.broadcast_to(jnp.arange(T), (R, T))
    attend = _prefill_attend(cache, prompts, slots.probe_length_P.shape[0] > 0, statics)
    hidden_RTD = decoder.hidden(prompts.tokens_RT, positions_RT, attend)
    last_R = jnp.maximum(prompts.length_R - 1, 0)
    hidden_RD = jnp.take_along_axis(hidden_RTD, last_R[:, None, None], axis=1)[:, 0]
    first_R = jnp.zeros(R, jnp.int32)
    top_p = values.top_p if statics.truncate else None
    token_R, logp_R = draw(decoder.logits(hidden_RD), prompts.key_R2, first_R, values.temperature, top_p)
    ended_R = _is_end(token_R, statics.end_ids)

    def put(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[prompts.slot_R].set(value, mode='drop')

    def put_first(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[prompts.slot_R, 0].set(value, mode='drop')

    slots = Slots(
        table_BN=put(slots.table_BN, prompts.table_RN),
        length_B=put(slots.length_B, prompts.length_R),
        token_B=put(slots.token_B, token_R),
        count_B=put(slots.count_B, first_R + 1),
        limit_B=put(slots.limit_B, prompts.limit_R),
        active_B=put(slots.active_B, ~ended_R & (prompts.limit_R > 1)),
        stopped_B=put(slots.stopped_B, ended_R),
        key_B2=put(slots.key_B2, prompts.key_R2),
        tokens_BT=put_first(slots.tokens_BT, token_R),
        logp_BT=put_first(slots.logp_BT, logp_R),
        pages_read_BT=put_first(slots.pages_read_BT, first_R),
        hidden_BTD=put_first(slots.hidden_BTD, hidden_RD) if slots.hidden_BTD.shape[2] else slots.hidden_BTD,
        probe_table_PN=put(slots.probe_table_PN, prompts.probe_table_RN),
        probe_length_P=put(slots.probe_length_P, prompts.length_R),
        probe_hidden_PTD=slots.probe_hidden_PTD,
    )
    return cache, slots


def decode_segment(
    graphdef: nnx.GraphDef,
    statics: SamplerStatics,
    steps: int,
    params: nnx.State,
    cache: Cache,
    slots: Slots,
    values: SamplingValues,
) -> tuple[Cache, Slots]:
    """`steps` decode steps of all slots in one loop on the device.

    Finished slots idle: the trip count is the same on every shard.
    """

    def body(step: jax.Array, state: tuple[Cache, Slots]) -> tuple[Cache, Slots]:
        return _decode_step(nnx.merge(graphdef, params), statics, step, *state, values)

    return lax.fori_loop(0, steps, body, (cache, slots))


def _decode_step(
    decoder, statics: SamplerStatics, step: jax.Array, cache: Cache, slots: Slots, values: SamplingValues
) -> tuple[Cache, Slots]:
    cache = Cache(list(cache.pages), list(cache.landmarks))
    active_B = slots.active_B
    position_B = slots.length_B
    length_B = jnp.where(active_B, position_B + 1, 1)  # idle slots read one page, not their last sequence again
    budget_B = budget_for_length(values.budget_bins, length_B, statics.bin_width_tokens)
    attend = _decode_attend(cache, slots.table_BN, position_B, length_B, budget_B, active_B, statics)
    hidden_BD = decoder.hidden(slots.token_B[:, None], position_B[:, None], attend)[:, 0]
    top_p = values.top_p if statics.truncate else None
    token_B, logp_B = draw(decoder.logits(hidden_BD), slots.key_B2, slots.count_B, values.temperature, top_p)

    pages_B = -(-length_B // statics.page_tokens)
    if len(statics.dense_layers) < len(cache.pages):
        most_B = jnp.minimum(budget_B + statics.reserved_first + statics.reserved_last, statics.max_pages)
        pages_B = jnp.minimum(pages_B, most_B)
    rows_B = jnp.arange(active_B.shape[0])
    here_B = jnp.where(active_B, slots.count_B, slots.tokens_BT.shape[1])  # out of range: dropped

    def record(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[rows_B, here_B].set(value, mode='drop')

    ended_B = _is_end(token_B, statics.end_ids)
    count_B = slots.count_B + active_B
    slots = dataclasses.replace(
        slots,
        length_B=slots.length_B + active_B,
        token_B=jnp.where(active_B, token_B, slots.token_B),
        count_B=count_B,
        active_B=active_B & ~ended_B & (count_B < slots.limit_B),
        stopped_B=slots.stopped_B | (active_B & ended_B),
        tokens_BT=record(slots.tokens_BT, token_B),
        logp_BT=record(slots.logp_BT, logp_B),
        pages_read_BT=record(slots.pages_read_BT, pages_B),
        hidden_BTD=record(slots.hidden_BTD, hidden_BD) if slots.hidden_BTD.shape[2] else slots.hidden_BTD,
        probe_hidden_PTD=slots.probe_hidden_PTD.at[:, step].set(hidden_BD[: slots.probe_length_P.shape[0]]),
    )
    return cache, slots


def _decode_attend(cache: Cache, table_BN, position_B, length_B, budget_B, active_B, statics: SamplerStatics) -> Attend:
    """Writes the token's key and value, then attends to the chosen pages (to all in a dense layer)."""

    kernels = statics.kernels

    def attend(layer: int, q_BTHA: jax.Array, k_BTKA: jax.Array, v_BTKA: jax.Array) -> jax.Array:
        cache.pages[layer], cache.landmarks[layer] = landmark_update(
            cache.pages[layer],
            cache.landmarks[layer],
            k_BTKA[:, 0],
            v_BTKA[:, 0],
            table_BN,
            position_B,
            active_B,
            policy=statics.policy,
            implementation=statics.selection_kernels,
        )
        if layer in statics.dense_layers:
            return dense_decode(q_BTHA, cache.pages[layer], table_BN, length_B, implementation=kernels)
        ids_BKM, count_B = page_select(
            q_BTHA[:, 0],
            cache.landmarks[layer],
            length_B,
            budget_B,
            table_BN,
            page_tokens=statics.page_tokens,
            max_pages=statics.max_pages,
            reserved_first=statics.reserved_first,
            reserved_last=statics.reserved_last,
            policy=statics.policy,
            implementation=statics.selection_kernels,
        )
        o_BHA = sparse_decode(
            q_BTHA[:, 0], cache.pages[layer], None, ids_BKM, count_B, length_B, implementation=kernels
        )
        return o_BHA[:, None]

    return attend


def _prefill_attend(cache: Cache, prompts: Prompts, probes: bool, statics: SamplerStatics) -> Attend:
    """Attends densely within the prompts and writes their pages and landmarks whole.

    A probe shares the pages that its prompt fills; of the last, partly filled one it gets a copy of its own.
    """
    R, T = prompts.tokens_RT.shape
    C = statics.page_tokens
    pages = T // C
    slots = cache.landmarks[0].shape[0]
    taken_RN = jnp.arange(pages) * C < prompts.length_R[:, None]
    taken_RN &= (prompts.slot_R < slots)[:, None]
    last_R = prompts.length_R // C
    copy_R = jnp.take_along_axis(prompts.probe_table_RN, last_R[:, None], axis=1)[:, 0]
    has_copy_R = (prompts.length_R % C > 0) & (prompts.slot_R < slots)
    last_R = jnp.minimum(last_R, pages - 1)
    dense = causal_attend(None, statics.prefill_attention)

    def attend(layer: int, q_RTHA: jax.Array, k_RTKA: jax.Array, v_RTKA: jax.Array) -> jax.Array:
        pool_KPCE, landmark_BKNW = cache.pages[layer], cache.landmarks[layer]
        K, P, _, E = pool_KPCE.shape
        kv_RTKE = jnp.concatenate([k_RTKA, v_RTKA], axis=-1).astype(pool_KPCE.dtype)
        kv_KRNCE = kv_RTKE.reshape(R, pages, C, K, E).transpose(3, 0, 1, 2, 4)
        target_RN = jnp.where(taken_RN, prompts.table_RN[:, :pages], P)  # out of range: dropped
        pool_KPCE = pool_KPCE.at[:, target_RN].set(kv_KRNCE, mode='drop')
        if probes:
            last_KRCE = kv_KRNCE[:, jnp.arange(R), last_R]
            pool_KPCE = pool_KPCE.at[:, jnp.where(has_copy_R, copy_R, P)].set(last_KRCE, mode='drop')
        cache.pages[layer] = pool_KPCE
        filled_RKNW = statics.policy.landmark(kv_KRNCE[..., : E // 2]).swapaxes(0, 1).astype(landmark_BKNW.dtype)
        cache.landmarks[layer] = landmark_BKNW.at[prompts.slot_R, :, :pages].set(filled_RKNW, mode='drop')
        return dense(layer, q_RTHA, k_RTKA, v_RTKA)

    return attend


def _is_end(token_B: jax.Array, end_ids: tuple[int, ...]) -> jax.Array:
    return (token_B[:, None] == jnp.asarray(end_ids, jnp.int32)).any(axis=-1)
