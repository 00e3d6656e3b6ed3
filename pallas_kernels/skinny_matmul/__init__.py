"""Products of few rows with large weights, as in a decode step: reading the weights is all that takes time."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_floats, check_shapes
from pallas_kernels.implementation import Implementation, check_gpu, check_machine, kernel_module, named
from pallas_kernels.skinny_matmul import reference

MAX_ROWS = 128  # more leave the products no longer limited by reading
COLUMN_MULTIPLE = 64  # the least that a thread block makes
ROW_MULTIPLE = 8  # narrowest product of the tensor cores; other numbers are padded, in kernels of their own
DEPTH_MULTIPLE = 64  # of D that one step takes
_COLUMNS = 'FGHIJKLM'  # of each weight, in messages

__all__ = ['skinny_matmul']


def skinny_matmul(
    x_BD: jax.Array,
    weights: Sequence[jax.Array],
    *,
    gated: bool = False,
    weights_at_rest: bool = False,
    implementation: Implementation | str = Implementation.REFERENCE,
) -> jax.Array:
    """x [w0, w1, ...], the results side by side and not yet summed up; or silu(x w0) * (x w1).

    Args:
        x_BD: bfloat16 for the kernel, which takes up to 128 rows; any float dtype else.
        weights: one to eight, [D, F_i] each, in x's dtype.
        gated: there are two weights of one shape; the result is the gated product, computed in float32.
        weights_at_rest: whether neither of the two operations before this one writes the weights, as where they are
            arguments of a program in which this is not among the first: the kernel then reads them while those run.
        implementation: of `pallas_kernels.implementation`; the kernel is one for GPUs.

    Returns:
        parts_SBF float32, whose sum over S is the product, F = sum of F_i; S is the kernel's choice. Gated: [B, F] in
        x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit each other or the implementation.
    """
    op = 'skinny_matmul'
    implementation = named(op, implementation)
    if not 1 <= len(weights) <= len(_COLUMNS) or (gated and len(weights) != 2):
        must = '2, gated' if gated else f'1 to {len(_COLUMNS)}'
        raise ValueError(f'{op}: got {len(weights)} weights; must be {must}')
    arrays = {'x_BD': (x_BD, 'BD')}
    arrays |= {f'weights[{i}]': (weight, f'D{_COLUMNS[0 if gated else i]}') for i, weight in enumerate(weights)}
    sizes = check_shapes(op, arrays)
    check_floats(op, x_BD=x_BD)
    for i, weight in enumerate(weights):
        if weight.dtype != x_BD.dtype:
            raise ValueError(f'{op}: weights[{i}] must have the dtype of x_BD, {x_BD.dtype}, got {weight.dtype}')
    if implementation is Implementation.REFERENCE:
        return reference.skinny_matmul(x_BD, weights, gated)
    check_gpu(op, implementation)
    if unfit := why_unfit(sizes['B'], sizes['D'], [weight.shape[1] for weight in weights], x_BD.dtype):
        raise ValueError(f'{op}: {unfit}; use implementation="{Implementation.REFERENCE}"')
    check_machine(op, implementation, x_BD)
    kernel = kernel_module(op, implementation)
    return kernel.skinny_matmul(
        x_BD, tuple(weights), gated=gated, weights_at_rest=weights_at_rest, interpret=implementation.interpreted
    )


def why_unfit(rows: int, depth: int, columns: Sequence[int], dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernel does not take such a product, or None where it does."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f'the kernel multiplies bfloat16, not {jnp.dtype(dtype)}'
    if rows > MAX_ROWS:
        return f'the kernel takes up to {MAX_ROWS} rows, not {rows}'
    if depth % DEPTH_MULTIPLE or any(number % COLUMN_MULTIPLE for number in columns):
        return (
            f'the kernel takes weights with rows in multiples of {DEPTH_MULTIPLE} and columns in multiples of '
            f'{COLUMN_MULTIPLE}, not {depth} rows and {" and ".join(map(str, columns))} columns'
        )
    return None
