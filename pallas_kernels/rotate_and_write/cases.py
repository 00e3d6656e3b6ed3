"""Shapes of rotate_and_write that tests run through."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.landmark_update.cases import Case as Cache


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape: a cache with the positions to write (see `landmark_update`), G query heads a KV head, S parts.

    spare_rows: of the parts, behind those of the sequences; they hold NaN.
    """

    cache: Cache
    group: int
    parts: int
    normalized: bool = True
    spare_rows: int = 0

    @property
    def name(self) -> str:
        return f'{self.cache.name}_g{self.group}'

    def arguments(self, seed: int = 0, free: float = 0.0) -> dict[str, Any]:
        """Random arguments of `rotate_and_write`; `free` is what unwritten memory and landmarks hold."""
        arguments: dict[str, Any] = self.cache.arguments(seed, free)
        B, K, A = arguments.pop('k_BKA').shape
        del arguments['v_BKA']
        rng = np.random.default_rng(seed + 1)
        float32 = lambda array: jnp.asarray(array, jnp.float32)
        angle_BR = rng.uniform(0, 2 * np.pi, (B, A // 2))
        scales = tuple(float32(1 + 0.1 * rng.standard_normal(A)) for _ in range(2))
        return arguments | {
            'parts_SBF': jnp.pad(
                float32(rng.standard_normal((self.parts, B, (self.group + 2) * K * A))),
                ((0, 0), (0, self.spare_rows), (0, 0)),
                constant_values=np.nan,
            ),
            'norms': scales if self.normalized else None,
            'cos_BR': float32(np.cos(angle_BR)),
            'sin_BR': float32(np.sin(angle_BR)),
            'eps': 1e-6,
        }


_ALL = (True,) * 3
CASES = (
    Case(Cache('bf16_a128_c16', 2, 128, 16, 3, (15, 20, 47), _ALL, 'bfloat16'), group=2, parts=3, spare_rows=5),
    Case(Cache('bf16_a64_c8', 2, 64, 8, 5, (7, 39, 16), (True, False, True), 'bfloat16'), 5, 1, normalized=False),
    Case(Cache('a128_c8', 1, 128, 8, 8, (63, 8, 30), _ALL, 'float32'), group=1, parts=2),
)
LARGE = (
    Case(
        Cache('bf16_1p7b', 8, 128, 16, 32, tuple(range(15, 511, 31)), (True, False, True, True) * 4, 'bfloat16'), 2, 4
    ),
    Case(Cache('bf16_8b', 8, 128, 16, 32, tuple(range(0, 510, 32)), (True,) * 16, 'bfloat16'), 4, 2),
)
