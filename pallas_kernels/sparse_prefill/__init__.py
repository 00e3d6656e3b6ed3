"""Attention of every token of a sequence over the pages that it read when it was sampled, for training."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checks import check_floats, check_heads, check_integers, check_pages, check_reserved, check_shapes
from pallas_kernels.implementation import Implementation, check_fit, kernel_module
from pallas_kernels.page_select.policies import SelectionPolicy, named_policy
from pallas_kernels.sparse_prefill import blocked
from pallas_kernels.sparse_prefill.attention import masked_attention
from pallas_kernels.sparse_prefill.selection import page_landmarks

PAGE_MASK = 'sparse_prefill_page_mask'  # its name for the policies of jax.checkpoint


def sparse_prefill(
    q_BTHA: jax.Array,
    k_BTKA: jax.Array,
    v_BTKA: jax.Array,
    length_B: jax.Array,
    budget_BT: jax.Array,
    *,
    page_tokens: int,
    reserved_first: int,
    reserved_last: int,
    policy: SelectionPolicy | str = SelectionPolicy.BLOCK_MEAN,
    implementation: Implementation = Implementation.REFERENCE,
    selection: Implementation | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """What `landmark_update`, `page_select` and `sparse_decode` give token by token, for whole sequences at once.

    Query t reads the reserved pages and the budget[t] best others of the ceil((t + 1) / C) pages there were when its
    token was the newest, by the policy's score (by default the mean over the group's query heads of q . landmark, in
    float32); equal scores: the lower page. o[t] = softmax(q[t] . k / sqrt(A)) v over their tokens up to t (Sparrow,
    section on DistillSparse: the teacher-forced sparse pass).

    Args:
        q_BTHA: queries after RoPE and QK-norm, unscaled. A row holds one sequence from its start.
        k_BTKA, v_BTKA: keys and values in q's dtype, which must be that of the sampler's cache for the same pages.
        length_B: int32 valid tokens, the rest of the row is padding and may hold NaN.
        budget_BT: int32 pages beside the reserved ones: the recorded `pages_read` less them; negative counts as 0, and
            a query with as many as there are pages is dense (those of the prompt).
        page_tokens: C.
        reserved_first, reserved_last: pages; the last must be at least 1.
        policy: how pages are scored, see `page_select`.
        implementation: of `pallas_kernels.implementation`. The JAX path, `blocked`, has memory linear in T too.
        selection: of the choice of pages; None: as `implementation`. Policies without kernels, which have 'block_mean'
            alone, need `policy.implementation(implementation)` here.
        out_dtype: of the result, q's by default.

    Returns:
        o_BTHA, summed in float32; zeros in the padding. Gradients flow to q, k and v through the attention over the
        chosen pages, and not through the choice, which forward and backward pass share as a bit mask of
        4 B K T ceil(T / 32 C) bytes. Under `jax.checkpoint` let the policy save the name `PAGE_MASK`: a choice made
        anew in the backward pass may differ by a page where two scores are nearly equal. Gradients of padding are 0.

    Raises:
        ValueError: shapes, dtypes, sizes or the policy do not fit each other or the implementation.
    """
    op = 'sparse_prefill'
    selection = implementation if selection is None else selection
    policy = named_policy(op, policy, selection)
    sizes = check_shapes(
        op,
        {
            'q_BTHA': (q_BTHA, 'BTHA'),
            'k_BTKA': (k_BTKA, 'BTKA'),
            'v_BTKA': (v_BTKA, 'BTKA'),
            'length_B': (length_B, 'B'),
            'budget_BT': (budget_BT, 'BT'),
        },
    )
    check_pages(op, page_tokens)
    check_integers(op, length_B=length_B, budget_BT=budget_BT)
    check_floats(op, q_BTHA=q_BTHA, k_BTKA=k_BTKA, v_BTKA=v_BTKA)
    for name, array in {'k_BTKA': k_BTKA, 'v_BTKA': v_BTKA}.items():
        if array.dtype != q_BTHA.dtype:
            raise ValueError(f'{op}: {name} must have the dtype of q_BTHA, {q_BTHA.dtype}, got {array.dtype}')
    check_heads(op, sizes['H'], sizes['K'])
    check_reserved(op, reserved_first, reserved_last)
    if implementation is not Implementation.REFERENCE:
        check_fit(op, sizes['A'], sizes['H'] // sizes['K'], k_BTKA.dtype)

    valid_BT11 = (jnp.arange(sizes['T']) < length_B[:, None])[:, :, None, None]
    # Zero times NaN would leak what the padding holds, into results and gradients; what is selected here does neither.
    q_BTHA, k_BTKA, v_BTKA = (jnp.where(valid_BT11, x, 0) for x in (q_BTHA, k_BTKA, v_BTKA))
    steps = _steps(implementation)
    page_mask = _steps(selection).page_mask
    if policy is not SelectionPolicy.BLOCK_MEAN:
        page_mask = functools.partial(page_mask, policy=policy)
    mask_BKWT = page_mask(
        lax.stop_gradient(q_BTHA),
        page_landmarks(lax.stop_gradient(k_BTKA), page_tokens, policy),
        length_B,
        budget_BT,
        page_tokens=page_tokens,
        reserved_first=reserved_first,
        reserved_last=reserved_last,
    )
    mask_BKWT = checkpoint_name(mask_BKWT, PAGE_MASK)
    out_dtype = jnp.dtype(out_dtype or q_BTHA.dtype)
    o_BTHA = masked_attention(steps, page_tokens, out_dtype, q_BTHA, k_BTKA, v_BTKA, mask_BKWT)
    return jnp.where(valid_BT11, o_BTHA, 0)


@functools.cache
def _steps(implementation: Implementation) -> Any:
    """What has the functions `page_mask`, `forward` and `backward` as `blocked` defines them; one object for each."""
    if implementation is Implementation.REFERENCE:
        return blocked
    module = kernel_module('sparse_prefill', implementation)
    steps = {
        name: functools.partial(getattr(module, name), interpret=implementation.interpreted)
        for name in ('page_mask', 'forward', 'backward')
    }
    return SimpleNamespace(**steps)
