"""sparse_decode on TPU: the flash loop of `paged_flash_tpu`, a page list for every KV head."""

import jax
import jax.numpy as jnp

from pallas_kernels.page_stream_tpu import Launch
from pallas_kernels.paged_flash_tpu import attend_lists


def sparse_decode(
    q_BHA,
    pages_KPCE,
    table_BN,
    ids_BKM,
    count_B,
    length_B,
    *,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool,
    launch: Launch | None = None,
) -> jax.Array:
    """`pallas_kernels.sparse_decode.sparse_decode` with checked arguments.

    With a table, pages of a list must differ from each other.
    """
    B, H, A = q_BHA.shape
    K, C = pages_KPCE.shape[0], pages_KPCE.shape[2]
    if table_BN is None:
        physical_BKM = ids_BKM
        # Only the last page, the newest, may be partly filled.
        tokens_B = (jnp.minimum(count_B, ids_BKM.shape[-1]) - 1) * C + (length_B - 1) % C + 1
        tokens_BL = jnp.broadcast_to(jnp.where(length_B > 0, tokens_B, 0)[:, None], (B, K))
    else:
        physical_BKM, tokens_BL = _in_order(table_BN, ids_BKM, count_B, length_B, C)
    o_BKGA = attend_lists(
        q_BHA.reshape(B, K, H // K, A),
        pages_KPCE,
        physical_BKM,
        tokens_BL,
        queries=1,
        launch=launch or Launch.here(interpret),
        out_dtype=out_dtype,
    )
    return o_BKGA.reshape(B, H, A)


def _in_order(table_BN, ids_BKM, count_B, length_B, page_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Physical pages, the partly filled one after the full ones and the empty ones at the end, and their tokens."""
    used_BKM = jnp.arange(ids_BKM.shape[-1]) < count_B[:, None, None]
    tokens_BKM = jnp.clip(length_B[:, None, None] - ids_BKM * page_tokens, 0, page_tokens)
    tokens_BKM = jnp.where(used_BKM, tokens_BKM, 0)
    order_BKM = jnp.argsort(-tokens_BKM, axis=-1)
    ordered_BKM = jnp.take_along_axis(ids_BKM, order_BKM, axis=-1)
    physical_BKM = jnp.take_along_axis(table_BN[:, None], ordered_BKM, axis=2, mode='clip')
    return physical_BKM, tokens_BKM.sum(axis=-1)
