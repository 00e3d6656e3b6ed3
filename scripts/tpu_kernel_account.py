"""What the TPU compilers make of sparse_decode and dense_decode: copies, on-chip memory and instructions, by counting.

    JAX_PLATFORMS=cpu python scripts/tpu_kernel_account.py

Compiles for chips that need not be there (libtpu does, see tests/pallas_kernels/aot.py) and reads the compiler's dump.
Nothing runs: a bundle of instructions takes at least one cycle, and waits for copies and results come on top, so the
share of the memory's bandwidth that the instructions leave room for is an upper bound, not a speed.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import sys
import tempfile

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
from pallas_kernels.sparse_decode import sparse_decode  # noqa: E402

GRANULE_BYTES = 32  # the dump's unit of copies
DEPTHS = {'grid': 1, 'unit': 2, 'tile': 3}  # loops of the kernel, by how deep they lie


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures, of all cores that make up one device; clocks in GHz, the least and the most assumed."""

    bandwidth_tb_s: float
    cores: int
    clocks: tuple[float, float]


CHIPS = {
    'v5e': Chip(0.819, 1, (1.5, 1.5)),
    'v5p': Chip(2.765, 2, (1.75, 1.75)),
    'v6e': Chip(1.64, 1, (0.94, 1.7)),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One compiled kernel: bfloat16, 8 KV heads, 32 sequences; every list is read to its end."""

    op: str
    group: int
    head_dim: int
    page_tokens: int
    pages: int
    sequences: int = 32
    kv_heads: int = 8
    pool: int = 32768

    def compile(self, chip: str):
        dtype, heads = jnp.bfloat16, self.kv_heads * self.group
        shape = jax.ShapeDtypeStruct
        pool_KPCE = shape((self.kv_heads, self.pool, self.page_tokens, 2 * self.head_dim), dtype)
        length_B = shape((self.sequences,), jnp.int32)
        use = {'implementation': Implementation.MOSAIC_TPU}
        if self.op == 'dense':
            q_BTHA = shape((self.sequences, 1, heads, self.head_dim), dtype)
            table_BN = shape((self.sequences, self.pages), jnp.int32)
            return aot.compile_for_tpu(lambda *a: dense_decode(*a, **use), chip, q_BTHA, pool_KPCE, table_BN, length_B)
        q_BHA = shape((self.sequences, heads, self.head_dim), dtype)
        ids_BKM = shape((self.sequences, self.kv_heads, self.pages), jnp.int32)
        attend = lambda q, pool, ids, count, length: sparse_decode(q, pool, None, ids, count, length, **use)
        return aot.compile_for_tpu(attend, chip, q_BHA, pool_KPCE, ids_BKM, length_B, length_B)


SHAPES = (
    Shape('sparse', 2, 128, 16, 64),
    Shape('sparse', 2, 128, 16, 256),
    Shape('sparse', 4, 128, 64, 64),
    Shape('sparse', 5, 128, 8, 256),
    Shape('sparse', 2, 64, 16, 256),
    Shape('dense', 2, 128, 16, 2048),
    Shape('dense', 5, 128, 64, 512),
)


@dataclasses.dataclass(frozen=True)
class Account:
    """Counted from the dump: bundles of the straight way through a tile, a unit and a program, and bytes."""

    tile: int
    unit: int
    grid: int
    tile_copies: int
    page_bytes: int
    vmem_bytes: int
    smem_bytes: int


def dumped(label: str) -> str:
    """The dump of the kernel compiled last, after one pass; takes it away."""
    paths = [
        path for path in pathlib.Path(DUMP.name).glob(f'*-attend_lists*-{label}.txt') if 'analysis' not in path.name
    ]
    text = paths[0].read_text()
    for path in paths:
        path.unlink()
    return text


BUNDLE = re.compile(r'\s*(?:0x)?[0-9a-f]+\s+(?P<mark>[A-Z]{2})?\s*:(?P<loops>[ >]*)')


def count(text: str, allocations: str) -> Account:
    """Adds up an account.

    Bundles belong to the loop that they lie in; those of a branch's delay, which name no loop, to the one before. A
    tile runs one of two copies of the arithmetic, so the smaller one is taken off; all else that a branch might skip is
    counted, but for loops inside, which the straight way does not enter, and what comes before the loop over units.
    """
    bundles = [(match, line) for line in text.splitlines() if (match := BUNDLE.match(line))]
    per = dict.fromkeys(DEPTHS, 0)
    arithmetic: list[int] = []  # bundles of the stretches that hold products
    depth = here = products = 0
    for match, line in bundles:
        depth = match['loops'].count('>') or depth
        if match['mark'] == 'LB' and depth == DEPTHS['unit']:
            per['unit'] = 0  # the loop over units is the last one of its depth
        for loop, level in DEPTHS.items():
            per[loop] += depth == level
        if match['mark'] or 'sbr.rel' in line:
            if products:
                arithmetic.append(here)
            here = products = 0
        here += 1
        products += 'matmul' in line
    granules = [int(n) for n in re.findall(r'dma\.hbm_to_vmem .*?size_in_granules=\*/(\d+)', text)]
    page = max(set(granules), key=granules.count)
    memory = {
        space: sum(int(size, 16) for size in re.findall(rf'space={space}, size = (0x[0-9a-f]+), scoped', allocations))
        for space in ('vmem', 'smem')
    }
    return Account(
        tile=per['tile'] - min(arithmetic),
        unit=per['unit'],
        grid=per['grid'],
        tile_copies=granules.count(page) // 2 - 1,  # the loop that fills the buffers has two more
        page_bytes=page * GRANULE_BYTES,
        vmem_bytes=memory['vmem'],
        smem_bytes=memory['smem'],
    )


def row(name: str, shape: Shape, account: Account) -> str:
    chip = CHIPS[name]
    units = min(shape.kv_heads, 8)
    tiles = -(-shape.pages // account.tile_copies)
    bundles = account.grid + units * (account.unit + tiles * account.tile)
    mb = units * shape.pages * account.page_bytes / 1e6
    rates = [chip.cores * mb / 1e6 / (bundles / (clock * 1e9)) for clock in chip.clocks]
    shares = sorted({f'{100 * rate / chip.bandwidth_tb_s:.0f}%' for rate in rates}, key=lambda s: int(s[:-1]))
    cells = [
        f'{shape.op} G={shape.group} A={shape.head_dim} C={shape.page_tokens} pages={shape.pages}',
        name,
        f'{account.tile} / {account.tile_copies}',
        f'{bundles:,}',
        f'{mb:.2f} MB in {units * shape.pages:,}',
        f'{account.vmem_bytes / 2**20:.1f} MB',
        f'{account.smem_bytes / 2**10:.0f} KB',
        ' - '.join(shares),
    ]
    return '| ' + ' | '.join(cells) + ' |'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--chips', nargs='+', default=['v5p', 'v6e'], choices=list(CHIPS))
    arguments = parser.parse_args()
    heads = (
        'kernel',
        'chip',
        'bundles / pages of a tile',
        'bundles a program',
        'copied a program',
        'VMEM',
        'SMEM',
        'room',
    )
    print('| ' + ' | '.join(heads) + ' |')
    print('|' + '---|' * len(heads))
    for shape in SHAPES:
        for chip in arguments.chips:
            shape.compile(chip)
            print(row(chip, shape, count(dumped('final_bundles'), dumped('original'))), flush=True)


if __name__ == '__main__':
    main()
