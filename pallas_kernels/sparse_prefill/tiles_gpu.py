"""Tiles of the GPU kernels: their sizes, the lists of those that are read, the loop over a block's keys."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_gpu import iota, layout_cast, load
from pallas_kernels.sparse_prefill.selection import WORD_PAGES, padded, tile_bits

ROWS = 64  # queries or keys whose tile a warpgroup holds in registers
WARPGROUPS = 2  # that multiply; one more copies
TILE = ROWS * WARPGROUPS  # queries or keys of a block; keys of a step, whose pages are all in one word of the mask
KEY_STAGES, QUERY_STAGES = 2, 2  # steps in shared memory of a loop over keys, and of one over ROWS queries: what fits
LOG2_E = math.log2(math.e)
MATRIX = plgpu.Layout.WGMMA
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)
# Registers of a thread that copies and of one that multiplies; 24 + 2 * 240 is what a multiprocessor has for them.
_COPYING, _MULTIPLYING = 24, 240
_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All sizes of one call; tokens: T, padded to whole tiles."""

    sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    tokens: int

    @classmethod
    def make(cls, q_BTHA: jax.Array, k_BTKA: jax.Array, page_tokens: int) -> 'Plan':
        B, T, H, A = q_BTHA.shape
        return cls(B, H, k_BTKA.shape[2], A, page_tokens, -(-T // TILE) * TILE)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Of scores, in powers of two."""
        return self.head_dim**-0.5 * LOG2_E

    def blocks(self, heads: int) -> dict[str, Any]:
        """Arguments of `kernel` for a block a tile and head. Neighbours on the chip share keys and values."""
        return {
            'grid': (heads, self.tokens // TILE, self.sequences),
            'grid_names': ('head', 'block', 'sequence'),
            'num_threads': WARPGROUPS + 1,
            'thread_name': 'warpgroup',
            'compiler_params': _PARAMS,
        }

    def _tiles(self, *shape: int) -> Any:
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((*shape, self.head_dim), jnp.bfloat16, transforms=transforms)

    def query_scratch(self, arrays: int) -> dict[str, Any]:
        """Of a block of queries that loops over keys; arrays: that it has a tile of."""
        emptied = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=KEY_STAGES)
        return {
            'queries': [self._tiles(WARPGROUPS, ROWS)] * arrays,
            'k': self._tiles(KEY_STAGES, TILE),
            'v': self._tiles(KEY_STAGES, TILE),
            'words': plgpu.SMEM((KEY_STAGES, WARPGROUPS, ROWS), jnp.int32),
            'queries_full': plgpu.Barrier(num_arrivals=arrays, num_barriers=WARPGROUPS),
            'k_full': plgpu.Barrier(num_arrivals=1 + WARPGROUPS, num_barriers=KEY_STAGES),
            'v_full': plgpu.Barrier(num_barriers=KEY_STAGES),
            'k_empty': emptied,
            'v_empty': emptied,
        }

    def key_scratch(self) -> dict[str, Any]:
        """Of a block of keys that loops over queries."""
        row = lambda dtype: plgpu.SMEM((QUERY_STAGES, ROWS), dtype)
        return {
            'k': self._tiles(WARPGROUPS, ROWS),
            'v': self._tiles(WARPGROUPS, ROWS),
            'q': self._tiles(QUERY_STAGES, ROWS),
            'do': self._tiles(QUERY_STAGES, ROWS),
            'less': row(jnp.float32),
            'delta': row(jnp.float32),
            'words': row(jnp.int32),
            'keys_full': plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            'q_full': plgpu.Barrier(num_arrivals=3, num_barriers=QUERY_STAGES),
            'do_full': plgpu.Barrier(num_arrivals=2, num_barriers=QUERY_STAGES),
            'empty': plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=QUERY_STAGES),
        }

    def word_of(self, tile: Any) -> Any:
        """The word that has the bits of a tile of keys."""
        return lax.div(tile, jnp.int32(self.page_tokens * WORD_PAGES // TILE))

    def bit_of(self, tile: Any) -> Any:
        """Where in its word a tile of keys begins."""
        return lax.rem(tile, jnp.int32(self.page_tokens * WORD_PAGES // TILE)) * (TILE // self.page_tokens)

    def has_bit(self, words: jax.Array, key: jax.Array) -> jax.Array:
        """Whether the bit of a key's page is set in a matrix of words that begin with the page of key 0."""
        page = lax.shift_right_logical(key, jnp.full(key.shape, self.page_tokens.bit_length() - 1))
        return words & lax.shift_left(jnp.full(key.shape, 1), page) != 0


class Lists:
    """The mask padded to whole tiles, and lists of the tiles in which it has a bit."""

    def __init__(self, plan: Plan, mask_BKWT: jax.Array):
        self.mask_BKWT = padded(mask_BKWT, 3, TILE)
        word_BKWiQ = self.mask_BKWT.reshape(*mask_BKWT.shape[:3], -1, ROWS)
        any_BKWi = lax.reduce(word_BKWiQ, jnp.int32(0), lax.bitwise_or, (4,))
        self.tile_J = jnp.arange(plan.tokens // TILE, dtype=jnp.int32)
        bits_BKJi = tile_bits(
            any_BKWi[:, :, plan.word_of(self.tile_J)], plan.bit_of(self.tile_J)[:, None], TILE // plan.page_tokens
        )
        self.reads_BKJi = bits_BKJi != 0

    def keys_of_queries(self) -> tuple[jax.Array, jax.Array]:
        """For each tile of queries the tiles of keys, that on the diagonal last, and their number."""
        reads_BKJI = self.reads_BKJi.reshape(*self.reads_BKJi.shape[:3], -1, WARPGROUPS).any(axis=4)
        return _listed(reads_BKJI.swapaxes(2, 3) | (self.tile_J[:, None] == self.tile_J))

    def queries_of_keys(self) -> tuple[jax.Array, jax.Array]:
        """For each tile of keys the tiles of ROWS queries, those on the diagonal first, and their number."""
        tile_i = jnp.arange(self.reads_BKJi.shape[3])
        return _listed(self.reads_BKJi | (self.tile_J[:, None] == tile_i // WARPGROUPS))


def _listed(reads_BKIJ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the last axis is true, in order, with something beyond it behind; and how often that is."""
    J = reads_BKIJ.shape[-1]
    return jnp.sort(jnp.where(reads_BKIJ, jnp.arange(J, dtype=jnp.int32), J)), reads_BKIJ.sum(axis=-1, dtype=jnp.int32)


def in_roles(copy: Callable[[], None], multiply: Callable[[jax.Array], None]) -> None:
    """One warpgroup copies, the others multiply."""
    warpgroup = lax.axis_index('warpgroup')

    @pl.when(warpgroup == WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_COPYING, action='decrease')
        copy()

    @pl.when(warpgroup < WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_MULTIPLYING, action='increase')
        multiply(warpgroup)


def drain(steps: jax.Array, stages: int, *barriers: Any) -> None:
    """The last steps' phases of barriers: who waits on a barrier has to see all of them."""

    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def _(step: jax.Array) -> None:
        for barrier in barriers:
            plgpu.barrier_wait(barrier.at[lax.rem(step, jnp.int32(stages))])


def zeros(rows: int, columns: int) -> jax.Array:
    return layout_cast(jnp.zeros((rows, columns), jnp.float32), MATRIX)


class QueryBlock:
    """The block of queries of this thread block, and the loop over its tiles of keys."""

    def __init__(self, plan: Plan, mask_BKWT: Any, ids_BKIJ: Any, count_BKI: Any, scratch: dict[str, Any]):
        self.plan, self.scratch = plan, scratch
        self.b, self.h = lax.axis_index('sequence'), lax.axis_index('head')
        self.k = lax.div(self.h, jnp.int32(plan.group))
        self.tile = plan.tokens // TILE - 1 - lax.axis_index('block')  # the last ones, which read the most, start first
        self.mask_WT = mask_BKWT.at[self.b, self.k]
        self.ids_J = ids_BKIJ.at[self.b, self.k, self.tile]
        self.steps = count_BKI[self.b, self.k, self.tile]

    def queries(self, warpgroup: Any) -> Any:
        return pl.ds(self.tile * TILE + warpgroup * ROWS, ROWS)

    def copy_keys(self, k_BTKA: Any, v_BTKA: Any) -> None:
        """The part of the warpgroup that copies."""
        scratch = self.scratch

        def visit(step: jax.Array, tile: jax.Array) -> jax.Array:
            slot = lax.rem(step, jnp.int32(KEY_STAGES))
            next_tile = self.ids_J[jnp.minimum(step + 1, self.steps - 1)]  # asked for before it is needed
            keys = (self.b, pl.ds(tile * TILE, TILE), self.k)

            @pl.when(step >= KEY_STAGES)
            def _() -> None:
                plgpu.barrier_wait(scratch['k_empty'].at[slot])

            plgpu.copy_gmem_to_smem(k_BTKA.at[keys], scratch['k'].at[slot], scratch['k_full'].at[slot])
            for warpgroup in range(WARPGROUPS):
                words_T = self.mask_WT.at[self.plan.word_of(tile), self.queries(warpgroup)]
                plgpu.copy_gmem_to_smem(words_T, scratch['words'].at[slot, warpgroup], scratch['k_full'].at[slot])

            @pl.when(step >= KEY_STAGES)
            def _() -> None:
                plgpu.barrier_wait(scratch['v_empty'].at[slot])

            plgpu.copy_gmem_to_smem(v_BTKA.at[keys], scratch['v'].at[slot], scratch['v_full'].at[slot])
            return next_tile

        lax.fori_loop(0, self.steps, visit, self.ids_J[0])
        drain(self.steps, KEY_STAGES, scratch['k_empty'], scratch['v_empty'])

    def copy_queries(self, warpgroup: jax.Array, *arrays: Any) -> list[Any]:
        """References to a warpgroup's queries in shared memory."""
        full = self.scratch['queries_full'].at[warpgroup]
        refs = [tile.at[warpgroup] for tile in self.scratch['queries']]
        for x_BTHA, ref in zip(arrays, refs, strict=True):
            plgpu.copy_gmem_to_smem(x_BTHA.at[self.b, self.queries(warpgroup), self.h], ref, full)
        plgpu.barrier_wait(full)
        return refs

    def over_keys(self, warpgroup: jax.Array, visit: Callable[..., Any], state: Any) -> Any:
        """Folds `visit(slot, masked, state)` over the tiles; `masked` makes scores of what is not read -inf."""

        def on_step(on_diagonal: bool, step: jax.Array, state: Any) -> Any:
            slot = lax.rem(step, jnp.int32(KEY_STAGES))
            tile = self.ids_J[step]
            plgpu.barrier_wait(self.scratch['k_full'].at[slot])

            def masked(score_TS: jax.Array) -> jax.Array:
                words_T = load(self.scratch['words'].at[slot, warpgroup], layout=ROW, optimized=False)
                words_T = lax.shift_right_logical(words_T, jnp.broadcast_to(self.plan.bit_of(tile), words_T.shape))
                key_TS = iota(score_TS.shape, 1, layout=MATRIX)
                reads_TS = self.plan.has_bit(lax.broadcast_in_dim(words_T, score_TS.shape, (0,)), key_TS)
                if on_diagonal:
                    reads_TS &= key_TS <= warpgroup * ROWS + iota(score_TS.shape, 0, layout=MATRIX)
                return jnp.where(reads_TS, score_TS, -jnp.inf)

            return visit(slot, masked, state)

        state = lax.fori_loop(0, self.steps - 1, functools.partial(on_step, False), state)
        return on_step(True, self.steps - 1, state)
