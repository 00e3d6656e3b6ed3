"""The choice of pages and the attention to them, for one query token per sequence; one kernel where that is faster."""

import functools
from typing import Any

import jax

from pallas_kernels.implementation import Implementation, check_machine, kernel_module, named
from pallas_kernels.page_select import page_select
from pallas_kernels.sparse_decode import sparse_decode

__all__ = ['select_decode']


def select_decode(
    q_BHA: jax.Array,
    pages_KPCE: jax.Array,
    landmark_BKNA: jax.Array,
    table_BN: jax.Array,
    length_B: jax.Array,
    budget_B: jax.Array,
    *,
    max_pages: int,
    reserved_first: int,
    reserved_last: int,
    landmarks_at_rest: bool = False,
    implementation: Implementation | str = Implementation.REFERENCE,
) -> jax.Array:
    """`sparse_decode` of the pages that `page_select` chooses by their means.

    One kernel spares the wait of all sequences for the last one's choice. On a GPU that is worth it while each pair of
    sequence and KV head has a multiprocessor of its own; where there are more, one pair's choice hides behind the
    reading of another, and the two kernels run.

    Args:
        q_BHA, pages_KPCE, landmark_BKNA, table_BN, length_B, budget_B: as those two operations take them.
        max_pages, reserved_first, reserved_last, landmarks_at_rest: of `page_select`.
        implementation: of `pallas_kernels.implementation`.

    Returns:
        o_BHA in q's dtype.

    Raises:
        ValueError: as the two operations do.
    """
    implementation = named('select_decode', implementation)
    reserved: dict[str, Any] = {'reserved_first': reserved_first, 'reserved_last': reserved_last}
    arrays = q_BHA, pages_KPCE, landmark_BKNA, table_BN, length_B, budget_B

    def one_after_another(*arrays: jax.Array, implementation: Implementation) -> jax.Array:
        q_BHA, pages_KPCE, landmark_BKNA, table_BN, length_B, budget_B = arrays
        ids_BKM, count_B = page_select(
            q_BHA,
            landmark_BKNA,
            length_B,
            budget_B,
            table_BN,
            page_tokens=pages_KPCE.shape[2],
            max_pages=max_pages,
            **reserved,
            landmarks_at_rest=landmarks_at_rest,
            implementation=implementation,
        )
        return sparse_decode(q_BHA, pages_KPCE, None, ids_BKM, count_B, length_B, implementation=implementation)

    if implementation.platform == 'gpu':
        jax.eval_shape(functools.partial(one_after_another, implementation=implementation), *arrays)  # its checks
        kernel = kernel_module('select_decode', implementation)
        most_pages = min(max_pages, table_BN.shape[1])
        if kernel.is_faster(q_BHA, pages_KPCE, landmark_BKNA, most_pages):
            check_machine('select_decode', implementation, q_BHA)
            return kernel.select_decode(
                *arrays,
                max_pages=most_pages,
                **reserved,
                landmarks_at_rest=landmarks_at_rest,
                interpret=implementation.interpreted,
            )
    return one_after_another(*arrays, implementation=implementation)
