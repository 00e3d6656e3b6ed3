"""What runs where: the host's decisions before every segment, on counts alone.

The engine asks in this order: which sequences must leave for host memory so that the others have pages for the next
segment, which of those that left come back, which requests begin. It does what it is told with the arrays on the
device, and reports how long the sequences have become.
"""

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import numpy as np

from sparrow_jax.rollout.pool import Pool, Request, Row, Wanted


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of an engine; slots, pages, probes and prefill rows are those of one data shard.

    Attributes:
        page_tokens: C.
        pages_per_sequence: N.
        segment_steps: tokens that a sequence grows by at most between two decisions.
        rows: prompts of one prefill call, samples: of each.
    """

    shards: int
    slots: int
    pages: int
    probes: int
    page_tokens: int
    pages_per_sequence: int
    segment_steps: int
    rows: int
    samples: int


class Scheduler:
    """One call of the engine: its requests, and where each of them is.

    Older requests go first: a younger one leaves when an older one lacks pages, and comes back before a new one
    begins. So the oldest sequence of a shard always goes on, and every request ends.

    Args:
        requests, keys: in the order in which responses are wanted.
        layout: sizes.

    Attributes:
        pool: slots and pages.
        parked: what has left for host memory, by request.
        parks: how often that happened.
        table_BN, probe_table_PN: page tables of all slots and of all probes.
        tables_changed: whether they differ from when this was last set to False.
    """

    def __init__(self, requests: Sequence[Request], keys: np.ndarray, layout: Layout):
        self.requests, self.keys, self.layout = requests, keys, layout
        self.pool = Pool(layout.shards, layout.slots, layout.pages, layout.probes)
        self.waiting = deque(range(len(requests)))
        self.parked: dict[int, Row] = {}
        self.parks = 0
        self.table_BN = np.zeros((layout.shards * layout.slots, layout.pages_per_sequence), np.int32)
        self.probe_table_PN = np.zeros((layout.shards * layout.probes, layout.pages_per_sequence), np.int32)
        self.tables_changed = False
        self._cached: dict[int, int] = {}  # tokens of each request's cache

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.pool.running or self.parked)

    def make_room(self) -> Iterator[Row]:
        """Gives every running sequence pages for the next segment; yields those that have to leave for it.

        A row still has its slot and pages when it is yielded, and no longer when the next one is asked for.
        """
        for row in sorted(self.pool.running.values(), key=lambda row: row.index):
            before = len(row.pages)
            while row.slot in self.pool.running and not self.pool.grow(row, self._pages(row.index)):
                shard = row.slot // self.layout.slots
                neighbours = [r for r in self.pool.running.values() if r.slot // self.layout.slots == shard]
                youngest = max(neighbours, key=lambda r: r.index)
                yield youngest
                self.pool.release(youngest.slot)
                self.parked[youngest.index] = youngest
                self.parks += 1
            if row.slot in self.pool.running:
                self._extend_tables(row, before)

    def come_back(self) -> Iterator[tuple[Row, Row]]:
        """Yields (where it was, where it goes on) of the parked sequences that there is room for, oldest first."""
        for index in sorted(self.parked):
            old = self.parked[index]
            sample = Wanted(index, old.request, old.key, self._pages(index))
            rows = self.pool.admit(
                [sample],
                len(old.prefix.pages),
                range(self.layout.shards),
                headroom=self._growth_pages,
                probe=self.pool.is_probe(old.slot),
            )
            if not rows:
                return
            del self.parked[index]
            self._write_tables(rows[0])
            self.tables_changed = True  # a sequence brings the table along that it left with
            yield old, rows[0]

    def begin(self) -> Iterator[list[list[list[Row]]]]:
        """Yields batches of admitted samples, by shard and prompt, in the order of the requests, until one has to
        wait. None begins while another waits to come back.
        """
        while self.waiting and not self.parked:
            groups: list[list[list[Row]]] = [[] for _ in range(self.layout.shards)]
            while self.waiting:
                open_shards = [s for s in range(self.layout.shards) if len(groups[s]) < self.layout.rows]
                rows = self.pool.admit(*self._next_prompt(), open_shards, headroom=self._growth_pages)
                if not rows:
                    break
                for row in rows:
                    self.waiting.popleft()
                    self._write_tables(row)
                groups[rows[0].slot // self.layout.slots].append(rows)
            if not any(groups):
                return
            yield groups

    @property
    def slots_needed(self) -> int:
        """Of every shard, for what runs: its probes, which keep their slots, and others."""
        others = Counter(slot // self.layout.slots for slot in self.pool.running if not self.pool.is_probe(slot))
        return self.layout.probes + max(others.values(), default=0)

    def compact(self, width: int) -> list[list[tuple[int, int]]]:
        """Moves what runs behind the first `width` slots of a shard to free ones before; at least `slots_needed`.

        Returns:
            Of every shard (slot, where it goes on), counted within the shard.
        """
        moves: list[list[tuple[int, int]]] = [[] for _ in range(self.layout.shards)]
        for slot in sorted(self.pool.running):
            shard, place = divmod(slot, self.layout.slots)
            if place < width:
                continue
            first = shard * self.layout.slots
            free = self.pool.free_slots[shard]
            target = min(s for s in free if first + self.layout.probes <= s < first + width)
            self._write_tables(self.pool.move(slot, target))
            moves[shard].append((place, target - first))
        return moves

    def advance(self, count_B: np.ndarray) -> None:
        """Takes note of the response tokens of every slot; the newest of them is not cached yet."""
        for slot, row in self.pool.running.items():
            self._cached[row.index] = len(row.request.prompt_ids) + int(count_B[slot]) - 1

    @property
    def drawn_tokens(self) -> int:
        """Response tokens of the sequences that have begun and not finished."""
        rows = (*self.pool.running.values(), *self.parked.values())
        return sum(self._cached[row.index] - len(row.request.prompt_ids) + 1 for row in rows)

    def filled_pages(self, row: Row) -> tuple[list[int], list[int]]:
        """Pages of its cache, and of its dense cache, that hold tokens, as they are numbered in the pool of all shards.
        The dense cache's are those behind the shared ones.
        """
        first = row.slot // self.layout.slots * self.layout.pages
        count = -(-self._cached[row.index] // self.layout.page_tokens)
        shared = len(row.prefix.pages)
        pages = (row.prefix.pages + row.pages)[:count]
        return [first + page for page in pages], [first + page for page in row.probe_pages[: count - shared]]

    def probe_of(self, slot: int) -> int:
        """The slot's row in arrays over probes; behind the last one where it is none."""
        shard, place = divmod(slot, self.layout.slots)
        layout = self.layout
        return shard * layout.probes + place if place < layout.probes else layout.shards * layout.probes

    @property
    def _growth_pages(self) -> int:
        """That a segment fills at most."""
        return -(-self.layout.segment_steps // self.layout.page_tokens)

    def _pages(self, index: int) -> int:
        """Own pages that a request needs until the end of the next segment."""
        request, C = self.requests[index], self.layout.page_tokens
        prompt = len(request.prompt_ids)
        last = min(self._cached.get(index, prompt) + self.layout.segment_steps, prompt + request.limit_tokens)
        return -(-last // C) - prompt // C

    def _next_prompt(self) -> tuple[list[Wanted], int]:
        """The next requests of one prompt, and the pages that the prompt fills."""
        prompt_ids = self.requests[self.waiting[0]].prompt_ids
        same = itertools.takewhile(
            lambda i: self.requests[i].prompt_ids == prompt_ids, itertools.islice(self.waiting, self.layout.samples)
        )
        samples = [Wanted(i, self.requests[i], self.keys[i], self._pages(i)) for i in same]
        return samples, len(prompt_ids) // self.layout.page_tokens

    def _write_tables(self, row: Row) -> None:
        """The whole rows, as prefill writes them: what an earlier sequence has left there would look up to date."""
        for table, place, pages in self._tables(row):
            whole = row.prefix.pages + pages
            whole += [0] * (table.shape[1] - len(whole))
            if not np.array_equal(table[place], whole):
                table[place] = whole
                self.tables_changed = True

    def _extend_tables(self, row: Row, before: int) -> None:
        """The pages that a running row has got behind its first `before` own ones. Rows are thousands of pages long."""
        first = len(row.prefix.pages) + before
        for table, place, pages in self._tables(row):
            if len(pages) > before:
                table[place, first : first + len(pages) - before] = pages[before:]
                self.tables_changed = True

    def _tables(self, row: Row) -> list[tuple[np.ndarray, int, list[int]]]:
        """The table of the sequence, and a probe's second one, with the row in it and its own pages."""
        tables = [(self.table_BN, row.slot, row.pages)]
        if row.probe_pages:
            tables.append((self.probe_table_PN, self.probe_of(row.slot), row.probe_pages))
        return tables
