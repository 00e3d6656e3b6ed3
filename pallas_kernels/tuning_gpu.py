"""Block sizes of sparse_decode, dense_decode and the attention of select_decode on GPUs, as data.

`python -m pallas_kernels.tune` times the candidates and prints which of them is best for each shape.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes that change no result but for rounding.

    Attributes:
        tile_tokens: tokens multiplied at once, 64 or 128.
        stages: tiles in shared memory, all but the one at hand under way.
        split_tokens: cached tokens that one thread block reads at most; longer lists are split, and the parts combined
            afterwards. It depends on nothing but the list, whatever the batch.
    """

    tile_tokens: int
    stages: int
    split_tokens: int


# H200. sparse_decode by `tune`: 129.1 us with 2 stages, 132.3 with 3, 138.2 with 6 at 32 x 256 pages of 16, all alike
# at 16 x 64. dense_decode reasoned, and found good by `bench`: two thread blocks a multiprocessor, 96 KB under way
# in each. No split below 8K tokens.
SPARSE_DECODE = Blocks(tile_tokens=64, stages=2, split_tokens=8192)
# A block that is alone on its multiprocessor hides its own reads, and its arithmetic where others leave it the memory.
# 26K tokens and 256 pages, 5 / 10 / 16 sequences of 8 KV heads: 58.0 / 64.5 / 82.6 us with two tiles of 64 tokens,
# 52.0 / 57.3 / 80.2 with three, 50.1 / 56.0 / 81.7 with four, 44.5 / 57.1 / 84.2 with two of 128.
SELECT_DECODE = Blocks(tile_tokens=64, stages=3, split_tokens=8192)
SELECT_DECODE_FEW = Blocks(tile_tokens=128, stages=2, split_tokens=8192)  # half of the multiprocessors at most
DENSE_DECODE = Blocks(tile_tokens=64, stages=3, split_tokens=8192)
