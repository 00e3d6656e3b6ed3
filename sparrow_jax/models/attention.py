"""Dense causal attention over whole rows, for the learner and for prefill: cuDNN's on GPUs, splash attention for the
learner on TPUs, plain JAX elsewhere.

Queries, keys and values come from a decoder layer; the result goes back to it. There is never a [T, T] mask for a
whole row: the plain JAX path works on blocks of queries against the keys before them, the others mask inside kernels.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sparrow_jax.models.decoder import Attend
from sparrow_jax.models.splash import splash_attention

QUERY_BLOCK = 256  # query tokens whose scores the plain JAX path holds at once


def causal_attend(segment_BT: jax.Array | None, implementation: str, mesh: Mesh | None = None) -> Attend:
    """An `attend` for `Decoder.hidden` in which every token sees the earlier tokens of its own segment.

    Args:
        segment_BT: int32, which sequence of the row a token belongs to; 0 is padding. None: each row is one
            sequence, padded at its end (the padding is then invisible to the sequence's tokens because it comes later).
        implementation: 'xla' (any platform), 'cudnn' (GPU; needs segment_BT None) or 'splash' (TPU; needs segment_BT),
            see `best_implementation`.
        mesh: of the arrays; needed by 'splash'.
    """
    if implementation == 'cudnn' and segment_BT is not None:
        raise ValueError('cuDNN attention takes one sequence a row: segment_BT must be None')
    if implementation == 'splash' and (segment_BT is None or mesh is None):
        raise ValueError('splash attention takes packed rows on a mesh: segment_BT and mesh must be given')

    def attend(layer: int, q_BTHA: jax.Array, k_BTKA: jax.Array, v_BTKA: jax.Array) -> jax.Array:
        del layer
        if implementation == 'cudnn':
            return jax.nn.dot_product_attention(q_BTHA, k_BTKA, v_BTKA, is_causal=True, implementation='cudnn')
        if implementation == 'splash':
            assert segment_BT is not None
            assert mesh is not None
            return splash_attention(q_BTHA, k_BTKA, v_BTKA, segment_BT, mesh)
        return causal_attention(q_BTHA, k_BTKA, v_BTKA, segment_BT)

    return attend


def best_implementation(compute_dtype: str) -> str:
    """'cudnn' on GPU in 16-bit arithmetic, else 'xla'."""
    return 'cudnn' if jax.default_backend() == 'gpu' and compute_dtype == 'bfloat16' else 'xla'


def causal_attention(
    q_BTHA: jax.Array, k_BTKA: jax.Array, v_BTKA: jax.Array, segment_BT: jax.Array | None = None
) -> jax.Array:
    """softmax(q . k / sqrt(A)) v over tokens s <= t of the same segment, block of queries by block.

    Args:
        q_BTHA, k_BTKA, v_BTKA: H a multiple of K; q unscaled.
        segment_BT: as in `causal_attend`.

    Returns:
        o_BTHA in q's dtype; sums in float32. Padding gives finite values without meaning. Differentiable in q, k, v.
    """
    B, T, H, A = q_BTHA.shape
    K = k_BTKA.shape[2]
    precision = jax.lax.Precision.HIGHEST if q_BTHA.dtype == jnp.float32 else None
    q_BTKGA = q_BTHA.reshape(B, T, K, H // K, A)
    blocks = []
    for start in range(0, T, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, T)
        score_BKGTS = jnp.einsum(
            'btkga,bska->bkgts',
            q_BTKGA[:, start:stop],
            k_BTKA[:, :stop],
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        seen_BTS = (jnp.arange(start, stop)[:, None] >= jnp.arange(stop))[None]
        if segment_BT is not None:
            seen_BTS = seen_BTS & (segment_BT[:, start:stop, None] == segment_BT[:, None, :stop])
        score_BKGTS = jnp.where(seen_BTS[:, None, None], score_BKGTS * A**-0.5, -1e30)
        weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(v_BTKA.dtype)
        o_BTKGA = jnp.einsum(
            'bkgts,bska->btkga', weight_BKGTS, v_BTKA[:, :stop], precision=precision, preferred_element_type=jnp.float32
        )
        blocks.append(o_BTKGA.reshape(B, stop - start, H, A).astype(q_BTHA.dtype))
    return jnp.concatenate(blocks, axis=1)
