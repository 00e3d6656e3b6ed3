"""page_select on TPU, one kernel, without sorting.

Landmarks are streamed: the chunks of all sequences form one list, and a ring of buffers keeps the next ones under way
whatever is being computed. A chunk of all KV heads of a sequence becomes int32 keys in the order of the scores. When a
group of sequences is complete, the key of each row's last chosen page is found digit by digit, by counting, for all
rows at once; prefix sums (products with a triangle of ones) give every chosen page its place, and a network of
log2(N) conditional shifts moves it there. A row is a pair of sequence and KV head.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.page_select.choice_tpu import ALWAYS, NEVER, distances, look_up, move_left, thresholds
from pallas_kernels.page_select.tuning import TPU, Blocks
from pallas_kernels.pallas_tpu import LANES, SUBLANES, device_cores, interpreter
from pallas_kernels.score_order import ordered

_HIGH_HALF = -(1 << 16)
_SEQUENCE, _CHUNK, _READ = range(3)  # cells of scalar memory: the chunk copied next, and how many were read


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What is fixed when the kernel is traced.

    Attributes:
        sequences, heads, pages, head_dim: B, K, N and A.
        most: M.
        unused: what fills the ids beyond the count: N, or 0, which is a place in the table, where ids are looked up.
        first, last: reserved pages.
        group: sequences of a program, whose thresholds are searched together.
        steps: programs of one core, one after the other.
        padded_heads: rows of a sequence, a power of two or a multiple of 8, so that none lies across two tiles.
        pieces: parts of the mean query of which each fits the landmarks' dtype without rounding.
    """

    sequences: int
    heads: int
    pages: int
    head_dim: int
    most: int
    unused: int
    first: int
    last: int
    group: int
    steps: int
    padded_heads: int
    pieces: int
    buffers: int
    blocks: Blocks

    @property
    def rows(self) -> int:
        return self.group * self.padded_heads

    @property
    def score_rows(self) -> int:
        """Rows of one tile of scores; those of a sequence lie within it."""
        return max(self.padded_heads, SUBLANES)

    @property
    def chunks(self) -> int:
        """Whole chunks of a full sequence. The pages after them come as a block, which may end anywhere."""
        return self.pages // self.blocks.chunk_pages

    @property
    def widths(self) -> list[int]:
        """Numbers of pages for which there is code that chooses among them, the last being all, in whole chunks."""
        width = pl.cdiv(self.pages, self.blocks.chunk_pages) * self.blocks.chunk_pages
        parts = [width // part // LANES * LANES for part in (4, 2)]
        return [part for part in parts if part >= self.blocks.narrowest] + [width]


class _Scratch(NamedTuple):
    """Memory that outlives a program, or what stands for it."""

    ring: Any
    arrived: Any
    cells: Any
    queries: Any
    keys: Any
    counts: Any
    thresholds: Any


def page_select(
    q_BHA,
    landmark_BKNA,
    length_B,
    budget_B,
    table_BN,
    *,
    page_tokens: int,
    max_pages: int,
    reserved_first: int,
    reserved_last: int,
    interpret: bool,
    blocks: Blocks = TPU,
    cores: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`pallas_kernels.page_select.page_select` with checked arguments.

    TPU v5e and newer. On chip it holds the ring (`Blocks.buffer_bytes`), queries and page table whole, and keys of one
    group; docs/kernels_tpu.md has the sizes. Chosen pages are those of the definition wherever scores differ by
    more than the rounding of a float32 sum.

    Args:
        blocks, cores: for tests; sizes of the chip at hand by default.
    """
    B, K, N, A = landmark_BKNA.shape
    padded_heads = pl.next_power_of_2(K) if K < SUBLANES else pl.cdiv(K, SUBLANES) * SUBLANES
    tile = max(SUBLANES // padded_heads, 1)  # sequences of one register
    group = min(max(blocks.rows // padded_heads, 1), pl.cdiv(B, tile) * tile)
    groups = pl.cdiv(B, group)
    cores = cores or device_cores(interpret)
    if groups % cores:
        cores = 1
    chunk_bytes = K * blocks.chunk_pages * max(A, LANES) * landmark_BKNA.dtype.itemsize
    sizes = _Sizes(
        sequences=B,
        heads=K,
        pages=N,
        head_dim=A,
        most=max_pages,
        unused=N if table_BN is None else 0,
        first=reserved_first,
        last=reserved_last,
        group=group,
        steps=groups // cores,
        padded_heads=padded_heads,
        pieces=3 if landmark_BKNA.dtype == jnp.bfloat16 else 1,
        buffers=min(max(blocks.buffer_bytes // chunk_bytes, 2), blocks.most_buffers),
        blocks=blocks,
    )
    # Layers of a step share these, so they are left to the compiler, which makes them once.
    pages_B = -(-length_B // page_tokens)
    count_B = jnp.minimum(pages_B, jnp.minimum(budget_B, max_pages) + reserved_first + reserved_last)
    count_B = jnp.minimum(count_B, max_pages)
    ids_BKM = _call(sizes, cores, interpret, q_BHA, landmark_BKNA, pages_B, count_B, table_BN)
    return ids_BKM, count_B


def _call(sizes: _Sizes, cores: int, interpret: bool, q_BHA, landmark_BKNA, pages_B, count_B, table_BN) -> jax.Array:
    B, K, N, A = landmark_BKNA.shape
    groups = cores * sizes.steps
    chunk, rows = sizes.blocks.chunk_pages, sizes.rows
    width = sizes.widths[-1]
    in_specs = [pl.BlockSpec(q_BHA.shape, lambda *_: (0, 0, 0)), pl.BlockSpec(memory_space=pl.ANY)]
    operands = [q_BHA, landmark_BKNA]
    tail = N % chunk != 0
    if tail:
        # The same array once more. A group without a sequence that gets this far asks for the first group's block.
        index_map = lambda core, step, *scalars: (scalars[-1][core * sizes.steps + step], 0, sizes.chunks, 0)
        in_specs.append(pl.BlockSpec((sizes.group, K, chunk, A), index_map))
        operands.append(landmark_BKNA)
    if table_BN is not None:
        in_specs.append(pl.BlockSpec(table_BN.shape, lambda *_: (0, 0)))
        operands.append(table_BN)
    reach_G = jnp.pad(pages_B, (0, groups * sizes.group - B)).reshape(groups, sizes.group).max(axis=1)
    tails_G = jnp.where(reach_G > sizes.chunks * chunk, jnp.arange(groups), 0).astype(jnp.int32)
    ids = pl.pallas_call(
        functools.partial(_kernel, sizes, tail, table_BN is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cores, sizes.steps),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((rows, sizes.most), lambda core, step, *_: (core * sizes.steps + step, 0)),
            scratch_shapes=_Scratch(
                ring=pltpu.VMEM((sizes.buffers, K, chunk, A), landmark_BKNA.dtype),
                arrived=pltpu.SemaphoreType.DMA((sizes.buffers,)),
                cells=pltpu.SMEM((3,), jnp.int32),
                queries=pltpu.VMEM((K, sizes.pieces * sizes.score_rows, A), landmark_BKNA.dtype),
                keys=pltpu.VMEM((rows, width), jnp.int32),
                counts=pltpu.VMEM((rows, LANES), jnp.int32),
                thresholds=pltpu.VMEM((rows, LANES), jnp.int32),
            ),
        ),
        out_shape=jax.ShapeDtypeStruct((groups * rows, sizes.most), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=sizes.blocks.vmem_bytes
        ),
        interpret=interpreter(interpret),
        name='page_select',
    )(pages_B, count_B, tails_G, *operands)
    return ids.reshape(-1, sizes.padded_heads, sizes.most)[:B, :K]


def _kernel(sizes: _Sizes, tail: bool, physical: bool, pages_B, count_B, tails_G, q_BHA, landmark_BKNA, *refs):
    del tails_G
    inputs = iter(refs)
    tail_ref = next(inputs) if tail else None
    table_BN = next(inputs) if physical else None
    ids_ref = next(inputs)
    scratch = _Scratch(*inputs)
    core, step = pl.program_id(0), pl.program_id(1)
    first = core * sizes.steps * sizes.group
    stop = jnp.minimum(first + sizes.steps * sizes.group, sizes.sequences)
    start = first + step * sizes.group
    stream = _Stream(sizes, stop, pages_B, landmark_BKNA, scratch)
    keys_ref, counts_ref = scratch.keys, scratch.counts

    @pl.when(step == 0)
    def _():
        stream.begin(first)

    keys_ref[...] = jnp.full(keys_ref.shape, NEVER, jnp.int32)
    counts_ref[...] = jnp.zeros(counts_ref.shape, jnp.int32)

    @pl.loop(0, jnp.minimum(sizes.group, stop - start))
    def _(i):
        b = start + i
        pages = pages_B[b]
        row = i * sizes.padded_heads
        tile = pl.multiple_of(row // sizes.score_rows * sizes.score_rows, SUBLANES)
        own_rows = pl.ds(tile, sizes.score_rows)
        offset = row - tile
        _spread_queries(sizes, q_BHA[b], offset, scratch.queries)
        counts_ref[own_rows] = jnp.where(_owned(sizes, offset, LANES), count_B[b], counts_ref[own_rows])

        def score(landmark_KNA, first_page):
            own_lanes = pl.ds(pl.multiple_of(first_page, LANES), sizes.blocks.chunk_pages)
            score_RN = _scores(sizes, scratch.queries, landmark_KNA)
            page_RN = first_page + lax.broadcasted_iota(jnp.int32, score_RN.shape, 1)
            key_RN = ordered(score_RN)
            reserved_RN = (page_RN < sizes.first) | (page_RN >= pages - sizes.last)
            key_RN = jnp.where(reserved_RN, ALWAYS, key_RN)
            key_RN = jnp.where(page_RN < pages, key_RN, NEVER)
            mine_RN = _owned(sizes, offset, sizes.blocks.chunk_pages)
            keys_ref[own_rows, own_lanes] = jnp.where(mine_RN, key_RN, keys_ref[own_rows, own_lanes])

        @pl.loop(0, stream.chunks(b))
        def _(chunk):
            stream.read(functools.partial(score, first_page=chunk * sizes.blocks.chunk_pages))

        if tail:
            first_page = sizes.chunks * sizes.blocks.chunk_pages
            pl.when(pages > first_page)(lambda: score(tail_ref.at[i], first_page))  # type: ignore[union-attr]

    # Sequences far shorter than the longest possible one are spared the work on pages that they do not have.
    reach = functools.reduce(jnp.maximum, [pages_B[jnp.minimum(start + i, stop - 1)] for i in range(sizes.group)])
    reach = jnp.minimum(reach, sizes.pages)  # a finished sequence may stand one token beyond the cache
    for shorter, width in itertools.pairwise((-1, *sizes.widths)):
        choose = functools.partial(_choose, sizes, width, start, scratch, table_BN, ids_ref)
        pl.when((reach > shorter) & (reach <= width))(choose)


def _choose(sizes: _Sizes, width: int, start, scratch: _Scratch, table_BN, ids_ref) -> None:
    """Writes the group's ids; the first `width` keys hold all pages of its sequences."""
    scratch.thresholds[...] = thresholds(
        scratch.keys, scratch.counts[...], width=width, digit_bits=sizes.blocks.digit_bits
    )

    @pl.loop(0, sizes.rows // SUBLANES)
    def _(tile):
        own_rows = pl.ds(pl.multiple_of(tile * SUBLANES, SUBLANES), SUBLANES)
        count_RL = scratch.counts[own_rows]
        away_RN = distances(scratch.keys[own_rows, :width], scratch.thresholds[own_rows], count_RL)
        wide = min(pl.cdiv(sizes.most, LANES) * LANES, width)
        place_RM = lax.broadcasted_iota(jnp.int32, (SUBLANES, wide), 1)
        chosen_RM = place_RM < jnp.tile(count_RL, (1, wide // LANES))
        ids_RM = jnp.where(chosen_RM, place_RM + move_left(away_RN)[:, :wide], sizes.unused)
        if table_BN is not None:
            table_RN = _table_rows(sizes, width, table_BN, start + tile * SUBLANES // sizes.padded_heads)
            ids_RM = jnp.where(chosen_RM, look_up(table_RN, ids_RM), sizes.unused)
        most = min(width, sizes.most)
        ids_ref[own_rows, :most] = ids_RM[:, :most]
        if most < sizes.most:
            ids_ref[own_rows, most:] = jnp.full((SUBLANES, sizes.most - most), sizes.unused, jnp.int32)


class _Stream:
    """The ring of landmark chunks: [KV heads, chunk pages, A] of one sequence after the other, up to `stop`."""

    def __init__(self, sizes: _Sizes, stop, pages_B, landmark_BKNA, scratch: _Scratch):
        self.sizes, self.stop, self.pages_B, self.landmark_BKNA = sizes, stop, pages_B, landmark_BKNA
        self.ring, self.arrived, self.cells = scratch.ring, scratch.arrived, scratch.cells

    def chunks(self, b):
        """Chunks of a sequence that are copied: no more than its pages need."""
        return jnp.minimum(pl.cdiv(self.pages_B[b], self.sizes.blocks.chunk_pages), self.sizes.chunks)

    def begin(self, first) -> None:
        self.cells[_SEQUENCE] = self._with_chunks(first)
        self.cells[_CHUNK] = 0
        self.cells[_READ] = 0

        @pl.loop(0, self.sizes.buffers)
        def _(buffer):
            self._start_next(buffer)

    def read(self, use) -> None:
        """Waits for the oldest chunk, calls `use` on it, and copies the next one into its place."""
        buffer = lax.rem(self.cells[_READ], self.sizes.buffers)
        # A wait needs the size and the semaphore of a copy, not its source.
        self._copy(0, 0, buffer).wait()
        use(self.ring.at[buffer])
        self.cells[_READ] += 1
        self._start_next(buffer)

    def _start_next(self, buffer) -> None:
        b, chunk = self.cells[_SEQUENCE], self.cells[_CHUNK]

        @pl.when(b < self.stop)
        def _():
            self._copy(b, chunk, buffer).start()
            ended = chunk + 1 == self.chunks(b)
            self.cells[_CHUNK] = jnp.where(ended, 0, chunk + 1)
            self.cells[_SEQUENCE] = jnp.where(ended, self._with_chunks(b + 1), b)

    def _with_chunks(self, b):
        """The first sequence from b on that has a chunk to copy; `stop` where none has."""
        return lax.while_loop(
            lambda b: (b < self.stop) & (self.chunks(jnp.minimum(b, self.stop - 1)) == 0), lambda b: b + 1, b
        )

    def _copy(self, b, chunk, buffer):
        pages = self.sizes.blocks.chunk_pages
        return pltpu.make_async_copy(
            self.landmark_BKNA.at[b, :, pl.ds(pl.multiple_of(chunk * pages, LANES), pages)],
            self.ring.at[buffer],
            self.arrived.at[buffer],
        )


def _owned(sizes: _Sizes, offset, width: int) -> jax.Array:
    """Which rows of a tile of scores are of the sequence that begins at row `offset`."""
    row_RN = lax.broadcasted_iota(jnp.int32, (sizes.score_rows, width), 0)
    return (row_RN >= offset) & (row_RN < offset + sizes.padded_heads)


def _spread_queries(sizes: _Sizes, q_HA, offset, queries_ref) -> None:
    """Writes, for each KV head, a block that is 0 but for the head's mean query in the head's row.

    The sum of the heads' products with such blocks has every head's scores in its own row: nothing has to be moved.
    """
    K, A = sizes.heads, sizes.head_dim
    mean_KA = q_HA.astype(jnp.float32).reshape(K, -1, A).mean(axis=1)
    row_RA = lax.broadcasted_iota(jnp.int32, (sizes.score_rows, A), 0)
    pieces = _split(mean_KA) if sizes.pieces == 3 else [mean_KA]
    for k in range(K):
        parts = [jnp.where(row_RA == offset + k, piece_KA[k : k + 1], 0.0) for piece_KA in pieces]
        queries_ref[k] = jnp.concatenate(parts, axis=0).astype(queries_ref.dtype)


def _split(x: jax.Array) -> list[jax.Array]:
    """Three float32 numbers of 8 significant bits, bfloat16 without rounding, whose sum is x.

    By cutting bits off: conversions there and back may be simplified away.
    """
    pieces = []
    for _ in range(3):
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & _HIGH_HALF, jnp.float32)
        pieces.append(high)
        x = x - high
    return pieces


def _scores(sizes: _Sizes, queries_ref, landmark_ref) -> jax.Array:
    """Products of each head's mean query with its landmarks, exact, added up in float32: [rows of the tile, pages]."""
    # One pass of the matrix unit multiplies bfloat16 exactly; HIGHEST is for float32 and is refused for bfloat16.
    precision = None if sizes.pieces == 3 else lax.Precision.HIGHEST
    total: Any = 0.0
    for k in range(sizes.heads):
        total = total + lax.dot_general(
            queries_ref[k],
            landmark_ref[k],
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
    return total.reshape(sizes.pieces, sizes.score_rows, -1).sum(axis=0)


def _table_rows(sizes: _Sizes, width: int, table_BN, first) -> jax.Array:
    """The first entries of the table's row of the sequence of each of 8 rows, that of the first row being `first`."""
    filled = min(width, sizes.pages)
    row_RN = lax.broadcasted_iota(jnp.int32, (SUBLANES, filled), 0)
    rows_RN = jnp.zeros(row_RN.shape, jnp.int32)
    for i in range(pl.cdiv(SUBLANES, sizes.padded_heads)):
        b = jnp.minimum(first + i, sizes.sequences - 1)
        rows_RN = jnp.where(row_RN >= i * sizes.padded_heads, table_BN[pl.ds(b, 1), :filled], rows_RN)
    return jnp.pad(rows_RN, ((0, 0), (0, width - filled)))
