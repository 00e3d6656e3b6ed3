"""Attention over lists of pages on TPU: the kernel that sparse_decode and dense_decode share.

A *unit* is one KV head of one sequence with its query rows. Each has a list of physical pages, of whose tokens the
first so many are attended to; in dense decoding the units of a sequence share one list.

The lists of all units, cut into tiles of pages, form one stream. A core works through it with a few tiles in flight:
while it computes on one, the pages of the next ones are being copied, whichever unit they belong to, so that it waits
for a copy in full only once, at the start. `_Stream` holds how far copying and reading have got.

The even tiles of the stream have buffers apart from the odd ones, and a program has its code once for each: only then
does the compiler know that the copies it starts leave alone the tile it reads, and packs both into the same
instructions. Starting a copy takes scalar instructions alone, attention nearly none.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pallas_tpu import LANES, device_cores, interpreter
from pallas_kernels.tuning_tpu import INTERPRETED, Blocks, of_chip

_NOTHING_SEEN = -1e30  # the running maximum at the start: finite, so that rows that see no token stay free of NaN


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the kernel runs.

    Attributes:
        blocks: sizes of tiles and programs.
        cores: of the chip, that work as one device and share the units.
        interpret: on any machine, strictly, for tests.
    """

    blocks: Blocks
    cores: int
    interpret: bool

    @classmethod
    def here(cls, interpret: bool) -> 'Launch':
        """For the device that the caller is traced for."""
        blocks = INTERPRETED if interpret else of_chip(str(pltpu.get_tpu_info().chip_version))
        return cls(blocks, device_cores(interpret), interpret)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What is fixed when the kernel is traced.

    Attributes:
        cores, steps: programs side by side, and one after the other on each core.
        units: of a program.
        share: units that share a list: 1 or K.
        pool_pages, page_tokens: P and C.
        list_pages: length of a list in memory.
        tile_pages, tiles_held: pages of a tile, buffers for tiles.
        queries, group: T and G; row t * G + g of a unit is query t of the unit's g-th query head.
        rows, row_blocks: rows of a block, and blocks of a unit.
    """

    cores: int
    steps: int
    units: int
    share: int
    pool_pages: int
    page_tokens: int
    list_pages: int
    tile_pages: int
    tiles_held: int
    queries: int
    group: int
    rows: int
    row_blocks: int

    @property
    def tile_tokens(self) -> int:
        return self.tile_pages * self.page_tokens

    @property
    def lists(self) -> int:
        """Lists of a program."""
        return max(self.units // self.share, 1)

    @classmethod
    def of(cls, launch: Launch, q_BKRA, pages_KPCE, lists_BLM, queries: int) -> '_Sizes':
        blocks = launch.blocks
        B, K, R, _ = q_BKRA.shape
        P, C = pages_KPCE.shape[1:3]
        L, M = lists_BLM.shape[1:]
        rows = min(R, blocks.block_rows)
        row_blocks = pl.cdiv(R, rows)
        # Lists of all lengths up to M in few tiles, and none of them much shorter than the others; whole registers.
        tiles = max(M * C // blocks.tile_tokens, 1)
        whole = max(min(blocks.tile_tokens, LANES) // C, 1)
        tile_pages = pl.cdiv(pl.cdiv(M, tiles), whole) * whole
        tile_bytes = tile_pages * C * pages_KPCE.shape[-1] * pages_KPCE.dtype.itemsize
        tiles_held = min(max(blocks.buffer_bytes // tile_bytes, blocks.least_tiles), blocks.most_tiles) // 2 * 2
        # Copies to scalar memory start at multiples of LANES, and a tile is looked up whole.
        list_pages = pl.cdiv(pl.cdiv(M, tile_pages) * tile_pages, LANES) * LANES
        share = K // L
        most_units = min(blocks.program_units, blocks.program_rows // (rows * row_blocks))
        most_lists = blocks.list_bytes // (_LISTS_HELD * list_pages * jnp.dtype(jnp.int32).itemsize)

        def divides(units: int, cores: int) -> bool:
            together = units % share == 0 or share % units == 0
            return together and units // share <= most_lists and B * K % (units * cores) == 0

        # Many units to a program, as a program costs time of its own; but every core has the same number of programs.
        choices = [(units, cores) for cores in (launch.cores, 1) for units in range(most_units, 0, -1)]
        units, cores = next((choice for choice in choices if divides(*choice)), (1, 1))
        return cls(
            cores=cores,
            steps=B * K // (units * cores),
            units=units,
            share=share,
            pool_pages=P,
            page_tokens=C,
            list_pages=list_pages,
            tile_pages=tile_pages,
            tiles_held=tiles_held,
            queries=queries,
            group=R // queries,
            rows=rows,
            row_blocks=row_blocks,
        )


# The scalar memory that outlives a program: the tile copied next (program, unit, tile of the unit, buffer), the buffer
# read next, and how many tiles are copied or under way and not read yet.
_STEP, _UNIT, _TILE, _BUFFER, _READ_BUFFER, _AHEAD = range(6)
_CELLS = 6
_LISTS_HELD = 3  # programs whose page lists are in scalar memory: this one, the next, and one whose lists are coming


class _Stream:
    """The tiles of a core in order: which is copied next, which is read next."""

    def __init__(self, sizes: _Sizes, tokens_ref, lists_ref, pages_ref, tile_refs, page_sem, ids_ref, ids_sem, state):
        self.sizes = sizes
        self.tokens_ref, self.lists_ref, self.pages_ref = tokens_ref, lists_ref, pages_ref
        self.tile_refs, self.page_sem = tile_refs, page_sem
        self.ids_ref, self.ids_sem = ids_ref, ids_sem
        self.state = state
        self.first_program = pl.program_id(0) * sizes.steps

    def unit(self, step, unit):
        """Number of a unit over all programs."""
        return (self.first_program + step) * self.sizes.units + unit

    def tokens(self, step, unit):
        return self.tokens_ref[self.unit(step, unit) // self.sizes.share]

    def tiles(self, tokens):
        """Tiles of a unit; one without tokens has one, of no pages, so that every unit takes its turn."""
        return jnp.maximum(pl.cdiv(tokens, self.sizes.tile_tokens), 1)

    def tile_pages(self, tokens, tile):
        """Pages of a tile: all but the last of a unit are full."""
        pages = pl.cdiv(tokens, self.sizes.page_tokens) - tile * self.sizes.tile_pages
        return jnp.minimum(pages, self.sizes.tile_pages)

    def list_copy(self, step):
        """Brings a program's page lists to scalar memory."""
        sizes = self.sizes
        entries = sizes.lists * sizes.list_pages
        held = step % _LISTS_HELD
        source = pl.multiple_of(self.unit(step, 0) // sizes.share * sizes.list_pages, LANES)
        target = pl.multiple_of(held * entries, LANES)
        return pltpu.make_async_copy(
            self.lists_ref.at[pl.ds(source, entries)], self.ids_ref.at[pl.ds(target, entries)], self.ids_sem.at[held]
        )

    def open(self, step):
        """To be called as a program starts: afterwards its page lists and the next program's are there."""

        @pl.when(step == 0)
        def _():
            for cell in range(_CELLS):
                self.state[cell] = 0

            # Places that no copy was made to must not hold NaN, see `_clear`.
            @pl.loop(0, self.sizes.tiles_held // 2)
            def _(place):
                for tile_ref in self.tile_refs:
                    tile_ref[place] = jnp.zeros(tile_ref.shape[1:], tile_ref.dtype)

            self.list_copy(0).start()
            self.list_copy(0).wait()

        @pl.when((step == 0) & (self.sizes.steps > 1))
        def _():
            self.list_copy(1).start()

        @pl.when(step + 1 < self.sizes.steps)
        def _():
            self.list_copy(step + 1).wait()

        @pl.when(step + 2 < self.sizes.steps)
        def _():
            self.list_copy(step + 2).start()

    def next_copy(self, step) -> '_Copy':
        """The tile that comes next; of no pages where no buffer is free or its list is not here yet."""
        sizes, state = self.sizes, self.state
        next_step, unit, tile, buffer = (state[cell] for cell in (_STEP, _UNIT, _TILE, _BUFFER))
        copied = jnp.minimum(next_step, jnp.minimum(step + 1, sizes.steps - 1))
        allowed = (state[_AHEAD] < sizes.tiles_held) & (next_step == copied)
        tokens = self.tokens(copied, unit)
        held_list = copied % _LISTS_HELD * sizes.lists + (unit // sizes.share if sizes.lists > 1 else 0)
        copy = _Copy(
            pages=jnp.where(allowed, self.tile_pages(tokens, tile), 0),
            entry=held_list * sizes.list_pages + tile * sizes.tile_pages,
            head_page=self.unit(copied, unit) % sizes.share * sizes.pool_pages,
            buffer=buffer,
        )

        @pl.when(allowed)
        def _():
            ends_unit = tile + 1 == self.tiles(tokens)
            ends_step = ends_unit & (unit + 1 == sizes.units)
            state[_TILE] = jnp.where(ends_unit, 0, tile + 1)
            state[_UNIT] = jnp.where(ends_step, 0, jnp.where(ends_unit, unit + 1, unit))
            state[_STEP] = jnp.where(ends_step, copied + 1, copied)
            state[_BUFFER] = _after(buffer, sizes)
            state[_AHEAD] += 1

        return copy

    def page_copy(self, copy: '_Copy', place, parity: int):
        # The id is looked up even for a place that is not wanted: a conditional load costs more.
        page = self.ids_ref[copy.entry + place]
        page = page + copy.head_page if self.sizes.share > 1 else page
        target = self.tile_refs[parity].at[copy.buffer // 2, place]
        return pltpu.make_async_copy(self.pages_ref.at[page], target, self.page_sem.at[copy.buffer])

    def fill(self, step):
        """Starts copies until all buffers but one are taken: at the start, or when later lists were not here yet."""

        @pl.loop(self.state[_AHEAD], self.sizes.tiles_held - 1)
        def _(_turn):
            copy = self.next_copy(step)
            start = lambda place: _by_parity(copy.buffer, lambda parity: self.page_copy(copy, place, parity).start())
            pl.loop(0, copy.pages)(start)

    def start(self, copy: '_Copy', parity: int):
        """Starts the copies of a tile, in code without a branch, to be packed with other work."""
        for place in range(self.sizes.tile_pages):
            pl.when(place < copy.pages)(self.page_copy(copy, place, parity).start)

    def wait(self, tokens, tile):
        """Waits for the tile read next; gives its buffer."""
        buffer = self.state[_READ_BUFFER]
        semaphore = self.page_sem.at[buffer]
        pages = self.tile_pages(tokens, tile)

        # A wait takes as many bytes off the semaphore as what it names holds, wherever that is; all copies of a tile
        # signal the same one. So the binary digits of their number do.
        for digit in range(self.sizes.tile_pages.bit_length()):
            some_ref = self.tile_refs[0].at[0, pl.ds(0, 1 << digit)]
            wait = pltpu.make_async_copy(some_ref, some_ref, semaphore).wait
            pl.when(pages & (1 << digit) != 0)(wait)

        return buffer

    def leave(self, buffer):
        """The buffer that `wait` gave is free again."""
        self.state[_READ_BUFFER] = _after(buffer, self.sizes)
        self.state[_AHEAD] -= 1


class _Copy(NamedTuple):
    """A tile to copy: how many pages, where their ids begin, what is added to these, and the buffer."""

    pages: jax.Array
    entry: jax.Array
    head_page: jax.Array
    buffer: jax.Array


def _after(buffer, sizes: _Sizes):
    return jnp.where(buffer + 1 == sizes.tiles_held, 0, buffer + 1)


def _by_parity(buffer, body):
    """Runs `body` with the parity of a buffer, a number known to the compiler."""
    odd = buffer % 2 == 1
    pl.when(odd)(lambda: body(1))
    pl.when(jnp.logical_not(odd))(lambda: body(0))


def _clear(sizes: _Sizes, tile_ref, left):
    """Zeros for what is no token in the last page of a tile with `left` tokens: zero weight times NaN would leak it.

    Places beyond hold zeros or tokens of earlier tiles, which zero weight leaves out.
    """

    @pl.when((left < sizes.tile_tokens) & (left % sizes.page_tokens != 0))
    def _():
        place = left // sizes.page_tokens
        page_CE = tile_ref[place]
        token_CE = lax.broadcasted_iota(jnp.int32, page_CE.shape, 0)
        tile_ref[place] = jnp.where(token_CE < left % sizes.page_tokens, page_CE, jnp.zeros_like(page_CE))


def _attend_tile(sizes: _Sizes, scale, q_RL, kv_SE, left, row, top_ref, total_ref, o_ref):
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
    sizes: _Sizes,
    scale: float,
):
    step = pl.program_id(1)
    tile_refs = even_ref, odd_ref
    stream = _Stream(sizes, tokens_ref, lists_ref, pages_ref, tile_refs, page_sem, ids_ref, ids_sem, state)
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

            _by_parity(buffer, visit)
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
    sizes = _Sizes.of(launch, q_BKRA, pages_KPCE, lists_BLM, queries)
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
                pltpu.SMEM((_LISTS_HELD * sizes.lists * sizes.list_pages,), jnp.int32),
                running,
                running,
                running,
                pltpu.SMEM((_CELLS,), jnp.int32),
                pltpu.SemaphoreType.DMA((sizes.tiles_held,)),
                pltpu.SemaphoreType.DMA((_LISTS_HELD,)),
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
