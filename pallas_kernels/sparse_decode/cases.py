"""Shapes of sparse_decode that tests, benches and tuning run through."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.random_cache import random_pool


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        kv_heads, group, head_dim: K, G (query heads of one KV head) and A.
        page_tokens, pages: C and N.
        most_pages: M.
        lengths: cached tokens of each sequence.
        counts: pages read by each sequence, at most its pages and M.
        dtype: of queries and pool.
    """

    name: str
    kv_heads: int
    group: int
    head_dim: int
    page_tokens: int
    pages: int
    most_pages: int
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    dtype: str

    def arguments(self, seed: int = 0, free: float = 0.0) -> dict[str, jax.Array]:
        """Random arguments of `sparse_decode`; `free` is what unwritten memory holds.

        Every KV head has pages of its own choice; even heads always read the last one, which may be partly filled.
        """
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
        ids_BKM = np.full((len(self.lengths), self.kv_heads, self.most_pages), self.pages, np.int32)
        for b, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            last = -(-length // self.page_tokens) - 1
            for k in range(self.kv_heads if count else 0):
                chosen = rng.permutation(last + 1)[:count]
                if k % 2 == 0 and last not in chosen:
                    chosen[0] = last
                ids_BKM[b, k, :count] = np.sort(chosen)
        sizes = (len(self.lengths), self.kv_heads * self.group, self.head_dim)
        return {
            'q_BHA': jnp.asarray(rng.standard_normal(sizes), self.dtype),
            'pages_KPCE': jnp.asarray(pages_KPCE),
            'table_BN': jnp.asarray(table_BN),
            'ids_BKM': jnp.asarray(ids_BKM),
            'count_B': jnp.asarray(self.counts, jnp.int32),
            'length_B': jnp.asarray(self.lengths, jnp.int32),
        }


CASES = (
    Case('small', 2, 2, 32, 8, 12, 5, (1, 8, 9, 64, 93), (1, 1, 2, 5, 4), 'float32'),
    Case('mha_a64', 3, 1, 64, 8, 6, 3, (48, 33, 20), (3, 1, 2), 'float32'),
    Case('g4_a128_c16', 2, 4, 128, 16, 8, 4, (128, 50, 17), (4, 2, 2), 'float32'),
    Case('g8_a128_c32', 1, 8, 128, 32, 4, 2, (100, 128), (2, 1), 'float32'),
    Case('g5_a64_c16_all_pages', 2, 5, 64, 16, 7, 7, (111, 1, 90), (7, 1, 6), 'float32'),
    Case('none_read', 2, 2, 32, 8, 4, 2, (0, 30, 12), (0, 0, 2), 'float32'),
    Case('bf16_g2_a128_c16', 2, 2, 128, 16, 6, 3, (96, 41, 16), (3, 2, 1), 'bfloat16'),
    Case('bf16_g8_a64_c32', 1, 8, 64, 32, 5, 2, (150, 96), (2, 1), 'bfloat16'),
    Case('bf16_g5_a128_c8', 2, 5, 128, 8, 10, 4, (80, 73), (4, 3), 'bfloat16'),
    Case('bf16_g4_a128_c64', 2, 4, 128, 64, 3, 2, (150, 64), (2, 1), 'bfloat16'),
    Case('g2_a64_c128', 1, 2, 64, 128, 2, 2, (130, 256), (1, 2), 'float32'),
)
