"""The host's decisions alone, with a made-up device: every request ends, older ones first, and no page is shared."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow_jax.rollout.pool import Request
from sparrow_jax.rollout.scheduler import Layout, Scheduler

LAYOUT = Layout(
    shards=2, slots=3, pages=16, probes=1, page_tokens=4, pages_per_sequence=8, segment_steps=6, rows=2, samples=3
)
LONGEST = LAYOUT.pages_per_sequence * LAYOUT.page_tokens


def simulate(lengths, layout=LAYOUT):
    """Runs requests of (prompt number, prompt tokens, limit, tokens until the end).

    Returns what happened, in order: ('begins' | 'leaves' | 'returns' | 'ends', request).
    """
    requests = [Request([number] * prompt, number, i, limit) for i, (number, prompt, limit, _) in enumerate(lengths)]
    scheduler = Scheduler(requests, np.zeros((len(requests), 2), np.uint32), layout)
    count_B, drawn, events = np.zeros(layout.shards * layout.slots, int), {}, []
    device = scheduler.table_BN.copy(), scheduler.probe_table_PN.copy()
    for _ in range(2000):
        if not scheduler.busy:
            return events
        for row in scheduler.make_room():
            pages, _ = scheduler.filled_pages(row)
            cached = len(row.request.prompt_ids) + drawn[row.index] - 1
            assert len(pages) == -(-cached // layout.page_tokens)
            assert bool(row.probe_pages) == (scheduler.probe_of(row.slot) < layout.shards * layout.probes)
            events.append(('leaves', row.index))
        for old, new in scheduler.come_back():
            assert scheduler.pool.is_probe(old.slot) == scheduler.pool.is_probe(new.slot)
            assert list(map(len, scheduler.filled_pages(new))) == list(map(len, scheduler.filled_pages(old)))
            count_B[new.slot] = drawn[new.index]
            events.append(('returns', new.index))
        for groups in scheduler.begin():
            prompts = [rows for shard in groups for rows in shard]
            assert all(len({tuple(row.request.prompt_ids) for row in rows}) == 1 for rows in prompts)
            for row in sorted((row for rows in prompts for row in rows), key=lambda row: row.index):
                count_B[row.slot] = drawn[row.index] = 1
                events.append(('begins', row.index))
                for table, place, pages in tables_of(scheduler, row, *device):
                    table[place] = 0  # prefill writes whole rows
                    table[place, : len(pages)] = pages
        compact(scheduler, count_B)
        if scheduler.tables_changed:
            device = scheduler.table_BN.copy(), scheduler.probe_table_PN.copy()
            scheduler.tables_changed = False
        check_pages(scheduler, drawn, *device)
        for slot, row in scheduler.pool.running.items():
            end = min(row.request.limit_tokens, lengths[row.index][3])
            drawn[row.index] = count_B[slot] = min(drawn[row.index] + layout.segment_steps, end)
        scheduler.advance(count_B)
        for slot, row in list(scheduler.pool.running.items()):
            if drawn[row.index] == min(row.request.limit_tokens, lengths[row.index][3]):
                scheduler.pool.release(slot)
                events.append(('ends', row.index))
    raise AssertionError(f'it goes on for ever: {events[-20:]}')


def compact(scheduler, count_B):
    """To as few slots as can be; probes stay, and nothing moves onto another."""
    layout, before = scheduler.layout, dict(scheduler.pool.running)
    width = scheduler.slots_needed
    for shard, pairs in enumerate(scheduler.compact(width)):
        for source, target in pairs:
            source, target = shard * layout.slots + source, shard * layout.slots + target
            assert target not in before
            assert not scheduler.pool.is_probe(source)
            assert not scheduler.pool.is_probe(target)
            assert scheduler.pool.running[target].index == before.pop(source).index
            count_B[target] = count_B[source]
    running = scheduler.pool.running
    assert {slot: running[slot].index for slot in before} == {slot: row.index for slot, row in before.items()}
    assert all(slot % layout.slots < width and row.slot == slot for slot, row in running.items())
    free = [slot for slots in scheduler.pool.free_slots for slot in slots]
    assert sorted([*running, *free]) == list(range(layout.shards * layout.slots))


def tables_of(scheduler, row, table_BN, probe_table_PN):
    """(table, row of it, pages that should stand there) of a sequence."""
    found = [(table_BN, row.slot, row.prefix.pages + row.pages)]
    if row.probe_pages:
        found.append((probe_table_PN, scheduler.probe_of(row.slot), row.prefix.pages + row.probe_pages))
    return found


def check_pages(scheduler, drawn, *device):
    """Every running sequence has pages for a segment, as the table on the device says, and nobody else's."""
    layout = scheduler.layout
    for shard in range(layout.shards):
        rows = [row for slot, row in scheduler.pool.running.items() if slot // layout.slots == shard]
        prefixes = {id(row.prefix): row.prefix for row in rows}.values()
        taken = [page for prefix in prefixes for page in prefix.pages]
        taken += [page for row in rows for page in row.pages + row.probe_pages]
        assert sorted(taken + scheduler.pool.free_pages[shard]) == list(range(layout.pages))
        for row in rows:
            prompt = len(row.request.prompt_ids)
            last = min(prompt + drawn[row.index] - 1 + layout.segment_steps, prompt + row.request.limit_tokens - 1)
            for table, place, pages in tables_of(scheduler, row, *device):
                assert len(pages) * layout.page_tokens >= last
                assert table[place, : len(pages)].tolist() == pages


def request_shapes():
    prompts = st.integers(1, 20)
    limits = st.integers(1, LONGEST - 20)
    return st.lists(st.tuples(st.integers(0, 3), prompts, limits, st.integers(1, LONGEST)), max_size=14)


@given(lengths=request_shapes())
def test_every_request_begins_once_ends_once_and_no_page_is_shared(lengths):
    # Prompts of one number are alike, so that samples are admitted together.
    first = {}
    lengths = [(number, first.setdefault(number, prompt), limit, end) for number, prompt, limit, end in lengths]
    events = simulate(lengths)
    for kind in ('begins', 'ends'):
        assert sorted(i for what, i in events if what == kind) == list(range(len(lengths)))
    assert sorted(i for what, i in events if what == 'leaves') == sorted(i for what, i in events if what == 'returns')
    begun = [i for what, i in events if what == 'begins']
    assert begun == sorted(begun)


def test_the_youngest_leaves_and_none_begins_before_it_is_back():
    one = Layout(**{**LAYOUT.__dict__, 'shards': 1, 'probes': 0, 'pages': 10})
    events = simulate([(i, 4, 20, 20) for i in range(4)], one)
    left = [i for what, i in events if what == 'leaves']
    assert left
    assert 0 not in left
    for i in left:
        between = events[events.index(('leaves', i)) : events.index(('returns', i))]
        assert not any(what == 'begins' for what, _ in between)


def test_nobody_leaves_where_pages_suffice_for_all():
    roomy = Layout(**{**LAYOUT.__dict__, 'pages': 4 * LAYOUT.pages_per_sequence})
    events = simulate([(i, 4, 28, 28) for i in range(9)], roomy)
    assert not any(what == 'leaves' for what, _ in events)


@pytest.mark.parametrize('prompt', [3, 4, 5])
def test_a_sequence_alone_gets_pages_as_it_grows(prompt):
    scheduler = Scheduler([Request([1] * prompt, 0, 0, 20)], np.zeros((1, 2), np.uint32), LAYOUT)
    assert list(scheduler.make_room()) == []
    [[[[row]], []]] = scheduler.begin()
    pages = []
    for count in (7, 13, 19, 20):
        pages.append(len(row.prefix.pages + row.pages))
        scheduler.advance(np.full(6, count))
        assert list(scheduler.make_room()) == []
    assert pages == [-(-min(prompt + n, prompt + 20) // 4) for n in (6, 12, 18, 24)]
