"""Adds what a block of the decoder computed to the residual stream and normalizes the sum for the next block."""

import jax

from pallas_kernels.checks import check_floats, check_shapes
from pallas_kernels.implementation import Implementation, check_gpu, check_machine, kernel_module, named
from pallas_kernels.residual_norm import reference

LANES = 128  # of the warpgroup that takes a row

__all__ = ['residual_norm']


def residual_norm(
    x_BD: jax.Array,
    parts_SBD: jax.Array,
    scale_D: jax.Array,
    *,
    eps: float,
    implementation: Implementation | str = Implementation.REFERENCE,
) -> tuple[jax.Array, jax.Array]:
    """x + sum of the parts, and its RMS norm: x / sqrt(mean(x^2) + eps) * scale.

    The sum is rounded to x's dtype before the norm is taken of it, as where the two are operations of their own.

    Args:
        x_BD: the residual stream, any float dtype.
        parts_SBD: float32, as `skinny_matmul` leaves them.
        scale_D: float32.
        eps: added to the mean square.
        implementation: of `pallas_kernels.implementation`; the kernel is one for GPUs, for D a multiple of 128.

    Returns:
        The sum and its norm, [B, D] in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit each other or the implementation.
    """
    implementation = named('residual_norm', implementation)
    arrays = {'x_BD': (x_BD, 'BD'), 'parts_SBD': (parts_SBD, 'SBD'), 'scale_D': (scale_D, 'D')}
    sizes = check_shapes('residual_norm', arrays)
    check_floats('residual_norm', x_BD=x_BD, parts_SBD=parts_SBD, scale_D=scale_D)
    if implementation is Implementation.REFERENCE:
        return reference.residual_norm(x_BD, parts_SBD, scale_D, eps)
    check_gpu('residual_norm', implementation)
    if sizes['D'] % LANES:
        raise ValueError(f'residual_norm: x_BD has rows of {sizes["D"]}; the kernel takes multiples of {LANES}')
    check_machine('residual_norm', implementation, x_BD)
    kernel = kernel_module('residual_norm', implementation)
    return kernel.residual_norm(x_BD, parts_SBD, scale_D, eps=eps, interpret=implementation.interpreted)
