"""Query, key and value of a token from the sums of their projections, in JAX: the definition."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.landmark_update import landmark_update


def rotate_and_write(pages_KPCE, landmark_BKNA, parts_SBF, norms, cos_BR, sin_BR, table_BN, position_B, write_B, eps):
    (K, _, _, _), (B, _, _, A) = pages_KPCE.shape, landmark_BKNA.shape
    heads_BhA = parts_SBF[:, :B].sum(axis=0).reshape(B, -1, A)
    q_BHA, k_BKA, v_BKA = jnp.split(heads_BhA, [heads_BhA.shape[1] - 2 * K, heads_BhA.shape[1] - K], axis=1)
    if norms is not None:
        q_BHA, k_BKA = (_normalized(x, scale_A, eps) for x, scale_A in zip((q_BHA, k_BKA), norms, strict=True))
    q_BHA, k_BKA = (_rotated(x, cos_BR[:, None], sin_BR[:, None]) for x in (q_BHA, k_BKA))
    written = landmark_update(pages_KPCE, landmark_BKNA, k_BKA, v_BKA, table_BN, position_B, write_B)
    return q_BHA.astype(pages_KPCE.dtype), *written


def _normalized(x_BhA, scale_A, eps):
    return x_BhA * lax.rsqrt(jnp.mean(x_BhA * x_BhA, axis=-1, keepdims=True) + eps) * scale_A


def _rotated(x_BhA, cos, sin):
    first, second = jnp.split(x_BhA, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
