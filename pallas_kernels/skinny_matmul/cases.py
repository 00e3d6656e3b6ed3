"""Shapes of skinny_matmul that tests run through."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape: B rows of D numbers, and the columns of each weight."""

    name: str
    rows: int
    depth: int
    columns: tuple[int, ...]
    gated: bool = False
    dtype: str = 'bfloat16'

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """Random arguments of `skinny_matmul`, of which results have about unit size."""
        rng = np.random.default_rng(seed)
        matrix = lambda *shape, scale: jnp.asarray(scale * rng.standard_normal(shape), self.dtype)
        weights = [matrix(self.depth, n, scale=self.depth**-0.5) for n in self.columns]
        return {'x_BD': matrix(self.rows, self.depth, scale=1), 'weights': weights, 'gated': self.gated}


CASES = (
    Case('one', 8, 128, (64,)),
    Case('three_side_by_side', 5, 320, (128, 64, 64)),
    Case('gated', 3, 192, (128, 128), gated=True),
    Case('splits', 16, 2048, (192,)),
    Case('float32', 3, 40, (24, 8), dtype='float32'),
    Case('float32_gated', 3, 40, (24, 24), gated=True, dtype='float32'),
)
LARGE = (
    Case('qkv_1p7b', 16, 2048, (2048, 1024, 1024)),
    Case('down_1p7b', 33, 6144, (2048,)),
    Case('gated_1p7b', 64, 2048, (6144, 6144), gated=True),
    Case('gated_4b', 32, 2560, (9728, 9728), gated=True),
    Case('o_8b', 128, 4096, (4096,)),
    Case('gated_8b', 128, 4096, (12288, 12288), gated=True),
)
