"""Exact attention of one query token per sequence over chosen pages."""

import jax

from pallas_kernels.checks import (
    check_arrays,
    check_counts,
    check_heads,
    check_integers,
    check_out_dtype,
    check_pages,
    check_shapes,
    check_stored,
)
from pallas_kernels.implementation import Implementation, check_fit, check_machine, kernel_module, named
from pallas_kernels.sparse_decode import reference


def sparse_decode(
    q_BHA: jax.Array,
    pages_KPCE: jax.Array,
    table_BN: jax.Array | None,
    ids_BKM: jax.Array,
    count_B: jax.Array,
    length_B: jax.Array,
    *,
    implementation: Implementation | str = Implementation.REFERENCE,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """softmax(q . k / sqrt(A)) v over the tokens of the chosen pages that lie below the sequence's length.

    Args:
        q_BHA: one query a sequence, unscaled, in the pool's dtype.
        pages_KPCE: the pool; unused memory may hold NaN.
        table_BN: int32 physical page of each logical page; None where `ids` are physical pages already. The last one
            read must then be the sequence's newest page, as `page_select` gives them: it alone may be partly filled.
        ids_BKM: int32 pages of each KV head; entries from `count` on are ignored.
        count_B: int32 pages read, at most M.
        length_B: int32 cached tokens, the current one included.
        implementation: of `pallas_kernels.implementation`.
        out_dtype: of the result, q's by default.

    Returns:
        o_BHA, accumulated in float32. A sequence with count 0 or length 0 gives zeros. Not differentiable by intent.

    Raises:
        ValueError: shapes, dtypes or the page size do not fit each other or the implementation.
    """
    check_arrays('sparse_decode', q_BHA=q_BHA)
    arrays = {
        'q_BHA': (q_BHA, 'BHA'),
        'pages_KPCE': (pages_KPCE, 'KPCE'),
        'ids_BKM': (ids_BKM, 'BKM'),
        'count_B': (count_B, 'B'),
        'length_B': (length_B, 'B'),
    }
    if table_BN is not None:
        arrays['table_BN'] = (table_BN, 'BN')
    sizes = check_shapes('sparse_decode', arrays, E=2 * q_BHA.shape[-1])
    if table_BN is not None:
        check_integers('sparse_decode', table_BN=table_BN)
    check_pages('sparse_decode', sizes['C'])
    check_counts('sparse_decode', ids_BKM, sizes.get('N', sizes['P']))
    check_integers('sparse_decode', ids_BKM=ids_BKM, count_B=count_B, length_B=length_B)
    check_stored('sparse_decode', pages_KPCE, q_BHA=q_BHA)
    check_heads('sparse_decode', sizes['H'], sizes['K'])
    out_dtype = check_out_dtype('sparse_decode', out_dtype or q_BHA.dtype)
    arguments = q_BHA, pages_KPCE, table_BN, ids_BKM, count_B, length_B
    implementation = named('sparse_decode', implementation)
    if implementation is Implementation.REFERENCE:
        return reference.sparse_decode(*arguments, out_dtype=out_dtype)
    check_fit('sparse_decode', sizes['A'], sizes['H'] // sizes['K'], pages_KPCE.dtype)
    check_machine('sparse_decode', implementation, q_BHA)
    kernel = kernel_module('sparse_decode', implementation)
    return kernel.sparse_decode(*arguments, out_dtype=out_dtype, interpret=implementation.interpreted)
