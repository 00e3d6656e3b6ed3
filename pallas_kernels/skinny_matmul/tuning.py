"""Block sizes of skinny_matmul, as data."""

import dataclasses
from collections.abc import Sequence

from pallas_kernels.pallas_gpu import MULTIPROCESSORS

SHARED_BYTES = 227 << 10  # of a multiprocessor, for all thread blocks on it


@dataclasses.dataclass(frozen=True)
class HopperBlocks:
    """Sizes that change no result but for rounding.

    Attributes:
        columns: of each weight that a thread block multiplies by.
        depth: of D that a step takes.
        stages: steps of the weights in shared memory.
        splits: parts of D that different thread blocks take.
        alone: whether a multiprocessor takes one block only.
    """

    columns: int
    depth: int
    stages: int
    splits: int
    alone: bool = False

    def shared_bytes(self, rows: int, together: int) -> int:
        """Shared memory of a block that multiplies bfloat16 rows by so many matrices together, but for barriers."""
        return 2 * self.stages * self.depth * (rows + together * self.columns) + 4 * rows * self.columns


def hopper_blocks(rows: int, depth_of_all: int, columns: Sequence[int], gated: bool) -> HopperBlocks:
    """Found on an H200 with the widths of Qwen3 1.7B and 8B.

    As many splits as keep all thread blocks on the device at once, each with four steps or more: beyond 32 rows a block
    fills a multiprocessor, and with more blocks than these the rest would wait until one has ended. More under way than
    these stages is slower again. Gated blocks are few: with six stages no more than two fit on a multiprocessor, on
    which early ones would crowd, and one if there is one for each of them; with 96 rows three longer ones are faster.
    """
    if gated:
        alone = columns[0] // 64 <= MULTIPROCESSORS
        if rows > 64 and depth_of_all % 128 == 0:
            return HopperBlocks(columns=64, depth=128, stages=3, splits=1, alone=alone)
        return HopperBlocks(columns=64, depth=64, stages=6, splits=1, alone=alone)
    depth = 128 if depth_of_all % 128 == 0 else 64
    blocks = HopperBlocks(columns=64, depth=depth, stages=4 * 128 // depth, splits=1)
    resident = min(SHARED_BYTES // blocks.shared_bytes(rows, 1), 2)
    most = max(depth_of_all // (4 * depth), 1)
    return dataclasses.replace(blocks, splits=max(min(resident * MULTIPROCESSORS // (sum(columns) // 64), most, 8), 1))
