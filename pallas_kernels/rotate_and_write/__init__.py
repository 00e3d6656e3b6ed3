"""From the sums of a decoded token's query, key and value projections to the query and the cache."""

import jax

from pallas_kernels.checks import check_arrays, check_bools, check_floats, check_integers, check_pages, check_shapes
from pallas_kernels.implementation import Implementation, check_fit, check_gpu, check_machine, kernel_module, named
from pallas_kernels.rotate_and_write import reference

__all__ = ['rotate_and_write']


def rotate_and_write(
    pages_KPCE: jax.Array,
    landmark_BKNA: jax.Array,
    parts_SBF: jax.Array,
    norms: tuple[jax.Array, jax.Array] | None,
    cos_BR: jax.Array,
    sin_BR: jax.Array,
    table_BN: jax.Array,
    position_B: jax.Array,
    write_B: jax.Array,
    *,
    eps: float,
    implementation: Implementation | str = Implementation.REFERENCE,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """QK norm and rotary embedding, all in float32 and rounded once, then `landmark_update` ('block_mean').

    Args:
        pages_KPCE, landmark_BKNA, table_BN, position_B, write_B: of `landmark_update`.
        parts_SBF: float32, of B rows or more, of which the first B count; their sum has a token's query heads, KV
            heads' keys and KV heads' values side by side, F = (H + 2 K) A.
        norms: float32 scales [A] of the norm of a query head and of a key; None for models without it.
        cos_BR, sin_BR: float32, of the angles by which the pairs (i, i + A/2) of a head are turned; R = A/2.
        eps: added to the mean square of a head.
        implementation: of `pallas_kernels.implementation`; the kernel is one for GPUs.

    Returns:
        q_BHA in the pool's dtype, the pool and the landmarks; donate both.

    Raises:
        ValueError: shapes, dtypes or the page size do not fit each other or the implementation.
    """
    op = 'rotate_and_write'
    implementation = named(op, implementation)
    check_arrays(op, pages_KPCE=pages_KPCE, cos_BR=cos_BR)
    R = cos_BR.shape[-1]
    arrays = {
        'pages_KPCE': (pages_KPCE, 'KPCE'),
        'landmark_BKNA': (landmark_BKNA, 'BKNA'),
        'parts_SBF': (parts_SBF, 'SXF'),
        'cos_BR': (cos_BR, 'BR'),
        'sin_BR': (sin_BR, 'BR'),
        'table_BN': (table_BN, 'BN'),
        'position_B': (position_B, 'B'),
        'write_B': (write_B, 'B'),
    }
    if norms is not None:
        arrays |= {'norms[0]': (norms[0], 'A'), 'norms[1]': (norms[1], 'A')}
    sizes = check_shapes(op, arrays, A=2 * R, E=4 * R)
    if sizes['X'] < sizes['B']:
        raise ValueError(f'{op}: parts_SBF has {sizes["X"]} rows; must have one for each of {sizes["B"]} sequences')
    check_pages(op, sizes['C'])
    check_floats(
        op, pages_KPCE=pages_KPCE, landmark_BKNA=landmark_BKNA, parts_SBF=parts_SBF, cos_BR=cos_BR, sin_BR=sin_BR
    )
    check_integers(op, table_BN=table_BN, position_B=position_B)
    check_bools(op, write_B=write_B)
    K, A = sizes['K'], sizes['A']
    heads, rest = divmod(sizes['F'], A)
    if rest or heads <= 2 * K or heads % K:
        raise ValueError(f'{op}: parts_SBF has rows of {sizes["F"]}, not (G + 2) times K A = {K * A} for any G')
    arguments = pages_KPCE, landmark_BKNA, parts_SBF, norms, cos_BR, sin_BR, table_BN, position_B, write_B
    if implementation is Implementation.REFERENCE:
        return reference.rotate_and_write(*arguments, eps)
    check_gpu(op, implementation)
    check_fit(op, A, heads // K - 2, pages_KPCE.dtype)
    check_machine(op, implementation, parts_SBF)
    kernel = kernel_module(op, implementation)
    return kernel.rotate_and_write(*arguments, eps=eps, interpret=implementation.interpreted)
