"""Writing tokens into the paged cache on Hopper GPUs, in place.

A thread block writes the token of one KV head of one sequence. What it takes is latency: the position, the page that it
lies in, and where that token fills the page, all of the page's keys at once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.pallas_gpu import in_every_warp, kernel, load, mutable

_AT_ONCE = 42  # a third of a page of 128 tokens, all of a page of up to 32


# There are no references outside of jit, and inside of it the layers of a model share one lowering.
@functools.partial(jax.jit, static_argnames='interpret', inline=True)
def landmark_update(
    pages_KPCE: jax.Array,
    landmark_BKNA: jax.Array,
    k_BKA: jax.Array,
    v_BKA: jax.Array,
    table_BN: jax.Array,
    position_B: jax.Array,
    write_B: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.landmark_update`."""
    B, K, _, A = landmark_BKNA.shape
    layout = in_every_warp(A)

    def body(k_ref: Any, v_ref: Any, table_ref: Any, position_ref: Any, pages_ref: Any, landmark_ref: Any) -> None:
        b, head = lax.axis_index('b'), lax.axis_index('k')
        key, value = ([load(ref.at[b, head], layout=layout, optimized=False)] for ref in (k_ref, v_ref))
        write_token(pages_ref, landmark_ref, table_ref, b, head, position_ref[b], key, value)

    pool, landmarks = mutable(pages_KPCE), mutable(landmark_BKNA)
    kernel(body, grid=(B, K), grid_names=('b', 'k'), name='landmark_update', interpret=interpret)(
        k_BKA.astype(pages_KPCE.dtype),
        v_BKA.astype(pages_KPCE.dtype),
        table_BN,
        jnp.where(write_B, position_B, -1),
        pool,
        landmarks,
    )
    return jax.freeze(pool), jax.freeze(landmarks)


def write_token(
    pages_ref: Any,
    landmark_ref: Any,
    table_ref: Any,
    b: Any,
    head: Any,
    position: Any,
    key: list[jax.Array],
    value: list[jax.Array],
) -> None:
    """Writes the key and the value of one head of a sequence, and the landmark of a page that they fill.

    Args:
        pages_ref, landmark_ref, table_ref: whole.
        b, head: which.
        position: of the token; negative to write nothing.
        key, value: in parts of equal size that follow each other, in the pool's dtype, every warp holding them whole.
    """
    C, (size,) = pages_ref.shape[2], key[0].shape
    layout = in_every_warp(size)
    # Keys between the first and the new one that are read together.
    at_once = max(keys for keys in range(1, _AT_ONCE + 1) if (C - 2) % keys == 0)

    @pl.when(position >= 0)
    def _() -> None:
        page, offset = lax.div(position, C), lax.rem(position, C)
        token_ref = pages_ref.at[head, table_ref[b, page]]
        for part, number in enumerate((*key, *value)):
            token_ref[offset, pl.ds(part * size, size)] = number

        @pl.when(offset == C - 1)
        def _() -> None:
            for part, newest in enumerate(key):
                columns = pl.ds(part * size, size)

                def stored(token: Any, columns: Any = columns) -> jax.Array:
                    return load(token_ref.at[token, columns], layout=layout, optimized=False).astype(jnp.float32)

                def add(group: jax.Array, total: jax.Array, stored: Any = stored) -> jax.Array:
                    for token in range(at_once):
                        total = total + stored(1 + group * at_once + token)
                    return total

                total = lax.fori_loop(0, (C - 2) // at_once, add, stored(0))
                mean = (total + newest.astype(jnp.float32)) / C
                landmark_ref[b, head, page, columns] = mean.astype(landmark_ref.dtype)
