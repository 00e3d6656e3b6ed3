"""Argument checks shared by the operations: a wrong shape, dtype or page size is an error before anything is launched.

They look at shapes and dtypes alone, so they also run, at no cost, while a jitted caller is traced.
"""

from collections.abc import Mapping
from numbers import Integral

import jax
import jax.numpy as jnp

PAGE_TOKENS = (8, 16, 32, 64, 128)


def check_arrays(op: str, **arrays: jax.Array) -> None:
    """Raises ValueError unless every array is one of JAX."""
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            raise ValueError(f'{op}: {name} must be a jax array, got {type(array).__name__}; jnp.asarray makes one')
        if not array.ndim:
            raise ValueError(f'{op}: {name} must have axes, got a single number')


def check_shapes(op: str, arrays: Mapping[str, tuple[jax.Array, str]], **sizes: int) -> dict[str, int]:
    """Binds the letters of each array's pattern to sizes and checks that all agree.

    arrays: name -> (array, pattern), a pattern being letters and literal digits, e.g. 'KPCE'.
    sizes: letters fixed beforehand.
    Returns the size of every letter. Raises ValueError naming the operation and the argument.
    """
    bound = dict(sizes)
    for name, (array, pattern) in arrays.items():
        check_arrays(op, **{name: array})
        if array.ndim != len(pattern):
            axes = ', '.join(pattern)
            raise ValueError(f'{op}: {name} must have {len(pattern)} dimensions [{axes}], got shape {array.shape}')
        for axis, letter in enumerate(pattern):
            expected = int(letter) if letter.isdigit() else bound.setdefault(letter, array.shape[axis])
            if array.shape[axis] != expected:
                raise ValueError(f'{op}: {name} has shape {array.shape}; axis {axis} ({letter}) must be {expected}')
            if not expected:
                raise ValueError(f'{op}: {name} has shape {array.shape}; axis {axis} ({letter}) must not be empty')
    return bound


def check_pages(op: str, page_tokens: int) -> None:
    """Raises ValueError unless the page size is a power of two from 8 to 128."""
    if not isinstance(page_tokens, Integral) or page_tokens not in PAGE_TOKENS:
        raise ValueError(f'{op}: pages hold {page_tokens!r} tokens; must be one of {PAGE_TOKENS}')


def check_heads(op: str, query_heads: int, kv_heads: int) -> None:
    """Raises ValueError unless the query heads divide into equal groups, one a KV head."""
    if query_heads % kv_heads:
        raise ValueError(f'{op}: q has {query_heads} heads, not a multiple of the {kv_heads} KV heads')


def check_reserved(op: str, reserved_first: int, reserved_last: int) -> None:
    """Raises ValueError unless the pages that are always read include the newest, which has no landmark yet."""
    if reserved_first < 0:
        raise ValueError(f'{op}: reserved_first={reserved_first}: must not be negative')
    if reserved_last < 1:
        raise ValueError(f'{op}: reserved_last={reserved_last}: must be at least 1, the page that is not full')


def check_counts(op: str, ids_BKM: jax.Array, pages: int) -> None:
    """Raises ValueError where more pages could be read than there are."""
    if ids_BKM.shape[-1] > pages:
        raise ValueError(f'{op}: ids_BKM has room for {ids_BKM.shape[-1]} pages; there are {pages}')


def check_integers(op: str, **arrays: jax.Array) -> None:
    """Raises ValueError unless every array is int32."""
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f'{op}: {name} must be int32, got {array.dtype}')


def check_bools(op: str, **arrays: jax.Array) -> None:
    """Raises ValueError unless every array is boolean."""
    for name, array in arrays.items():
        if array.dtype != jnp.bool_:
            raise ValueError(f'{op}: {name} must be bool, got {array.dtype}')


def check_floats(op: str, **arrays: jax.Array) -> None:
    """Raises ValueError unless every array is floating point."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f'{op}: {name} must be floating point, got {array.dtype}')


def check_out_dtype(op: str, out_dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype of a result. Raises ValueError unless it is floating point."""
    try:
        dtype = jnp.dtype(out_dtype)
    except TypeError as error:
        raise ValueError(f'{op}: out_dtype={out_dtype!r}: {error}') from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f'{op}: out_dtype must be floating point, got {dtype}')
    return dtype


def check_stored(op: str, pages_KPCE: jax.Array, **arrays: jax.Array) -> None:
    """Raises ValueError unless every array has the pool's dtype, and that is floating point."""
    check_floats(op, pages_KPCE=pages_KPCE)
    for name, array in arrays.items():
        if array.dtype != pages_KPCE.dtype:
            raise ValueError(f'{op}: {name} must have the dtype of pages_KPCE, {pages_KPCE.dtype}, got {array.dtype}')
