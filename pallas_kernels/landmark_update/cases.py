"""Shapes of landmark_update that tests, benches and tuning run through."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.random_cache import random_pool


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        kv_heads, head_dim: K and A.
        page_tokens, pages: C and N.
        positions: where each sequence's token goes; the tokens before it are cached.
        write: which sequences write.
        dtype: of pool, landmarks and the tokens.
    """

    name: str
    kv_heads: int
    head_dim: int
    page_tokens: int
    pages: int
    positions: tuple[int, ...]
    write: tuple[bool, ...]
    dtype: str

    def arguments(self, seed: int = 0, free: float = 0.0) -> dict[str, jax.Array]:
        """Random arguments of `landmark_update`; `free` is what unwritten memory and landmarks hold."""
        rng = np.random.default_rng(seed)
        B, K, N, A, C = len(self.positions), self.kv_heads, self.pages, self.head_dim, self.page_tokens
        pages_KPCE, table_BN = random_pool(
            rng,
            kv_heads=K,
            head_dim=A,
            page_tokens=C,
            pages=N,
            lengths=[position + 1 for position in self.positions],
            dtype=self.dtype,
            free=free,
        )
        landmark_BKNA = rng.standard_normal((B, K, N, A))
        for b, position in enumerate(self.positions):
            page, offset = divmod(position, C)
            pages_KPCE[:, table_BN[b, page], offset] = free
            landmark_BKNA[b, :, page:] = free
        return {
            'pages_KPCE': jnp.asarray(pages_KPCE),
            'landmark_BKNA': jnp.asarray(landmark_BKNA, self.dtype),
            'k_BKA': jnp.asarray(rng.standard_normal((B, K, A)), self.dtype),
            'v_BKA': jnp.asarray(rng.standard_normal((B, K, A)), self.dtype),
            'table_BN': jnp.asarray(table_BN),
            'position_B': jnp.asarray(self.positions, jnp.int32),
            'write_B': jnp.asarray(self.write),
        }


_ALL = (True,) * 5
CASES = (
    Case('ends_and_middles', 2, 32, 8, 4, (0, 7, 8, 30, 31), _ALL, 'float32'),
    Case('some_idle', 2, 32, 8, 4, (31, 7, 15, 3, 23), (False, True, False, True, True), 'float32'),
    Case('all_idle', 1, 64, 16, 3, (15, 47), (False, False), 'float32'),
    Case('a128_c16', 3, 128, 16, 3, (15, 20, 47), _ALL[:3], 'float32'),
    Case('a64_c32', 1, 64, 32, 2, (31, 63, 40), (True, True, False), 'float32'),
    Case('bf16_a128_c8', 2, 128, 8, 5, (7, 39, 16, 0, 23), _ALL, 'bfloat16'),
    Case('bf16_a64_c16', 2, 64, 16, 3, (15, 31, 47), (True, False, True), 'bfloat16'),
    Case('a64_c128', 1, 64, 128, 2, (127, 255, 100), _ALL[:3], 'float32'),
    Case('a128_c16_n8', 2, 128, 16, 8, (127, 95, 31, 64), (True, True, False, True), 'float32'),
    Case('bf16_a128_c64_n8', 3, 128, 64, 8, (511, 63, 200), _ALL[:3], 'bfloat16'),
    Case('bf16_a64_c8_n40', 2, 64, 8, 40, (319, 255, 63, 7, 100), (True, True, True, False, True), 'bfloat16'),
)
