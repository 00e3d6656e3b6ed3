"""Exact attention of one query token per sequence over chosen pages."""

import jax

from pallas_kernels.checks import check_heads, check_integers, check_pages, check_shapes, check_stored
from pallas_kernels.sparse_decode import reference


def sparse_decode(
    q_BHA: jax.Array,
    pages_KP2CA: jax.Array,
    table_BN: jax.Array,
    ids_BKM: jax.Array,
    count_B: jax.Array,
    length_B: jax.Array,
) -> jax.Array:
    """softmax(q . k / sqrt(A)) v over the tokens of the chosen pages that lie below the sequence's length.

    Args:
        q_BHA: one query a sequence, unscaled, in the pool's dtype.
        pages_KP2CA: the pool; unused memory may hold NaN.
        table_BN: int32 physical page of each logical page.
        ids_BKM: int32 logical pages of each KV head; entries from `count` on are ignored.
        count_B: int32 pages read.
        length_B: int32 cached tokens, the current one included.

    Returns:
        o_BHA in q's dtype, accumulated in float32. A sequence with count 0 or length 0 gives zeros. Not differentiable
        by intent.

    Raises:
        ValueError: shapes, dtypes or the page size do not fit each other.
    """
    sizes = check_shapes(
        'sparse_decode',
        {
            'q_BHA': (q_BHA, 'BHA'),
            'pages_KP2CA': (pages_KP2CA, 'KP2CA'),
            'table_BN': (table_BN, 'BN'),
            'ids_BKM': (ids_BKM, 'BKM'),
            'count_B': (count_B, 'B'),
            'length_B': (length_B, 'B'),
        },
    )
    check_pages('sparse_decode', sizes['C'])
    check_integers('sparse_decode', table_BN=table_BN, ids_BKM=ids_BKM, count_B=count_B, length_B=length_B)
    check_stored('sparse_decode', pages_KP2CA, q_BHA=q_BHA)
    check_heads('sparse_decode', sizes['H'], sizes['K'])
    return reference.sparse_decode(q_BHA, pages_KP2CA, table_BN, ids_BKM, count_B, length_B)
