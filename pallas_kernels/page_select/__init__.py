"""Chooses the pages that each KV head of each sequence reads in one decode step."""

from numbers import Integral

import jax

from pallas_kernels.checks import (
    check_arrays,
    check_floats,
    check_heads,
    check_integers,
    check_pages,
    check_reserved,
    check_shapes,
)
from pallas_kernels.implementation import Implementation, check_fit, check_machine, kernel_module, named
from pallas_kernels.page_select import reference
from pallas_kernels.page_select.policies import SelectionPolicy, named_policy


def page_select(
    q_BHA: jax.Array,
    landmark_BKNA: jax.Array,
    length_B: jax.Array,
    budget_B: jax.Array,
    table_BN: jax.Array | None = None,
    *,
    page_tokens: int,
    max_pages: int,
    reserved_first: int,
    reserved_last: int,
    policy: SelectionPolicy | str = SelectionPolicy.BLOCK_MEAN,
    landmarks_at_rest: bool = False,
    implementation: Implementation | str = Implementation.REFERENCE,
) -> tuple[jax.Array, jax.Array]:
    """Reserved pages and the `budget` best others by the policy's score (formulas and sources: `policies`).

    By default score[b, k, n] = mean over the group's query heads of q[b, h] . landmark[b, k, n], in float32. The first
    `reserved_first` and the last `reserved_last` pages are always chosen, on top of the budget. Equal scores: the lower
    page wins.

    Args:
        q_BHA: queries after RoPE and QK-norm, not yet divided by sqrt(A): 'group_softmax' does that.
        landmark_BKNA: landmarks, A numbers each, or what the policy keeps of a page (2 A under 'quest'); those of pages
            that are not full are never looked at, since those pages are reserved.
        length_B: int32 cached tokens, the current one included, at least 1.
        budget_B: int32 pages beside the reserved ones, at least 0.
        table_BN: int32 physical page of each logical page, to get physical ids; None for logical ones.
        page_tokens: C.
        max_pages: M, the most pages any sequence may read; budgets beyond it are cut, so size it from the schedule. It
            must hold the reserved pages, or all N where those are fewer.
        reserved_first, reserved_last: pages; the last must be at least 1.
        policy: how pages are scored.
        landmarks_at_rest: whether the operation that runs right before this one writes none of them but those of
            reserved pages: the GPU kernel then reads them while that one runs.
        implementation: of `pallas_kernels.implementation`; kernels have 'block_mean' alone.

    Returns:
        ids_BKM int32, pages in ascending order of their logical place, so that the newest is the last; entries from
        the count on are N (logical) or 0 (physical). M is at most N. count_B int32, pages read by each sequence.

    Raises:
        ValueError: shapes, dtypes, sizes or the policy do not fit each other or the implementation.
    """
    implementation = named('page_select', implementation)
    policy = named_policy('page_select', policy, implementation)
    check_arrays('page_select', q_BHA=q_BHA)
    arrays = {
        'q_BHA': (q_BHA, 'BHA'),
        'landmark_BKNA': (landmark_BKNA, 'BKNW'),
        'length_B': (length_B, 'B'),
        'budget_B': (budget_B, 'B'),
    }
    if table_BN is not None:
        arrays['table_BN'] = (table_BN, 'BN')
    sizes = check_shapes('page_select', arrays, W=policy.landmark_width(q_BHA.shape[-1]))
    if table_BN is not None:
        check_integers('page_select', table_BN=table_BN)
    check_pages('page_select', page_tokens)
    check_integers('page_select', length_B=length_B, budget_B=budget_B)
    check_floats('page_select', q_BHA=q_BHA, landmark_BKNA=landmark_BKNA)
    check_heads('page_select', sizes['H'], sizes['K'])
    numbers = {'max_pages': max_pages, 'reserved_first': reserved_first, 'reserved_last': reserved_last}
    for name, number in numbers.items():
        if not isinstance(number, Integral):
            raise ValueError(f'page_select: {name}={number!r}: must be a whole number')
    check_reserved('page_select', reserved_first, reserved_last)
    least = min(reserved_first + reserved_last, sizes['N'])
    if max_pages < least:
        raise ValueError(f'page_select: max_pages={max_pages}: must be at least {least} to hold the reserved pages')
    arguments = q_BHA, landmark_BKNA, length_B, budget_B, table_BN
    options = {
        'page_tokens': page_tokens,
        'max_pages': min(max_pages, sizes['N']),
        'reserved_first': reserved_first,
        'reserved_last': reserved_last,
    }
    if implementation is Implementation.REFERENCE:
        return reference.page_select(*arguments, **options, policy=policy)
    check_fit('page_select', sizes['A'], sizes['H'] // sizes['K'], landmark_BKNA.dtype)
    check_machine('page_select', implementation, q_BHA)
    kernel = kernel_module('page_select', implementation)
    if implementation.platform == 'gpu':
        options['landmarks_at_rest'] = landmarks_at_rest
    return kernel.page_select(*arguments, **options, interpret=implementation.interpreted)
