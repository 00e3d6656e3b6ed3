"""dense_decode on TPU: the flash loop of `paged_flash_tpu`, the page table as the one list of a sequence."""

import jax

from pallas_kernels.page_stream_tpu import Launch
from pallas_kernels.paged_flash_tpu import attend_lists


def dense_decode(
    q_BTHA,
    pages_KPCE,
    table_BN,
    length_B,
    *,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool,
    launch: Launch | None = None,
) -> jax.Array:
    """`pallas_kernels.dense_decode.dense_decode` with checked arguments."""
    B, T, H, A = q_BTHA.shape
    K = pages_KPCE.shape[0]
    q_BKRA = q_BTHA.reshape(B, T, K, H // K, A).swapaxes(1, 2).reshape(B, K, T * (H // K), A)
    o_BKRA = attend_lists(
        q_BKRA,
        pages_KPCE,
        table_BN[:, None],
        length_B[:, None],
        queries=T,
        launch=launch or Launch.here(interpret),
        out_dtype=out_dtype,
    )
    return o_BKRA.reshape(B, K, T, H // K, A).swapaxes(1, 2).reshape(B, T, H, A)
