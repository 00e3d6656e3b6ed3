"""Shapes of page_select that tests, benches and tuning run through."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        kv_heads, group, head_dim: K, G (query heads of one KV head) and A.
        page_tokens, pages: C and N.
        max_pages: M.
        reserved_first, reserved_last: pages always read.
        lengths, budgets: cached tokens and budget of each sequence.
        dtype: of queries and landmarks.
        exact: small whole numbers instead of normal ones. Every score is then exact in any order of summation, and many
            are equal, so that the choice is the same on every platform and ties are decided all the time.
    """

    name: str
    kv_heads: int
    group: int
    head_dim: int
    page_tokens: int
    pages: int
    max_pages: int
    reserved_first: int
    reserved_last: int
    lengths: tuple[int, ...]
    budgets: tuple[int, ...]
    dtype: str
    exact: bool

    def arguments(self, seed: int = 0, free: float = 0.0) -> dict[str, Any]:
        """Random arguments of `page_select`; `free` is what the landmarks of unfilled pages hold."""
        rng = np.random.default_rng(seed)
        B, K, N, A = len(self.lengths), self.kv_heads, self.pages, self.head_dim
        q_BHA = rng.standard_normal((B, K * self.group, A))
        landmark_BKNA = rng.standard_normal((B, K, N, A))
        if self.exact:
            q_BHA = np.sign(np.trunc(q_BHA)) * self.group  # so that the group's mean is a whole number too
            landmark_BKNA = np.sign(np.trunc(landmark_BKNA / 2.2))  # one in forty is not 0
        unfilled_BN = (np.arange(N) + 1) * self.page_tokens > np.asarray(self.lengths)[:, None]
        landmark_BKNA = np.where(unfilled_BN[:, None, :, None], free, landmark_BKNA)
        return {
            'q_BHA': jnp.asarray(q_BHA, self.dtype),
            'landmark_BKNA': jnp.asarray(landmark_BKNA, self.dtype),
            'length_B': jnp.asarray(self.lengths, jnp.int32),
            'budget_B': jnp.asarray(self.budgets, jnp.int32),
            'page_tokens': self.page_tokens,
            'max_pages': self.max_pages,
            'reserved_first': self.reserved_first,
            'reserved_last': self.reserved_last,
        }


_HUGE = (1 << 31) - 1
CASES = (
    Case('small', 2, 2, 32, 8, 12, 6, 1, 1, (1, 8, 9, 64, 93), (4, 4, 4, 4, 2), 'float32', False),
    Case('small_ties', 2, 2, 32, 8, 12, 6, 1, 1, (1, 8, 9, 64, 93), (4, 4, 4, 4, 2), 'float32', True),
    Case('mha_a64_ties', 3, 1, 64, 8, 20, 10, 1, 2, (160, 153, 79), (7, 3, 0), 'float32', True),
    Case('g4_a128_c16', 2, 4, 128, 16, 30, 12, 1, 2, (480, 250, 17), (9, 5, 1), 'float32', False),
    Case('g8_a128_c32_ties', 1, 8, 128, 32, 24, 8, 2, 2, (768, 700, 128), (4, 3, 2), 'float32', True),
    Case('g5_a64_c16_ties', 2, 5, 64, 16, 17, 17, 1, 1, (272, 200, 15), (20, 5, 1), 'float32', True),
    Case('budget_beyond_max_pages', 2, 2, 32, 8, 12, 5, 1, 2, (96, 60, 24), (1 << 20, 9, 9), 'float32', True),
    Case('no_first_page', 2, 2, 32, 8, 12, 4, 0, 1, (96, 55), (3, 1), 'float32', True),
    Case('reserved_fill_the_cache', 1, 2, 32, 8, 3, 3, 2, 2, (24, 17, 8), (0, 1, 5), 'float32', True),
    Case('bf16_g2_a128_c16', 2, 2, 128, 16, 20, 8, 1, 2, (320, 141, 16), (5, 3, 1), 'bfloat16', False),
    Case('bf16_g8_a64_c32_ties', 1, 8, 64, 32, 16, 7, 1, 1, (512, 500), (5, 2), 'bfloat16', True),
    Case('bf16_whole_chunks', 8, 2, 128, 16, 256, 24, 1, 2, (4096, 4095, 2000), (21, 0, 5), 'bfloat16', False),
    Case('chunks_and_a_rest_ties', 3, 2, 64, 8, 300, 40, 1, 2, (2400, 2393, 1, 2048), (20, 5, 3, 0), 'bfloat16', True),
    Case('huge_budget', 1, 4, 128, 16, 290, 64, 1, 2, (4640, 4097, 100), (61, 20, _HUGE), 'float32', False),
)
