"""Shapes of dense_decode that tests, benches and tuning run through."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.random_cache import random_pool


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        queries: T.
        kv_heads, group, head_dim: K, G (query heads of one KV head) and A.
        page_tokens, pages: C and N.
        lengths: cached tokens of each sequence.
        dtype: of queries and pool.
    """

    name: str
    queries: int
    kv_heads: int
    group: int
    head_dim: int
    page_tokens: int
    pages: int
    lengths: tuple[int, ...]
    dtype: str

    def arguments(self, seed: int = 0, free: float = 0.0) -> dict[str, jax.Array]:
        """Random arguments of `dense_decode`; `free` is what unwritten memory holds."""
        rng = np.random.default_rng(seed)
        pages_KPCE, table_BN = random_pool(
            rng,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_tokens=self.page_tokens,
            pages=self.pages,
            lengths=self.lengths,
            dtype=self.dtype,
            free=free,
        )
        sizes = (len(self.lengths), self.queries, self.kv_heads * self.group, self.head_dim)
        return {
            'q_BTHA': jnp.asarray(rng.standard_normal(sizes), self.dtype),
            'pages_KPCE': jnp.asarray(pages_KPCE),
            'table_BN': jnp.asarray(table_BN),
            'length_B': jnp.asarray(self.lengths, jnp.int32),
        }


CASES = (
    Case('one_query', 1, 2, 2, 32, 8, 12, (1, 0, 7, 8, 9, 64, 65, 96), 'float32'),
    Case('g4_a128_c16', 1, 2, 4, 128, 16, 6, (96, 50, 17), 'float32'),
    Case('g8_a128_c32', 1, 1, 8, 128, 32, 4, (100, 128), 'float32'),
    Case('g5_a64_c16', 1, 2, 5, 64, 16, 7, (111, 1), 'float32'),
    Case('chunk_of_5', 5, 3, 1, 64, 8, 9, (5, 6, 41, 72), 'float32'),
    Case('chunk_over_pages', 20, 1, 4, 64, 16, 5, (20, 79), 'float32'),
    Case('chunk_before_the_start', 6, 2, 2, 32, 8, 3, (2, 0, 19), 'float32'),
    Case('bf16_g2_a128_c16', 1, 2, 2, 128, 16, 6, (96, 41, 16), 'bfloat16'),
    Case('bf16_g8_a64_c32', 3, 1, 8, 64, 32, 3, (70, 96), 'bfloat16'),
    Case('bf16_g5_a128_c64', 9, 1, 5, 128, 64, 2, (128, 70), 'bfloat16'),
    Case('bf16_g4_a64_c128', 1, 2, 4, 64, 128, 2, (129, 20), 'bfloat16'),
    Case('g2_a128_c8', 2, 1, 2, 128, 8, 9, (72, 3), 'float32'),
)
