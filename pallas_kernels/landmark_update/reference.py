"""Writing tokens into the paged cache, in JAX: the definition."""

import jax.numpy as jnp


def landmark_update(pages_KPCE, landmark_BKNA, k_BKA, v_BKA, table_BN, position_B, write_B, policy):
    P, C = pages_KPCE.shape[1:3]
    N, A = landmark_BKNA.shape[2], k_BKA.shape[2]
    page_B, offset_B = position_B // C, position_B % C
    physical_B = jnp.take_along_axis(table_BN, page_B[:, None], axis=1, mode='clip')[:, 0]
    target_B = jnp.where(write_B, physical_B, P)  # out of range: dropped
    token_KBE = jnp.concatenate([k_BKA, v_BKA], axis=-1).astype(pages_KPCE.dtype).swapaxes(0, 1)
    pages_KPCE = pages_KPCE.at[:, target_B, offset_B].set(token_KBE, mode='drop')

    keys_KBCA = pages_KPCE[:, physical_B, :, :A]
    filled_BKA = policy.landmark(keys_KBCA).swapaxes(0, 1).astype(landmark_BKNA.dtype)
    filled_B = jnp.where(write_B & (offset_B == C - 1), page_B, N)
    rows_B = jnp.arange(position_B.shape[0])
    return pages_KPCE, landmark_BKNA.at[rows_B, :, filled_B].set(filled_BKA, mode='drop')
