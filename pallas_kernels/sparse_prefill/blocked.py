"""The operation's three steps in JAX, tile by tile, with memory linear in the length: for CPUs and older GPUs.

A tile is QUERY_TILE queries against `key_tile` keys. Tiles after the queries, and those of which no query reads a page,
are skipped.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.page_select.policies import SelectionPolicy
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

QUERY_TILE = 128
LOWEST = float(jnp.finfo(jnp.float32).min)


def page_mask(
    q_BTHA,
    landmark_BKNA,
    length_B,
    budget_BT,
    *,
    page_tokens,
    reserved_first,
    reserved_last,
    policy=SelectionPolicy.BLOCK_MEAN,
):
    """Bit mask `mask_BKWT` of the pages that each query reads, see `selection`."""
    B, T, _, _ = q_BTHA.shape
    K, N = landmark_BKNA.shape[1:3]
    landmark_BKNA = padded(landmark_BKNA.astype(jnp.float32), 2, WORD_PAGES)
    scores_at = _scores(q_BTHA, landmark_BKNA, page_tokens, policy)
    budget_BT = padded(budget_BT, 1, QUERY_TILE)
    page_N1 = jnp.arange(landmark_BKNA.shape[2], dtype=jnp.int32)[:, None]

    def select(first_query):
        budget_B11t = lax.dynamic_slice_in_dim(budget_BT, first_query, QUERY_TILE, axis=1)[:, None, None]
        position_t = first_query + jnp.arange(QUERY_TILE, dtype=jnp.int32)
        position_B11t = jnp.where(position_t < length_B[:, None], position_t, -1)[:, None, None]
        reserved_B1Nt, competes_B1Nt, competing_B11t = rivals(
            position_B11t, page_N1, page_tokens, reserved_first, reserved_last
        )
        score_BKNt = scores_at(first_query)
        key_BKNt = contest(score_BKNt, competes_B1Nt)

        def count(chosen_BKNt):
            return chosen_BKNt.sum(axis=2, keepdims=True, dtype=jnp.int32)

        threshold_BK1t, limit_BK1t = bisect(
            lambda threshold: count(key_BKNt >= threshold),
            lambda threshold, limit: count((key_BKNt == threshold) & (page_N1 < limit)),
            jnp.broadcast_to(budget_B11t, (B, K, 1, QUERY_TILE)),
            jnp.broadcast_to(competing_B11t, (B, K, 1, QUERY_TILE)),
            N,
        )
        return pack(reserved_B1Nt | (competes_B1Nt & wins(key_BKNt, page_N1, threshold_BK1t, limit_BK1t)))

    mask_iBKWt = lax.map(select, jnp.arange(0, budget_BT.shape[1], QUERY_TILE, dtype=jnp.int32))
    return _joined(mask_iBKWt, 3)[..., :T]


def _scores(q_BTHA, landmark_BKNW, page_tokens, policy):
    """A function of a tile's first query: the scores [B, K, N, t] of all pages for its queries."""
    B, _, H, A = q_BTHA.shape
    K, N = landmark_BKNW.shape[1:3]
    if policy is SelectionPolicy.BLOCK_MEAN:
        mean_BKAT = padded(mean_query(q_BTHA, K), 3, QUERY_TILE)

        def of_means(first_query):
            mean_BKAt = lax.dynamic_slice_in_dim(mean_BKAT, first_query, QUERY_TILE, axis=3)
            return jnp.einsum('bkna,bkat->bknt', landmark_BKNW, mean_BKAt, precision=lax.Precision.HIGHEST)

        return of_means

    q_BTHA = padded(q_BTHA, 1, QUERY_TILE)

    def of_policy(first_query):
        q_BtHA = lax.dynamic_slice_in_dim(q_BTHA, first_query, QUERY_TILE, axis=1).astype(jnp.float32)
        q_tBKGA = q_BtHA.swapaxes(0, 1).reshape(QUERY_TILE, B, K, H // K, A)
        pages_t1 = ((first_query + 1 + jnp.arange(QUERY_TILE)) // page_tokens)[:, None]
        full_tBN = jnp.broadcast_to((jnp.arange(N) < pages_t1)[:, None], (QUERY_TILE, B, N))
        score_tBKN = jax.vmap(policy.scores, in_axes=(0, None, 0))(q_tBKGA, landmark_BKNW, full_tBN)
        return jnp.moveaxis(score_tBKN, 0, 3)

    return of_policy


def forward(q_BTHA, k_BTKA, v_BTKA, mask_BKWT, *, page_tokens):
    """Attention over the pages of the mask.

    Returns:
        o_BTHA, and lse_BHT, the log of the softmax's denominator, 0 for a query that reads nothing. Both in float32:
        the gradients of q and k need o as it was before rounding, or half of their error comes from there.
    """
    B, T, H, A = q_BTHA.shape
    tiles = _Tiles(q_BTHA, k_BTKA, mask_BKWT, page_tokens)
    v_BKSA = tiles.keys(v_BTKA)

    def of_queries(i):
        q_BKGtA = tiles.queries_at(i)

        def visit(j, state):
            o_BKGAt, top_BKG1t, total_BKG1t = state
            score_BKGst, _ = tiles.scores(i, j, q_BKGtA)
            new_top_BKG1t = jnp.maximum(top_BKG1t, score_BKGst.max(axis=-2, keepdims=True))
            weight_BKGst = jnp.exp(score_BKGst - new_top_BKG1t)
            keep_BKG1t = jnp.exp(top_BKG1t - new_top_BKG1t)
            v_BKsA = tiles.keys_at(j, v_BKSA)
            more_BKGAt = tiles.product('bksa,bkgst->bkgat', v_BKsA, weight_BKGst.astype(v_BKsA.dtype))
            return (
                o_BKGAt * keep_BKG1t + more_BKGAt,
                new_top_BKG1t,
                total_BKG1t * keep_BKG1t + weight_BKGst.sum(axis=-2, keepdims=True),
            )

        K, G = tiles.kv_heads, tiles.group
        start = (
            jnp.zeros((B, K, G, A, QUERY_TILE), jnp.float32),
            jnp.full((B, K, G, 1, QUERY_TILE), LOWEST, jnp.float32),
            jnp.zeros((B, K, G, 1, QUERY_TILE), jnp.float32),
        )
        o_BKGAt, top_BKG1t, total_BKG1t = tiles.over_keys(i, visit, start)
        o_BKGAt = o_BKGAt / jnp.where(total_BKG1t == 0, 1, total_BKG1t)
        lse_BKG1t = jnp.where(total_BKG1t == 0, 0, top_BKG1t + jnp.log(total_BKG1t))
        return o_BKGAt, lse_BKG1t[..., 0, :]

    o_iBKGAt, lse_iBKGt = lax.map(of_queries, jnp.arange(tiles.query_tiles))
    o_BKGAT, lse_BKGT = _joined(o_iBKGAt, 4), _joined(lse_iBKGt, 3)
    o_BTHA = o_BKGAT.transpose(0, 4, 1, 2, 3).reshape(B, -1, H, A)[:, :T]
    return o_BTHA, lse_BKGT.reshape(B, H, -1)[..., :T]


def backward(q_BTHA, k_BTKA, v_BTKA, mask_BKWT, lse_BHT, delta_BHT, do_BTHA, *, page_tokens):
    """Gradients of the attention of `forward`, which made `lse`, with its probabilities made anew.

    delta_BHT: float32 sum of o and its gradient's products over the head.

    Returns:
        dq_BTHA, dk_BTKA, dv_BTKA, summed in float32, in the dtypes of q, k and v.
    """
    B, T, H, A = q_BTHA.shape
    tiles = _Tiles(q_BTHA, k_BTKA, mask_BKWT, page_tokens)
    K, G = tiles.kv_heads, tiles.group
    v_BKSA = tiles.keys(v_BTKA)
    do_BKGTA = tiles.queries(do_BTHA.astype(v_BTKA.dtype))
    row_BKG1T = [padded(row.reshape(B, K, G, 1, T), 4, QUERY_TILE) for row in (lse_BHT, delta_BHT)]

    def of_queries(sums, i):
        q_BKGtA, do_BKGtA = tiles.queries_at(i), tiles.queries_at(i, do_BKGTA)
        lse_BKG1t, delta_BKG1t = (
            lax.dynamic_slice_in_dim(row, i * QUERY_TILE, QUERY_TILE, axis=4) for row in row_BKG1T
        )

        def visit(j, state):
            dq_BKGtA, dk_BKSA, dv_BKSA = state
            score_BKGst, k_BKsA = tiles.scores(i, j, q_BKGtA)
            weight_BKGst = jnp.exp(score_BKGst - lse_BKG1t)
            dweight_BKGst = tiles.product('bksa,bkgta->bkgst', tiles.keys_at(j, v_BKSA), do_BKGtA)
            dscore_BKGst = weight_BKGst * (dweight_BKGst - delta_BKG1t) * A**-0.5
            dscore_BKGst = dscore_BKGst.astype(k_BKsA.dtype)
            dk_BKsA = tiles.product('bkgst,bkgta->bksa', dscore_BKGst, q_BKGtA)
            dv_BKsA = tiles.product('bkgst,bkgta->bksa', weight_BKGst.astype(do_BKGtA.dtype), do_BKGtA)
            return (
                dq_BKGtA + tiles.product('bkgst,bksa->bkgta', dscore_BKGst, k_BKsA),
                tiles.add_at(j, dk_BKSA, dk_BKsA),
                tiles.add_at(j, dv_BKSA, dv_BKsA),
            )

        dq_BKGtA, *sums = tiles.over_keys(i, visit, (jnp.zeros(q_BKGtA.shape, jnp.float32), *sums))
        return tuple(sums), dq_BKGtA.astype(q_BTHA.dtype)

    zeros_BKSA = jnp.zeros(v_BKSA.shape, jnp.float32)
    sums, dq_iBKGtA = lax.scan(of_queries, (zeros_BKSA, zeros_BKSA), jnp.arange(tiles.query_tiles))
    dq_BTHA = dq_iBKGtA.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, H, A)[:, :T]
    dk_BTKA, dv_BTKA = (
        sum_BKSA[:, :, :T].swapaxes(1, 2).astype(x.dtype) for sum_BKSA, x in zip(sums, (k_BTKA, v_BTKA), strict=True)
    )
    return dq_BTHA, dk_BTKA, dv_BTKA


class _Tiles:
    """Queries, keys and mask of one call, cut into tiles."""

    def __init__(self, q_BTHA, k_BTKA, mask_BKWT, page_tokens):
        self.kv_heads, self.group = k_BTKA.shape[2], q_BTHA.shape[2] // k_BTKA.shape[2]
        self.page_tokens, self.key_tile = page_tokens, key_tile(page_tokens)
        # By default a float32 product on GPU and TPU is rounded to fewer bits; float32 keys ask for exact ones.
        self.product = functools.partial(
            jnp.einsum,
            precision=lax.Precision.HIGHEST if k_BTKA.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        self.q_BKGTA, self.k_BKSA = self.queries(q_BTHA), self.keys(k_BTKA)
        self.mask_BKWT = padded(mask_BKWT, 3, QUERY_TILE)
        self.query_tiles = self.q_BKGTA.shape[3] // QUERY_TILE

    def queries(self, x_BTHA):
        B, T, _, A = x_BTHA.shape
        x_BKGTA = x_BTHA.reshape(B, T, self.kv_heads, self.group, A).transpose(0, 2, 3, 1, 4)
        return padded(x_BKGTA, 3, QUERY_TILE)

    def keys(self, x_BTKA):
        return padded(x_BTKA.swapaxes(1, 2), 2, self.key_tile)

    def queries_at(self, i, x_BKGTA=None):
        x_BKGTA = self.q_BKGTA if x_BKGTA is None else x_BKGTA
        return lax.dynamic_slice_in_dim(x_BKGTA, i * QUERY_TILE, QUERY_TILE, axis=3)

    def keys_at(self, j, x_BKSA):
        return lax.dynamic_slice_in_dim(x_BKSA, j * self.key_tile, self.key_tile, axis=2)

    def add_at(self, j, sum_BKSA, more_BKsA):
        return lax.dynamic_update_slice_in_dim(
            sum_BKSA, self.keys_at(j, sum_BKSA) + more_BKsA, j * self.key_tile, axis=2
        )

    def bits(self, i, j):
        tile_pages = self.key_tile // self.page_tokens
        first_page = j * tile_pages
        word_BK1t = lax.dynamic_slice(
            self.mask_BKWT,
            (0, 0, first_page // WORD_PAGES, i * QUERY_TILE),
            (*self.mask_BKWT.shape[:2], 1, QUERY_TILE),
        )
        return tile_bits(word_BK1t, first_page, tile_pages)

    def scores(self, i, j, q_BKGtA):
        """Scaled scores, -inf where a query does not read the key, and the tile's keys."""
        k_BKsA = self.keys_at(j, self.k_BKSA)
        score_BKGst = self.product('bksa,bkgta->bkgst', k_BKsA, q_BKGtA) * q_BKGtA.shape[-1] ** -0.5
        reads_BKst = tile_reads(self.bits(i, j), j * self.key_tile, i * QUERY_TILE, self.key_tile, self.page_tokens)
        return jnp.where(reads_BKst[:, :, None], score_BKGst, -jnp.inf), k_BKsA

    def over_keys(self, i, visit, state):
        """Folds `visit(j, state)` over the tiles of keys that some query of tile i reads."""

        def visit_if_read(j, state):
            return lax.cond((self.bits(i, j) != 0).any(), visit, lambda _, state: state, j, state)

        ended = -(-(i + 1) * QUERY_TILE // self.key_tile)
        return lax.fori_loop(0, jnp.minimum(ended, self.k_BKSA.shape[2] // self.key_tile), visit_if_read, state)


def _joined(x: jax.Array, axis: int) -> jax.Array:
    """Tiles in the leading axis, side by side along another."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
