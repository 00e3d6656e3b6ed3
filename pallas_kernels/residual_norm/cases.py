"""Shapes of residual_norm that tests run through."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape: B rows of D numbers, S parts."""

    name: str
    rows: int
    width: int
    parts: int
    dtype: str

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """Random arguments of `residual_norm`."""
        rng = np.random.default_rng(seed)
        return {
            'x_BD': jnp.asarray(3 * rng.standard_normal((self.rows, self.width)), self.dtype),
            'parts_SBD': jnp.asarray(rng.standard_normal((self.parts, self.rows, self.width)), jnp.float32),
            'scale_D': jnp.asarray(1 + 0.1 * rng.standard_normal(self.width), jnp.float32),
            'eps': 1e-6,
        }


CASES = (
    Case('bf16_d512', 3, 512, 2, 'bfloat16'),
    Case('bf16_d256', 2, 256, 1, 'bfloat16'),
    Case('bf16_d384', 1, 384, 3, 'bfloat16'),
    Case('float32_d128', 4, 128, 2, 'float32'),
)
LARGE = (
    Case('1p7b', 64, 2048, 8, 'bfloat16'),
    Case('4b', 16, 2560, 6, 'bfloat16'),
    Case('32b', 8, 5120, 4, 'bfloat16'),
)
