"""sparse_decode on Hopper: `paged_flash_gpu` over the chosen pages."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_flash_gpu import paged_flash
from pallas_kernels.tuning_gpu import SPARSE_DECODE, Blocks


def sparse_decode(
    q_BHA, pages_KPCE, table_BN, ids_BKM, count_B, length_B, *, out_dtype, interpret, blocks: Blocks = SPARSE_DECODE
):
    C = pages_KPCE.shape[2]
    M = ids_BKM.shape[-1]
    if table_BN is None:
        physical_BKM = ids_BKM
        tokens: tuple[jax.Array, ...] = count_B, length_B
    else:
        # In order of their place, so that only the last page that is read can be partly filled.
        count_B = jnp.where(length_B > 0, jnp.minimum(count_B, M), 0)
        used_BKM = jnp.arange(M) < count_B[:, None, None]
        ids_BKM = jnp.sort(jnp.where(used_BKM, ids_BKM, table_BN.shape[1]), axis=-1)
        tokens_BKM = jnp.clip(length_B[:, None, None] - ids_BKM * C, 0, C)
        tokens = (jnp.where(used_BKM, tokens_BKM, 0).sum(axis=-1).astype(jnp.int32),)
        physical_BKM = jnp.take_along_axis(table_BN[:, None], ids_BKM, axis=2, mode='clip')
    return paged_flash(
        q_BHA[:, None], pages_KPCE, physical_BKM, tokens, blocks=blocks, out_dtype=out_dtype, interpret=interpret
    )[:, 0]
