"""Random paged caches in which every test, bench and tuning run of the operations works, made from a `cases.py` entry.

Physical pages are dealt out in random order and sequences differ in length, as in a pool that has been in use for a
while. Memory that no token was written to holds `free`: give NaN to see that nobody reads it.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

SPARE_PAGES = 3  # physical pages that no sequence owns; page 0 is one of them


def random_pool(
    rng: np.random.Generator,
    *,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    pages: int,
    lengths: Sequence[int],
    dtype: str,
    free: float,
) -> tuple[np.ndarray, np.ndarray]:
    """A pool with a sequence of each of these lengths, and its page table.

    Args:
        rng: source of keys and values (standard normal) and of the pages' places.
        pages: N, logical pages of the longest sequence that the cache is made for.
        lengths: cached tokens of each sequence.
        dtype: of the pool.
        free: what memory without a token holds.

    Returns:
        pages_KPCE, and table_BN int32 whose entries past a sequence's last page are 0, a page that nobody owns.
    """
    K, C, A, N = kv_heads, page_tokens, head_dim, pages
    physical = len(lengths) * N + SPARE_PAGES
    pages_KPCE = np.full((K, physical, C, 2 * A), free, np.float32)
    table_BN = np.zeros((len(lengths), N), np.int32)
    places = iter(rng.permutation(np.arange(1, physical)))
    for b, length in enumerate(lengths):
        for n in range(-(-length // C)):
            table_BN[b, n] = place = next(places)
            filled = min(length - n * C, C)
            pages_KPCE[:, place, :filled] = rng.standard_normal((K, filled, 2 * A))
    return pages_KPCE.astype(jnp.dtype(dtype)), table_BN
