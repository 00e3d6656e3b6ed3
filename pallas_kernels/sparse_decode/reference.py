"""Attention of one query token over chosen pages, in JAX: the definition."""

import jax.numpy as jnp
from jax import lax


def sparse_decode(q_BHA, pages_KPCE, table_BN, ids_BKM, count_B, length_B, *, out_dtype):
    B, H, A = q_BHA.shape
    K, C = pages_KPCE.shape[0], pages_KPCE.shape[2]
    # By default a float32 product on GPU and TPU is rounded to fewer bits; a float32 cache asks for exact ones.
    precision = lax.Precision.HIGHEST if pages_KPCE.dtype == jnp.float32 else None
    M = ids_BKM.shape[-1]
    used_BKM = jnp.arange(M) < count_B[:, None, None]
    if table_BN is None:
        physical_BKM = ids_BKM
        # Only the last one, the newest, may be partly filled.
        newest_B = jnp.maximum(length_B - 1, 0) // C * C
        first_BKM = jnp.where(jnp.arange(M) == count_B[:, None, None] - 1, newest_B[:, None, None], 0)
    else:
        physical_BKM = jnp.take_along_axis(table_BN[:, None], ids_BKM, axis=2, mode='clip')
        first_BKM = ids_BKM * C
    kv_BKMCE = pages_KPCE[jnp.arange(K)[:, None], jnp.where(used_BKM, physical_BKM, 0)]
    position_BKMC = first_BKM[..., None] + jnp.arange(C)
    valid_BKMC = used_BKM[..., None] & (position_BKMC < length_B[:, None, None, None])

    q_BKGA = q_BHA.reshape(B, K, H // K, A)
    k_BKMCA, v_BKMCA = kv_BKMCE[..., :A], kv_BKMCE[..., A:]
    score_BKGMC = jnp.einsum(
        'bkga,bkmca->bkgmc', q_BKGA, k_BKMCA, precision=precision, preferred_element_type=jnp.float32
    )
    score_BKGMC = jnp.where(valid_BKMC[:, :, None], score_BKGMC * A**-0.5, -jnp.inf)
    top_BKG11 = score_BKGMC.max(axis=(-2, -1), keepdims=True)
    weight_BKGMC = jnp.exp(score_BKGMC - jnp.where(jnp.isfinite(top_BKG11), top_BKG11, 0))
    total_BKG1 = weight_BKGMC.sum(axis=(-2, -1))[..., None]
    # Zero times NaN would leak what unused memory holds.
    v_BKMCA = jnp.where(valid_BKMC[..., None], v_BKMCA, 0)
    weight_BKGMC = weight_BKGMC.astype(v_BKMCA.dtype)
    o_BKGA = jnp.einsum(
        'bkgmc,bkmca->bkga', weight_BKGMC, v_BKMCA, precision=precision, preferred_element_type=jnp.float32
    )
    o_BKGA = o_BKGA / jnp.maximum(total_BKG1, 1e-30)
    return o_BKGA.reshape(B, H, A).astype(out_dtype)
