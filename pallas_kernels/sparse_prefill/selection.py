"""What every implementation of the operation shares: landmarks, the bisection for the best pages, the mask of bits.

All of it is plain JAX on values, so that it runs inside Pallas kernels too, and all of it has the queries T in the last
axis, pages or keys before them: counts over pages are then sums of whole vectors on every platform, and 32 pages fold
into a word without moving data between lanes.

The page set of each query and KV head is a bit mask: `mask_BKWT` int32, bit n % 32 of word n // 32 says whether page n
is read. A set that long lists of ids would name in [T, M] words takes [T, N / 32].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.page_select.policies import SelectionPolicy
from pallas_kernels.score_order import ordered

WORD_PAGES = 32
KEY_TILE = 512  # most keys of a tile
LEAST = -(2**31)  # below the key of every number


def padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Zeros appended until the axis is a multiple."""
    return jnp.pad(x, [(0, -x.shape[axis] % multiple if a == axis else 0) for a in range(x.ndim)])


def page_landmarks(
    k_BTKA: jax.Array, page_tokens: int, policy: SelectionPolicy = SelectionPolicy.BLOCK_MEAN
) -> jax.Array:
    """landmark_BKNW of a row's pages, as decoding makes them once a page is full; those of other pages have no use."""
    B, _, K, A = k_BTKA.shape
    k_BNCKA = padded(k_BTKA, 1, page_tokens).reshape(B, -1, page_tokens, K, A)
    k_BKNCA = k_BNCKA.transpose(0, 3, 1, 2, 4)
    return policy.landmark(k_BKNCA).astype(k_BTKA.dtype)


def mean_query(q_BTHA: jax.Array, kv_heads: int) -> jax.Array:
    """The float32 mean over each group's query heads, [B, K, A, T]."""
    B, T, _, A = q_BTHA.shape
    return q_BTHA.astype(jnp.float32).reshape(B, T, kv_heads, -1, A).mean(axis=3).transpose(0, 2, 3, 1)


def rivals(
    position_T: jax.Array, page_N: jax.Array, page_tokens: int, first: int, last: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which pages are read whatever their score, which compete for the budget, and how many those are.

    position: of the query, -1 where there is none; it sees the tokens up to its own. The arguments broadcast.
    first, last: reserved pages.

    Returns:
        Two bool arrays over pages and queries, and a number for each query.
    """
    pages_T = lax.shift_right_arithmetic(position_T + page_tokens, page_tokens.bit_length() - 1)
    reserved_NT = (page_N < pages_T) & ((page_N < first) | (page_N >= pages_T - last))
    competes_NT = (page_N >= first) & (page_N < pages_T - last)
    return reserved_NT, competes_NT, jnp.maximum(pages_T - first - last, 0)


def contest(score_NT: jax.Array, competes_NT: jax.Array) -> jax.Array:
    """int32 in the order of the scores; LEAST for pages that do not compete."""
    return jnp.where(competes_NT, ordered(score_NT.astype(jnp.float32)), LEAST)


def bisect(
    count_reaching: Callable[[jax.Array], jax.Array],
    count_before: Callable[[jax.Array, jax.Array], jax.Array],
    budget_T: jax.Array,
    competing_T: jax.Array,
    pages: int,
) -> tuple[jax.Array, jax.Array]:
    """Where each query's winners end; equal scores: the lower page wins.

    Both thresholds are found bit by bit from the highest, by counting alone. It ends early once every query has a
    threshold that just its winners reach, which takes about 20 steps of 32 on scores without order, 0 for queries that
    read all pages or none.

    Args:
        count_reaching: of a threshold, how many pages have a key at least as high.
        count_before: of a threshold and a page, how many pages with just that key come before the page.
        budget_T: most winners of each query.
        competing_T: pages that compete.
        pages: N.

    Returns:
        threshold_T and limit_T: a page wins if its key is higher than the threshold, or equal and the page below the
        limit.
    """
    wanted_T = jnp.clip(budget_T, 0, competing_T)
    none_T = wanted_T == 0
    all_T = wanted_T == competing_T
    threshold_T = jnp.where(none_T, -LEAST - 1, LEAST + 1)
    reach_T = jnp.where(none_T | all_T, wanted_T, competing_T)

    def undecided(state):
        step, _, reach_T = state
        return (step < 32) & (jnp.max(reach_T - wanted_T) > 0)

    def halve(state):
        step, threshold_T, reach_T = state
        higher_T = threshold_T + lax.shift_left(jnp.int32(1), 31 - step)
        count_T = count_reaching(higher_T)
        take_T = (reach_T > wanted_T) & (count_T >= wanted_T)
        return step + 1, jnp.where(take_T, higher_T, threshold_T), jnp.where(take_T, count_T, reach_T)

    _, threshold_T, reach_T = lax.while_loop(undecided, halve, (jnp.int32(0), threshold_T, reach_T))

    # Keys that equal the threshold of a query with too many: the first few of them win.
    tied_T = reach_T > wanted_T
    room_T = wanted_T - count_reaching(threshold_T + jnp.where(tied_T, 1, 0))
    bits = pages.bit_length()

    def place(step, limit_T):
        further_T = limit_T + lax.shift_left(jnp.int32(1), bits - 1 - step)
        return jnp.where(count_before(threshold_T, further_T) <= room_T, further_T, limit_T)

    steps = jnp.where(jnp.max(reach_T - wanted_T) > 0, bits, 0)
    limit_T = lax.fori_loop(0, steps, place, jnp.zeros_like(wanted_T))
    return threshold_T, jnp.where(tied_T, limit_T, pages)


def wins(key_NT: jax.Array, page_N: jax.Array, threshold_T: jax.Array, limit_T: jax.Array) -> jax.Array:
    """The pages that `bisect` found, bool."""
    return (key_NT > threshold_T) | ((key_NT == threshold_T) & (page_N < limit_T))


def pack(read_NT: jax.Array) -> jax.Array:
    """Bit mask words [..., W, T] of bool [..., N, T], N a multiple of 32."""
    *leading, N, T = read_NT.shape
    bit_WNT = read_NT.astype(jnp.int32).reshape(*leading, N // WORD_PAGES, WORD_PAGES, T)
    return lax.shift_left(bit_WNT, lax.broadcasted_iota(jnp.int32, bit_WNT.shape, bit_WNT.ndim - 2)).sum(axis=-2)


def unpack(mask_WT: jax.Array, pages: int) -> jax.Array:
    """bool [..., N, T] of bit mask words [..., W, T]."""
    *leading, W, T = mask_WT.shape
    place_N1 = jnp.arange(WORD_PAGES, dtype=jnp.int32)[:, None]
    bit_WNT = _lower(mask_WT[..., None, :], place_N1) & 1
    return bit_WNT.reshape(*leading, W * WORD_PAGES, T)[..., :pages, :] == 1


def key_tile(page_tokens: int) -> int:
    """Keys of a tile of the attention: whole pages, all in one word of the mask."""
    return min(WORD_PAGES * page_tokens, KEY_TILE)


def tile_bits(word_T: jax.Array, first_page: jax.Array, tile_pages: int) -> jax.Array:
    """A word's bits of a tile's pages, moved to its lower end: 0 where the query reads nothing of the tile."""
    return _lower(word_T, first_page & (WORD_PAGES - 1)) & (-1 if tile_pages == WORD_PAGES else (1 << tile_pages) - 1)


def tile_reads(
    bits_T: jax.Array, first_key: jax.Array, first_query: jax.Array, keys: int, page_tokens: int
) -> jax.Array:
    """bool [..., S, T]: whether a query of a tile reads a key of it: its page is chosen, and it is not a later token.

    bits_T: of `tile_bits`, [..., 1, T].
    """
    shape = (*bits_T.shape[:-2], keys, bits_T.shape[-1])
    key_ST = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2)
    query_ST = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    page_ST = lax.shift_right_logical(key_ST, page_tokens.bit_length() - 1)
    chosen_ST = _lower(bits_T, page_ST) & 1
    return (chosen_ST == 1) & (first_key + key_ST <= first_query + query_ST)


def _lower(word: jax.Array, places: jax.Array) -> jax.Array:
    return lax.shift_right_logical(*jnp.broadcast_arrays(word, places))
