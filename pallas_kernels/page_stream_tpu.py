"""The stream of page tiles that decode attention on TPU works through: how it is cut, and what is copied when.

A *unit* is one KV head of one sequence with its query rows. Each has a list of physical pages, of whose tokens the
first so many are attended to; in dense decoding the units of a sequence share one list. The lists of all units, cut
into tiles of pages, form one stream. A core works through it with a few tiles in flight: while it computes on one, the
pages of the next ones are being copied, whichever unit they belong to, so that it waits for a copy in full only once,
at the start.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pallas_tpu import LANES, device_cores
from pallas_kernels.tuning_tpu import INTERPRETED, Blocks, of_chip


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
class Sizes:
    """What is fixed when the kernel is traced.

    Attributes:
        cores, steps: programs side by side, and one after the other on each core.
        units: of a program.
        share: units that share a list: 1 or K.
        pool_pages, page_tokens: P and C.
        list_pages: length of a list in memory.
        tile_pages, tiles_held: pages of a tile, buffers for tiles, an even number.
        part_pages: pages of the parts that a tile divides into, of LANES tokens at least where it has as many.
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
    part_pages: int
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
    def of(cls, launch: Launch, q_BKRA, pages_KPCE, lists_BLM, queries: int) -> 'Sizes':
        blocks = launch.blocks
        B, K, R, _ = q_BKRA.shape
        P, C = pages_KPCE.shape[1:3]
        L, M = lists_BLM.shape[1:]
        rows = min(R, blocks.block_rows)
        row_blocks = pl.cdiv(R, rows)
        # A list that is full gives tiles of much the same size.
        tiles = max(M * C // blocks.tile_tokens, 1)
        part_pages = max(min(blocks.tile_tokens, LANES) // C, 1)
        tile_pages = pl.cdiv(pl.cdiv(M, tiles), part_pages) * part_pages
        tile_bytes = tile_pages * C * pages_KPCE.shape[-1] * pages_KPCE.dtype.itemsize
        tiles_held = min(max(blocks.buffer_bytes // tile_bytes, blocks.least_tiles), blocks.most_tiles) // 2 * 2
        # Copies to scalar memory start at multiples of LANES, and a tile is looked up whole.
        list_pages = pl.cdiv(pl.cdiv(M, tile_pages) * tile_pages, LANES) * LANES
        share = K // L
        most_units = min(blocks.program_units, blocks.program_rows // (rows * row_blocks))
        most_lists = blocks.list_bytes // (LISTS_HELD * list_pages * jnp.dtype(jnp.int32).itemsize)

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
            part_pages=part_pages,
            queries=queries,
            group=R // queries,
            rows=rows,
            row_blocks=row_blocks,
        )


# The scalar memory that outlives a program: the tile copied next (program, unit, tile of the unit, buffer), the buffer
# read next, and how many tiles are copied or under way and not read yet.
_STEP, _UNIT, _TILE, _BUFFER, _READ_BUFFER, _AHEAD = range(6)
CELLS = 6
LISTS_HELD = 3  # programs whose page lists are in scalar memory: this one, the next, and one whose lists are coming


class Stream:
    """The tiles of a core in order: which is copied next, which is read next."""

    def __init__(self, sizes: Sizes, tokens_ref, lists_ref, pages_ref, tile_refs, page_sem, ids_ref, ids_sem, state):
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
        held = step % LISTS_HELD
        source = pl.multiple_of(self.unit(step, 0) // sizes.share * sizes.list_pages, LANES)
        target = pl.multiple_of(held * entries, LANES)
        return pltpu.make_async_copy(
            self.lists_ref.at[pl.ds(source, entries)], self.ids_ref.at[pl.ds(target, entries)], self.ids_sem.at[held]
        )

    def open(self, step):
        """To be called as a program starts: afterwards its page lists and the next program's are there."""

        @pl.when(step == 0)
        def _():
            for cell in range(CELLS):
                self.state[cell] = 0
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

    def next_copy(self, step) -> 'Copy':
        """The tile that comes next; of no pages where no buffer is free or its list is not here yet."""
        sizes, state = self.sizes, self.state
        next_step, unit, tile, buffer = (state[cell] for cell in (_STEP, _UNIT, _TILE, _BUFFER))
        copied = jnp.minimum(next_step, jnp.minimum(step + 1, sizes.steps - 1))
        allowed = (state[_AHEAD] < sizes.tiles_held) & (next_step == copied)
        tokens = self.tokens(copied, unit)
        held_list = copied % LISTS_HELD * sizes.lists + (unit // sizes.share if sizes.lists > 1 else 0)
        copy = Copy(
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

    def page_copy(self, copy: 'Copy', place, parity: int):
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
            start = lambda place: by_parity(copy.buffer, lambda parity: self.page_copy(copy, place, parity).start())
            pl.loop(0, copy.pages)(start)

    def start(self, copy: 'Copy', parity: int):
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


class Copy(NamedTuple):
    """A tile to copy: how many pages, where their ids begin, what is added to these, and the buffer."""

    pages: jax.Array
    entry: jax.Array
    head_page: jax.Array
    buffer: jax.Array


def _after(buffer, sizes: Sizes):
    return jnp.where(buffer + 1 == sizes.tiles_held, 0, buffer + 1)


def by_parity(buffer, body):
    """Runs `body` with the parity of a buffer, a number known to the compiler."""
    odd = buffer % 2 == 1
    pl.when(odd)(lambda: body(1))
    pl.when(jnp.logical_not(odd))(lambda: body(0))
