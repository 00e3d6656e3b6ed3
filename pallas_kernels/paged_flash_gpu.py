"""Softmax attention of a few query rows over a list of pages, on Hopper: the core of sparse_decode and dense_decode.

A thread block takes the query rows of one (sequence, KV head) and streams that head's pages through shared memory. One
warpgroup does nothing but start copies, one bulk copy a page, several tiles of tokens ahead; the other multiplies. Both
products have the tokens or the head's dimension on their long side and the few query rows on the short one,

    scores [tokens, rows] = keys [tokens, A] q^T [A, rows]    o [A, rows] = values^T [A, tokens] weights [tokens, rows]

so that eight rows, not 64, are the least that the tensor cores work on, and a block needs few registers: two or more
fit on a multiprocessor and one's arithmetic hides behind the other's copies. Rows never mix: what stands in rows beyond
the real ones is left to be whatever it is.

float32 caches are multiplied as three bfloat16 terms of each operand, which keeps 24 bits: exact enough for tests that
compare tokens, and slow.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_gpu import (
    MULTIPROCESSORS,
    Operand,
    iota,
    kernel,
    layout_cast,
    let_next_start,
    load_transposed,
    product,
    row_memory,
    store_transposed,
    wait_for_previous,
)
from pallas_kernels.tuning_gpu import Blocks

ROW_MULTIPLE = 8  # narrowest product of the tensor cores
MAX_ROWS = {'bfloat16': 32, 'float32': 16}  # more would not fit registers, or shared memory
_FAR_BELOW = -1e30  # stands for minus infinity where a difference of two is taken
# Terms of the two operands whose product still counts in float32; the rest is below its last bit.
_TERMS = {'bfloat16': ((0, 0),), 'float32': ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))}


# Under jit, so that the layers of a model share one lowering.
@functools.partial(jax.jit, static_argnames=('blocks', 'out_dtype', 'interpret'), inline=True)
def paged_flash(
    q_BTHA: jax.Array,
    pages_KPCE: jax.Array,
    ids_BLM: jax.Array,
    tokens: tuple[jax.Array, ...],
    *,
    blocks: Blocks,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool,
) -> jax.Array:
    """softmax(q . k / sqrt(A)) v over the first `tokens` tokens of a list of pages, causal from the bottom right.

    Args:
        q_BTHA: query t of T sees the first tokens - T + 1 + t tokens.
        pages_KPCE: the pool, bfloat16 or float32.
        ids_BLM: int32 physical pages; L is K, or 1 where all heads read the same.
        tokens: tokens_BL int32, L as of the ids; all of the listed pages are full but the last one that is read. Or
            (count_B, length_B): `count` pages are read, the last one up to where a sequence of `length` tokens ends.
        blocks: sizes.
        out_dtype: of the result.
        interpret: on the CPU.

    Returns:
        o_BTHA; zeros where a query sees nothing.

    On chip: `stages` tiles of `tile_tokens` * 2 A and three times `rows` * A elements; float32 pools need three
    bfloat16 copies of half a tile beside.
    """
    B, T, H, A = q_BTHA.shape
    K, _, C, _ = pages_KPCE.shape
    G, M = H // K, ids_BLM.shape[-1]
    plan = Plan.make(T, G, A, C, M, pages_KPCE.dtype, blocks)
    part = jnp.dtype(out_dtype) if plan.splits == 1 else jnp.dtype(jnp.float32)
    out_type = [jax.ShapeDtypeStruct((B, plan.splits, T, H, A), part)]
    if plan.splits > 1:
        out_type += [jax.ShapeDtypeStruct((B, K, plan.row_blocks, plan.splits, plan.rows), jnp.float32)] * 2
    grid = K, plan.row_blocks, plan.splits, B
    result = kernel(
        functools.partial(_body, plan, len(tokens)),
        out_type=out_type,
        grid=grid,
        grid_names=('head', 'row_block', 'split', 'sequence'),
        scratch_types=plan.scratch(part),
        num_threads=2,
        thread_name='warpgroup',
        alone=math.prod(grid) <= MULTIPROCESSORS,
        name=f'paged_flash_{plan.rows}x{A}',
        interpret=interpret,
    )(q_BTHA, pages_KPCE, ids_BLM, *tokens)
    if plan.splits == 1:
        return result[0][:, 0]
    return _combine(plan, K, *result).astype(out_dtype)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All sizes of one call. Queries of a row block: `queries`; its rows are (query, head of the group)."""

    T: int
    G: int
    A: int
    C: int
    M: int
    dtype: str
    queries: int
    rows: int
    row_blocks: int
    tile: int
    stages: int
    split_tiles: int
    splits: int

    @classmethod
    def make(cls, T: int, G: int, A: int, C: int, M: int, dtype, blocks: Blocks) -> 'Plan':
        dtype = jnp.dtype(dtype)
        queries = min(T, MAX_ROWS[dtype.name] // G)
        tile = blocks.tile_tokens
        split_tiles = max(blocks.split_tokens // tile, 1)
        return cls(
            T=T,
            G=G,
            A=A,
            C=C,
            M=M,
            dtype=dtype.name,
            queries=queries,
            rows=-(-queries * G // ROW_MULTIPLE) * ROW_MULTIPLE,
            row_blocks=-(-T // queries),
            tile=tile,
            stages=blocks.stages if dtype.itemsize == 2 else 2,  # as many as fit
            split_tiles=split_tiles,
            splits=max(-(-M * C // (split_tiles * tile)), 1),
        )

    @property
    def terms(self) -> tuple[tuple[int, int], ...]:
        return _TERMS[self.dtype]

    @property
    def parts(self) -> int:
        """bfloat16 terms that an operand is made of."""
        return 1 + max(i for i, _ in self.terms)

    def tokens(self, count: jax.Array, length: jax.Array) -> jax.Array:
        """That `count` pages hold, the last of which ends where a sequence of `length` tokens does."""
        tokens = (count - 1) * self.C + lax.rem(length - 1, jnp.int32(self.C)) + 1
        return jnp.where((count > 0) & (length > 0), tokens, 0)

    def scratch(self, out_dtype: jnp.dtype) -> dict[str, object]:
        swizzled = lambda columns: (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
        bf16 = lambda *shape: plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(64))
        width = 128 // jnp.dtype(self.dtype).itemsize
        kept = {
            'kv': plgpu.SMEM((self.stages, self.tile, 2 * self.A), self.dtype, transforms=swizzled(width)),
            'q_given': row_memory(self.rows, self.A, self.dtype),
            'q': bf16(self.parts, self.rows, self.A),
            'weights': bf16(self.parts, self.rows, self.tile),
            'o': row_memory(self.rows, self.A, out_dtype),
            'full': plgpu.Barrier(num_arrivals=max(self.tile // self.C, 1), num_barriers=self.stages),
            'empty': plgpu.Barrier(num_barriers=self.stages),
            'q_full': plgpu.Barrier(num_arrivals=self.queries),
        }
        if self.parts > 1:
            kept['split'] = bf16(self.parts, self.tile, self.A)
        return kept


def _body(plan: Plan, numbers: int, q_BTHA, pages_KPCE, ids_BLM, *refs, **scratch) -> None:
    wait_for_previous()
    b, k = lax.axis_index('sequence'), lax.axis_index('head')
    ids_M = ids_BLM.at[b, 0 if ids_BLM.shape[1] == 1 else k]
    outputs = [out.at[b] for out in refs[numbers:]]
    attend(plan, k, q_BTHA.at[b], pages_KPCE.at[k], ids_M, _tokens(plan, b, k, *refs[:numbers]), outputs, scratch)


def attend(plan: Plan, k, q_THA, pages_PCE, ids_M, tokens, outputs, scratch) -> None:
    """What a thread block does for one sequence and KV head k, with references to what is theirs.

    Args:
        tokens: that the listed pages hold.
        outputs: of `kernel`, of the sequence.
        scratch: of `Plan.scratch`.
    """
    split, row_block = lax.axis_index('split'), lax.axis_index('row_block')
    first = split * plan.split_tiles
    last = jnp.minimum(first + plan.split_tiles, pl.cdiv(tokens, jnp.int32(plan.tile)))

    @pl.when(lax.axis_index('warpgroup') == 1)
    def _():
        _copy_tiles(plan, pages_PCE, ids_M, tokens, first, last, scratch)

    @pl.when(lax.axis_index('warpgroup') == 0)
    def _():
        _load_queries(plan, q_THA, k, scratch)
        o_AR, top_R, total_R = _attend_tiles(plan, tokens, first, last, scratch)
        if plan.splits == 1:
            o_AR = o_AR / lax.broadcast_in_dim(jnp.maximum(total_R, 1e-30), o_AR.shape, (1,))
        else:
            _, top_out, total_out = outputs
            top_out[k, row_block, split] = top_R
            total_out[k, row_block, split] = total_R
        _store_queries(plan, o_AR, outputs[0].at[split], k, scratch['o'])


def _tokens(plan: Plan, b, k, first, length_B=None):
    """Tokens that the listed pages hold, of either form of `tokens`."""
    if length_B is None:
        return first[b, 0 if first.shape[1] == 1 else k]
    return plan.tokens(jnp.minimum(first[b], plan.M), length_B[b])


def _copy_tiles(plan: Plan, pages_PCE, ids_M, tokens, first, last, scratch) -> None:
    kv, full, empty = scratch['kv'], scratch['full'], scratch['empty']
    # What one copy brings: a page, or the part of one that is a tile.
    unit = min(plan.C, plan.tile)
    copies, units_of_page = plan.tile // unit, plan.C // unit
    count = pl.cdiv(tokens, jnp.int32(unit))

    def ids_of(step):
        start = (first + step) * copies
        return [ids_M[jnp.minimum((start + i) // units_of_page, plan.M - 1)] for i in range(copies)]

    def start_copies(step, slot, ids):
        start = (first + step) * copies
        for i, page in enumerate(ids):
            part = pl.ds((start + i) % units_of_page * unit, unit)
            here = pages_PCE.at[page] if units_of_page == 1 else pages_PCE.at[page, part]
            there = kv.at[slot, pl.ds(i * unit, unit)]

            @pl.when(start + i < count)
            def _(here=here, there=there):
                plgpu.copy_gmem_to_smem(here, there, full.at[slot])

            pl.when(start + i >= count)(lambda: plgpu.barrier_arrive(full.at[slot]))

    # All ids that are needed at once are asked for before the first is used: each takes most of a microsecond.
    for step, ids in enumerate([ids_of(step) for step in range(plan.stages)]):
        pl.when(first + step < last)(functools.partial(start_copies, step, step, ids))

    @pl.loop(plan.stages, last - first)
    def _(step):
        slot = lax.rem(step, jnp.int32(plan.stages))
        ids = ids_of(step)
        plgpu.barrier_wait(empty.at[slot])
        start_copies(step, slot, ids)

    let_next_start()


def _each_query(plan: Plan, act) -> None:
    """act(rows of the block, query number) for the block's queries that exist."""
    start = lax.axis_index('row_block') * plan.queries
    for i in range(plan.queries):
        rows = pl.ds(i * plan.G, plan.G)
        if plan.T % plan.queries == 0:
            act(rows, start + i)
        else:
            pl.when(start + i < plan.T)(functools.partial(act, rows, start + i))


def _load_queries(plan: Plan, q_THA, k, scratch) -> None:
    q_given, q, q_full = scratch['q_given'], scratch['q'], scratch['q_full']
    heads = pl.ds(k * plan.G, plan.G)
    start = lax.axis_index('row_block') * plan.queries
    for i in range(plan.queries):
        # The last block's missing queries are the last one again: every arrival is waited for.
        t = jnp.minimum(start + i, plan.T - 1)
        plgpu.copy_gmem_to_smem(q_THA.at[t, heads], q_given.at[pl.ds(i * plan.G, plan.G)], q_full)
    plgpu.barrier_wait(q_full)
    q_AR = load_transposed(q_given, layout=plgpu.Layout.WGMMA_TRANSPOSED)
    _store_terms(q_AR, [q.at[i] for i in range(plan.parts)], transposed=True)


def _attend_tiles(plan: Plan, tokens, first, last, scratch):
    """(o_AR unnormalized, largest score by row in powers of two, sum of weights by row)."""
    L, rows = plgpu.Layout.WGMMA, (plan.rows,)
    row_layout = L.reduce(0)
    scale = plan.A**-0.5 * math.log2(math.e)

    def visit(masked, step, state):
        o_AR, top_R, total_SR = state
        slot = lax.rem(step, jnp.int32(plan.stages))
        plgpu.barrier_wait(scratch['full'].at[slot])
        kv_SE = scratch['kv'].at[slot]
        start = (first + step) * plan.tile
        keys = _terms_of(plan, kv_SE, pl.ds(0, plan.A), scratch, None)
        factors = [(Operand(keys[i]), Operand(scratch['q'].at[j], transposed=True)) for i, j in plan.terms]
        score_SR = product((plan.tile, plan.rows), factors) * scale
        if masked:
            score_SR = jnp.where(_seen(plan, tokens, start), score_SR, -jnp.inf)
        new_top_R = jnp.maximum(top_R, score_SR.max(axis=0))
        weight_SR = jnp.exp2(score_SR - lax.broadcast_in_dim(new_top_R, score_SR.shape, (1,)))
        keep_R = jnp.exp2(top_R - new_top_R)
        weights = [scratch['weights'].at[i] for i in range(plan.parts)]
        _store_terms(weight_SR, weights, transposed=True)
        values = _terms_of(plan, kv_SE, pl.ds(plan.A, plan.A), scratch, tokens - start if masked else None)
        factors = [(Operand(values[i], transposed=True), Operand(weights[j], transposed=True)) for i, j in plan.terms]
        more_AR = product((plan.A, plan.rows), factors)
        plgpu.barrier_arrive(scratch['empty'].at[slot])
        return (
            o_AR * lax.broadcast_in_dim(keep_R, o_AR.shape, (1,)) + more_AR,
            new_top_R,
            total_SR * lax.broadcast_in_dim(keep_R, total_SR.shape, (1,)) + weight_SR,
        )

    state = (
        layout_cast(jnp.zeros((plan.A, plan.rows), jnp.float32), L),
        layout_cast(jnp.full(rows, _FAR_BELOW, jnp.float32), row_layout),
        layout_cast(jnp.zeros((plan.tile, plan.rows), jnp.float32), L),
    )
    # Tiles that every row sees whole need no mask.
    whole = jnp.clip((tokens - plan.T + 1) // plan.tile, first, jnp.maximum(last, first)) - first
    state = lax.fori_loop(0, whole, functools.partial(visit, False), state)
    o_AR, top_R, total_SR = lax.fori_loop(whole, last - first, functools.partial(visit, True), state)
    return o_AR, top_R, total_SR.sum(axis=0)


def _seen(plan: Plan, tokens, start) -> jax.Array:
    """Which of a tile's tokens each row sees."""
    shape = (plan.tile, plan.rows)
    token_SR = start + iota(shape, 0, layout=plgpu.Layout.WGMMA)
    if plan.T == 1:
        return token_SR < tokens
    row_SR = iota(shape, 1, layout=plgpu.Layout.WGMMA)
    query_SR = lax.axis_index('row_block') * plan.queries + row_SR // plan.G
    return token_SR < tokens - plan.T + 1 + query_SR


def _terms_of(plan: Plan, kv_SE, lanes, scratch, valid) -> list:
    """References to the bfloat16 terms of a tile's keys or values. valid: tokens from there on become zeros."""
    half_SA = kv_SE.at[:, lanes]
    if valid is None and plan.parts == 1:
        return [half_SA]
    half = half_SA[...]
    half = layout_cast(half, plgpu.Layout.WGMMA)
    if valid is not None:
        # Zero times NaN would leak what unused memory holds.
        token_SA = iota(half.shape, 0, layout=plgpu.Layout.WGMMA)
        half = jnp.where(token_SA < valid, half, jnp.zeros_like(half))
    terms = [half_SA] if plan.parts == 1 else [scratch['split'].at[i] for i in range(plan.parts)]
    _store_terms(half, terms)
    return terms


def _store_terms(array: jax.Array, terms: list, *, transposed: bool = False) -> None:
    """Writes a matrix, or its transpose, as a sum of bfloat16 terms."""
    rest = array.astype(jnp.float32)
    for i, term in enumerate(terms):
        rounded = rest.astype(jnp.bfloat16)
        if transposed:
            store_transposed(term, rounded)
        else:
            term[...] = rounded
        if i + 1 < len(terms):
            rest = rest - rounded.astype(jnp.float32)
    plgpu.commit_smem()


def _store_queries(plan: Plan, o_AR, out_THA, k, o) -> None:
    store_transposed(o, o_AR.astype(o.dtype))
    plgpu.commit_smem()
    heads = pl.ds(k * plan.G, plan.G)
    _each_query(plan, lambda rows, t: plgpu.copy_smem_to_gmem(o.at[rows], out_THA.at[t, heads]))
    plgpu.wait_smem_to_gmem(0)


def _combine(plan: Plan, K: int, o_BsTHA, top_BKbsR, total_BKbsR) -> jax.Array:
    """One result from the splits'."""
    B, s, T, H, _ = o_BsTHA.shape
    used = plan.queries * plan.G

    def by_query(x_BKbsR):
        x = x_BKbsR[..., :used].reshape(B, K, plan.row_blocks, s, plan.queries, plan.G)
        return x.transpose(0, 3, 2, 4, 1, 5).reshape(B, s, plan.row_blocks * plan.queries, H)[:, :, :T]

    top_BsTH, total_BsTH = by_query(top_BKbsR), by_query(total_BKbsR)
    weight_BsTH = jnp.exp2(top_BsTH - top_BsTH.max(axis=1, keepdims=True))
    total_BTH = (weight_BsTH * total_BsTH).sum(axis=1)
    o_BTHA = (weight_BsTH[..., None] * o_BsTHA).sum(axis=1)
    return o_BTHA / jnp.maximum(total_BTH, 1e-30)[..., None]
