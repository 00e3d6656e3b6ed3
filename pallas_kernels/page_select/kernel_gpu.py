"""Block top-k selection for Hopper GPUs: scores, reserved pages, choice and ids in one kernel.

A thread block takes one KV head of one sequence, see `choice_gpu`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.page_select.choice_gpu import Choice, for_copies
from pallas_kernels.page_select.tuning import HopperBlocks, hopper_blocks
from pallas_kernels.pallas_gpu import MULTIPROCESSORS, kernel

_STATIC = ('page_tokens', 'max_pages', 'reserved_first', 'reserved_last', 'landmarks_at_rest', 'interpret', 'blocks')


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)  # the layers of a model then share one lowering
def page_select(
    q_BHA: jax.Array,
    landmark_BKNA: jax.Array,
    length_B: jax.Array,
    budget_B: jax.Array,
    table_BN: jax.Array | None,
    *,
    page_tokens: int,
    max_pages: int,
    reserved_first: int,
    reserved_last: int,
    landmarks_at_rest: bool = False,
    interpret: bool,
    blocks: HopperBlocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.page_select`; `blocks` are those of `tuning` unless given."""
    B, K, N, A = landmark_BKNA.shape
    # Interpreted warpgroups wait for each other in threads of the CPU's pool, which may have too few: one never ends.
    used = hopper_blocks(B * K)
    blocks = blocks or (dataclasses.replace(used, warpgroups=1) if interpret else used)
    landmark_BKNA, whole = for_copies(landmark_BKNA)
    choice = Choice(
        N=N,
        A=A,
        group=q_BHA.shape[1] // K,
        dtype=landmark_BKNA.dtype.name,
        page_tokens=page_tokens,
        max_pages=max_pages,
        reserved_first=reserved_first,
        reserved_last=reserved_last,
        landmarks_at_rest=landmarks_at_rest and whole,
        physical=table_BN is not None,
        is_all=True,
        blocks=blocks,
    )

    def body(q_ref: Any, landmark_ref: Any, length_ref: Any, budget_ref: Any, *refs: Any, **scratch: Any) -> None:
        *tables, ids_ref, count_ref = refs
        b, k = lax.axis_index('b'), lax.axis_index('k')
        table_N = tables[0].at[b] if tables else None
        count = choice.run(
            b, k, q_ref.at[b], landmark_ref.at[b, k], length_ref, budget_ref, table_N, ids_ref.at[b, k], **scratch
        )

        @pl.when((k == 0) & (lax.axis_index('warpgroup') == 0))
        def _() -> None:
            count_ref[b] = count

    ids_BKM, count_B = kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, K, max_pages), jnp.int32),
            jax.ShapeDtypeStruct((B,), jnp.int32),
        ),
        grid=(B, K),
        grid_names=('b', 'k'),
        num_threads=blocks.warpgroups,
        thread_name='warpgroup',
        alone=B * K <= MULTIPROCESSORS,
        scratch_types=choice.scratch(),
        name='page_select',
        interpret=interpret,
    )(q_BHA, landmark_BKNA, length_B, budget_B, *(() if table_BN is None else (table_BN,)))
    return ids_BKM, count_B
