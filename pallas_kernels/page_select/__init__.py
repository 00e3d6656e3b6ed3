"""Chooses the pages that each KV head of each sequence reads in one decode step."""

import jax

from pallas_kernels.checks import check_integers, check_pages, check_shapes
from pallas_kernels.page_select import reference


def page_select(
    q_BHA: jax.Array,
    landmark_BKNA: jax.Array,
    length_B: jax.Array,
    budget_B: jax.Array,
    *,
    page_tokens: int,
    max_pages: int,
    reserved_first: int,
    reserved_last: int,
) -> tuple[jax.Array, jax.Array]:
    """Reserved pages and the `budget` best others by the block-mean score (Sparrow, section on dynamic block top-k).

    score[b, k, n] = mean over the group's query heads of q[b, h] . landmark[b, k, n], in float32. The first `reserved_first` and the last
    `reserved_last` pages are always chosen, on top of the budget. Equal scores: the lower page wins.

    Args:
        q_BHA: queries after RoPE and QK-norm; scaling does not change the choice.
        landmark_BKNA: landmarks; those of pages that are not full are never looked at, since those pages are reserved.
        length_B: int32 cached tokens, the current one included, at least 1.
        budget_B: int32 pages beside the reserved ones, at least 0.
        page_tokens: C.
        max_pages: M, the most pages any sequence may read; budgets beyond it are cut, so size it from the schedule.
        reserved_first, reserved_last: pages; the last must be at least 1.

    Returns:
        ids_BKM int32, logical pages in ascending order, N where unused; count_B int32, pages read by each sequence.

    Raises:
        ValueError: shapes, dtypes or sizes do not fit each other.
    """
    sizes = check_shapes(
        'page_select',
        {
            'q_BHA': (q_BHA, 'BHA'),
            'landmark_BKNA': (landmark_BKNA, 'BKNA'),
            'length_B': (length_B, 'B'),
            'budget_B': (budget_B, 'B'),
        },
    )
    check_pages('page_select', page_tokens)
    check_integers('page_select', length_B=length_B, budget_B=budget_B)
    if sizes['H'] % sizes['K']:
        raise ValueError(f'page_select: q_BHA has {sizes["H"]} heads, not a multiple of the {sizes["K"]} KV heads')
    if reserved_first < 0 or reserved_last < 1 or max_pages < 1:
        raise ValueError(f'page_select: reserved_first={reserved_first}, reserved_last={reserved_last}, max_pages={max_pages}: need >= 0, 1, 1')
    return reference.page_select(
        q_BHA,
        landmark_BKNA,
        length_B,
        budget_B,
        page_tokens=page_tokens,
        max_pages=max_pages,
        reserved_first=reserved_first,
        reserved_last=reserved_last,
    )
