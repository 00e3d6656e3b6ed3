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
    C = pages_KPCE.shape[2]
    B, K, _, A = landmark_BKNA.shape
    # Keys between the first and the new one that are read together.
    at_once = max(keys for keys in range(1, _AT_ONCE + 1) if (C - 2) % keys == 0)
    layout = in_every_warp(A)

    def body(k_ref: Any, v_ref: Any, table_ref: Any, position_ref: Any, pages_ref: Any, landmark_ref: Any) -> None:
        b, head = lax.axis_index('b'), lax.axis_index('k')
        position = position_ref[b]

        @pl.when(position >= 0)
        def _() -> None:
            page, offset = lax.div(position, C), lax.rem(position, C)
            token_ref = pages_ref.at[head, table_ref[b, page]]
            k_A, v_A = (load(ref.at[b, head], layout=layout, optimized=False) for ref in (k_ref, v_ref))
            token_ref[offset, pl.ds(0, A)] = k_A
            token_ref[offset, pl.ds(A, A)] = v_A

            @pl.when(offset == C - 1)
            def _() -> None:
                def key(token: Any) -> jax.Array:
                    stored_A = load(token_ref.at[token, pl.ds(0, A)], layout=layout, optimized=False)
                    return stored_A.astype(jnp.float32)

                def add(group: jax.Array, total_A: jax.Array) -> jax.Array:
                    for token in range(at_once):
                        total_A = total_A + key(1 + group * at_once + token)
                    return total_A

                total_A = lax.fori_loop(0, (C - 2) // at_once, add, key(0))
                mean_A = (total_A + k_A.astype(jnp.float32)) / C
                landmark_ref[b, head, page] = mean_A.astype(landmark_ref.dtype)

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
