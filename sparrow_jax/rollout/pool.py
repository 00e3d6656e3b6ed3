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
    """

    index: int
    request: Request
    key: np.ndarray
    slot: int
    pages: list[int]


class Pool:
    """Free slots and pages of every shard, on the host."""

    def __init__(self, shards: int, slots: int, pages: int):
        self.slots_per_shard = slots
        self.free_slots = [list(range(shard * slots, (shard + 1) * slots))[::-1] for shard in range(shards)]
        self.free_pages = [list(range(pages))[::-1] for _ in range(shards)]
        self.running: dict[int, Row] = {}

    def admit(self, index: int, request: Request, key: np.ndarray, pages: int, shards: list[int]) -> Row | None:
        """Gives the request a slot and pages on the emptiest of these shards, or None where none has room."""
        fitting = [s for s in shards if self.free_slots[s] and len(self.free_pages[s]) >= pages]
        if not fitting:
            return None
        shard = max(fitting, key=lambda s: (len(self.free_slots[s]), -s))
        taken = [self.free_pages[shard].pop() for _ in range(pages)]
        row = Row(index, request, key, self.free_slots[shard].pop(), taken)
        self.running[row.slot] = row
        return row

    def release(self, slot: int) -> Row:
        """Takes back a finished slot and its pages; returns what ran there."""
        row = self.running.pop(slot)
        shard = slot // self.slots_per_shard
        self.free_slots[shard].append(slot)
        self.free_pages[shard].extend(reversed(row.pages))
        return row
