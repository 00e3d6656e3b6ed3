"""The operation's three steps on Hopper: the choice of pages in `selection_gpu`, flash attention over lists of tiles.

A thread block of the attention is one warpgroup that does nothing but start copies, a few tiles ahead, and two that
multiply, each a tile of its own: 64 queries in `forward` and for dq, 64 keys for dk and dv, which stay in registers
over all queries and heads of the group. Probabilities never leave registers but as factors of a product.

The bit mask costs little: a tile of keys has all its pages in one word of it, so that each query's word comes with the
tile, and which bit belongs to a register is known when the kernel is compiled. Tiles that no query of a block reads are
in no list; only those on the diagonal compare positions.

float32 tensors, which tests have, are handed to `blocked`: the tensor cores would round them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_gpu import Operand, add_products, iota, kernel, layout_cast, load, product
from pallas_kernels.sparse_prefill import blocked
from pallas_kernels.sparse_prefill.selection import padded
from pallas_kernels.sparse_prefill.selection_gpu import page_mask
from pallas_kernels.sparse_prefill.tiles_gpu import (
    COLUMN,
    LOG2_E,
    MATRIX,
    QUERY_STAGES,
    ROW,
    ROWS,
    TILE,
    WARPGROUPS,
    Lists,
    Plan,
    QueryBlock,
    drain,
    in_roles,
    zeros,
)

__all__ = ('backward', 'forward', 'page_mask')

_FAR_BELOW = -1e30  # stands for minus infinity where a difference of two is taken


@functools.partial(jax.jit, static_argnames=('page_tokens', 'interpret'), inline=True)  # once for all layers
def forward(q_BTHA, k_BTKA, v_BTKA, mask_BKWT, *, page_tokens, interpret):
    """`blocked.forward`."""
    if k_BTKA.dtype == jnp.float32:
        return blocked.forward(q_BTHA, k_BTKA, v_BTKA, mask_BKWT, page_tokens=page_tokens)
    B, T, H, A = q_BTHA.shape
    plan, lists = _planned(q_BTHA, k_BTKA, mask_BKWT, page_tokens)
    o_BTHA, lse_BHT = kernel(
        functools.partial(_attend, plan),
        out_type=(
            jax.ShapeDtypeStruct((B, plan.tokens, H, A), jnp.float32),
            jax.ShapeDtypeStruct((B, H, plan.tokens), jnp.float32),
        ),
        **plan.blocks(H),
        scratch_types=plan.query_scratch(1),
        name='sparse_prefill_forward',
        interpret=interpret,
    )(*(padded(x, 1, TILE) for x in (q_BTHA, k_BTKA, v_BTKA)), lists.mask_BKWT, *lists.keys_of_queries())
    return o_BTHA[:, :T], lse_BHT[..., :T]


@functools.partial(jax.jit, static_argnames=('page_tokens', 'interpret'), inline=True)  # once for all layers
def backward(q_BTHA, k_BTKA, v_BTKA, mask_BKWT, lse_BHT, delta_BHT, do_BTHA, *, page_tokens, interpret):
    """`blocked.backward`."""
    if k_BTKA.dtype == jnp.float32:
        return blocked.backward(q_BTHA, k_BTKA, v_BTKA, mask_BKWT, lse_BHT, delta_BHT, do_BTHA, page_tokens=page_tokens)
    T = q_BTHA.shape[1]
    plan, lists = _planned(q_BTHA, k_BTKA, mask_BKWT, page_tokens)
    q_BTHA, k_BTKA, v_BTKA, do_BTHA = (
        padded(x, 1, TILE) for x in (q_BTHA, k_BTKA, v_BTKA, do_BTHA.astype(q_BTHA.dtype))
    )
    less_BHT = lse_BHT * -LOG2_E  # what is added to scores
    operands = (q_BTHA, k_BTKA, v_BTKA, do_BTHA, padded(less_BHT, 2, TILE), padded(delta_BHT, 2, TILE), lists.mask_BKWT)
    dq_BTHA = kernel(
        functools.partial(_query_gradient, plan),
        out_type=jax.ShapeDtypeStruct(q_BTHA.shape, q_BTHA.dtype),
        **plan.blocks(plan.heads),
        scratch_types=plan.query_scratch(2),
        name='sparse_prefill_dq',
        interpret=interpret,
    )(*operands, *lists.keys_of_queries())
    dk_BTKA, dv_BTKA = kernel(
        functools.partial(_key_gradients, plan),
        out_type=(jax.ShapeDtypeStruct(k_BTKA.shape, k_BTKA.dtype),) * 2,
        **plan.blocks(plan.kv_heads),
        scratch_types=plan.key_scratch(),
        name='sparse_prefill_dkv',
        interpret=interpret,
    )(*operands, *lists.queries_of_keys())
    return dq_BTHA[:, :T], dk_BTKA[:, :T], dv_BTKA[:, :T]


def _planned(q_BTHA, k_BTKA, mask_BKWT, page_tokens) -> tuple[Plan, Lists]:
    plan = Plan.make(q_BTHA, k_BTKA, page_tokens)
    return plan, Lists(plan, mask_BKWT)


def _attend(plan, q_BTHA, k_BTKA, v_BTKA, mask_BKWT, ids_BKIJ, count_BKI, o_BTHA, lse_BHT, **scratch):
    block = QueryBlock(plan, mask_BKWT, ids_BKIJ, count_BKI, scratch)

    def multiply(warpgroup):
        (q_TA,) = block.copy_queries(warpgroup, q_BTHA)

        def visit(slot, masked, state):
            o_TA, top_T, total_T = state
            k_SA, v_SA = scratch['k'].at[slot], scratch['v'].at[slot]
            score_TS = masked(product((ROWS, TILE), [(Operand(q_TA), Operand(k_SA, transposed=True))]))
            plgpu.barrier_arrive(scratch['k_empty'].at[slot])
            new_top_T = jnp.maximum(top_T, score_TS.max(axis=1) * plan.scale)
            weight_TS = jnp.exp2(score_TS * plan.scale - lax.broadcast_in_dim(new_top_T, score_TS.shape, (0,)))
            keep_T = jnp.exp2(top_T - new_top_T)
            total_T = total_T * keep_T + weight_TS.sum(axis=1)
            o_TA = o_TA * lax.broadcast_in_dim(keep_T, o_TA.shape, (0,))
            weight_TS = weight_TS.astype(jnp.bfloat16)
            plgpu.barrier_wait(scratch['v_full'].at[slot])
            (o_TA,) = add_products([o_TA], [(weight_TS, Operand(v_SA))])
            plgpu.barrier_arrive(scratch['v_empty'].at[slot])
            return o_TA, new_top_T, total_T

        row = lambda value: layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)
        state = zeros(ROWS, plan.head_dim), row(_FAR_BELOW), row(0.0)
        o_TA, top_T, total_T = block.over_keys(warpgroup, visit, state)
        nothing_T = total_T == 0
        total_T = jnp.where(nothing_T, 1.0, total_T)
        part_TA = lax.broadcast_in_dim(1 / total_T, o_TA.shape, (0,))
        queries = block.queries(warpgroup)
        o_BTHA.at[block.b, queries, block.h][...] = o_TA * part_TA
        lse_T = (top_T + jnp.log2(total_T)) * (1 / LOG2_E)
        lse_BHT.at[block.b, block.h, queries][...] = jnp.where(nothing_T, 0.0, lse_T)

    in_roles(lambda: block.copy_keys(k_BTKA, v_BTKA), multiply)


def _query_gradient(
    plan, q_BTHA, k_BTKA, v_BTKA, do_BTHA, less_BHT, delta_BHT, mask_BKWT, ids_BKIJ, count_BKI, dq_BTHA, **scratch
):
    block = QueryBlock(plan, mask_BKWT, ids_BKIJ, count_BKI, scratch)

    def multiply(warpgroup):
        q_TA, do_TA = block.copy_queries(warpgroup, q_BTHA, do_BTHA)
        b, queries, h = block.b, block.queries(warpgroup), block.h
        shape = ROWS, TILE

        def rows(row_BHT):
            return lax.broadcast_in_dim(load(row_BHT.at[b, h, queries], layout=ROW, optimized=False), shape, (0,))

        less_TS, delta_TS = rows(less_BHT), rows(delta_BHT)

        def visit(slot, masked, dq_TA):
            k_SA, v_SA = scratch['k'].at[slot], scratch['v'].at[slot]
            plgpu.barrier_wait(scratch['v_full'].at[slot])
            score_TS, dweight_TS = add_products(
                [zeros(*shape)] * 2,
                [(Operand(q_TA), Operand(k_SA, transposed=True)), (Operand(do_TA), Operand(v_SA, transposed=True))],
            )
            plgpu.barrier_arrive(scratch['v_empty'].at[slot])
            weight_TS = jnp.exp2(masked(score_TS * plan.scale + less_TS))
            dscore_TS = (weight_TS * (dweight_TS - delta_TS)).astype(jnp.bfloat16)
            (dq_TA,) = add_products([dq_TA], [(dscore_TS, Operand(k_SA))])
            plgpu.barrier_arrive(scratch['k_empty'].at[slot])
            return dq_TA

        dq_TA = block.over_keys(warpgroup, visit, zeros(ROWS, plan.head_dim))
        q_TA[...] = (dq_TA * plan.head_dim**-0.5).astype(q_TA.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_TA, dq_BTHA.at[b, queries, h])
        plgpu.wait_smem_to_gmem(0)

    in_roles(lambda: block.copy_keys(k_BTKA, v_BTKA), multiply)


def _key_gradients(
    plan,
    q_BTHA,
    k_BTKA,
    v_BTKA,
    do_BTHA,
    less_BHT,
    delta_BHT,
    mask_BKWT,
    ids_BKJI,
    count_BKJ,
    dk_BTKA,
    dv_BTKA,
    **scratch,
):
    b, k = lax.axis_index('sequence'), lax.axis_index('head')
    tile = lax.axis_index('block')  # the first keys, which are read by the most queries, start first
    words_T, ids_I = mask_BKWT.at[b, k, plan.word_of(tile)], ids_BKJI.at[b, k, tile]
    steps = count_BKJ[b, k, tile] * plan.group  # the heads of the group in turn, then the next queries

    def queries_of(step):
        return ids_I[lax.div(step, jnp.int32(plan.group))]

    def copy():
        def visit(step, query_tile):
            slot = lax.rem(step, jnp.int32(QUERY_STAGES))
            next_tile = queries_of(jnp.minimum(step + 1, steps - 1))  # asked for before it is needed
            h = k * plan.group + lax.rem(step, jnp.int32(plan.group))
            queries = pl.ds(query_tile * ROWS, ROWS)

            @pl.when(step >= QUERY_STAGES)
            def _():
                plgpu.barrier_wait(scratch['empty'].at[slot])

            def bring(ref, name, full):
                plgpu.copy_gmem_to_smem(ref, scratch[name].at[slot], scratch[full].at[slot])

            bring(q_BTHA.at[b, queries, h], 'q', 'q_full')
            bring(less_BHT.at[b, h, queries], 'less', 'q_full')
            bring(words_T.at[queries], 'words', 'q_full')
            bring(do_BTHA.at[b, queries, h], 'do', 'do_full')
            bring(delta_BHT.at[b, h, queries], 'delta', 'do_full')
            return next_tile

        lax.fori_loop(0, steps, visit, queries_of(0))
        drain(steps, QUERY_STAGES, scratch['empty'])

    def multiply(warpgroup):
        keys = (b, pl.ds(tile * TILE + warpgroup * ROWS, ROWS), k)
        k_SA, v_SA = scratch['k'].at[warpgroup], scratch['v'].at[warpgroup]
        for x_BTKA, ref in ((k_BTKA, k_SA), (v_BTKA, v_SA)):
            plgpu.copy_gmem_to_smem(x_BTKA.at[keys], ref, scratch['keys_full'].at[warpgroup])
        plgpu.barrier_wait(scratch['keys_full'].at[warpgroup])
        shape = ROWS, ROWS
        columns = lambda ref: lax.broadcast_in_dim(load(ref, layout=COLUMN, optimized=False), shape, (1,))

        def visit(on_diagonal, step, state):
            dk_SA, dv_SA = state
            slot = lax.rem(step, jnp.int32(QUERY_STAGES))
            q_TA, do_TA = scratch['q'].at[slot], scratch['do'].at[slot]
            plgpu.barrier_wait(scratch['q_full'].at[slot])
            plgpu.barrier_wait(scratch['do_full'].at[slot])
            score_ST, dweight_ST = add_products(
                [zeros(*shape)] * 2,
                [(Operand(k_SA), Operand(q_TA, transposed=True)), (Operand(v_SA), Operand(do_TA, transposed=True))],
            )
            key_ST = warpgroup * ROWS + iota(shape, 0, layout=MATRIX)
            reads_ST = plan.has_bit(columns(scratch['words'].at[slot]), key_ST + plan.bit_of(tile) * plan.page_tokens)
            if on_diagonal:
                reads_ST &= key_ST <= lax.div(step, jnp.int32(plan.group)) * ROWS + iota(shape, 1, layout=MATRIX)
            score_ST = score_ST * plan.scale + columns(scratch['less'].at[slot])
            weight_ST = jnp.exp2(jnp.where(reads_ST, score_ST, -jnp.inf))
            dscore_ST = weight_ST * (dweight_ST - columns(scratch['delta'].at[slot]))
            weight_ST, dscore_ST = weight_ST.astype(jnp.bfloat16), dscore_ST.astype(jnp.bfloat16)
            dv_SA, dk_SA = add_products([dv_SA, dk_SA], [(weight_ST, Operand(do_TA)), (dscore_ST, Operand(q_TA))])
            plgpu.barrier_arrive(scratch['empty'].at[slot])
            return dk_SA, dv_SA

        state = (zeros(ROWS, plan.head_dim),) * 2
        on_diagonal = WARPGROUPS * plan.group
        state = lax.fori_loop(0, on_diagonal, functools.partial(visit, True), state)
        dk_SA, dv_SA = lax.fori_loop(on_diagonal, steps, functools.partial(visit, False), state)
        k_SA[...] = (dk_SA * plan.head_dim**-0.5).astype(k_SA.dtype)
        v_SA[...] = dv_SA.astype(v_SA.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_SA, dk_BTKA.at[keys])
        plgpu.copy_smem_to_gmem(v_SA, dv_BTKA.at[keys])
        plgpu.wait_smem_to_gmem(0)

    in_roles(copy, multiply)
