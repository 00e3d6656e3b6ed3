"""Block top-k selection in JAX: the definition."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.page_select.policies import SelectionPolicy


def page_select(
    q_BHA,
    landmark_BKNA,
    length_B,
    budget_B,
    table_BN,
    *,
    page_tokens,
    max_pages,
    reserved_first,
    reserved_last,
    policy=SelectionPolicy.BLOCK_MEAN,
):
    B, K, N, _ = landmark_BKNA.shape
    q_BKGA = q_BHA.astype(jnp.float32).reshape(B, K, -1, q_BHA.shape[-1])
    logical_N = jnp.arange(N)
    full_BN = logical_N < (length_B // page_tokens)[:, None]
    score_BKN = policy.scores(q_BKGA, landmark_BKNA.astype(jnp.float32), full_BN)
    score_BKN = jnp.where(score_BKN == 0, 0.0, score_BKN)  # top_k orders -0 below 0

    pages_B = -(-length_B // page_tokens)
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
