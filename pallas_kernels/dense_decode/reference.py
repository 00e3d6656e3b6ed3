"""Attention of a few query tokens over all pages of their sequence, in JAX: the definition.

Pages are visited in blocks with a running softmax, up to the longest sequence at hand: a step over short sequences in a
long cache reads little.
"""

import jax.numpy as jnp
from jax import lax

BLOCK_TOKENS = 64


def dense_decode(q_BTHA, pages_KPCE, table_BN, length_B, *, out_dtype):
    B, T, H, A = q_BTHA.shape
    K, C = pages_KPCE.shape[0], pages_KPCE.shape[2]
    # By default a float32 product on GPU and TPU is rounded to fewer bits; a float32 cache asks for exact ones.
    precision = lax.Precision.HIGHEST if pages_KPCE.dtype == jnp.float32 else None
    block = max(BLOCK_TOKENS // C, 1)  # pages a block
    blocks = -(-table_BN.shape[1] // block)
    table_BN = jnp.pad(table_BN, ((0, 0), (0, blocks * block - table_BN.shape[1])))
    q_BKGTA = q_BTHA.reshape(B, T, K, H // K, A).transpose(0, 2, 3, 1, 4)
    # Causal from the bottom right: the last query sees `length` tokens, the one before it one less.
    seen_BT = length_B[:, None] - T + 1 + jnp.arange(T)

    def visit(i, state):
        o_BKGTA, top_BKGT, total_BKGT = state
        position_S = i * block * C + jnp.arange(block * C)
        table_Bn = lax.dynamic_slice_in_dim(table_BN, i * block, block, axis=1)
        exists_BS = position_S < length_B[:, None]
        table_Bn = jnp.where(exists_BS[:, ::C], table_Bn, 0)
        kv_BKnCE = pages_KPCE[jnp.arange(K)[:, None], table_Bn[:, None]]
        k_BKnCA, v_BKnCA = kv_BKnCE[..., :A], kv_BKnCE[..., A:]
        score_BKGTnC = jnp.einsum(
            'bkgta,bknca->bkgtnc', q_BKGTA, k_BKnCA, precision=precision, preferred_element_type=jnp.float32
        )
        seen_BTS = position_S < seen_BT[..., None]
        score_BKGTS = score_BKGTnC.reshape(*score_BKGTnC.shape[:4], block * C) * A**-0.5
        score_BKGTS = jnp.where(seen_BTS[:, None, None], score_BKGTS, -jnp.inf)
        new_top_BKGT = jnp.maximum(top_BKGT, score_BKGTS.max(axis=-1))
        finite_BKGT = jnp.where(jnp.isfinite(new_top_BKGT), new_top_BKGT, 0)
        weight_BKGTS = jnp.exp(score_BKGTS - finite_BKGT[..., None])
        keep_BKGT = jnp.exp(top_BKGT - finite_BKGT)
        # Zero times NaN would leak what unused memory holds.
        v_BKnCA = jnp.where(exists_BS.reshape(B, 1, block, C, 1), v_BKnCA, 0)
        weight_BKGTnC = weight_BKGTS.reshape(score_BKGTnC.shape).astype(v_BKnCA.dtype)
        more_BKGTA = jnp.einsum(
            'bkgtnc,bknca->bkgta', weight_BKGTnC, v_BKnCA, precision=precision, preferred_element_type=jnp.float32
        )
        return (
            o_BKGTA * keep_BKGT[..., None] + more_BKGTA,
            new_top_BKGT,
            total_BKGT * keep_BKGT + weight_BKGTS.sum(axis=-1),
        )

    start = (
        jnp.zeros(q_BKGTA.shape, jnp.float32),
        jnp.full(q_BKGTA.shape[:-1], -jnp.inf, jnp.float32),
        jnp.zeros(q_BKGTA.shape[:-1], jnp.float32),
    )
    visited = jnp.minimum(-(-jnp.max(length_B) // (block * C)), blocks)
    o_BKGTA, _, total_BKGT = lax.fori_loop(0, visited, visit, start)
    o_BKGTA = o_BKGTA / jnp.maximum(total_BKGT, 1e-30)[..., None]
    return o_BKGTA.transpose(0, 3, 1, 2, 4).reshape(B, T, H, A).astype(out_dtype)
