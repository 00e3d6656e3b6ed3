"""Shapes of sparse_prefill that tests, benches and tuning run through."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        kv_heads, group, head_dim: K, G (query heads of one KV head) and A.
        page_tokens, tokens: C and T.
        reserved_first, reserved_last: pages always read.
        lengths: valid tokens of each row.
        prompts: first tokens of each row, which read all pages.
        budgets: the largest budget of each row; later tokens have budgets from 0 to it.
        dtype: of queries, keys and values.
        exact: whole numbers instead of normal ones, so that every score is exact in any order of summation and many are
            equal.
    """

    name: str
    kv_heads: int
    group: int
    head_dim: int
    page_tokens: int
    tokens: int
    reserved_first: int
    reserved_last: int
    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    budgets: tuple[int, ...]
    dtype: str
    exact: bool

    @property
    def pages(self) -> int:
        return -(-self.tokens // self.page_tokens)

    def arguments(self, seed: int = 0, free: float = 0.0) -> dict[str, Any]:
        """Random arguments of `sparse_prefill`; `free` is what the padding holds."""
        rng = np.random.default_rng(seed)
        B, T, K, A, C = len(self.lengths), self.tokens, self.kv_heads, self.head_dim, self.page_tokens
        q_BTHA = rng.standard_normal((B, T, K * self.group, A))
        k_BTKA, v_BTKA = rng.standard_normal((2, B, T, K, A))
        if self.exact:
            q_BTHA = np.sign(np.trunc(q_BTHA)) * self.group  # so that the group's mean is a whole number too
            # One in forty is not 0, the same in all tokens of a page; noise that the page's mean is free of.
            mean_BTKA = np.sign(np.trunc(k_BTKA / 2.2))[:, ::C].repeat(C, axis=1)[:, :T]
            noise_BTKA = np.rint(rng.standard_normal((B, T // 2 + 1, K, A))).repeat(2, axis=1)[:, :T]
            k_BTKA = mean_BTKA + noise_BTKA * np.where(np.arange(T) % 2, -1, 1)[:, None, None]
        position_T = np.arange(T)
        padding_BT = position_T >= np.asarray(self.lengths)[:, None]
        q_BTHA, k_BTKA, v_BTKA = (
            np.where(padding_BT[:, :, None, None], free, array) for array in (q_BTHA, k_BTKA, v_BTKA)
        )
        budget_BT = rng.integers(0, np.asarray(self.budgets)[:, None] + 1, (B, T))
        budget_BT = np.where(position_T < np.asarray(self.prompts)[:, None], np.iinfo(np.int32).max, budget_BT)
        return {
            'q_BTHA': jnp.asarray(q_BTHA, self.dtype),
            'k_BTKA': jnp.asarray(k_BTKA, self.dtype),
            'v_BTKA': jnp.asarray(v_BTKA, self.dtype),
            'length_B': jnp.asarray(self.lengths, jnp.int32),
            'budget_BT': jnp.asarray(budget_BT, jnp.int32),
            'page_tokens': C,
            'reserved_first': self.reserved_first,
            'reserved_last': self.reserved_last,
        }


CASES = (
    # Entries that differ in lengths, budgets and numbers alone compile once.
    Case('small', 2, 2, 32, 8, 77, 1, 2, (77, 41, 0), (10, 3, 0), (3, 2, 2), 'float32', False),
    Case('small_ties', 2, 2, 32, 8, 77, 1, 2, (77, 64, 9), (10, 0, 0), (3, 2, 9), 'float32', True),
    Case('small_budget_0', 2, 2, 32, 8, 77, 1, 2, (77, 76, 24), (30, 0, 0), (0, 0, 0), 'float32', False),
    Case('tiles', 1, 4, 32, 8, 300, 1, 1, (300, 283), (0, 70), (12, 5), 'float32', False),
    Case('tiles_ties', 1, 4, 32, 8, 300, 1, 1, (299, 131), (0, 0), (12, 5), 'float32', True),
    Case('g5_a64_c16_no_first_page', 2, 5, 64, 16, 150, 0, 1, (150, 99), (0, 17), (2, 4), 'float32', False),
    Case('c128_two_tiles_a_word', 1, 2, 64, 128, 700, 1, 1, (700,), (100,), (1,), 'float32', False),
    Case('bf16_mha_a128_c32', 2, 1, 128, 32, 250, 1, 2, (250, 101), (20, 5), (3, 2), 'bfloat16', False),
    Case('bf16_g8_a64_c8_ties', 1, 8, 64, 8, 100, 1, 1, (97,), (11,), (5,), 'bfloat16', True),
)
