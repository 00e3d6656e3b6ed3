"""Prefill and the decode segment: the two jitted functions of the sampler, and the two `attend` of the decoder in them.

Both take the cache and the slots and return them changed; the engine donates them. All lengths, budgets and
temperatures are values, so nothing compiles after each function's first call.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.implementation import Implementation
from pallas_kernels.landmark_update import landmark_update
from pallas_kernels.page_select import page_select
from pallas_kernels.page_select.policies import SelectionPolicy
from pallas_kernels.rotate_and_write import rotate_and_write
from pallas_kernels.select_decode import select_decode
from pallas_kernels.sparse_decode import sparse_decode
from sparrow_jax.models.adapter import SamplerAdapter
from sparrow_jax.models.attention import causal_attend
from sparrow_jax.models.decoder import Attend
from sparrow_jax.rollout.cache import STATE, Cache, Slots
from sparrow_jax.rollout.fused_step import MergedFactors, fused_hidden, merged_factors
from sparrow_jax.rollout.head_shards import FIRST, SECOND, THIRD, WHOLE, HeadShards
from sparrow_jax.rollout.sampling import Noise, draw, draw_noise, noise_of_step, segment_noise
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
        heads: how the cache's heads lie on tensor shards.
        fused: whether kernels also run the rest of them, see `fused_step`.
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
    heads: HeadShards
    fused: bool
    truncate: bool

    @property
    def selection_kernels(self) -> Implementation:
        """What runs page_select and landmark_update."""
        return self.policy.implementation(self.kernels)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Prompts:
    """Prompts to encode, one a row, each for up to F samples, which share the pages that it fills.

    A sample whose slot is the number of slots is padding (never -1: that would wrap).
    """

    tokens_RT: jax.Array  # int32, padded at the end
    length_R: jax.Array  # int32
    slot_RF: jax.Array  # int32 slot that takes the sample
    table_RFN: jax.Array  # int32 pages given to it
    # int32 pages of its dense cache where the slot is a probe; a number that no page has where it is none
    probe_table_RFN: jax.Array
    limit_RF: jax.Array  # int32 most response tokens
    key_RF2: jax.Array  # uint32 key data of the sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SamplingValues:
    """Numbers that may change from call to call."""

    budget_bins: jax.Array  # int32 [bins]
    temperature: jax.Array  # float32
    top_p: jax.Array  # float32, used when `truncate`
    adapter: SamplerAdapter | None = None  # of decode steps: prompts are encoded by the weights alone


def prefill(
    graphdef: nnx.GraphDef,
    statics: SamplerStatics,
    params: nnx.State,
    cache: Cache,
    slots: Slots,
    prompts: Prompts,
    values: SamplingValues,
) -> tuple[Cache, Slots]:
    """Encodes prompts densely into their samples' pages and draws the first token of each response."""
    R, T = prompts.tokens_RT.shape
    cache = Cache(list(cache.pages), list(cache.landmarks))
    decoder = nnx.merge(graphdef, params)
    positions_RT = jnp.broadcast_to(jnp.arange(T), (R, T))
    attend = _prefill_attend(cache, prompts, statics)
    hidden_RTD = decoder.hidden(prompts.tokens_RT, positions_RT, attend)
    last_R = jnp.maximum(prompts.length_R - 1, 0)
    hidden_RD = jnp.take_along_axis(hidden_RTD, last_R[:, None, None], axis=1)[:, 0]
    # From here on a row is a sample, Q = R F.
    F = prompts.slot_RF.shape[1]
    slot_Q, limit_Q = prompts.slot_RF.reshape(-1), prompts.limit_RF.reshape(-1)
    key_Q2, length_Q = prompts.key_RF2.reshape(-1, 2), jnp.repeat(prompts.length_R, F)
    tables = [table.reshape(slot_Q.size, -1) for table in (prompts.table_RFN, prompts.probe_table_RFN)]
    hidden_QD, logits_QV = (jnp.repeat(x, F, axis=0) for x in (hidden_RD, decoder.logits(hidden_RD)))
    first_Q = jnp.zeros(slot_Q.size, jnp.int32)
    top_p = values.top_p if statics.truncate else None
    noise = draw_noise(key_Q2, first_Q, logits_QV.shape[1])
    token_Q, logp_Q = draw(logits_QV, noise, values.temperature, top_p)
    ended_Q = _is_end(token_Q, statics.end_ids)

    def put(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[slot_Q].set(value, mode='drop')

    def put_first(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[slot_Q, 0].set(value, mode='drop')

    slots = Slots(
        table_BN=put(slots.table_BN, tables[0]),
        length_B=put(slots.length_B, length_Q),
        token_B=put(slots.token_B, token_Q),
        count_B=put(slots.count_B, first_Q + 1),
        limit_B=put(slots.limit_B, limit_Q),
        active_B=put(slots.active_B, ~ended_Q & (limit_Q > 1)),
        stopped_B=put(slots.stopped_B, ended_Q),
        key_B2=put(slots.key_B2, key_Q2),
        tokens_BT=put_first(slots.tokens_BT, token_Q),
        logp_BT=put_first(slots.logp_BT, logp_Q),
        pages_read_BT=put_first(slots.pages_read_BT, first_Q),
        hidden_BTD=put_first(slots.hidden_BTD, hidden_QD) if slots.hidden_BTD.shape[2] else slots.hidden_BTD,
        probe_table_PN=put(slots.probe_table_PN, tables[1]),
        probe_length_P=put(slots.probe_length_P, length_Q),
        probe_hidden_PTD=slots.probe_hidden_PTD,
    )
    return cache, slots


def decode_segment(
    graphdef: nnx.GraphDef,
    statics: SamplerStatics,
    steps: int,
    width: int,
    params: nnx.State,
    cache: Cache,
    slots: Slots,
    values: SamplingValues,
) -> tuple[Cache, Slots]:
    """`steps` decode steps of the first `width` slots in one loop on the device; the others must be idle.

    Finished slots idle: the trip count is the same on every shard. All probes must be among the first.
    """
    every, landmarks, B = slots, cache.landmarks, width
    slots, cache = _first_slots(slots, width), Cache(cache.pages, [array[:width] for array in landmarks])
    P = slots.probe_length_P.shape[0]
    kept_rows = B if slots.hidden_BTD.shape[2] else P
    # Whatever can be known before the loop is made before it: in the loop each operation is a kernel of its own.
    shape, adapter = nnx.merge(graphdef, params).shape, values.adapter
    noise = segment_noise(slots.key_B2, slots.count_B, steps, shape.vocab_size)
    merged = merged_factors(shape, adapter) if statics.fused and adapter is not None else None
    drawn = _Drawn(
        token_SB=jnp.zeros((steps, B), jnp.int32),
        logp_SB=jnp.zeros((steps, B), jnp.float32),
        hidden_SBD=jnp.zeros((steps, kept_rows, slots.probe_hidden_PTD.shape[2]), slots.probe_hidden_PTD.dtype),
    )

    def body(step: jax.Array, state: tuple[Cache, Slots, _Drawn]) -> tuple[Cache, Slots, _Drawn]:
        cache, slots, drawn = state
        decoder, noise_now = nnx.merge(graphdef, params), noise_of_step(noise, step)
        cache, slots, now = _decode_step(decoder, statics, cache, slots, noise_now, values, merged)
        put = lambda all_S, one: lax.dynamic_update_index_in_dim(all_S, one[: all_S.shape[1]], step, axis=0)
        return cache, slots, jax.tree.map(put, drawn, now)

    cache, after, drawn = lax.fori_loop(0, steps, body, (cache, slots, drawn))
    read_SB = slots.length_B + 1 + jnp.arange(steps)[:, None]  # lengths with each step's own token
    if len(statics.dense_layers) < len(cache.pages):
        pages_read_SB = _pages_of_sparse_layers(read_SB, statics, values)
    else:
        pages_read_SB = -(-read_SB // statics.page_tokens)
    after = _recorded(slots, after, drawn, pages_read_SB)
    if width == every.active_B.shape[0]:
        return cache, after
    put_first = lambda whole, first: lax.dynamic_update_slice_in_dim(whole, first, 0, axis=0)
    after = dataclasses.replace(
        after,
        **{name: put_first(getattr(every, name), getattr(after, name)) for name in STATE},
    )
    return Cache(cache.pages, list(map(put_first, landmarks, cache.landmarks))), after


def _first_slots(slots: Slots, width: int) -> Slots:
    """State of the first slots; what is recorded of responses stays whole."""
    return dataclasses.replace(slots, **{name: getattr(slots, name)[:width] for name in STATE})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Drawn:
    """What one step gives, [B], or all steps of a segment, [S, B]."""

    token_SB: jax.Array
    logp_SB: jax.Array
    hidden_SBD: jax.Array  # from which the tokens were drawn, of as many of the first slots as it is kept for


def _decode_step(
    decoder,
    statics: SamplerStatics,
    cache: Cache,
    slots: Slots,
    noise: Noise,
    values: SamplingValues,
    merged: MergedFactors | None,
) -> tuple[Cache, Slots, _Drawn]:
    cache = Cache(list(cache.pages), list(cache.landmarks))
    active_B = slots.active_B
    position_B = slots.length_B
    length_B = jnp.where(active_B, position_B + 1, 1)  # idle slots read one page, not their last sequence again
    budget_B = _budgets(length_B, statics, values)
    hidden_BD = _hidden(decoder, cache, slots, length_B, budget_B, statics, values.adapter, merged)
    top_p = values.top_p if statics.truncate else None
    token_B, logp_B = draw(decoder.logits(hidden_BD), noise, values.temperature, top_p)

    ended_B = _is_end(token_B, statics.end_ids)
    count_B = slots.count_B + active_B
    slots = dataclasses.replace(
        slots,
        length_B=slots.length_B + active_B,
        token_B=jnp.where(active_B, token_B, slots.token_B),
        count_B=count_B,
        active_B=active_B & ~ended_B & (count_B < slots.limit_B),
        stopped_B=slots.stopped_B | (active_B & ended_B),
    )
    return cache, slots, _Drawn(token_B, logp_B, hidden_BD)


def _recorded(before: Slots, after: Slots, drawn: _Drawn, pages_read_SB: jax.Array) -> Slots:
    """The slots after a segment, with its tokens among their responses'."""
    S, B = drawn.token_SB.shape
    P = before.probe_length_P.shape[0]
    step_S1 = jnp.arange(S)[:, None]
    new_B = after.count_B - before.count_B  # those of its first steps: a slot that ends does not begin again
    place_SB = jnp.where(step_S1 < new_B, before.count_B + step_S1, before.tokens_BT.shape[1])  # out of range: dropped

    def record(all_BT: jax.Array, new_SB: jax.Array) -> jax.Array:
        return all_BT.at[jnp.arange(B), place_SB].set(new_SB, mode='drop')

    return dataclasses.replace(
        after,
        tokens_BT=record(before.tokens_BT, drawn.token_SB),
        logp_BT=record(before.logp_BT, drawn.logp_SB),
        pages_read_BT=record(before.pages_read_BT, pages_read_SB),
        hidden_BTD=record(before.hidden_BTD, drawn.hidden_SBD) if before.hidden_BTD.shape[2] else before.hidden_BTD,
        probe_hidden_PTD=drawn.hidden_SBD[:, :P].swapaxes(0, 1) if P else before.probe_hidden_PTD,
    )


def _budgets(length: jax.Array, statics: SamplerStatics, values: SamplingValues) -> jax.Array:
    return budget_for_length(values.budget_bins, length, statics.bin_width_tokens)


def _pages_of_sparse_layers(length: jax.Array, statics: SamplerStatics, values: SamplingValues) -> jax.Array:
    """Pages that one reads of sequences of these lengths."""
    most = _budgets(length, statics, values) + statics.reserved_first + statics.reserved_last
    return jnp.minimum(-(-length // statics.page_tokens), jnp.minimum(most, statics.max_pages))


def _hidden(
    decoder,
    cache: Cache,
    slots: Slots,
    length_B,
    budget_B,
    statics: SamplerStatics,
    adapter: SamplerAdapter | None,
    merged: MergedFactors | None,
) -> jax.Array:
    """Final hidden states of the slots' tokens; writes their keys and values into the cache.

    The fused step takes the adapter as `merged`.
    """
    token_B, position_B, active_B, table_BN = slots.token_B, slots.length_B, slots.active_B, slots.table_BN

    def read(layer: int, q_BHA: jax.Array) -> jax.Array:
        return attend_layer(
            layer, q_BHA, cache.pages[layer], cache.landmarks[layer], table_BN, length_B, budget_B, statics
        )

    if statics.fused:

        def write(layer: int, parts_SBF, norms, cos_BR, sin_BR, eps: float) -> jax.Array:
            pages_KPCE, landmark_BKNA = cache.pages[layer], cache.landmarks[layer]
            at = table_BN, position_B, active_B
            q_BHA, cache.pages[layer], cache.landmarks[layer] = rotate_and_write(
                pages_KPCE,
                landmark_BKNA,
                parts_SBF,
                norms,
                cos_BR,
                sin_BR,
                *at,
                eps=eps,
                implementation=statics.kernels,
            )
            return q_BHA

        return fused_hidden(decoder, token_B, position_B, write, read, statics.kernels, merged)

    def attend(layer: int, q_BTHA: jax.Array, k_BTKA: jax.Array, v_BTKA: jax.Array) -> jax.Array:
        written = write_token(cache, layer, k_BTKA[:, 0], v_BTKA[:, 0], table_BN, position_B, active_B, statics)
        cache.pages[layer], cache.landmarks[layer] = written
        return read(layer, q_BTHA[:, 0])[:, None]

    one_B1 = token_B[:, None], position_B[:, None]
    if adapter is None:
        return decoder.hidden(*one_B1, attend)[:, 0]
    scale_B1 = jnp.full(one_B1[0].shape, adapter.scale, jnp.float32)
    return decoder.hidden(*one_B1, attend, adapter.factors, scale_B1)[:, 0]


def write_token(
    cache: Cache, layer: int, k_BKA, v_BKA, table_BN, position_B, active_B, statics: SamplerStatics
) -> tuple[jax.Array, jax.Array]:
    """The layer's pages and landmarks with the tokens' keys and values."""
    heads = statics.heads
    write = functools.partial(landmark_update, policy=statics.policy, implementation=statics.selection_kernels)
    k_BKA, v_BKA = (heads.repeated(x_BKA, axis=1) for x_BKA in (k_BKA, v_BKA))
    run = heads.each(write, (FIRST, SECOND, SECOND, SECOND, WHOLE, WHOLE, WHOLE), (FIRST, SECOND))
    return run(cache.pages[layer], cache.landmarks[layer], k_BKA, v_BKA, table_BN, position_B, active_B)


def choose_pages(
    q_BHA, landmark_BKNA, table_BN, length_B, budget_B, statics: SamplerStatics
) -> tuple[jax.Array, jax.Array]:
    """What a sparse layer reads: ids_BKM and count_B, of `page_select`."""
    select = functools.partial(
        page_select,
        page_tokens=statics.page_tokens,
        max_pages=statics.max_pages,
        reserved_first=statics.reserved_first,
        reserved_last=statics.reserved_last,
        policy=statics.policy,
        landmarks_at_rest=statics.fused,
        implementation=statics.selection_kernels,
    )
    run = statics.heads.each(select, (SECOND, SECOND, WHOLE, WHOLE, WHOLE), (SECOND, WHOLE))
    return run(statics.heads.whole_groups(q_BHA), landmark_BKNA, length_B, budget_B, table_BN)


def attend_chosen(q_BHA, pages_KPCE, ids_BKM, count_B, length_B, statics: SamplerStatics) -> jax.Array:
    """Attention of one query a sequence to the pages of `choose_pages`."""
    attend = lambda q, pages, ids, count, length: sparse_decode(
        q, pages, None, ids, count, length, implementation=statics.kernels
    )
    run = statics.heads.each(attend, (SECOND, FIRST, SECOND, WHOLE, WHOLE), SECOND)
    return run(q_BHA, pages_KPCE, ids_BKM, count_B, length_B)


def attend_all(q_BTHA, pages_KPCE, table_BN, length_B, statics: SamplerStatics) -> jax.Array:
    """Attention of the newest queries of each sequence to all of its pages."""
    attend = functools.partial(dense_decode, implementation=statics.kernels)
    run = statics.heads.each(attend, (THIRD, FIRST, WHOLE, WHOLE), THIRD)
    return run(q_BTHA, pages_KPCE, table_BN, length_B)


def attend_layer(
    layer: int, q_BHA, pages_KPCE, landmark_BKNA, table_BN, length_B, budget_B, statics: SamplerStatics
) -> jax.Array:
    """Attention of one query a sequence to the chosen pages, to all of them in a dense layer."""
    if layer in statics.dense_layers:
        return attend_all(q_BHA[:, None], pages_KPCE, table_BN, length_B, statics)[:, 0]
    if statics.policy is not SelectionPolicy.BLOCK_MEAN or statics.heads.copies > 1:
        chosen = choose_pages(q_BHA, landmark_BKNA, table_BN, length_B, budget_B, statics)
        return attend_chosen(q_BHA, pages_KPCE, *chosen, length_B, statics)
    choose_and_attend = functools.partial(
        select_decode,
        max_pages=statics.max_pages,
        reserved_first=statics.reserved_first,
        reserved_last=statics.reserved_last,
        landmarks_at_rest=statics.fused,
        implementation=statics.kernels,
    )
    run = statics.heads.each(choose_and_attend, (SECOND, FIRST, SECOND, WHOLE, WHOLE, WHOLE), SECOND)
    return run(q_BHA, pages_KPCE, landmark_BKNA, table_BN, length_B, budget_B)


def _prefill_attend(cache: Cache, prompts: Prompts, statics: SamplerStatics) -> Attend:
    """Attends densely within the prompts and writes their pages and landmarks whole.

    The pages that a prompt fills are written once. Every sample, and every probe's dense cache, gets a copy of the last
    one where it is partly filled, and every sample the landmarks.
    """
    R, T = prompts.tokens_RT.shape
    C = statics.page_tokens
    pages, slots = T // C, cache.landmarks[0].shape[0]
    filled_R = prompts.length_R // C
    exists_RF = prompts.slot_RF < slots
    shared_RN = exists_RF[:, :1] & (jnp.arange(pages) < filled_R[:, None])
    tables_RfN = jnp.concatenate([prompts.table_RFN, prompts.probe_table_RFN], axis=1)
    last_R = jnp.minimum(filled_R, pages - 1)
    copies_Rf = jnp.take_along_axis(tables_RfN, last_R[:, None, None], axis=2)[..., 0]
    copied_Rf = jnp.tile(exists_RF, 2) & (prompts.length_R % C > 0)[:, None]
    dense = causal_attend(None, statics.prefill_attention)

    def attend(layer: int, q_RTHA: jax.Array, k_RTKA: jax.Array, v_RTKA: jax.Array) -> jax.Array:
        pool_KPCE, landmark_BKNW = cache.pages[layer], cache.landmarks[layer]
        K, P, _, E = pool_KPCE.shape  # P is out of range: dropped
        k_RTKA, v_RTKA = (statics.heads.repeated(x_RTKA, axis=2) for x_RTKA in (k_RTKA, v_RTKA))
        kv_RTKE = jnp.concatenate([k_RTKA, v_RTKA], axis=-1).astype(pool_KPCE.dtype)
        kv_KRNCE = kv_RTKE.reshape(R, pages, C, K, E).transpose(3, 0, 1, 2, 4)
        target_RN = jnp.where(shared_RN, prompts.table_RFN[:, 0, :pages], P)
        pool_KPCE = pool_KPCE.at[:, target_RN].set(kv_KRNCE, mode='drop')
        last_KR1CE = kv_KRNCE[:, jnp.arange(R), last_R][:, :, None]
        cache.pages[layer] = pool_KPCE.at[:, jnp.where(copied_Rf, copies_Rf, P)].set(last_KR1CE, mode='drop')
        filled_RKNW = statics.policy.landmark(kv_KRNCE[..., : E // 2]).swapaxes(0, 1).astype(landmark_BKNW.dtype)
        filled_R1KNW = filled_RKNW[:, None]
        cache.landmarks[layer] = landmark_BKNW.at[prompts.slot_RF, :, :pages].set(filled_R1KNW, mode='drop')
        on_own_heads = statics.heads.each(functools.partial(dense, layer), (THIRD, THIRD, THIRD), THIRD)
        return on_own_heads(q_RTHA, k_RTKA, v_RTKA)

    return attend


def _is_end(token_B: jax.Array, end_ids: tuple[int, ...]) -> jax.Array:
    return (token_B[:, None] == jnp.asarray(end_ids, jnp.int32)).any(axis=-1)
