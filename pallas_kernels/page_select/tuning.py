"""Block sizes of page_select, as data."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes on TPU.

    Attributes:
        chunk_pages: pages of a copy, for all KV heads of a sequence; a multiple of 128. Reading ends with the chunk in
            which the sequence ends.
        buffer_bytes, most_buffers: chunks held on chip, most of them under way: what keeps the copies busy while pages
            are being chosen.
        rows: pairs of sequence and KV head whose thresholds are searched together, a multiple of 8: a step of the
            search takes as long for 32 rows as for 8.
        digit_bits: bits of the threshold found in one step: 2^digit_bits - 1 counts, but one wait for a sum over lanes.
        narrowest: pages of the smallest part of the keys, a half or a quarter, for which there is code of its own.
        vmem_bytes: the most that a program may hold on chip.
    """

    chunk_pages: int
    buffer_bytes: int
    most_buffers: int
    rows: int
    digit_bits: int
    narrowest: int
    vmem_bytes: int


TPU = Blocks(
    chunk_pages=256, buffer_bytes=8 << 20, most_buffers=32, rows=32, digit_bits=2, narrowest=512, vmem_bytes=40 << 20
)


@dataclasses.dataclass(frozen=True)
class HopperBlocks:
    """How a thread block of a Hopper GPU reads the landmarks of one KV head of one sequence.

    Attributes:
        warpgroups: groups of 128 threads; each takes every n-th tile of 64 landmarks and has its own copies under way.
        held_bytes: of landmarks under way in all.
        chunk_pages: scores in registers at a time while pages are chosen, a multiple of 128 and of all warpgroups'
            tiles.
        digit_bits: bits of the threshold found in one round, by 2^digit_bits - 1 counts and one wait for all warps.
    """

    warpgroups: int
    held_bytes: int
    chunk_pages: int
    digit_bits: int

    def stages(self, tile_bytes: int) -> int:
        """Tiles that each warpgroup has under way: at least two, one to read from while the other arrives."""
        return max(self.held_bytes // (self.warpgroups * tile_bytes), 2)


# Two blocks fit into a multiprocessor, shared memory and registers: one reads while the other chooses.
HOPPER = HopperBlocks(warpgroups=2, held_bytes=64 << 10, chunk_pages=1024, digit_bits=2)
# Four fit, for more pairs of sequence and KV head than two on each multiprocessor: 96 sequences of 1K tokens take 8.2
# instead of 11.5 us, of 8K tokens as long as before.
HOPPER_MANY = HopperBlocks(warpgroups=1, held_bytes=32 << 10, chunk_pages=1024, digit_bits=2)
_HELD_BLOCKS = 2 * 132  # of HOPPER, that an H200 has room for


def hopper_blocks(pairs: int) -> HopperBlocks:
    """For so many pairs of sequence and KV head."""
    return HOPPER if pairs <= _HELD_BLOCKS else HOPPER_MANY
