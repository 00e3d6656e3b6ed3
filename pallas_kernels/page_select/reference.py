"""Block top-k selection in JAX: the definition."""

import jax.numpy as jnp
from jax import lax


def page_select(
    q_BHA, landmark_BKNA, length_B, budget_B, table_BN, *, page_tokens, max_pages, reserved_first, reserved_last
):
    B, K, N, A = landmark_BKNA.shape
    group_BKA = q_BHA.astype(jnp.float32).reshape(B, K, -1, A).mean(axis=2)
    landmark_BKNA = landmark_BKNA.astype(jnp.float32)
    score_BKN = jnp.einsum('bka,bkna->bkn', group_BKA, landmark_BKNA, precision=lax.Precision.HIGHEST)
    score_BKN = jnp.where(score_BKN == 0, 0.0, score_BKN)  # top_k orders -0 below 0

    pages_B = -(-length_B // page_tokens)
    logical_N = jnp.arange(N)
    exists_BN = logical_N < pages_B[:, None]
    reserved_BN = (logical_N < reserved_first) | (logical_N >= pages_B[:, None] - reserved_last)
    score_BKN = jnp.where((reserved_BN & exists_BN)[:, None], jnp.inf, score_BKN)
    score_BKN = jnp.where(exists_BN[:, None], score_BKN, -jnp.inf)

    most_B = jnp.minimum(budget_B, max_pages) + reserved_first + reserved_last  # so that no budget overflows
    count_B = jnp.minimum(pages_B, most_B)
    count_B = jnp.minimum(count_B, max_pages)
    ids_BKM = lax.top_k(score_BKN, max_pages)[1]  # equal scores: the lower page first
    chosen_M = jnp.arange(max_pages) < count_B[:, None, None]
    ids_BKM = jnp.sort(jnp.where(chosen_M, ids_BKM, N), axis=-1)  # page order; the rest, N, at the end
    if table_BN is not None:
        ids_BKM = jnp.take_along_axis(table_BN[:, None], ids_BKM, axis=2, mode='fill', fill_value=0)
    return ids_BKM.astype(jnp.int32), count_B.astype(jnp.int32)
