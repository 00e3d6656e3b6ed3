"""Block sizes of skinny_matmul, as data."""

import dataclasses
from collections.abc import Sequence

_MULTIPROCESSORS = 132  # of an H200


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


def hopper_blocks(depth_of_all: int, columns: Sequence[int], gated: bool) -> HopperBlocks:
    """For 16 to 64 rows, found on an H200 with the widths of Qwen3 1.7B and 8B.

    As many splits as keep all thread blocks on the device at once, each with four steps or more. More under way than
    these stages is slower again. Gated blocks are few: with six stages no more than two fit on a multiprocessor, on
    which early ones would crowd, and one if there is one for each of them.
    """
    if gated:
        return HopperBlocks(columns=64, depth=64, stages=6, splits=1, alone=columns[0] // 64 <= _MULTIPROCESSORS)
    depth = 128 if depth_of_all % 128 == 0 else 64
    most = max(depth_of_all // (4 * depth), 1)
    splits = max(min(2 * _MULTIPROCESSORS // (sum(columns) // 64), most, 8), 1)
    return HopperBlocks(columns=64, depth=depth, stages=4 * 128 // depth, splits=splits)
