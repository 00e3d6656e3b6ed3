"""What the TPU compilers make of the kernels of all five operations: copies, on-chip memory, instructions, by counting.

    JAX_PLATFORMS=cpu python scripts/tpu_kernel_account.py
    JAX_PLATFORMS=cpu python scripts/tpu_kernel_account.py --op page_select --chips v5e --loops

Compiles for chips that need not be there (libtpu does, see tests/pallas_kernels/aot.py) and reads the compiler's dump.
Nothing runs: a bundle of instructions takes at least one cycle, and waits for copies and results come on top, so the
shares that the instructions leave room for are upper bounds, not speeds. `--loops` shows what the sums are made of.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import re
import sys
import tempfile
from types import MappingProxyType
from typing import Any

DUMP = tempfile.TemporaryDirectory()
os.environ['LIBTPU_INIT_ARGS'] = (  # read once, when libtpu is loaded
    f'--xla_jf_dump_to={DUMP.name} --xla_jf_dump_llo_text=true '
    '--xla_jf_dump_llo_pass_label_regex=original|final_bundles'
)
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'pallas_kernels')]

import aot  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from pallas_kernels.dense_decode import dense_decode  # noqa: E402
from pallas_kernels.implementation import Implementation  # noqa: E402
from pallas_kernels.landmark_update import landmark_update  # noqa: E402
from pallas_kernels.page_select import page_select  # noqa: E402
from pallas_kernels.page_select import tuning as select_tuning  # noqa: E402
from pallas_kernels.sparse_decode import sparse_decode  # noqa: E402
from pallas_kernels.sparse_prefill import kernel_tpu as prefill_tpu  # noqa: E402
from pallas_kernels.sparse_prefill import sparse_prefill  # noqa: E402

DTYPE = jnp.bfloat16
SEQUENCES, KV_HEADS, POOL = 32, 8, 32768
ROWS_OF_A_TILE = 8  # memory is copied in whole tiles
SEARCH_STEPS = 20  # of sparse_prefill's search for the thresholds, of 32, on scores without order
DELAY = 4  # bundles after a branch that run either way


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures, of all cores that make up one device.

    Attributes:
        bandwidth: bytes a second.
        matrix_rate: bfloat16 FLOP a second.
        cores: that share the work.
        clocks: Hz, the least and the most assumed; none where none is known.
    """

    bandwidth: float
    matrix_rate: float
    cores: int
    clocks: tuple[float, ...]


CHIPS = {
    'v5e': Chip(0.819e12, 197e12, 1, (1.5e9,)),
    'v5p': Chip(2.765e12, 459e12, 2, (1.75e9,)),
    'v6e': Chip(1.64e12, 918e12, 1, (0.94e9, 1.7e9)),
    'tpu7x': Chip(3.7e12, 1153e12, 1, ()),
}


class Loop:
    """A loop of the compiled kernel: its own bundles, by their place in the kernel, and the loops within."""

    def __init__(self):
        self.own: list[int] = []
        self.loops: list[Loop] = []


@dataclasses.dataclass(frozen=True)
class Span:
    """Bundles that a branch may skip."""

    start: int
    stop: int

    def holds(self, other) -> bool:
        """Another span, or a loop, lies within."""
        first, last = (other.start, other.stop - 1) if isinstance(other, Span) else (other.own[0], other.own[-1])
        return self != other and self.start <= first and last < self.stop


BUNDLE = re.compile(r'\s*(?:0x)?[0-9a-f]+\s+(?P<mark>[A-Z]{2})?\s*:(?P<loops>[ >]*)')
UNITS = {
    'loads': r'= vld ',
    'stores': r'vst ',
    'compares': r'vcmp',
    'selects': r'= vsel ',
    'products': r'vmatmul',
    'weights': r'vmatpush',
    'rotations': r'vrot',
    'lane sums': r'add\.xlane',
    'copies': r'dma\.\w+_to_',
}


class Kernel:
    """One kernel of the dump, taken apart."""

    def __init__(self, bundles: str, original: str):
        matches = [(match, line) for line in bundles.splitlines() if (match := BUNDLE.match(line))]
        self.lines = [line for _, line in matches]
        self.original = original
        self.root = Loop()
        path = [self.root]
        for i, (match, line) in enumerate(matches):
            depth = match['loops'].count('>')
            delays = any('sbr.rel' in before for before in self.lines[max(i - DELAY, 0) : i])
            if not depth and (delays or '{}' in line):
                depth = len(path) - 1  # the delay of a branch, and what is empty, names no loop
            del path[depth + (match['mark'] != 'LB') :]
            if match['mark'] == 'LB':
                path[-1].loops.append(Loop())
                path.append(path[-1].loops[-1])
            path[-1].own.append(i)
        ends = {name: i for i, line in enumerate(self.lines) for name in re.findall(r'empty region (\d+)', line)}
        branches = [
            (i, m[1]) for i, line in enumerate(self.lines) if (m := re.search(r'sbr\.rel.*\$region(\d+)', line))
        ]
        self.spans = [Span(i + 1 + DELAY, ends[name]) for i, name in branches if ends.get(name, 0) > i]

    def uses(self, unit: str, places) -> int:
        return sum(len(re.findall(UNITS[unit], self.lines[i])) for i in places)

    def way_to(self, unit: str) -> list[Loop]:
        """The loops around the first of the deepest loops that use a unit, and that one, from the outermost on."""

        def ways(loop, before):
            way = [*before, loop]
            if self.uses(unit, loop.own):
                yield way
            for inner in loop.loops:
                yield from ways(inner, way)

        return max(ways(self.root, []), key=len)[1:]

    def branches(self, loop: Loop) -> list[Span]:
        return [span for span in self.spans if loop.own[0] <= span.start and span.stop <= loop.own[-1]]

    def skipped(self, loop: Loop, but: Loop | None = None, within: int = 0) -> int:
        """Own bundles that branches may skip, those on the way to a loop excepted.

        within: counts only what lies in so many other such stretches of the loop.
        """
        spans = [span for span in self.branches(loop) if but is None or not span.holds(but)]
        return sum(sum(span.start <= i < span.stop for span in spans) > within for i in loop.own)

    def copies(self) -> list[int]:
        """Sizes of the copies into vector memory in bytes, as often as they stand in the code."""
        return [
            32 * int(n) for n in re.findall(r'dma\.hbm_to_vmem .*?size_in_granules=\*/(\d+)', '\n'.join(self.lines))
        ]

    def memory(self, space: str) -> int:
        sizes = re.findall(rf'space={space}, size = (0x[0-9a-f]+), scoped', self.original)
        return sum(int(size, 16) for size in sizes)

    def print_loops(self, loop: Loop | None = None, depth: int = 0) -> None:
        loop = loop or self.root
        used = ', '.join(f'{n} {unit}' for unit in UNITS if (n := self.uses(unit, loop.own)))
        print(f'{"  " * depth}{len(loop.own)} bundles, {self.skipped(loop)} of them in branches: {used}')
        for inner in loop.loops:
            self.print_loops(inner, depth + 1)


def dumped(name: str) -> Kernel:
    """The kernel of a name compiled last; takes its dump away."""

    def take(label):
        found = list(pathlib.Path(DUMP.name).glob(f'*{name}*-{label}.txt'))
        text = next(path.read_text() for path in found if 'analysis' not in path.name)
        for path in found:
            path.unlink()
        return text

    return Kernel(take('final_bundles'), take('original'))


@dataclasses.dataclass(frozen=True)
class Account:
    """Of one call on one device.

    Attributes:
        pieces: bundles of what is repeated, in words.
        bundles: of one core.
        bytes: copied by all cores.
        flop: that the result asks for, where the matrix unit's rate is the measure and not the memory's.
    """

    pieces: str
    bundles: float
    bytes: float
    flop: float = 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """One compiled call, whose lists and sequences are all read to their end."""

    group: int = 2
    head_dim: int = 128
    page_tokens: int = 16
    pages: int = 2048

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * 2 * self.head_dim * DTYPE.dtype.itemsize

    def array(self, *sizes, dtype=DTYPE):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def integers(self, *sizes):
        return self.array(*sizes, dtype=jnp.int32)

    @property
    def pool(self):
        return self.array(KV_HEADS, POOL, self.page_tokens, 2 * self.head_dim)

    @property
    def landmarks(self):
        return self.array(SEQUENCES, KV_HEADS, self.pages, self.head_dim)

    def __str__(self) -> str:
        return f'G={self.group} A={self.head_dim} C={self.page_tokens} pages={self.pages}'


USE: dict[str, Any] = {'implementation': Implementation.MOSAIC_TPU}


class Attend:
    """sparse_decode (page lists of each KV head) or dense_decode (one list a sequence)."""

    def __init__(self, dense: bool, *shapes: Shape):
        self.dense, self.shapes, self.kernels = dense, shapes, ('attend_lists',)

    def compile(self, chip: str, shape: Shape):
        number_B, heads = shape.integers(SEQUENCES), KV_HEADS * shape.group
        if self.dense:
            q_BTHA = shape.array(SEQUENCES, 1, heads, shape.head_dim)
            table_BN = shape.integers(SEQUENCES, shape.pages)
            return aot.compile_for_tpu(
                functools.partial(dense_decode, **USE), chip, q_BTHA, shape.pool, table_BN, number_B
            )
        q_BHA = shape.array(SEQUENCES, heads, shape.head_dim)
        ids_BKM = shape.integers(SEQUENCES, KV_HEADS, shape.pages)
        attend = lambda q, pool, ids, count, length: sparse_decode(q, pool, None, ids, count, length, **USE)
        return aot.compile_for_tpu(attend, chip, q_BHA, shape.pool, ids_BKM, number_B, number_B)

    def count(self, kernel: Kernel, shape: Shape, cores: int, *_) -> Account:
        """A tile runs one of two copies of the arithmetic; all else that a branch might skip is counted."""
        grid, unit, tile = kernel.way_to('products')
        copies = [size for size in kernel.copies() if size == shape.page_bytes]
        tile_pages = len(copies) // 2 - 1  # the loop that fills the buffers has two more
        arithmetic = [s for s in kernel.branches(tile) if kernel.uses('products', range(s.start, s.stop))]
        outermost = [span for span in arithmetic if not any(other.holds(span) for other in arithmetic)]
        bundles = len(tile.own) - min(sum(span.start <= i < span.stop for i in tile.own) for span in outermost)
        units = SEQUENCES * KV_HEADS / cores
        tiles = -(-shape.pages // tile_pages)
        return Account(
            pieces=f'{bundles} a tile of {tile_pages} pages',
            bundles=units * (len(unit.own) + tiles * bundles) + SEQUENCES / cores * len(grid.own),
            bytes=SEQUENCES * KV_HEADS * shape.pages * shape.page_bytes,
        )


class Select:
    """Sequences that fill the cache, or half of it: groups of such have code of their own."""

    kernels = ('page_select', 'page_select, half full')
    shapes = (Shape(),)
    chosen = 256

    def compile(self, chip: str, shape: Shape):
        select = functools.partial(
            page_select, page_tokens=shape.page_tokens, max_pages=self.chosen, reserved_first=1, reserved_last=2, **USE
        )
        q_BHA = shape.array(SEQUENCES, KV_HEADS * shape.group, shape.head_dim)
        number_B, table_BN = shape.integers(SEQUENCES), shape.integers(SEQUENCES, shape.pages)
        return aot.compile_for_tpu(select, chip, q_BHA, shape.landmarks, number_B, number_B, table_BN)

    def count(self, kernel: Kernel, shape: Shape, cores: int, name: str) -> Account:
        """The code for a quarter, a half and all of the pages comes in this order."""
        blocks, half = select_tuning.TPU, name != self.kernels[0]
        grid, sequence, chunk = kernel.way_to('products')
        *_, of_half, of_all = [loop for loop in grid.loops if kernel.uses('lane sums', loop.own)]
        step = of_half if half else of_all
        ids = grid.loops[grid.loops.index(step) + 1]
        pages = shape.pages // 2 if half else shape.pages
        chunks = pages // blocks.chunk_pages
        group = blocks.rows // KV_HEADS
        a_group = (
            len(grid.own)
            + group * (len(sequence.own) + chunks * len(chunk.own) + len(ids.own))
            + 32 // blocks.digit_bits * len(step.own)
        )
        return Account(
            pieces=f'{len(chunk.own)} a chunk of {blocks.chunk_pages} pages, {len(step.own)} a step of the search for '
            f'{group} sequences, {len(ids.own)} for the ids of one',
            bundles=SEQUENCES / group / cores * a_group,
            bytes=SEQUENCES * KV_HEADS * (pages * shape.head_dim * DTYPE.dtype.itemsize + self.chosen * 4),
        )


class Landmark:
    """A step in which every sequence writes; in the last one of a page, the page is read and its landmark made."""

    kernels = ('landmark_update', 'landmark_update, full pages')
    shapes = (Shape(),)

    def compile(self, chip: str, shape: Shape):
        update = functools.partial(landmark_update, **USE)
        token_BKA = shape.array(SEQUENCES, KV_HEADS, shape.head_dim)
        integers = shape.integers(SEQUENCES, shape.pages), shape.integers(SEQUENCES)
        writes_B = shape.array(SEQUENCES, dtype=jnp.bool_)
        arrays = shape.pool, shape.landmarks, token_BKA, token_BKA, *integers, writes_B
        return aot.compile_for_tpu(update, chip, *arrays, donate_argnums=(0, 1))

    def count(self, kernel: Kernel, shape: Shape, cores: int, name: str) -> Account:
        full = name != self.kernels[0]
        *_, change = kernel.way_to('rotations')
        around = next(loop for loop in (kernel.root, *kernel.root.loops) if change in loop.loops)
        # What runs for full pages alone is a branch of the branch for sequences that write.
        bundles = len(change.own) - (0 if full else kernel.skipped(change, within=1))
        others = sum(len(loop.own) for loop in around.loops if loop is not change)
        row_bytes = KV_HEADS * shape.head_dim * DTYPE.dtype.itemsize
        copied = 2 * ROWS_OF_A_TILE * 2 * row_bytes
        if full:
            copied += shape.page_tokens * 2 * row_bytes + 2 * ROWS_OF_A_TILE * row_bytes
        return Account(
            pieces=f'{bundles} a sequence, {others} for its copies',
            bundles=SEQUENCES / cores * (bundles + others),
            bytes=SEQUENCES * copied,
        )


class Prefill:
    """One sequence, forward and backward, none of whose pages is left out."""

    kernels = (
        'sparse_prefill_page_mask',
        'sparse_prefill_forward',
        'sparse_prefill_backward_q',
        'sparse_prefill_backward_kv',
    )
    products = MappingProxyType(dict(zip(kernels, (0, 2, 3, 4), strict=True)))
    shapes = (Shape(pages=1024),)

    def compile(self, chip: str, shape: Shape):
        tokens = shape.pages * shape.page_tokens

        def with_gradients(q_BTHA, k_BTKA, v_BTKA, length_B, budget_BT, do_BTHA):
            attend = lambda q, k, v: sparse_prefill(
                q, k, v, length_B, budget_BT, page_tokens=shape.page_tokens, reserved_first=1, reserved_last=2, **USE
            )
            return jax.vjp(attend, q_BTHA, k_BTKA, v_BTKA)[1](do_BTHA)

        q_BTHA = shape.array(1, tokens, KV_HEADS * shape.group, shape.head_dim)
        k_BTKA = shape.array(1, tokens, KV_HEADS, shape.head_dim)
        integers = shape.integers(1), shape.integers(1, tokens)
        return aot.compile_for_tpu(with_gradients, chip, q_BTHA, k_BTKA, k_BTKA, *integers, q_BTHA)

    def count(self, kernel: Kernel, shape: Shape, cores: int, name: str) -> Account:
        tokens, item = shape.pages * shape.page_tokens, DTYPE.dtype.itemsize
        mask_bytes = KV_HEADS * tokens * shape.pages // 8
        if not self.products[name]:
            return self.count_selection(kernel, shape, cores, mask_bytes)
        grid, part, head = kernel.way_to('products')
        query, part_keys, key = prefill_tpu.QUERY_TILE, prefill_tpu.KEY_PART, prefill_tpu.key_tile(shape.page_tokens)
        queries, keys = tokens // query, tokens // key
        parts = sum(-(-(i + 1) * query // part_keys) for i in range(queries))
        pairs = sum(-(-(i + 1) * query // key) for i in range(queries))
        over_keys = name.endswith('_kv')
        seldom = kernel.skipped(grid, but=part) + sum(len(loop.own) for loop in grid.loops if loop is not part)
        masks = kernel.skipped(part)
        step = len(grid.own) - kernel.skipped(grid, but=part) + key // part_keys * (len(part.own) - masks)
        bundles = queries * keys * step + (keys if over_keys else queries) * seldom
        bundles += parts * (masks + shape.group * len(head.own))
        # The block that stays is copied once, the other with each pair that is not above the diagonal.
        query_bytes, key_bytes = query * shape.group * shape.head_dim * item, 2 * key * shape.head_dim * item
        if over_keys:
            copied = pairs * 2 * query_bytes + keys * 2 * key_bytes
        else:
            copied = pairs * key_bytes + queries * 3 * query_bytes  # q and float32 o, or q, do and dq
        heads = KV_HEADS * shape.group
        return Account(
            pieces=f'{len(head.own)} a head of {query} queries by {part_keys} keys, {masks} '
            f'for their mask, {step} a pair of blocks, read or not',
            bundles=KV_HEADS / cores * bundles,
            bytes=KV_HEADS * copied + mask_bytes,
            flop=self.products[name] * heads * 2 * shape.head_dim * tokens * (tokens + 1) / 2,
        )

    def count_selection(self, kernel: Kernel, shape: Shape, cores: int, mask_bytes: int) -> Account:
        """Loops over chunks of pages: scores, the search's (in that over its steps), the last count, the packing."""
        grid, scores = kernel.way_to('products')
        search = next(loop for loop in grid.loops if loop.loops)
        recount, pack = [loop for loop in grid.loops if not loop.loops and loop is not scores]
        tokens = shape.pages * shape.page_tokens
        tile, chunk = prefill_tpu.SELECT_TILE, prefill_tpu.PAGE_CHUNK
        blocks = tokens // tile
        chunks = sum(-(-(i + 1) * tile // (shape.page_tokens * chunk)) for i in range(blocks))
        (count,) = search.loops
        a_chunk = len(scores.own) + len(recount.own) + len(pack.own) + SEARCH_STEPS * len(count.own)
        return Account(
            pieces=f'{len(scores.own)} for the scores of {tile} queries and {chunk} pages, '
            f'{len(count.own)} for each of their {SEARCH_STEPS} counts, {len(pack.own)} for the bits',
            bundles=KV_HEADS / cores * (blocks * (len(grid.own) + SEARCH_STEPS * len(search.own)) + chunks * a_chunk),
            bytes=KV_HEADS * shape.head_dim * (tokens * 4 + shape.pages * DTYPE.dtype.itemsize) + mask_bytes,
        )


OPS: dict[str, Any] = {
    'sparse_decode': Attend(
        False, Shape(pages=64), Shape(pages=256), Shape(4, 128, 64, 64), Shape(5, 128, 8, 256), Shape(2, 64, 16, 256)
    ),
    'dense_decode': Attend(True, Shape(), Shape(5, 128, 64, 512)),
    'page_select': Select(),
    'landmark_update': Landmark(),
    'sparse_prefill': Prefill(),
}
HEADS = ('kernel', 'chip', 'bundles', 'copies take', 'bundles take', 'VMEM', 'SMEM', 'share', 'bound by')


def span_of(numbers, form: str) -> str:
    return ' - '.join(dict.fromkeys(form.format(number) for number in sorted(numbers)))


def row(name: str, shape: Shape, chip_name: str, kernel: Kernel, account: Account) -> str:
    chip = CHIPS[chip_name]
    copies = account.bytes / chip.bandwidth
    instructions = [account.bundles / clock for clock in chip.clocks]
    # What the measure's own unit asks for, to what the slower of instructions and copies takes at least.
    least = account.flop / chip.matrix_rate or copies
    shares = [100 * least / max(seconds, copies if account.flop else 0) for seconds in instructions]
    bound = {seconds > copies for seconds in instructions}
    cells = [
        f'{name} {shape}',
        chip_name,
        account.pieces,
        f'{1e6 * copies:,.1f} us ({account.bytes / 1e6:,.1f} MB)',
        span_of((1e6 * seconds for seconds in instructions), '{:,.1f}') + f' us ({account.bundles:,.0f})',
        f'{kernel.memory("vmem") / 2**20:.1f} MiB',
        f'{kernel.memory("smem") / 2**10:.0f} KiB',
        span_of(shares, '{:.0f}%') + (' of the matrix unit' if account.flop else ''),
        {frozenset({True}): 'bundles', frozenset({False}): 'copies'}.get(frozenset(bound), 'either' if bound else ''),
    ]
    return '| ' + ' | '.join(cells) + ' |'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--op', nargs='+', default=list(OPS), choices=list(OPS))
    parser.add_argument('--chips', nargs='+', default=['v5p', 'v6e'], choices=list(CHIPS))
    parser.add_argument('--loops', action='store_true', help='show the bundles of every loop, too')
    arguments = parser.parse_args()
    print('| ' + ' | '.join(HEADS) + ' |')
    print('|' + '---|' * len(HEADS))
    for op in arguments.op:
        for shape in OPS[op].shapes:
            for chip in arguments.chips:
                OPS[op].compile(chip, shape)
                found: dict[str, Kernel] = {}
                for name in OPS[op].kernels:
                    base = name.split(',')[0]
                    kernel = found.setdefault(base, found.get(base) or dumped(base))
                    title = op if base == 'attend_lists' else name
                    print(
                        row(title, shape, chip, kernel, OPS[op].count(kernel, shape, CHIPS[chip].cores, name)),
                        flush=True,
                    )
                    if arguments.loops:
                        kernel.print_loops()


if __name__ == '__main__':
    main()
