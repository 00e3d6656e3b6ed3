"""Exact attention of 1 to 256 query tokens per sequence over all its pages."""

import jax

from pallas_kernels.checks import check_heads, check_integers, check_pages, check_shapes, check_stored
from pallas_kernels.dense_decode import reference

MAX_QUERIES = 256


def dense_decode(q_BTHA: jax.Array, pages_KP2CA: jax.Array, table_BN: jax.Array, length_B: jax.Array) -> jax.Array:
    """softmax(q . k / sqrt(A)) v over all cached tokens, causal from the bottom right.

    Query t of T sees the first length - T + 1 + t tokens.

    Args:
        q_BTHA: the sequence's newest T queries, unscaled, 1 <= T <= 256, in the pool's dtype; their keys and values are
            in the cache already.
        pages_KP2CA: the pool; unused memory may hold NaN.
        table_BN: int32 physical page of each logical page.
        length_B: int32 cached tokens, the T newest included.

    Returns:
        o_BTHA in q's dtype, accumulated in float32. A query that sees no token gives zeros. Not differentiable by
        intent.

    Raises:
        ValueError: shapes, dtypes or the page size do not fit each other.
    """
    sizes = check_shapes(
        'dense_decode',
        {
            'q_BTHA': (q_BTHA, 'BTHA'),
            'pages_KP2CA': (pages_KP2CA, 'KP2CA'),
            'table_BN': (table_BN, 'BN'),
            'length_B': (length_B, 'B'),
        },
    )
    check_pages('dense_decode', sizes['C'])
    check_integers('dense_decode', table_BN=table_BN, length_B=length_B)
    check_stored('dense_decode', pages_KP2CA, q_BTHA=q_BTHA)
    check_heads('dense_decode', sizes['H'], sizes['K'])
    if not 1 <= sizes['T'] <= MAX_QUERIES:
        raise ValueError(f'dense_decode: q_BTHA has {sizes["T"]} queries a sequence; must be 1 to {MAX_QUERIES}')
    return reference.dense_decode(q_BTHA, pages_KP2CA, table_BN, length_B)
