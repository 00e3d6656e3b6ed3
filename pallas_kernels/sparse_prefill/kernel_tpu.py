"""The operation's three steps on TPU: four kernels over pipelined blocks.

Everything has the queries in the lanes, [..., A, T] and scores [S, T]: maxima, sums and counts over keys and pages then
add registers, what belongs to a query (its words of the mask, denominator, threshold) is a row, and no block has to be
turned for the matrix unit but that of keys in one of five products. The transposes at the ends are left to XLA. A row
R is a pair of sequence and KV head; its G query heads share scores' masks.

Blocks of keys after the queries are not copied, and those of which no query of the block reads a page not computed on.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pallas_tpu import SUBLANES, interpreter
from pallas_kernels.sparse_prefill.selection import (
    WORD_PAGES,
    bisect,
    contest,
    key_tile,
    mean_query,
    pack,
    padded,
    rivals,
    tile_bits,
    tile_reads,
    wins,
)

QUERY_TILE = 256  # against 512 keys: 260 FLOP for each byte of them at G = 2, about what the chips ask for
KEY_PART = 256  # keys of a block computed on at once, so that most of what is made of them stays in registers' reach
SELECT_TILE = 128  # queries, one register wide, whose thresholds are searched together
PAGE_CHUNK = SUBLANES * WORD_PAGES  # pages whose bits fill one register for SELECT_TILE queries
VMEM_BYTES = 48 << 20
_LOWEST = float(jnp.finfo(jnp.float32).min)


def page_mask(q_BTHA, landmark_BKNA, length_B, budget_BT, *, page_tokens, reserved_first, reserved_last, interpret):
    """`blocked.page_mask`."""
    B, T, _, A = q_BTHA.shape
    K, N = landmark_BKNA.shape[1:3]
    words = pl.cdiv(N, WORD_PAGES)
    landmark_BKNA = padded(landmark_BKNA, 2, PAGE_CHUNK)
    chunks = landmark_BKNA.shape[2] // PAGE_CHUNK
    landmark_RcnA = landmark_BKNA.reshape(B * K, chunks, PAGE_CHUNK, A)
    mean_RAT = padded(mean_query(q_BTHA, K).reshape(B * K, A, T), 2, SELECT_TILE)
    budget_B1T = padded(budget_BT[:, None], 2, SELECT_TILE)
    tokens = mean_RAT.shape[2]
    mask_RcwT = pl.pallas_call(
        functools.partial(
            _select, kv_heads=K, pages=N, page_tokens=page_tokens, first=reserved_first, last=reserved_last
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B * K, tokens // SELECT_TILE),
            in_specs=[
                pl.BlockSpec((None, 1, SELECT_TILE), lambda r, i, _: (r // K, 0, i)),
                pl.BlockSpec((None, A, SELECT_TILE), lambda r, i, _: (r, 0, i)),
                pl.BlockSpec((None, chunks, PAGE_CHUNK, A), lambda r, *_: (r, 0, 0, 0)),
            ],
            out_specs=pl.BlockSpec((None, chunks, SUBLANES, SELECT_TILE), lambda r, i, _: (r, 0, 0, i)),
            scratch_shapes=[pltpu.VMEM((chunks, PAGE_CHUNK, SELECT_TILE), jnp.int32)],
        ),
        out_shape=jax.ShapeDtypeStruct((B * K, chunks, SUBLANES, tokens), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel'), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpreter(interpret),
        name='sparse_prefill_page_mask',
    )(length_B, budget_B1T, mean_RAT, landmark_RcnA)
    return mask_RcwT.reshape(B, K, chunks * SUBLANES, tokens)[:, :, :words, :T]


def _select(
    length_B, budget_ref, mean_ref, landmark_ref, mask_ref, keys_ref, *, kv_heads, pages, page_tokens, first, last
):
    r, i = pl.program_id(0), pl.program_id(1)
    length = length_B[r // kv_heads]
    position_1T = i * SELECT_TILE + lax.broadcasted_iota(jnp.int32, (1, SELECT_TILE), 1)
    position_1T = jnp.where(position_1T < length, position_1T, -1)
    tokens = jnp.minimum((i + 1) * SELECT_TILE, length)  # that the last query of the block sees
    chunks = jnp.where(i * SELECT_TILE < length, pl.cdiv(tokens, page_tokens * PAGE_CHUNK), 0)

    def pages_of(c):
        page_NT = c * PAGE_CHUNK + lax.broadcasted_iota(jnp.int32, (PAGE_CHUNK, SELECT_TILE), 0)
        return page_NT, *rivals(position_1T, page_NT, page_tokens, first, last)

    @pl.loop(0, chunks)
    def _(c):
        _, _, competes_NT, _ = pages_of(c)
        score_NT = jnp.dot(
            landmark_ref[c].astype(jnp.float32),
            mean_ref[...],
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        keys_ref[c] = contest(score_NT, competes_NT)

    def count(chosen):
        def add(c, count_1T):
            return count_1T + chosen(c).astype(jnp.int32).sum(axis=0, keepdims=True)

        return lax.fori_loop(0, chunks, add, jnp.zeros((1, SELECT_TILE), jnp.int32))

    _, _, _, competing_1T = pages_of(0)
    threshold_1T, limit_1T = bisect(
        lambda threshold_1T: count(lambda c: keys_ref[c] >= threshold_1T),
        lambda threshold_1T, limit_1T: count(lambda c: (keys_ref[c] == threshold_1T) & (pages_of(c)[0] < limit_1T)),
        budget_ref[...],
        competing_1T,
        pages,
    )
    mask_ref[...] = jnp.zeros(mask_ref.shape, jnp.int32)

    @pl.loop(0, chunks)
    def _(c):
        page_NT, reserved_NT, competes_NT, _ = pages_of(c)
        mask_ref[c] = pack(reserved_NT | (competes_NT & wins(keys_ref[c], page_NT, threshold_1T, limit_1T)))


def forward(q_BTHA, k_BTKA, v_BTKA, mask_BKWT, *, page_tokens, interpret):
    """`blocked.forward`."""
    B, T, H, A = q_BTHA.shape
    blocks = _Blocks(q_BTHA, k_BTKA, page_tokens)
    o_RGAT, lse_RGT = pl.pallas_call(
        functools.partial(_attend, blocks),
        grid=(blocks.rows, blocks.query_tiles, blocks.key_tiles),
        in_specs=[
            blocks.mask_spec(blocks.of_queries),
            blocks.query_spec(blocks.of_queries),
            blocks.key_spec(blocks.of_queries),
            pl.BlockSpec((None, A, blocks.key_tile), lambda *at: (at[0], 0, blocks.of_queries(*at)[1])),
        ],
        out_specs=[blocks.query_spec(blocks.of_queries), blocks.query_row_spec(blocks.of_queries)],
        out_shape=[
            jax.ShapeDtypeStruct((blocks.rows, blocks.group, A, blocks.tokens), jnp.float32),
            jax.ShapeDtypeStruct((blocks.rows, blocks.group, blocks.tokens), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((blocks.group, 1, QUERY_TILE), jnp.float32)] * 2,
        **blocks.options(interpret),
        name='sparse_prefill_forward',
    )(blocks.words(mask_BKWT), blocks.queries(q_BTHA), blocks.keys(k_BTKA), blocks.keys(v_BTKA).swapaxes(1, 2))
    return blocks.heads(o_RGAT)[:, :T], lse_RGT.reshape(B, H, -1)[..., :T]


def _attend(blocks, mask_ref, q_ref, k_ref, v_ref, o_ref, lse_ref, top_ref, total_ref):
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def _():
        o_ref[...] = jnp.zeros(o_ref.shape, jnp.float32)
        top_ref[...] = jnp.full(top_ref.shape, _LOWEST, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    @blocks.for_parts_read(mask_ref, i, j)
    def _(keys, reads_ST):
        @pl.loop(0, blocks.group)
        def _(g):
            score_ST = jnp.where(reads_ST, blocks.scores(k_ref[keys], q_ref[g]), -jnp.inf)
            top_1T = top_ref[g]
            new_top_1T = jnp.maximum(top_1T, score_ST.max(axis=0, keepdims=True))
            weight_ST = jnp.exp(score_ST - new_top_1T)
            keep_1T = jnp.exp(top_1T - new_top_1T)
            o_ref[g] = o_ref[g] * keep_1T + blocks.product(v_ref[:, keys], weight_ST.astype(v_ref.dtype), 1, 0)
            total_ref[g] = total_ref[g] * keep_1T + weight_ST.sum(axis=0, keepdims=True)
            top_ref[g] = new_top_1T

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        @pl.loop(0, blocks.group)
        def _(g):
            total_1T = total_ref[g]
            nothing_1T = total_1T == 0
            total_1T = jnp.where(nothing_1T, 1, total_1T)
            o_ref[g] = o_ref[g] / total_1T
            lse_ref[pl.ds(g, 1)] = jnp.where(nothing_1T, 0, top_ref[g] + jnp.log(total_1T))


def backward(q_BTHA, k_BTKA, v_BTKA, mask_BKWT, lse_BHT, delta_BHT, do_BTHA, *, page_tokens, interpret):
    """`blocked.backward`."""
    B, T, _, A = q_BTHA.shape
    K = k_BTKA.shape[2]
    blocks = _Blocks(q_BTHA, k_BTKA, page_tokens)
    R, G = blocks.rows, blocks.group
    operands = (
        blocks.words(mask_BKWT),
        *(padded(row.reshape(R, G, T), 2, blocks.tokens) for row in (lse_BHT, delta_BHT)),
        blocks.queries(q_BTHA),
        blocks.queries(do_BTHA.astype(q_BTHA.dtype)),
        blocks.keys(k_BTKA),
        blocks.keys(v_BTKA),
    )

    def in_specs(order):
        return [
            blocks.mask_spec(order),
            *[blocks.query_row_spec(order)] * 2,
            *[blocks.query_spec(order)] * 2,
            *[blocks.key_spec(order)] * 2,
        ]

    dq_RGAT = pl.pallas_call(
        functools.partial(_query_gradient, blocks),
        grid=(R, blocks.query_tiles, blocks.key_tiles),
        in_specs=in_specs(blocks.of_queries),
        out_specs=blocks.query_spec(blocks.of_queries),
        out_shape=jax.ShapeDtypeStruct((R, G, A, blocks.tokens), q_BTHA.dtype),
        scratch_shapes=[pltpu.VMEM((G, A, QUERY_TILE), jnp.float32)],
        **blocks.options(interpret),
        name='sparse_prefill_backward_q',
    )(*operands)
    gradients_RSA = pl.pallas_call(
        functools.partial(_key_gradients, blocks),
        grid=(R, blocks.key_tiles, blocks.query_tiles),
        in_specs=in_specs(blocks.of_keys),
        out_specs=[blocks.key_spec(blocks.of_keys)] * 2,
        out_shape=[jax.ShapeDtypeStruct((R, blocks.tokens, A), k_BTKA.dtype)] * 2,
        scratch_shapes=[pltpu.VMEM((blocks.key_tile, A), jnp.float32)] * 2,
        **blocks.options(interpret),
        name='sparse_prefill_backward_kv',
    )(*operands)
    dk_BTKA, dv_BTKA = (x_RSA.reshape(B, K, -1, A)[:, :, :T].swapaxes(1, 2) for x_RSA in gradients_RSA)
    return blocks.heads(dq_RGAT)[:, :T], dk_BTKA, dv_BTKA


def _query_gradient(blocks, mask_ref, lse_ref, delta_ref, q_ref, do_ref, k_ref, v_ref, dq_ref, sum_ref):
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def _():
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    @blocks.for_parts_read(mask_ref, i, j)
    def _(keys, reads_ST):
        @pl.loop(0, blocks.group)
        def _(g):
            _, dscore_ST = blocks.gradients(reads_ST, g, lse_ref, delta_ref, q_ref, do_ref, k_ref[keys], v_ref[keys])
            sum_ref[g] += blocks.product(k_ref[keys], dscore_ST, 0, 0)

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        dq_ref[...] = sum_ref[...].astype(dq_ref.dtype)


def _key_gradients(blocks, mask_ref, lse_ref, delta_ref, q_ref, do_ref, k_ref, v_ref, dk_ref, dv_ref, *sum_refs):
    j, i = pl.program_id(1), pl.program_id(2)

    @pl.when(i == 0)
    def _():
        for sum_ref in sum_refs:
            sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    @blocks.for_parts_read(mask_ref, i, j)
    def _(keys, reads_ST):
        @pl.loop(0, blocks.group)
        def _(g):
            weight_ST, dscore_ST = blocks.gradients(
                reads_ST, g, lse_ref, delta_ref, q_ref, do_ref, k_ref[keys], v_ref[keys]
            )
            sum_refs[0][keys] += blocks.product(dscore_ST, q_ref[g], 1, 1)
            sum_refs[1][keys] += blocks.product(weight_ST, do_ref[g], 1, 1)

    @pl.when(i == pl.num_programs(2) - 1)
    def _():
        for gradient_ref, sum_ref in zip((dk_ref, dv_ref), sum_refs, strict=True):
            gradient_ref[...] = sum_ref[...].astype(gradient_ref.dtype)


class _Blocks:
    """How one call's arrays are cut into blocks of queries i and of keys j, and what the kernels do with a pair.

    An `order` maps a place in the grid to (i, j), of which it holds one, out of the way of the causal mask, while the
    grid passes over pairs that have nothing in common: a block already there is not copied again.
    """

    def __init__(self, q_BTHA, k_BTKA, page_tokens):
        B, T, H, A = q_BTHA.shape
        self.page_tokens, self.key_tile, self.head_dim = page_tokens, key_tile(page_tokens), A
        self.kv_heads, self.group = k_BTKA.shape[2], H // k_BTKA.shape[2]
        self.rows = B * self.kv_heads
        self.tokens = pl.cdiv(T, max(QUERY_TILE, self.key_tile)) * max(QUERY_TILE, self.key_tile)
        self.query_tiles, self.key_tiles = self.tokens // QUERY_TILE, self.tokens // self.key_tile
        self.tile_pages = self.key_tile // page_tokens
        # One pass of the matrix unit multiplies bfloat16 exactly; float32 asks for more.
        self.precision = lax.Precision.HIGHEST if k_BTKA.dtype == jnp.float32 else None

    def queries(self, x_BTHA):
        x_BHAT = x_BTHA.transpose(0, 2, 3, 1)
        return padded(x_BHAT.reshape(self.rows, self.group, *x_BHAT.shape[2:]), 3, self.tokens)

    def heads(self, x_RGAT):
        A, T = x_RGAT.shape[2:]
        return x_RGAT.reshape(-1, self.kv_heads * self.group, A, T).transpose(0, 3, 1, 2)

    def keys(self, x_BTKA):
        B, T, K, A = x_BTKA.shape
        return padded(x_BTKA.swapaxes(1, 2).reshape(B * K, T, A), 1, self.tokens)

    def words(self, mask_BKWT):
        B, K, W, T = mask_BKWT.shape
        return padded(padded(mask_BKWT.reshape(B * K, W, T), 1, SUBLANES), 2, self.tokens)

    def of_queries(self, _, i, j):
        return i, jnp.minimum(j, ((i + 1) * QUERY_TILE - 1) // self.key_tile)

    def of_keys(self, _, j, i):
        return jnp.maximum(i, j * self.key_tile // QUERY_TILE), j

    def query_spec(self, order):
        shape = (None, self.group, self.head_dim, QUERY_TILE)
        return pl.BlockSpec(shape, lambda *at: (at[0], 0, 0, order(*at)[0]))

    def query_row_spec(self, order):
        return pl.BlockSpec((None, self.group, QUERY_TILE), lambda *at: (at[0], 0, order(*at)[0]))

    def key_spec(self, order):
        return pl.BlockSpec((None, self.key_tile, self.head_dim), lambda *at: (at[0], order(*at)[1], 0))

    def mask_spec(self, order):
        def index_map(*at):
            i, j = order(*at)
            return at[0], j * self.tile_pages // (WORD_PAGES * SUBLANES), i

        return pl.BlockSpec((None, SUBLANES, QUERY_TILE), index_map)

    def options(self, interpret):
        return {
            'compiler_params': pltpu.CompilerParams(
                dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=VMEM_BYTES
            ),
            'interpret': interpreter(interpret),
        }

    def for_parts_read(self, mask_ref, i, j):
        """Runs a function of keys of the block and their `tile_reads` for each part that a query of the pair reads."""
        part_pages = KEY_PART // self.page_tokens

        def decorate(function):
            @pl.loop(0, self.key_tile // KEY_PART)
            def _(part):
                first_page = j * self.tile_pages + part * part_pages
                first_key = first_page * self.page_tokens
                word = first_page // WORD_PAGES
                bits_1T = tile_bits(mask_ref[pl.ds(word & (SUBLANES - 1), 1)], first_page, part_pages)

                @pl.when((first_key < (i + 1) * QUERY_TILE) & jnp.any(bits_1T != 0))
                def _():
                    keys = pl.ds(pl.multiple_of(part * KEY_PART, KEY_PART), KEY_PART)
                    function(keys, tile_reads(bits_1T, first_key, i * QUERY_TILE, KEY_PART, self.page_tokens))

        return decorate

    def product(self, a, b, axis_a, axis_b):
        return lax.dot_general(
            a, b, (((axis_a,), (axis_b,)), ((), ())), precision=self.precision, preferred_element_type=jnp.float32
        )

    def scores(self, k_SA, q_AT):
        return self.product(k_SA, q_AT, 1, 0) * self.head_dim**-0.5

    def gradients(self, reads_ST, g, lse_ref, delta_ref, q_ref, do_ref, k_SA, v_SA):
        """The softmax's weights once more and the gradient of the scores, in the dtype of the keys."""
        score_ST = jnp.where(reads_ST, self.scores(k_SA, q_ref[g]), -jnp.inf)
        weight_ST = jnp.exp(score_ST - lse_ref[pl.ds(g, 1)])
        dweight_ST = self.product(v_SA, do_ref[g], 1, 0)
        dscore_ST = weight_ST * (dweight_ST - delta_ref[pl.ds(g, 1)]) * self.head_dim**-0.5
        return weight_ST.astype(do_ref.dtype), dscore_ST.astype(k_SA.dtype)
