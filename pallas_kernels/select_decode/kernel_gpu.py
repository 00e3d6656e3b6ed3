"""Choice and attention on Hopper: a thread block chooses the pages of one KV head of one sequence, then reads them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.page_select.choice_gpu import Choice, for_copies
from pallas_kernels.page_select.tuning import HOPPER
from pallas_kernels.paged_flash_gpu import Plan, attend
from pallas_kernels.pallas_gpu import MULTIPROCESSORS, fits, kernel
from pallas_kernels.tuning_gpu import SELECT_DECODE, SELECT_DECODE_FEW

_STATIC = ('max_pages', 'reserved_first', 'reserved_last', 'landmarks_at_rest', 'interpret')
_WARPGROUPS = 2  # of the attention: one copies, one multiplies; both choose


def is_faster(q_BHA: jax.Array, pages_KPCE: jax.Array, landmark_BKNA: jax.Array, max_pages: int) -> bool:
    """Whether every pair of sequence and KV head has a multiprocessor of its own that holds what both parts need, and
    its pages one block.

    Float32 caches of 128 numbers a head need too much memory.
    """
    B, K = landmark_BKNA.shape[:2]
    choice, plan = _parts(q_BHA, pages_KPCE, landmark_BKNA, max_pages=max_pages)
    return K * B <= MULTIPROCESSORS and plan.splits == 1 and _fit(choice, plan, q_BHA.dtype)


def _parts(
    q_BHA: jax.Array,
    pages_KPCE: jax.Array,
    landmark_BKNA: jax.Array,
    *,
    max_pages: int,
    reserved_first: int = 0,
    reserved_last: int = 0,
    landmarks_at_rest: bool = False,
) -> tuple[Choice, Plan]:
    B, K, N, A = landmark_BKNA.shape
    group, C = q_BHA.shape[1] // K, pages_KPCE.shape[2]
    choice = Choice(
        N=N,
        A=A,
        group=group,
        dtype=landmark_BKNA.dtype.name,
        page_tokens=C,
        max_pages=max_pages,
        reserved_first=reserved_first,
        reserved_last=reserved_last,
        landmarks_at_rest=landmarks_at_rest,
        physical=True,
        is_all=False,
        blocks=HOPPER,
    )
    few = [SELECT_DECODE_FEW] if 2 * K * B <= MULTIPROCESSORS else []
    # Long page tables and wide numbers leave less room beside them.
    sizes = [*few, SELECT_DECODE, dataclasses.replace(SELECT_DECODE, stages=2)]
    plans = [Plan.make(1, group, A, C, max_pages, pages_KPCE.dtype, blocks) for blocks in sizes]
    return choice, next((plan for plan in plans if _fit(choice, plan, q_BHA.dtype)), plans[-1])


def _fit(choice: Choice, plan: Plan, out_dtype: jnp.dtype) -> bool:
    return fits([*choice.scratch().values(), *plan.scratch(out_dtype).values()])


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)  # the layers of a model then share one lowering
def select_decode(
    q_BHA: jax.Array,
    pages_KPCE: jax.Array,
    landmark_BKNA: jax.Array,
    table_BN: jax.Array,
    length_B: jax.Array,
    budget_B: jax.Array,
    *,
    max_pages: int,
    reserved_first: int,
    reserved_last: int,
    landmarks_at_rest: bool,
    interpret: bool,
) -> jax.Array:
    """See `pallas_kernels.select_decode`."""
    (B, H, A), K = q_BHA.shape, landmark_BKNA.shape[1]
    landmark_BKNA, whole = for_copies(landmark_BKNA)
    choice, plan = _parts(
        q_BHA,
        pages_KPCE,
        landmark_BKNA,
        max_pages=max_pages,
        reserved_first=reserved_first,
        reserved_last=reserved_last,
        landmarks_at_rest=landmarks_at_rest and whole,
    )
    of_choice, of_attention = choice.scratch(), plan.scratch(q_BHA.dtype)
    assert HOPPER.warpgroups == _WARPGROUPS
    assert not of_choice.keys() & of_attention.keys()

    def body(q_ref, pages_ref, landmark_ref, table_ref, length_ref, budget_ref, o_ref, ids_ref, *, chosen, **scratch):
        b, k = lax.axis_index('sequence'), lax.axis_index('head')
        ids_M = ids_ref.at[b, k]
        count = choice.run(
            b,
            k,
            q_ref.at[b, 0],
            landmark_ref.at[b, k],
            length_ref,
            budget_ref,
            table_ref.at[b],
            ids_M,
            **{name: scratch[name] for name in of_choice},
        )
        warpgroup = lax.axis_index('warpgroup')
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_arrive(chosen))
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_wait(chosen))
        of_sequence = [o_ref.at[b]]
        tokens = plan.tokens(count, length_ref[b])
        attend(plan, k, q_ref.at[b], pages_ref.at[k], ids_M, tokens, of_sequence, {n: scratch[n] for n in of_attention})

    scratch_types: dict[str, Any] = {**of_choice, **of_attention, 'chosen': plgpu.Barrier()}
    o_BsTHA, _ = kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((B, 1, 1, H, A), q_BHA.dtype),
            jax.ShapeDtypeStruct((B, K, max_pages), jnp.int32),
        ),
        grid=(K, 1, 1, B),
        grid_names=('head', 'row_block', 'split', 'sequence'),
        num_threads=_WARPGROUPS,
        thread_name='warpgroup',
        alone=True,
        scratch_types=scratch_types,
        name=f'select_decode_{plan.rows}x{A}',
        interpret=interpret,
    )(q_BHA[:, None], pages_KPCE, landmark_BKNA, table_BN, length_B, budget_B)
    return o_BsTHA[:, 0, 0]
