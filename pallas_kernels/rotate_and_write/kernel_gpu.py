"""Query, key and value of a token from the sums of their projections on Hopper, the cache written in place.

A thread block takes one KV head of one sequence: its group of query heads, its key and its value. What it takes is
latency, so all that is read is asked for at once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.landmark_update.kernel_gpu import write_token
from pallas_kernels.pallas_gpu import in_every_warp, kernel, let_next_start, load, mutable, wait_for_previous


# There are no references outside of jit, and inside of it the layers of a model share one lowering.
@functools.partial(jax.jit, static_argnames=('eps', 'interpret'), inline=True)
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
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.rotate_and_write`."""
    S = parts_SBF.shape[0]
    B, K, _, A = landmark_BKNA.shape
    R = A // 2
    H = parts_SBF.shape[2] // A - 2 * K
    group = H // K
    layout = in_every_warp(R)
    scales = 0 if norms is None else 2

    def body(parts_ref: Any, cos_ref: Any, sin_ref: Any, table_ref: Any, position_ref: Any, *refs: Any) -> None:
        scale_refs, (pages_ref, landmark_ref, q_ref) = refs[:scales], refs[scales:]
        b, head = lax.axis_index('b'), lax.axis_index('k')
        read = lambda ref: load(ref, layout=layout, optimized=False)
        halves = pl.ds(0, R), pl.ds(R, R)
        wait_for_previous()
        q_scale, k_scale = ([read(ref.at[half]) for half in halves] for ref in scale_refs) if scales else (None, None)
        cos_R, sin_R, position = read(cos_ref.at[b]), read(sin_ref.at[b]), position_ref[b]

        def summed(row: Any) -> list[jax.Array]:
            columns = [pl.ds(row * A + start, R) for start in (0, R)]
            parts = [[read(parts_ref.at[s, b, part]) for s in range(S)] for part in columns]
            return [sum(part[1:], start=part[0]) for part in parts]

        def rotated(head: list[jax.Array], scale: Any) -> list[jax.Array]:
            first_R, second_R = head
            if scale is not None:
                inverse = lax.rsqrt((first_R * first_R + second_R * second_R).sum() / A + eps)
                first_R, second_R = first_R * inverse * scale[0], second_R * inverse * scale[1]
            turned = first_R * cos_R - second_R * sin_R, second_R * cos_R + first_R * sin_R
            return [half_R.astype(pages_KPCE.dtype) for half_R in turned]

        queries = [summed(head * group + member) for member in range(group)]
        key, value = summed(H + head), [half.astype(pages_KPCE.dtype) for half in summed(H + K + head)]
        let_next_start()
        for member, query in enumerate(queries):
            for half, part in zip(rotated(query, q_scale), halves, strict=True):
                q_ref[b, head * group + member, part] = half
        write_token(pages_ref, landmark_ref, table_ref, b, head, position, rotated(key, k_scale), value)

    pool, landmarks = mutable(pages_KPCE), mutable(landmark_BKNA)
    q_BHA = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, H, A), pages_KPCE.dtype),
        grid=(B, K),
        grid_names=('b', 'k'),
        name='rotate_and_write',
        interpret=interpret,
    )(parts_SBF, cos_BR, sin_BR, table_BN, jnp.where(write_B, position_B, -1), *(norms or ()), pool, landmarks)
    return q_BHA, jax.freeze(pool), jax.freeze(landmarks)
