"""dense_decode on Hopper: `paged_flash_gpu` over the whole page table."""

from pallas_kernels.paged_flash_gpu import paged_flash
from pallas_kernels.tuning_gpu import DENSE_DECODE, Blocks


def dense_decode(q_BTHA, pages_KPCE, table_BN, length_B, *, out_dtype, interpret, blocks: Blocks = DENSE_DECODE):
    return paged_flash(
        q_BTHA,
        pages_KPCE,
        table_BN[:, None],
        (length_B[:, None],),
        blocks=blocks,
        out_dtype=out_dtype,
        interpret=interpret,
    )
