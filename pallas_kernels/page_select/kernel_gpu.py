"""Block top-k selection for Hopper GPUs: scores, reserved pages, choice and ids in one kernel.

A thread block takes one KV head of one sequence. Its warpgroups stream the landmarks of existing pages through shared
memory by bulk copies, and leave one float32 score a page. The first warpgroup then turns scores into integers of the
same order, finds the last one chosen from its highest bits down, with counts over the block, and writes every chosen
page to the place that the number of chosen ones before it gives.
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
from pallas_kernels.page_select.tuning import HOPPER, HopperBlocks
from pallas_kernels.pallas_gpu import (
    MULTIPROCESSORS,
    in_every_warp,
    kernel,
    layout_cast,
    let_next_start,
    load,
    wait_for_previous,
)
from pallas_kernels.score_order import ordered

_STATIC = ('page_tokens', 'max_pages', 'reserved_first', 'reserved_last', 'landmarks_at_rest', 'interpret', 'blocks')
_RESERVED = jnp.iinfo(jnp.int32).max
_MISSING = jnp.iinfo(jnp.int32).min
_KEY_BITS = 32
_SWIZZLE_ROWS, _SWIZZLE_BYTES = 8, 128  # the unit in which copies shuffle rows, against bank conflicts
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_TILE_PAGES = 64  # rows of the layout in which a warpgroup holds a matrix


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)  # the layers of a model then share one lowering
def page_select(
    q_BHA: jax.Array,
    landmark_BKNA: jax.Array,
    length_B: jax.Array,
    budget_B: jax.Array,
    table_BN: jax.Array | None,
    *,
    page_tokens: int,
    max_pages: int,
    reserved_first: int,
    reserved_last: int,
    landmarks_at_rest: bool = False,
    interpret: bool,
    blocks: HopperBlocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.page_select`; `blocks` are those of `tuning` unless given."""
    # Interpreted warpgroups wait for each other in threads of the CPU's pool, which may have too few: one never ends.
    blocks = blocks or dataclasses.replace(HOPPER, warpgroups=1 if interpret else HOPPER.warpgroups)
    B, K, N, A = landmark_BKNA.shape
    group = q_BHA.shape[1] // K
    warpgroups, stages = blocks.warpgroups, blocks.stages(_TILE_PAGES * A * landmark_BKNA.dtype.itemsize)
    unit = max(lanes.WARPGROUP, warpgroups * _TILE_PAGES)
    chunk = min(-(-N // unit) * unit, blocks.chunk_pages)
    chunks = -(-N // chunk)
    if (
        N % _SWIZZLE_ROWS
    ):  # the copies cannot express it; make caches of a multiple, since this reads and writes them all
        landmark_BKNA = jnp.pad(landmark_BKNA, ((0, 0), (0, 0), (0, -N % _SWIZZLE_ROWS), (0, 0)))
        landmarks_at_rest = False

    def body(q_ref: Any, landmark_ref: Any, length_ref: Any, budget_ref: Any, *refs: Any) -> None:
        table_ref, (ids_ref, count_ref, tiles_ref, query_ref, key_ref, words_ref, arrived, scored) = (
            (refs[0], refs[1:]) if table_BN is not None else (None, refs)
        )
        b, k, warpgroup = lax.axis_index('b'), lax.axis_index('k'), lax.axis_index('warpgroup')

        def pages_of(step: Any) -> Any:
            return pl.ds((step * warpgroups + warpgroup) * _TILE_PAGES, _TILE_PAGES)

        def stage(step: Any) -> jax.Array:
            return warpgroup * stages + lax.rem(step, stages)

        def read(step: Any) -> None:
            plgpu.copy_gmem_to_smem(
                landmark_ref.at[b, k, pages_of(step)], tiles_ref.at[stage(step)], arrived.at[stage(step)]
            )

        def steps_of(length: jax.Array) -> tuple[jax.Array, jax.Array]:
            pages = jnp.minimum(lax.div(length + (page_tokens - 1), page_tokens), N)
            tiles = lax.div(pages + (_TILE_PAGES - 1), _TILE_PAGES)
            return pages, jnp.maximum(lax.div(tiles + (warpgroups - 1) - warpgroup, warpgroups), 1)

        begun: Any = 1
        if landmarks_at_rest:
            # The length may not be there yet: read as another one, it brings too few tiles or too many, never others.
            begun = steps_of(length_ref[b])[1]
            for step in range(stages):
                pl.when(step < begun)(functools.partial(read, jnp.int32(step)))
        wait_for_previous()
        if not landmarks_at_rest:
            read(jnp.int32(0))
            plgpu.commit_smem()  # or the compiler would rather wait for the length, which takes as long as these
        length, budget = length_ref[b], budget_ref[b]
        heads = [load(q_ref.at[b, k * group + head], layout=in_every_warp(A), optimized=False) for head in range(group)]
        pages, steps = steps_of(length)
        for step in range(1, stages):
            pl.when((step >= begun) & (step < steps))(functools.partial(read, jnp.int32(step)))
        q_RA = _mean_query(heads, query_ref.at[warpgroup])
        used_chunks: Any = 1  # known beforehand where all keys are one chunk
        written_chunks: Any = 1
        if chunks > 1:
            used_chunks = jnp.maximum(lax.div(pages + (chunk - 1), chunk), 1)
            written_chunks = jnp.maximum(used_chunks, -(-max_pages // chunk))

        @pl.loop(steps, used_chunks * (chunk // _TILE_PAGES // warpgroups))
        def _(step: jax.Array) -> None:
            key_ref[pages_of(step)] = layout_cast(jnp.full(_TILE_PAGES, _MISSING), _ROWS)

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            plgpu.barrier_wait(arrived.at[stage(step)])
            tile_RA = layout_cast(tiles_ref[stage(step)], plgpu.Layout.WGMMA)
            # A copy waits for the whole warpgroup, so that everybody has read the stage by then.
            pl.when(step + stages < steps)(functools.partial(read, step + stages))
            pl.when(step + stages >= steps)(let_next_start)
            score_R = (tile_RA.astype(jnp.float32) * q_RA).sum(axis=1)
            page_R = pages_of(step).start + layout_cast(lax.iota(jnp.int32, _TILE_PAGES), _ROWS)
            reserved_R = (page_R < reserved_first) | (page_R >= pages - reserved_last)
            key_R = jnp.where(reserved_R, _RESERVED, ordered(score_R))
            key_ref[pages_of(step)] = jnp.where(page_R < pages, key_R, _MISSING)

        if landmarks_at_rest:  # no copy may be under way when the block ends
            for step in range(1, stages):
                waited = arrived.at[stage(jnp.int32(step))]
                pl.when((step >= steps) & (step < begun))(functools.partial(plgpu.barrier_wait, waited))
        plgpu.barrier_arrive(scored)

        @pl.when(warpgroup == 0)
        def _() -> None:
            count = jnp.minimum(budget, max_pages) + (reserved_first + reserved_last)
            count = jnp.minimum(jnp.minimum(pages, count), max_pages)
            keys = _Keys(key_ref, chunk, pages)

            def ids(part: jax.Array) -> jax.Array:
                if table_ref is None:
                    return keys.pages(part)
                return lanes.take(table_ref.at[b], jnp.minimum(keys.pages(part), N - 1))

            first_ids = ids(jnp.int32(0))  # on their way while the cut is being found
            plgpu.barrier_wait(scored)
            cut = _cut(keys, used_chunks, count, blocks.digit_bits, words_ref.at[pl.ds(0, 2)])
            unused = N if table_ref is None else 0
            _write(
                keys, written_chunks, cut, count, ids, first_ids, unused, ids_ref.at[b, k], words_ref.at[pl.ds(2, 2)]
            )

            @pl.when(k == 0)
            def _() -> None:
                count_ref[b] = count

    ids_BKM, count_B = kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, K, max_pages), jnp.int32),
            jax.ShapeDtypeStruct((B,), jnp.int32),
        ),
        grid=(B, K),
        grid_names=('b', 'k'),
        num_threads=warpgroups,
        thread_name='warpgroup',
        alone=B * K <= MULTIPROCESSORS,
        scratch_types=(
            plgpu.SMEM(
                (warpgroups * stages, _TILE_PAGES, A),
                landmark_BKNA.dtype,
                transforms=(
                    plgpu.TilingTransform((_SWIZZLE_ROWS, _SWIZZLE_BYTES // landmark_BKNA.dtype.itemsize)),
                    plgpu.SwizzleTransform(_SWIZZLE_BYTES),
                ),
            ),
            plgpu.SMEM((warpgroups, A), jnp.float32),
            plgpu.SMEM((chunks * chunk,), jnp.int32),
            plgpu.SMEM((4, (1 << blocks.digit_bits) - 1, lanes.WARPS), jnp.int32),
            plgpu.Barrier(num_barriers=warpgroups * stages),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        name='page_select',
        interpret=interpret,
    )(q_BHA, landmark_BKNA, length_B, budget_B, *(() if table_BN is None else (table_BN,)))
    return ids_BKM, count_B


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
