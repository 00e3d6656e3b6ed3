"""Residual sum and RMS norm on Hopper: a thread block takes a row."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_gpu import kernel, let_next_start, load, wait_for_previous
from pallas_kernels.residual_norm import LANES

_WIDEST = 4  # numbers that a lane reads at once


@functools.partial(jax.jit, static_argnames=('eps', 'interpret'), inline=True)  # the layers then share one lowering
def residual_norm(
    x_BD: jax.Array, parts_SBD: jax.Array, scale_D: jax.Array, *, eps: float, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.residual_norm`."""
    B, D = x_BD.shape
    width = next(width for width in (_WIDEST, 2, 1) if D % (width * LANES) == 0)
    layout = plgpu.Layout.WG_STRIDED((D,), vec_size=width)

    def body(x_ref: Any, parts_ref: Any, scale_ref: Any, sum_ref: Any, norm_ref: Any) -> None:
        b = lax.axis_index('b')
        let_next_start()
        wait_for_previous()
        scale_D = load(scale_ref, layout=layout, optimized=False)
        parts = [load(parts_ref.at[s, b], layout=layout, optimized=False) for s in range(parts_SBD.shape[0])]
        x_D = load(x_ref.at[b], layout=layout, optimized=False).astype(jnp.float32)
        x_D = (x_D + sum(parts[1:], start=parts[0])).astype(x_BD.dtype)
        sum_ref[b] = x_D
        x_D = x_D.astype(jnp.float32)
        norm_ref[b] = (x_D * lax.rsqrt((x_D * x_D).sum() / D + eps) * scale_D).astype(x_BD.dtype)

    out = jax.ShapeDtypeStruct((B, D), x_BD.dtype)
    run = kernel(body, out_type=(out, out), grid=(B,), grid_names=('b',), name='residual_norm', interpret=interpret)
    return run(x_BD, parts_SBD, scale_D)
