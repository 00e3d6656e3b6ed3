"""Which slot and which pages a request gets: bookkeeping on the host.

The engine asks for room in the order of its requests and gives it back when a sequence has finished. Each data shard
has its own slots and its own pages; page numbers are those of the shard's pool.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to sample: prompt ids, numbers of prompt and sample (they fix the random keys), most tokens."""

    prompt_ids: Sequence[int]
    prompt: int
    sample: int
    limit_tokens: int


@dataclasses.dataclass(frozen=True)
class Row:
    """A request that has been admitted.

    Attributes:
        index: of the request in the order it was given.
        key: uint32 [2], key data of the sample.
        slot: over all shards; pages: physical pages of the slot's shard.
        probe_pages: of the dense cache, behind the pages that it shares; none where the slot is no probe.
    """

    index: int
    request: Request
    key: np.ndarray
    slot: int
    pages: list[int]
    probe_pages: list[int]


class Pool:
    """Free slots and pages of every shard, on the host.

    The first `probes` slots of a shard are given out evenly among the others, so that they do not all go to the samples
    of one prompt.
    """

    def __init__(self, shards: int, slots: int, pages: int, probes: int = 0):
        self.slots_per_shard, self.probes = slots, probes
        even = {(i * slots) // probes: i for i in range(probes)}
        others = iter(range(probes, slots))
        order = [even[i] if i in even else next(others) for i in range(slots)]
        self.free_slots = [[shard * slots + slot for slot in order][::-1] for shard in range(shards)]
        self.free_pages = [list(range(pages))[::-1] for _ in range(shards)]
        self.running: dict[int, Row] = {}

    def admit(
        self, index: int, request: Request, key: np.ndarray, pages: int, probe_pages: int, shards: list[int]
    ) -> Row | None:
        """Gives the request a slot and pages on the emptiest of these shards, or None where none has room.

        probe_pages: that it needs more where its slot is a probe; where they are missing it takes another slot.
        """
        found = {shard: slot for shard in shards if (slot := self._fitting(shard, pages, probe_pages)) is not None}
        if not found:
            return None
        shard = max(found, key=lambda s: (len(self.free_slots[s]), -s))
        slot, free = found[shard], self.free_pages[shard]
        self.free_slots[shard].remove(slot)
        more = probe_pages if self.is_probe(slot) else 0
        row = Row(index, request, key, slot, [free.pop() for _ in range(pages)], [free.pop() for _ in range(more)])
        self.running[slot] = row
        return row

    def is_probe(self, slot: int) -> bool:
        return slot % self.slots_per_shard < self.probes

    def _fitting(self, shard: int, pages: int, probe_pages: int) -> int | None:
        """The next free slot that there are pages for."""
        spare = len(self.free_pages[shard]) - pages
        return next((s for s in reversed(self.free_slots[shard]) if spare >= probe_pages * self.is_probe(s)), None)

    def release(self, slot: int) -> Row:
        """Takes back a finished slot and its pages; returns what ran there."""
        row = self.running.pop(slot)
        shard = slot // self.slots_per_shard
        self.free_slots[shard].append(slot)
        self.free_pages[shard].extend(reversed(row.pages + row.probe_pages))
        return row
