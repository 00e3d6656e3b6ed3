"""Residual sum and RMS norm, in JAX: the definition."""

import jax.numpy as jnp
from jax import lax


def residual_norm(x_BD, parts_SBD, scale_D, eps):
    x_BD = (x_BD.astype(jnp.float32) + parts_SBD.sum(axis=0)).astype(x_BD.dtype)
    x32_BD = x_BD.astype(jnp.float32)
    inverse_B1 = lax.rsqrt(jnp.mean(x32_BD * x32_BD, axis=1, keepdims=True) + eps)
    return x_BD, (x32_BD * inverse_B1 * scale_D).astype(x_BD.dtype)
