"""Attention with a given page set, differentiable: ties the steps of any implementation together."""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def masked_attention(steps: ModuleType, page_tokens: int, out_dtype, q_BTHA, k_BTKA, v_BTKA, mask_BKWT) -> jax.Array:
    """softmax(q . k / sqrt(A)) v over the pages of the mask; the gradient reads the same mask.

    Args:
        steps: what has `forward` and `backward`, see `blocked`.
        page_tokens: C.
        out_dtype: of the result.
        q_BTHA, k_BTKA, v_BTKA: padding holds zeros, and the mask has no page of it.
        mask_BKWT: see `selection`; no gradient flows to it.
    """
    return steps.forward(q_BTHA, k_BTKA, v_BTKA, mask_BKWT, page_tokens=page_tokens)[0].astype(out_dtype)


def _forward(steps, page_tokens, out_dtype, q_BTHA, k_BTKA, v_BTKA, mask_BKWT):
    o_BTHA, lse_BHT = steps.forward(q_BTHA, k_BTKA, v_BTKA, mask_BKWT, page_tokens=page_tokens)
    return o_BTHA.astype(out_dtype), (q_BTHA, k_BTKA, v_BTKA, mask_BKWT, o_BTHA, lse_BHT)


def _backward(steps, page_tokens, out_dtype, saved, do_BTHA):
    del out_dtype
    q_BTHA, k_BTKA, v_BTKA, mask_BKWT, o_BTHA, lse_BHT = saved
    delta_BTH = (o_BTHA * do_BTHA.astype(jnp.float32)).sum(axis=-1)
    gradients = steps.backward(
        q_BTHA, k_BTKA, v_BTKA, mask_BKWT, lse_BHT, delta_BTH.swapaxes(1, 2), do_BTHA, page_tokens=page_tokens
    )
    return *gradients, None


masked_attention.defvjp(_forward, _backward)
