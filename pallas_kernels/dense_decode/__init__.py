"""Exact attention of 1 to 256 query tokens per sequence over all its pages."""

import jax

from pallas_kernels.checks import (
    check_arrays,
    check_heads,
    check_integers,
    check_out_dtype,
    check_pages,
    check_shapes,
    check_stored,
)
from pallas_kernels.dense_decode import reference
from pallas_kernels.implementation import Implementation, check_fit, check_machine, kernel_module, named

MAX_QUERIES = 256


def dense_decode(
    q_BTHA: jax.Array,
    pages_KPCE: jax.Array,
    table_BN: jax.Array,
    length_B: jax.Array,
    *,
    implementation: Implementation | str = Implementation.REFERENCE,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """softmax(q . k / sqrt(A)) v over all cached tokens, causal from the bottom right.

    Query t of T sees the first length - T + 1 + t tokens.

    Args:
        q_BTHA: the sequence's newest T queries, unscaled, 1 <= T <= 256, in the pool's dtype; their keys and values are
            in the cache already.
        pages_KPCE: the pool; unused memory may hold NaN.
        table_BN: int32 physical page of each logical page.
        length_B: int32 cached tokens, the T newest included.
        implementation: of `pallas_kernels.implementation`.
        out_dtype: of the result, q's by default.

    Returns:
        o_BTHA, accumulated in float32. A query that sees no token gives zeros. Not differentiable by
        intent.

    Raises:
        ValueError: shapes, dtypes or the page size do not fit each other or the implementation.
    """
    check_arrays('dense_decode', q_BTHA=q_BTHA)
    sizes = check_shapes(
        'dense_decode',
        {
            'q_BTHA': (q_BTHA, 'BTHA'),
            'pages_KPCE': (pages_KPCE, 'KPCE'),
            'table_BN': (table_BN, 'BN'),
            'length_B': (length_B, 'B'),
        },
        E=2 * q_BTHA.shape[-1],
    )
    check_pages('dense_decode', sizes['C'])
    check_integers('dense_decode', table_BN=table_BN, length_B=length_B)
    check_stored('dense_decode', pages_KPCE, q_BTHA=q_BTHA)
    check_heads('dense_decode', sizes['H'], sizes['K'])
    if not 1 <= sizes['T'] <= MAX_QUERIES:
        raise ValueError(f'dense_decode: q_BTHA has {sizes["T"]} queries a sequence; must be 1 to {MAX_QUERIES}')
    out_dtype = check_out_dtype('dense_decode', out_dtype or q_BTHA.dtype)
    implementation = named('dense_decode', implementation)
    if implementation is Implementation.REFERENCE:
        return reference.dense_decode(q_BTHA, pages_KPCE, table_BN, length_B, out_dtype=out_dtype)
    check_fit('dense_decode', sizes['A'], sizes['H'] // sizes['K'], pages_KPCE.dtype)
    check_machine('dense_decode', implementation, q_BTHA)
    kernel = kernel_module('dense_decode', implementation)
    return kernel.dense_decode(
        q_BTHA, pages_KPCE, table_BN, length_B, out_dtype=out_dtype, interpret=implementation.interpreted
    )
