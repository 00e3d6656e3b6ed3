"""Teacher-forced sparse attention in JAX: the definition, with memory that grows with the square of the length.

Padding holds zeros here (the public function sees to that).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.page_select.reference import page_select
from pallas_kernels.sparse_prefill.selection import page_landmarks


def chosen_pages(q_BTHA, k_BTKA, length_B, budget_BT, *, page_tokens, reserved_first, reserved_last):
    """bool_BKTN: `page_select` for every query, as it was when the query's token was the newest one."""
    B, T, _, _ = q_BTHA.shape
    landmark_BKNA = page_landmarks(k_BTKA, page_tokens)
    N = landmark_BKNA.shape[2]
    select = functools.partial(
        page_select,
        table_BN=None,
        page_tokens=page_tokens,
        max_pages=N,
        reserved_first=reserved_first,
        reserved_last=reserved_last,
    )
    cached_BT = jnp.broadcast_to(jnp.arange(1, T + 1), (B, T))
    budget_BT = jnp.clip(budget_BT, 0, N)
    ids_TBKM, _ = jax.vmap(select, in_axes=(1, None, 1, 1))(q_BTHA, landmark_BKNA, cached_BT, budget_BT)
    chosen_TBKN = jax.nn.one_hot(ids_TBKM, N, dtype=bool).any(axis=-2)  # ids past the count are N: no page
    valid_TB = jnp.arange(T)[:, None] < length_B
    return (chosen_TBKN & valid_TB[:, :, None, None]).transpose(1, 2, 0, 3)


def attend(q_BTHA, k_BTKA, v_BTKA, chosen_BKTN, *, page_tokens, out_dtype):
    """softmax(q . k / sqrt(A)) v over the tokens of chosen pages up to the query's own; zeros where there are none."""
    B, T, H, A = q_BTHA.shape
    K = k_BTKA.shape[2]
    precision = lax.Precision.HIGHEST if k_BTKA.dtype == jnp.float32 else None
    q_BTKGA = q_BTHA.reshape(B, T, K, H // K, A)
    score_BKGTS = jnp.einsum(
        'btkga,bska->bkgts', q_BTKGA, k_BTKA, precision=precision, preferred_element_type=jnp.float32
    )
    read_BKTS = chosen_BKTN.repeat(page_tokens, axis=-1)[..., :T] & jnp.tri(T, dtype=bool)
    score_BKGTS = jnp.where(read_BKTS[:, :, None], score_BKGTS * A**-0.5, -jnp.inf)
    # A row without a key would divide zero by zero.
    empty_BKT1 = ~read_BKTS.any(axis=-1, keepdims=True)
    weight_BKGTS = jax.nn.softmax(jnp.where(empty_BKT1[:, :, None], 0.0, score_BKGTS), axis=-1)
    weight_BKGTS = jnp.where(empty_BKT1[:, :, None], 0.0, weight_BKGTS).astype(v_BTKA.dtype)
    o_BTKGA = jnp.einsum(
        'bkgts,bska->btkga', weight_BKGTS, v_BTKA, precision=precision, preferred_element_type=jnp.float32
    )
    return o_BTKGA.reshape(B, T, H, A).astype(out_dtype)


def sparse_prefill(
    q_BTHA, k_BTKA, v_BTKA, length_B, budget_BT, *, page_tokens, reserved_first, reserved_last, out_dtype
):
    chosen_BKTN = chosen_pages(
        lax.stop_gradient(q_BTHA),
        lax.stop_gradient(k_BTKA),
        length_B,
        budget_BT,
        page_tokens=page_tokens,
        reserved_first=reserved_first,
        reserved_last=reserved_last,
    )
    return attend(q_BTHA, k_BTKA, v_BTKA, chosen_BKTN, page_tokens=page_tokens, out_dtype=out_dtype)
