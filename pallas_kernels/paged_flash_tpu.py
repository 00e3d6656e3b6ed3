"""Attention over lists of pages on TPU: the kernel that sparse_decode and dense_decode share.

A program takes the tiles of some units off the stream of `page_stream_tpu`, with a running softmax for each unit.

The even tiles of the stream have buffers apart from the odd ones, and a program has its code once for each: only then
does the compiler know that the copies it starts leave alone the tile it reads, and packs both into the same
instructions. Starting a copy takes scalar instructions alone, attention nearly none.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.page_stream_tpu import CELLS, LISTS_HELD, Launch, Sizes, Stream, by_parity
from pallas_kernels.pallas_tpu import LANES, interpreter

_NOTHING_SEEN = -1e30  # the running maximum at the start: finite, so that rows that see no token stay free of NaN


def _clear(sizes: Sizes, tile_ref, left):
    """Zeros for the values of what is no token in a tile with `left` tokens: zero weight times NaN would leak it.

    It may be unused memory, or tokens of another sequence that were copied there before. Keys are masked as scores.
    """

    @pl.when(left < sizes.tile_tokens)
    def _():
        part_tokens = sizes.part_pages * sizes.page_tokens

        @pl.loop(left // part_tokens, sizes.tile_pages // sizes.part_pages)
        def _(part):
            here = (
                pl.ds(part * sizes.part_pages, sizes.part_pages),
                slice(None),
                pl.ds(tile_ref.shape[-1] - LANES, LANES),
            )
            v_NCL = tile_ref[here]
            page_NCL, place_NCL = (lax.broadcasted_iota(jnp.int32, v_NCL.shape, axis) for axis in (0, 1))
            token_NCL = part * part_tokens + page_NCL * sizes.page_tokens + place_NCL
            tile_ref[here] = jnp.where(token_NCL < left, v_NCL, jnp.zeros_like(v_NCL))


def _attend_tile(sizes: Sizes, scale, q_RL, kv_SE, left, row, top_ref, total_ref, o_ref):
    """One step of the running softmax for a block of rows.

    Args:
        sizes: of the kernel.
        scale: of the scores.
        q_RL: queries, in the lanes that the key takes; heads of 64 share those with the value, against zeros.
        kv_SE: the tile.
        left: tokens of the unit from the tile's first on.
        row: of the unit, the block's first one.
        top_ref, total_ref, o_ref: running maximum, sum of weights and weighted sum of values, in all lanes.
    """
    precision = lax.Precision.HIGHEST if kv_SE.dtype == jnp.float32 else None
    k_SL, v_SL = kv_SE[:, :LANES], kv_SE[:, -LANES:]
    score_RS = lax.dot_general(
        q_RL, k_SL, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    place_RS = lax.broadcasted_iota(jnp.int32, score_RS.shape, 1)
    seen = left
    if sizes.queries > 1:
        query_RS = (row + lax.broadcasted_iota(jnp.int32, score_RS.shape, 0)) // sizes.group
        seen = jnp.minimum(left - sizes.queries + 1 + query_RS, left)  # rows that only fill a block come after T
    score_RS = jnp.where(place_RS < seen, score_RS * scale, -jnp.inf)
    top_RL = top_ref[...]
    new_top_RL = jnp.maximum(top_RL, score_RS.max(axis=1, keepdims=True))
    keep_RL = jnp.exp(top_RL - new_top_RL)
    weight_RS = jnp.exp(score_RS - new_top_RL[:, :1])
    top_ref[...] = new_top_RL
    total_ref[...] = total_ref[...] * keep_RL + weight_RS.sum(axis=1, keepdims=True)
    o_ref[...] = o_ref[...] * keep_RL + lax.dot_general(
        weight_RS.astype(v_SL.dtype),
        v_SL,
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _kernel(
    tokens_ref,
    lists_ref,
    q_ref,
    pages_ref,
    out_ref,
    even_ref,
    odd_ref,
    ids_ref,
    top_ref,
    total_ref,
    o_ref,
    state,
    page_sem,
    ids_sem,
    *,
    sizes: Sizes,
    scale: float,
):
    step = pl.program_id(1)
    tile_refs = even_ref, odd_ref
    stream = Stream(sizes, tokens_ref, lists_ref, pages_ref, tile_refs, page_sem, ids_ref, ids_sem, state)
    stream.open(step)

    @pl.loop(0, sizes.units)
    def _(unit):
        tokens = stream.tokens(step, unit)
        top_ref[...] = jnp.full_like(top_ref, _NOTHING_SEEN)
        total_ref[...] = jnp.zeros_like(total_ref)
        o_ref[...] = jnp.zeros_like(o_ref)

        @pl.loop(0, stream.tiles(tokens))
        def _(tile):
            stream.fill(step)
            buffer = stream.wait(tokens, tile)
            copy = stream.next_copy(step)
            left = tokens - tile * sizes.tile_tokens

            def visit(parity):
                tile_ref = tile_refs[parity].at[buffer // 2]
                _clear(sizes, tile_ref, left)
                # As the number of buffers is even, the last one read, free now, is among the others.
                stream.start(copy, 1 - parity)

                def attend(block):
                    row = block * sizes.rows
                    here = pl.ds(row, sizes.rows)
                    kv_SE = tile_ref[...].reshape(sizes.tile_tokens, tile_ref.shape[-1])
                    refs = top_ref.at[here], total_ref.at[here], o_ref.at[here]
                    _attend_tile(sizes, scale, q_ref[unit, here], kv_SE, left, row, *refs)

                if sizes.row_blocks == 1:
                    attend(0)  # beside the starts, where a loop would keep both apart
                else:
                    pl.loop(0, sizes.row_blocks)(attend)

            by_parity(buffer, visit)
            stream.leave(buffer)

        o_RL = o_ref[...] / jnp.maximum(total_ref[...], 1e-30)
        out_ref[unit] = o_RL[:, LANES - out_ref.shape[-1] :].astype(out_ref.dtype)


def attend_lists(
    q_BKRA: jax.Array,
    pages_KPCE: jax.Array,
    lists_BLM: jax.Array,
    tokens_BL: jax.Array,
    *,
    queries: int,
    launch: Launch,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Attention of every row to the first tokens of its page list.

    Args:
        q_BKRA: rows t * G + g of each KV head, unscaled.
        pages_KPCE: the pool.
        lists_BLM: int32 physical pages, L = K lists a sequence or one for all its heads.
        tokens_BL: int32 tokens of each list.
        queries: T; rows of query t see tokens - T + 1 + t tokens.
        launch: how to run.
        out_dtype: of the result.

    Returns:
        o_BKRA; zeros where nothing is seen.
    """
    B, K, R, A = q_BKRA.shape
    P, C, E = pages_KPCE.shape[1:]
    M = lists_BLM.shape[-1]
    sizes = Sizes.of(launch, q_BKRA, pages_KPCE, lists_BLM, queries)
    padded = sizes.rows * sizes.row_blocks
    # Whatever the lists hold, nothing outside the pool is read.
    lists_BLM = jnp.clip(lists_BLM, 0, P - 1)
    if sizes.share == 1:
        lists_BLM += jnp.arange(K)[:, None] * P
    lists_BLM = jnp.pad(lists_BLM, ((0, 0), (0, 0), (0, sizes.list_pages - M)))
    q_BKRL = jnp.pad(q_BKRA, ((0, 0), (0, 0), (0, padded - R), (0, LANES - A)))

    programs = sizes.cores * sizes.steps
    of_program = lambda core, step, *_: (core * sizes.steps + step, 0, 0, 0)
    tiles = pltpu.VMEM((sizes.tiles_held // 2, sizes.tile_pages, C, E), pages_KPCE.dtype)
    running = pltpu.VMEM((padded, LANES), jnp.float32)
    o = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes, scale=A**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(sizes.cores, sizes.steps),
            in_specs=[
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec((None, sizes.units, padded, LANES), of_program),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((None, sizes.units, padded, A), of_program),
            scratch_shapes=[
                tiles,
                tiles,
                pltpu.SMEM((LISTS_HELD * sizes.lists * sizes.list_pages,), jnp.int32),
                running,
                running,
                running,
                pltpu.SMEM((CELLS,), jnp.int32),
                pltpu.SemaphoreType.DMA((sizes.tiles_held,)),
                pltpu.SemaphoreType.DMA((LISTS_HELD,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((programs, sizes.units, padded, A), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'),
            vmem_limit_bytes=launch.blocks.vmem_bytes,
            disable_bounds_checks=True,  # a check takes longer than the copy that it guards; ids are clipped above
        ),
        interpret=interpreter(launch.interpret),
        name='attend_lists',
    )(
        jnp.clip(tokens_BL, 0, M * C).reshape(-1),
        lists_BLM.reshape(-1),
        q_BKRL.reshape(programs, sizes.units, padded, LANES),
        pages_KPCE.reshape(K * P, C, E),
    )
    return o.reshape(B, K, padded, A)[:, :, :R]
