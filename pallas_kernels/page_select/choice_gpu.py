"""How a thread block of a Hopper GPU chooses the pages of one KV head of one sequence.

Its warpgroups stream the landmarks of existing pages through shared memory by bulk copies, and leave one float32 score
a page. The first warpgroup then turns scores into integers of the same order, finds the last one chosen from its
highest bits down, with counts over the block, and writes every chosen page to the place that the number of chosen ones
before it gives.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.page_select import lanes_gpu as lanes
from pallas_kernels.page_select.tuning import HopperBlocks
from pallas_kernels.pallas_gpu import in_every_warp, layout_cast, let_next_start, load, wait_for_previous
from pallas_kernels.score_order import ordered

_RESERVED = jnp.iinfo(jnp.int32).max
_MISSING = jnp.iinfo(jnp.int32).min
_KEY_BITS = 32
_SWIZZLE_ROWS, _SWIZZLE_BYTES = 8, 128  # the unit in which copies shuffle rows, against bank conflicts
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_TILE_PAGES = 64  # rows of the layout in which a warpgroup holds a matrix


def for_copies(landmark_BKNA: jax.Array) -> tuple[jax.Array, bool]:
    """Landmarks as the bulk copies take them, and whether they are as they were given.

    Copies cannot express other numbers of pages than multiples of 8; make caches of such, since padding reads and
    writes them all.
    """
    missing = -landmark_BKNA.shape[2] % _SWIZZLE_ROWS
    return (jnp.pad(landmark_BKNA, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else landmark_BKNA), not missing


@dataclasses.dataclass(frozen=True)
class Choice:
    """All sizes of one call.

    Attributes:
        N, A: pages of a sequence at most, numbers of a landmark.
        group: query heads of a KV head.
        dtype: of the landmarks.
        page_tokens, max_pages, reserved_first, reserved_last, landmarks_at_rest: see `page_select`.
        physical: whether ids come from a page table.
        is_all: whether the kernel does nothing more, so that the next one may start when the last landmarks are read.
        blocks: sizes.
    """

    N: int
    A: int
    group: int
    dtype: str
    page_tokens: int
    max_pages: int
    reserved_first: int
    reserved_last: int
    landmarks_at_rest: bool
    physical: bool
    is_all: bool
    blocks: HopperBlocks

    @property
    def stages(self) -> int:
        return self.blocks.stages(_TILE_PAGES * self.A * jnp.dtype(self.dtype).itemsize)

    @property
    def chunk(self) -> int:
        """Pages whose keys are in registers at a time."""
        unit = max(lanes.WARPGROUP, self.blocks.warpgroups * _TILE_PAGES)
        return min(-(-self.N // unit) * unit, self.blocks.chunk_pages)

    @property
    def chunks(self) -> int:
        return -(-self.N // self.chunk)

    def scratch(self) -> dict[str, Any]:
        """Of a thread block, by the names that `run` takes."""
        warpgroups, width = self.blocks.warpgroups, _SWIZZLE_BYTES // jnp.dtype(self.dtype).itemsize
        swizzled = (plgpu.TilingTransform((_SWIZZLE_ROWS, width)), plgpu.SwizzleTransform(_SWIZZLE_BYTES))
        return {
            'tiles': plgpu.SMEM((warpgroups * self.stages, _TILE_PAGES, self.A), self.dtype, transforms=swizzled),
            'query': plgpu.SMEM((warpgroups, self.A), jnp.float32),
            'keys': plgpu.SMEM((self.chunks * self.chunk,), jnp.int32),
            'words': plgpu.SMEM((4, (1 << self.blocks.digit_bits) - 1, lanes.WARPS), jnp.int32),
            'arrived': plgpu.Barrier(num_barriers=warpgroups * self.stages),
            'scored': plgpu.Barrier(num_arrivals=warpgroups),
        }

    def run(
        self,
        b: Any,
        k: Any,
        q_HA: Any,
        landmark_NA: Any,
        length_B: Any,
        budget_B: Any,
        table_N: Any,
        ids_M: Any,
        *,
        tiles: Any,
        query: Any,
        keys: Any,
        words: Any,
        arrived: Any,
        scored: Any,
    ) -> jax.Array:
        """Writes the ids, and returns how many pages are read; all warpgroups call it, and the first one writes.

        Args:
            b, k: sequence and KV head.
            q_HA, landmark_NA, table_N, ids_M: references to theirs; the table is None where ids are not physical.
            length_B, budget_B: references to those of all sequences.
        """
        warpgroups, stages = self.blocks.warpgroups, self.stages
        warpgroup = lax.axis_index('warpgroup')

        def pages_of(step: Any) -> Any:
            return pl.ds((step * warpgroups + warpgroup) * _TILE_PAGES, _TILE_PAGES)

        def stage(step: Any) -> jax.Array:
            return warpgroup * stages + lax.rem(step, stages)

        def read(step: Any) -> None:
            plgpu.copy_gmem_to_smem(landmark_NA.at[pages_of(step)], tiles.at[stage(step)], arrived.at[stage(step)])

        def steps_of(length: jax.Array) -> tuple[jax.Array, jax.Array]:
            pages = jnp.minimum(lax.div(length + (self.page_tokens - 1), self.page_tokens), self.N)
            count = lax.div(pages + (_TILE_PAGES - 1), _TILE_PAGES)
            return pages, jnp.maximum(lax.div(count + (warpgroups - 1) - warpgroup, warpgroups), 1)

        begun: Any = 1
        if self.landmarks_at_rest:
            # The length may not be there yet: read as another one, it brings too few tiles or too many, never others.
            begun = steps_of(length_B[b])[1]
            for step in range(stages):
                pl.when(step < begun)(functools.partial(read, jnp.int32(step)))
        wait_for_previous()
        if not self.landmarks_at_rest:
            read(jnp.int32(0))
            plgpu.commit_smem()  # or the compiler would rather wait for the length, which takes as long as these
        length, budget = length_B[b], budget_B[b]
        layout = in_every_warp(self.A)
        heads = [load(q_HA.at[k * self.group + head], layout=layout, optimized=False) for head in range(self.group)]
        pages, steps = steps_of(length)
        for step in range(1, stages):
            pl.when((step >= begun) & (step < steps))(functools.partial(read, jnp.int32(step)))
        q_RA = _mean_query(heads, query.at[warpgroup])
        used_chunks: Any = 1  # known beforehand where all keys are one chunk
        written_chunks: Any = 1
        if self.chunks > 1:
            used_chunks = jnp.maximum(lax.div(pages + (self.chunk - 1), self.chunk), 1)
            written_chunks = jnp.maximum(used_chunks, -(-self.max_pages // self.chunk))

        @pl.loop(steps, used_chunks * (self.chunk // _TILE_PAGES // warpgroups))
        def _(step: jax.Array) -> None:
            keys[pages_of(step)] = layout_cast(jnp.full(_TILE_PAGES, _MISSING), _ROWS)

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            plgpu.barrier_wait(arrived.at[stage(step)])
            tile_RA = layout_cast(tiles[stage(step)], plgpu.Layout.WGMMA)
            # A copy waits for the whole warpgroup, so that everybody has read the stage by then.
            pl.when(step + stages < steps)(functools.partial(read, step + stages))
            if self.is_all:
                pl.when(step + stages >= steps)(let_next_start)
            score_R = (tile_RA.astype(jnp.float32) * q_RA).sum(axis=1)
            page_R = pages_of(step).start + layout_cast(lax.iota(jnp.int32, _TILE_PAGES), _ROWS)
            reserved_R = (page_R < self.reserved_first) | (page_R >= pages - self.reserved_last)
            key_R = jnp.where(reserved_R, _RESERVED, ordered(score_R))
            keys[pages_of(step)] = jnp.where(page_R < pages, key_R, _MISSING)

        if self.landmarks_at_rest:  # no copy may be under way when the block ends
            for step in range(1, stages):
                waited = arrived.at[stage(jnp.int32(step))]
                pl.when((step >= steps) & (step < begun))(functools.partial(plgpu.barrier_wait, waited))
        plgpu.barrier_arrive(scored)
        if warpgroups > 1:
            pl.when(warpgroup > 0)(lambda: plgpu.barrier_wait(scored))
        count = jnp.minimum(budget, self.max_pages) + (self.reserved_first + self.reserved_last)
        count = jnp.minimum(jnp.minimum(pages, count), self.max_pages)

        @pl.when(warpgroup == 0)
        def _() -> None:
            of_pages = _Keys(keys, self.chunk, pages)

            def ids(part: jax.Array) -> jax.Array:
                if table_N is None:
                    return of_pages.pages(part)
                return lanes.take(table_N, jnp.minimum(of_pages.pages(part), self.N - 1))

            first_ids = ids(jnp.int32(0))  # on their way while the cut is being found
            plgpu.barrier_wait(scored)
            cut = _cut(of_pages, used_chunks, count, self.blocks.digit_bits, words.at[pl.ds(0, 2)])
            unused = 0 if self.physical else self.N
            _write(of_pages, written_chunks, cut, count, ids, first_ids, unused, ids_M, words.at[pl.ds(2, 2)])

        return count


def _mean_query(heads: list[jax.Array], mean_ref: Any) -> jax.Array:
    """The heads' mean in float32, once for every row of a tile; `mean_ref` is where lanes exchange it."""
    total_A = sum((q_A.astype(jnp.float32) for q_A in heads[1:]), start=heads[0].astype(jnp.float32))
    mean_ref[...] = total_A / len(heads)
    mean_A = layout_cast(mean_ref[...], plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(mean_A, (_TILE_PAGES, *mean_A.shape), (1,))


@dataclasses.dataclass(frozen=True)
class _Keys:
    """The keys of all pages in shared memory, read in chunks that fit into the registers of a warpgroup."""

    ref: Any
    chunk: int
    existing: jax.Array

    def pages(self, part: jax.Array) -> jax.Array:
        """The numbers of a chunk's pages."""
        return part * self.chunk + layout_cast(lax.iota(jnp.int32, self.chunk), lanes.by_warp(self.chunk))

    def __getitem__(self, part: jax.Array) -> jax.Array:
        return layout_cast(self.ref[pl.ds(part * self.chunk, self.chunk)], lanes.by_warp(self.chunk))


def _cut(keys: _Keys, chunks: Any, count: jax.Array, digit_bits: int, words_ref: Any) -> tuple[jax.Array, jax.Array]:
    """A number, and how many keys are above it: not more than `count`, and together with the equal ones not less.

    Built from the highest bits down, until exactly `count` keys reach it: most scores differ, and far from each other,
    so that a few of the bits tell the chosen ones from the others.
    """
    digits = range(1, 1 << digit_bits)

    def unsure(state: Any) -> jax.Array:
        _, above, bits = state
        return (bits > 0) & (above < count)

    def narrow(state: Any) -> Any:
        cut, above, bits = state  # the lowest `bits` are not known yet
        shift = jnp.maximum(bits - digit_bits, 0)
        most = lax.shift_left(jnp.int32(1), bits - shift) - 1  # the last digit can be a shorter one
        tried = [cut + lax.shift_left(jnp.minimum(digit, most), shift) for digit in digits]

        def add(part: jax.Array, reached: list[jax.Array]) -> list[jax.Array]:
            key_N = keys[part]
            return [sum_N + (key_N >= cut).astype(jnp.int32) for sum_N, cut in zip(reached, tried, strict=True)]

        none_N = layout_cast(jnp.zeros(keys.chunk, jnp.int32), lanes.by_warp(keys.chunk))
        reached = lanes.total(
            lax.fori_loop(0, chunks, add, [none_N] * len(tried)),
            words_ref.at[lax.rem(lax.div(bits + digit_bits - 1, digit_bits), 2)],
        )
        for higher, number in zip(tried, reached, strict=True):
            cut = jnp.where(number > count, higher, jnp.where(number == count, higher - 1, cut))
            above = jnp.where(number <= count, jnp.maximum(number, above), above)
        return cut, above, shift

    state = jnp.int32(_MISSING), jnp.int32(0), jnp.int32(_KEY_BITS)
    return lax.while_loop(unsure, narrow, state)[:2]


def _write(
    keys: _Keys,
    chunks: Any,
    cut: tuple[jax.Array, jax.Array],
    count: jax.Array,
    ids: Callable[[jax.Array], jax.Array],
    first_ids: jax.Array,
    unused: int,
    ids_ref: Any,
    words_ref: Any,
) -> None:
    """Writes the ids of the chosen pages in page order: those above the cut and the first of the equal ones.

    `unused` stands behind them: every page that is not chosen writes it, to the place that its own rank gives.
    """
    lowest, above = cut
    wanted = count - above  # of the equal ones

    def write(part: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        above_before, equal_before, id_N = state
        next_N = ids(part + 1)  # asked for one chunk ahead
        page_N = keys.pages(part)
        key_N = jnp.where(page_N < keys.existing, keys[part], _MISSING)
        above_N, equal_N = key_N > lowest, key_N == lowest
        (above_before_N, equal_before_N), (above, equal) = lanes.count_before(
            [above_N.astype(jnp.int32), equal_N.astype(jnp.int32)], words_ref.at[lax.rem(part, 2)]
        )
        equal_before_N = equal_before + equal_before_N
        chosen_N = above_N | (equal_N & (equal_before_N < wanted))
        chosen_before_N = above_before + above_before_N + jnp.minimum(equal_before_N, wanted)
        place_N = jnp.where(chosen_N, chosen_before_N, count + page_N - chosen_before_N)
        lanes.put(ids_ref, place_N, jnp.where(chosen_N, id_N, unused))
        return above_before + above, equal_before + equal, next_N

    lax.fori_loop(0, chunks, write, (jnp.int32(0), jnp.int32(0), first_ids))
