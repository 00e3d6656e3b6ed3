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
class Wanted:
    """A request that waits for room.

    Attributes:
        index: of the request in the order it was given.
        key: uint32 [2], key data of the sample.
        pages: that it needs behind the ones that its prompt fills.
    """

    index: int
    request: Request
    key: np.ndarray
    pages: int


@dataclasses.dataclass
class Prefix:
    """Pages that a prompt fills, and how many running samples of it read them."""

    pages: list[int]
    users: int


@dataclasses.dataclass(frozen=True)
class Row:
    """A request that has been admitted.

    Attributes:
        index, request, key: as in `Wanted`.
        slot: over all shards.
        prefix: physical pages of the slot's shard, shared with samples that were admitted together.
        pages: its own, behind the shared ones.
        probe_pages: as many again, of the dense cache, where the slot is a probe; else none.
    """

    index: int
    request: Request
    key: np.ndarray
    slot: int
    prefix: Prefix
    pages: list[int]
    probe_pages: list[int]


class Pool:
    """Free slots and pages of every shard, on the host.

    The first `probes` slots of a shard are given out evenly among the others, so that they do not all go to the samples
    of one prompt.
    """

    def __init__(self, shards: int, slots: int, pages: int, probes: int = 0):
        self.slots_per_shard, self.probes, self.pages = slots, probes, shards * pages
        even = {(i * slots) // probes: i for i in range(probes)}
        others = iter(range(probes, slots))
        order = [even[i] if i in even else next(others) for i in range(slots)]
        self.free_slots = [[shard * slots + slot for slot in order][::-1] for shard in range(shards)]
        self.free_pages = [list(range(pages))[::-1] for _ in range(shards)]
        self.running: dict[int, Row] = {}

    def admit(
        self,
        samples: Sequence[Wanted],
        shared_pages: int,
        shards: Sequence[int],
        *,
        headroom: int = 0,
        probe: bool | None = None,
    ) -> list[Row]:
        """Gives samples of one prompt slots and pages, on the shard that takes most of them.

        Args:
            samples: in order; the first ones get room, as many as one shard has it for. A probe without pages for its
                dense cache is passed over.
            shared_pages: that the prompt fills.
            shards: that may be used.
            headroom: pages left free for each cache that is growing there already.
            probe: True or False to ask for a slot that is one, or none.
        """
        slots = {shard: self._fitting(shard, samples, shared_pages, headroom, probe) for shard in shards}
        shard = max(shards, key=lambda s: (len(slots[s]), len(self.free_slots[s]), -s), default=-1)
        if shard < 0 or not slots[shard]:
            return []
        take = lambda count: [self.free_pages[shard].pop() for _ in range(count)]
        prefix = Prefix(take(shared_pages), len(slots[shard]))
        for slot, sample in zip(slots[shard], samples, strict=False):
            self.free_slots[shard].remove(slot)
            probe_pages = take(sample.pages * self.is_probe(slot))
            self.running[slot] = Row(
                sample.index, sample.request, sample.key, slot, prefix, take(sample.pages), probe_pages
            )
        return [self.running[slot] for slot in slots[shard]]

    def grow(self, row: Row, pages: int) -> bool:
        """Brings a running row, and a probe's dense cache, to so many pages of its own; False, and nothing changes,
        where they are missing.
        """
        free = self.free_pages[row.slot // self.slots_per_shard]
        caches = [row.pages, row.probe_pages] if self.is_probe(row.slot) else [row.pages]
        more = max(pages - len(row.pages), 0)
        if more * len(caches) > len(free):
            return False
        for cache in caches:
            cache.extend(free.pop() for _ in range(more))
        return True

    def move(self, slot: int, target: int) -> Row:
        """Gives a running row another, free slot of its shard; returns the row as it is now."""
        shard = slot // self.slots_per_shard
        self.free_slots[shard].remove(target)
        self.free_slots[shard].insert(0, slot)  # the last to be given out
        row = self.running[target] = dataclasses.replace(self.running.pop(slot), slot=target)
        return row

    def is_probe(self, slot: int) -> bool:
        return slot % self.slots_per_shard < self.probes

    @property
    def taken_pages(self) -> int:
        """Of all shards."""
        return self.pages - sum(map(len, self.free_pages))

    def release(self, slot: int) -> Row:
        """Takes back a finished slot and the pages that nobody else reads; returns what ran there."""
        row = self.running.pop(slot)
        shard = slot // self.slots_per_shard
        self.free_slots[shard].append(slot)
        row.prefix.users -= 1
        shared = [] if row.prefix.users else row.prefix.pages
        self.free_pages[shard].extend(reversed(shared + row.pages + row.probe_pages))
        return row

    def _fitting(
        self, shard: int, samples: Sequence[Wanted], shared_pages: int, headroom: int, probe: bool | None
    ) -> list[int]:
        """A free slot for each of the first samples that there are pages for."""
        free = [slot for slot in reversed(self.free_slots[shard]) if probe in (None, self.is_probe(slot))]
        growing = sum(1 + self.is_probe(slot) for slot in self.running if slot // self.slots_per_shard == shard)
        spare = len(self.free_pages[shard]) - shared_pages - headroom * growing
        found: list[int] = []
        for sample in samples:
            need = lambda slot, pages=sample.pages: pages * (1 + self.is_probe(slot))
            slot = next((slot for slot in free if need(slot) <= spare), None)
            if slot is None:
                break
            free.remove(slot)
            found.append(slot)
            spare -= need(slot)
        return found
