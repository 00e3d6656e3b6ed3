"""Sequences that give up their slot and pages for a while: into host memory and back, bit for bit.

A sequence that was decoded sparsely cannot be encoded again: its keys and values are those of sparse hidden states. So
everything goes along, the pages, the landmarks, the dense cache of a probe and the slot's row of every array, and comes
back into other pages of any slot of the same kind.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from sparrow_jax.rollout.cache import PROBE_FIELDS, Cache, Slots

PAGES_AT_ONCE = 64  # of a copy; the number of pages then compiles nothing


@dataclasses.dataclass(frozen=True)
class Parked:
    """A sequence in host memory, as NumPy; lists hold an array a layer.

    Attributes:
        state: a row of each array of `Slots`.
        landmarks: [K, N, A].
        pages, probe_pages: [K, n, C, 2A] of the n pages with tokens, in order; no probe pages where the slot is none.
    """

    state: dict[str, np.ndarray]
    landmarks: list[np.ndarray]
    pages: list[np.ndarray]
    probe_pages: list[np.ndarray]


class Offload:
    """The compiled copies of one engine.

    Args:
        shardings: of cache and slots, as every function of the engine leaves them.
        whole: the sharding of what goes to the host.
    """

    def __init__(self, shardings: tuple[Any, Any], whole: Any):
        pages, landmarks = shardings[0].pages, shardings[0].landmarks
        self._take_slot = jax.jit(_take_slot, out_shardings=whole)
        self._put_slot = jax.jit(_put_slot, donate_argnums=(0, 1), out_shardings=(landmarks, shardings[1]))
        self._idle = jax.jit(_idle, donate_argnums=0, out_shardings=shardings[1])
        self._take_pages = jax.jit(_take_pages, out_shardings=whole)
        self._put_pages = jax.jit(_put_pages, donate_argnums=0, out_shardings=pages)

    def park(
        self, cache: Cache, slots: Slots, slot: int, probe: int, pages: list[int], probe_pages: list[int]
    ) -> tuple[Slots, Parked]:
        """Copies a sequence out; its slot idles from then on. The slots are donated.

        Args:
            slot, probe: the slot's rows in the arrays over slots and over probes (any where it is no probe).
            pages, probe_pages: those with tokens, as they are numbered in the whole pool.
        """
        state, landmarks = jax.device_get(self._take_slot(cache.landmarks, slots, slot, probe))
        parked = Parked(state, landmarks, self._read(cache, pages), self._read(cache, probe_pages))
        return self._idle(slots, slot), parked

    def restore(
        self,
        cache: Cache,
        slots: Slots,
        parked: Parked,
        slot: int,
        probe: int,
        pages: list[int],
        probe_pages: list[int],
    ) -> tuple[Cache, Slots]:
        """Copies a sequence in; its page tables are set by the caller. Arguments as in `park`; cache and slots are
        donated.
        """
        written = cache.pages
        for ids, arrays in ((pages, parked.pages), (probe_pages, parked.probe_pages)):
            for first in range(0, len(ids), PAGES_AT_ONCE):
                here = slice(first, first + PAGES_AT_ONCE)
                padding = PAGES_AT_ONCE - len(ids[here])
                values = [np.pad(array[:, here], ((0, 0), (0, padding), (0, 0), (0, 0))) for array in arrays]
                written = self._put_pages(written, _padded(ids[here], written[0].shape[1]), values)
        landmarks, slots = self._put_slot(cache.landmarks, slots, slot, probe, parked.state, parked.landmarks)
        return Cache(written, landmarks), slots

    def warm_up(self, cache: Cache, slots: Slots) -> tuple[Cache, Slots]:
        """Compiles all copies; what they copy stays where it is."""
        slots, parked = self.park(cache, slots, 0, 0, [0], [0])
        return self.restore(cache, slots, parked, 0, 0, [0], [0])

    def _read(self, cache: Cache, ids: Sequence[int]) -> list[np.ndarray]:
        parts = []
        for first in range(0, len(ids), PAGES_AT_ONCE):
            here = ids[first : first + PAGES_AT_ONCE]
            taken = jax.device_get(self._take_pages(cache.pages, _padded(here, 0)))
            parts.append([array[:, : len(here)] for array in taken])
        return [np.concatenate(layer, axis=1) for layer in zip(*parts, strict=True)]


def _padded(ids: Sequence[int], filling: int) -> np.ndarray:
    return np.asarray([*ids, *[filling] * (PAGES_AT_ONCE - len(ids))], np.int32)


def _rows(slots: Slots, slot: jax.Array, probe: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Array and row by name, of those that have a row for the sequence."""
    fields = {field.name: getattr(slots, field.name) for field in dataclasses.fields(slots)}
    return {name: (array, probe if name in PROBE_FIELDS else slot) for name, array in fields.items() if array.shape[0]}


def _take_slot(landmarks: list[jax.Array], slots: Slots, slot: jax.Array, probe: jax.Array):
    row: Callable[[jax.Array, jax.Array], jax.Array] = lambda array, i: array[i]
    state = {name: row(array, i) for name, (array, i) in _rows(slots, slot, probe).items()}
    return state, [row(array, slot) for array in landmarks]


def _put_slot(landmarks: list[jax.Array], slots: Slots, slot, probe, state, landmarks_row):
    rows = _rows(slots, slot, probe)
    changed = {name: array.at[i].set(state[name]) for name, (array, i) in rows.items()}
    written = [array.at[slot].set(row) for array, row in zip(landmarks, landmarks_row, strict=True)]
    return written, dataclasses.replace(slots, **changed)


def _idle(slots: Slots, slot: jax.Array) -> Slots:
    return dataclasses.replace(slots, active_B=slots.active_B.at[slot].set(False))


def _take_pages(pages: list[jax.Array], ids_W: jax.Array) -> list[jax.Array]:
    return [pool_KPCE[:, ids_W] for pool_KPCE in pages]


def _put_pages(pages: list[jax.Array], ids_W: jax.Array, values: list[jax.Array]) -> list[jax.Array]:
    return [
        pool_KPCE.at[:, ids_W].set(new_KWCE, mode='drop') for pool_KPCE, new_KWCE in zip(pages, values, strict=True)
    ]
