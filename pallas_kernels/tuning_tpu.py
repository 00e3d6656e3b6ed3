"""Block sizes of sparse_decode and dense_decode on TPU, as data."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes that change no result but for rounding.

    Attributes:
        tile_tokens: tokens computed on at once, at least; fewer where no list is as long, at most twice as many.
        buffer_bytes, least_tiles, most_tiles: buffers for tiles, even numbers of them; all but one are under way while
            that one is computed on.
        block_rows: query rows computed on at once; more are taken in turn, from the same tile.
        program_units: KV heads of sequences that a program takes at most, one after the other.
        program_rows: query rows that a program takes at most.
        list_bytes: scalar memory for page lists.
        vmem_bytes: on-chip memory that the kernel may take.
    """

    tile_tokens: int
    buffer_bytes: int
    least_tiles: int
    most_tiles: int
    block_rows: int
    program_units: int
    program_rows: int
    list_bytes: int
    vmem_bytes: int


# Found with scripts/tpu_kernel_account.py, that is by counting the compiler's instructions, not by running; see
# docs/kernels_tpu.md. Tiles: instructions a token fall by a quarter from 512 to 1,024 tokens and by a tenth from there
# to 2,048, while compiling takes half as long again and short lists more. Rows: instructions a row fall by a quarter
# from 128 to 256, though more is spilled. Buffers: a core reads at most 1.7 TB/s; with 2 us between a copy's start and
# its end, 3.4 MB under way keep it busy.
_CHIP = Blocks(
    tile_tokens=1024,
    buffer_bytes=4 << 20,
    least_tiles=4,
    most_tiles=16,
    block_rows=256,
    program_units=8,
    program_rows=2048,
    list_bytes=512 << 10,
    vmem_bytes=32 << 20,
)
CHIPS = {'v5e': _CHIP, 'v5p': _CHIP, 'v6e': _CHIP, '7x': _CHIP}

# So small that short lists, too, take several tiles, use buffers again and cross from one program into the next.
INTERPRETED = Blocks(
    tile_tokens=32,
    buffer_bytes=0,
    least_tiles=4,
    most_tiles=4,
    block_rows=32,
    program_units=2,
    program_rows=2048,
    list_bytes=512 << 10,
    vmem_bytes=32 << 20,
)


def of_chip(version: str) -> Blocks:
    """Sizes for a chip, by JAX's name of its version ('v5p'); one that nobody looked at gets those of the others."""
    return CHIPS.get(version, _CHIP)
