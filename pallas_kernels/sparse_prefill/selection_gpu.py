"""The choice of pages for every query on Hopper: scores by the tensor cores, thresholds by counting, one kernel.

A thread block, one warpgroup, takes a few neighbouring queries of one KV head. It streams the landmarks of the pages
that the last of them sees through shared memory and leaves the scores there, as integers of the same order; `bisect`
then counts over them, all queries at once. Pages are dealt to rows of tiles in such a way that the bits of a word of
the mask meet in one thread: row r of a group's tile t is page 32 (r // 16 * 8 + r % 8) + 16 (r // 8 % 2) + t.

The queries' mean is multiplied as three bfloat16 terms, which keep its 24 bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_gpu import Operand, iota, kernel, layout_cast, load, product
from pallas_kernels.sparse_prefill import blocked
from pallas_kernels.sparse_prefill.selection import WORD_PAGES, bisect, contest, mean_query, padded, rivals, wins
from pallas_kernels.sparse_prefill.tiles_gpu import COLUMN, MATRIX, ROWS

_STATIC = ('page_tokens', 'reserved_first', 'reserved_last', 'interpret')
_TERMS = 3
_STAGES = 2
_TILES = WORD_PAGES // 2  # of a group: half of a word's pages are in other rows of the same tiles
_GROUP_PAGES = _TILES * ROWS
_KEY_BYTES = 176 << 10  # shared memory for keys; what is left holds landmarks and queries
_UNROLLED = 4  # tiles that are counted in at once


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)  # once for all layers of a model
def page_mask(q_BTHA, landmark_BKNA, length_B, budget_BT, *, page_tokens, reserved_first, reserved_last, interpret):
    """`blocked.page_mask`, which itself does what has no place on chip: float32, and rows of more than 5120 pages."""
    B, T, _, A = q_BTHA.shape
    K, N = landmark_BKNA.shape[1:3]
    groups = pl.cdiv(N, _GROUP_PAGES)
    fitting = [queries for queries in (16, 8) if 4 * groups * _GROUP_PAGES * queries <= _KEY_BYTES]
    statics = {'page_tokens': page_tokens, 'reserved_first': reserved_first, 'reserved_last': reserved_last}
    if landmark_BKNA.dtype == jnp.float32 or not fitting:
        return blocked.page_mask(q_BTHA, landmark_BKNA, length_B, budget_BT, **statics)
    queries = fitting[0]
    landmark_BKgwlhtA = padded(landmark_BKNA, 2, _GROUP_PAGES).reshape(B, K, groups, 4, 8, 2, _TILES, A)
    tiles_BKtRA = landmark_BKgwlhtA.transpose(0, 1, 2, 6, 3, 5, 4, 7).reshape(B, K, groups * _TILES, ROWS, A)
    blocks = pl.cdiv(T, queries)
    part_BKigRQ = kernel(
        functools.partial(_select, queries=queries, pages=N, **statics),
        out_type=jax.ShapeDtypeStruct((B, K, blocks, groups, ROWS, queries), jnp.int32),
        grid=(blocks, K, B),
        grid_names=('block', 'head', 'sequence'),
        scratch_types={
            'tiles': _matrices(_STAGES, ROWS, A),
            'terms': _matrices(_TERMS, queries, A),
            'keys': plgpu.SMEM((groups * _TILES, ROWS, queries), jnp.int32),
            'tile_full': plgpu.Barrier(num_barriers=_STAGES),
            'terms_full': plgpu.Barrier(num_arrivals=_TERMS),
        },
        name='sparse_prefill_page_mask',
        interpret=interpret,
    )(
        padded(_terms(mean_query(q_BTHA, K).swapaxes(2, 3)), 3, queries),
        tiles_BKtRA,
        length_B,
        padded(budget_BT, 1, queries),
    )
    word_BKigwlQ = part_BKigRQ.reshape(B, K, blocks, groups, 4, 2, 8, queries).sum(axis=5)
    mask_BKWT = word_BKigwlQ.transpose(0, 1, 3, 4, 5, 2, 6).reshape(B, K, groups * WORD_PAGES, blocks * queries)
    return mask_BKWT[:, :, : pl.cdiv(N, WORD_PAGES), :T]


def _matrices(*shape: int) -> Any:
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def _terms(mean_BKTA: jax.Array) -> jax.Array:
    """[B, K, terms, T, A], bfloat16, whose sum the argument is."""
    terms = []
    for _ in range(_TERMS):
        # A plain cast there and back may be taken for nothing.
        rounded_BKTA = lax.reduce_precision(mean_BKTA, exponent_bits=8, mantissa_bits=7)
        terms.append(rounded_BKTA.astype(jnp.bfloat16))
        mean_BKTA = mean_BKTA - rounded_BKTA
    return jnp.stack(terms, axis=2)


def _select(
    terms_BKxTA: Any,
    tiles_BKtRA: Any,
    length_B: Any,
    budget_BT: Any,
    part_BKigRQ: Any,
    *,
    queries: int,
    pages: int,
    page_tokens: int,
    reserved_first: int,
    reserved_last: int,
    tiles: Any,
    terms: Any,
    keys: Any,
    tile_full: Any,
    terms_full: Any,
) -> None:
    b, k, i = lax.axis_index('sequence'), lax.axis_index('head'), lax.axis_index('block')
    here = pl.ds(i * queries, queries)
    shape = ROWS, queries
    for term in range(_TERMS):
        plgpu.copy_gmem_to_smem(terms_BKxTA.at[b, k, term, here], terms.at[term], terms_full)
    length = length_B[b]
    seen = jnp.where(i * queries < length, jnp.minimum((i + 1) * queries, length), 0)  # tokens that the last query sees
    groups = lax.div(seen + (page_tokens * _GROUP_PAGES - 1), jnp.int32(page_tokens * _GROUP_PAGES))
    steps = groups * _TILES
    position_T = i * queries + layout_cast(lax.iota(jnp.int32, queries), COLUMN)
    position_T = jnp.where(position_T < length, position_T, -1)

    def on_rows(x_T):
        return lax.broadcast_in_dim(x_T, shape, (1,))

    def read(step):
        slot = lax.rem(step, jnp.int32(_STAGES))
        plgpu.copy_gmem_to_smem(tiles_BKtRA.at[b, k, step], tiles.at[slot], tile_full.at[slot])

    def pages_of(step):
        row_RT = iota(shape, 0, layout=MATRIX)
        word_RT = lax.div(row_RT, 16) * 8 + lax.rem(row_RT, 8)
        first = lax.div(step, jnp.int32(_TILES)) * _GROUP_PAGES + lax.rem(step, jnp.int32(_TILES))
        page_RT = first + word_RT * WORD_PAGES + lax.rem(lax.div(row_RT, 8), 2) * _TILES
        return page_RT, *rivals(on_rows(position_T), page_RT, page_tokens, reserved_first, reserved_last)

    for step in range(_STAGES):
        pl.when(step < steps)(functools.partial(read, jnp.int32(step)))
    plgpu.barrier_wait(terms_full)

    @pl.loop(0, steps)
    def _(step):
        slot = lax.rem(step, jnp.int32(_STAGES))
        plgpu.barrier_wait(tile_full.at[slot])
        # The least first, so that little of it is lost.
        factors = [(Operand(tiles.at[slot]), Operand(terms.at[x], transposed=True)) for x in reversed(range(_TERMS))]
        score_RT = product(shape, factors)
        pl.when(step + _STAGES < steps)(functools.partial(read, step + _STAGES))
        _, _, competes_RT, _ = pages_of(step)
        keys[step] = contest(score_RT, competes_RT)

    def key(step):
        return load(keys.at[step], layout=MATRIX, optimized=False)

    def count(chosen):
        def add(some, count_RT):
            for step in range(_UNROLLED):
                count_RT += jnp.where(chosen(some * _UNROLLED + step), 1, 0)
            return count_RT

        none_RT = layout_cast(jnp.zeros(shape, jnp.int32), MATRIX)
        return lax.fori_loop(0, groups * (_TILES // _UNROLLED), add, none_RT).sum(axis=0)

    budget_T = load(budget_BT.at[b, here], layout=COLUMN, optimized=False)
    competing_T = rivals(position_T, position_T, page_tokens, reserved_first, reserved_last)[2]
    threshold_T, limit_T = bisect(
        lambda threshold_T: count(lambda step: key(step) >= on_rows(threshold_T)),
        lambda threshold_T, limit_T: count(
            lambda step: (key(step) == on_rows(threshold_T)) & (pages_of(step)[0] < on_rows(limit_T))
        ),
        budget_T,
        competing_T,
        pages,
    )

    @pl.loop(0, part_BKigRQ.shape[3])
    def _(group):
        def add(tile, part_RT):
            step = group * _TILES + tile
            page_RT, reserved_RT, competes_RT, _ = pages_of(step)
            reads_RT = reserved_RT | (competes_RT & wins(key(step), page_RT, on_rows(threshold_T), on_rows(limit_T)))
            place_RT = lax.rem(page_RT, WORD_PAGES)
            return part_RT + jnp.where(reads_RT, lax.shift_left(jnp.ones_like(place_RT), place_RT), 0)

        tiles_seen = jnp.where(group < groups, _TILES, 0)
        part_RT = lax.fori_loop(0, tiles_seen, add, layout_cast(jnp.zeros(shape, jnp.int32), MATRIX))
        part_BKigRQ.at[b, k, i, group][...] = part_RT
