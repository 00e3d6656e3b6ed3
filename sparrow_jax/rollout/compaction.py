"""Fewer slots for the last sequences of a rollout.

A decode step of many slots, most of them idle, takes longer than one of few: kernels are laid out for as many sequences
as there are slots, and draws are made for all. So segments are also compiled for the first half of the slots, the first
quarter and so on, rounded up to whole groups of the rows that kernels multiply together, and sequences behind them move
to the front, within their data shard. Pages stay where they are.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.skinny_matmul import ROW_MULTIPLE
from sparrow_jax.rollout.cache import PROBE_FIELDS, Slots


def widths(slots: int, halvings: int, probes: int) -> tuple[int, ...]:
    """Slots of a shard that segments are compiled for, descending: all, and so many halves, as far as a slot remains
    beside the probes, which do not move. Halves of more than eight slots are rounded up to multiples of eight.
    """
    found = [slots]
    for _ in range(halvings):
        unit = ROW_MULTIPLE if found[-1] > ROW_MULTIPLE else 1
        half = -(-found[-1] // (2 * unit)) * unit
        if half == found[-1] or half <= probes:
            break
        found.append(half)
    return tuple(found)


def move_sequences(
    landmarks: list[jax.Array], slots: Slots, source_M: jax.Array, target_M: jax.Array
) -> tuple[list[jax.Array], Slots]:
    """Copies slots' rows to idle slots of the shard, one after the other; where they came from idles afterwards.

    source_M, target_M: int32 slots; none is both, except where both are one and nothing moves.
    """
    names = {field.name for field in dataclasses.fields(slots)} - set(PROBE_FIELDS)
    rows = {name: getattr(slots, name) for name in sorted(names)}

    def move(i: jax.Array, arrays: tuple[list[jax.Array], dict[str, jax.Array]]):
        def copied(array: jax.Array) -> jax.Array:
            row = lax.dynamic_index_in_dim(array, source_M[i], axis=0)
            return lax.dynamic_update_slice_in_dim(array, row, target_M[i], axis=0)

        return jax.tree.map(copied, arrays)

    landmarks, rows = lax.fori_loop(0, source_M.size, move, (landmarks, rows))
    left_M = jnp.where(source_M == target_M, slots.active_B.size, source_M)  # out of range: dropped
    rows['active_B'] = rows['active_B'].at[left_M].set(False, mode='drop')
    return landmarks, dataclasses.replace(slots, **rows)
