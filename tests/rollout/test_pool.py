"""Slots and pages: samples of a prompt share what it fills, and everything comes back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow_jax.rollout.pool import Pool, Request, Wanted


def samples(*pages):
    return [Wanted(i, Request([1], 0, i, 1), np.zeros(2), own) for i, own in enumerate(pages)]


def test_samples_of_a_prompt_share_its_pages_until_the_last_has_finished():
    pool = Pool(shards=1, slots=4, pages=12)
    rows = pool.admit(samples(2, 3, 1), 4, [0])
    assert [len(row.pages) for row in rows] == [2, 3, 1]
    assert all(row.prefix is rows[0].prefix for row in rows)
    assert len({*rows[0].prefix.pages, *rows[0].pages, *rows[1].pages, *rows[2].pages}) == 10
    assert len(pool.free_pages[0]) == 2
    for row, free in zip(rows, (4, 7, 12), strict=True):
        pool.release(row.slot)
        assert len(pool.free_pages[0]) == free


def test_as_many_samples_as_fit_get_room():
    pool = Pool(shards=1, slots=4, pages=9)
    rows = pool.admit(samples(2, 2, 2, 2), 4, [0])
    assert [row.index for row in rows] == [0, 1]
    assert not pool.admit(samples(2), 0, [0])
    assert len(pool.admit(samples(1), 0, [0])) == 1


def test_the_shard_that_takes_most_samples_gets_them():
    pool = Pool(shards=3, slots=2, pages=10)
    [first] = pool.admit(samples(1), 0, [0, 1, 2])
    assert first.slot == 0
    assert [row.slot // 2 for row in pool.admit(samples(1, 1), 1, [0, 1, 2])] == [1, 1]
    assert not pool.admit(samples(1), 0, [1])
    assert not pool.admit(samples(1), 0, [])


@given(
    groups=st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 4), min_size=1, max_size=4)), max_size=12),
    random=st.randoms(use_true_random=False),
    probes=st.integers(0, 2),
)
def test_no_page_is_given_twice_and_none_is_lost(groups, random, probes):
    shards, slots, pages = 2, 3, 14
    pool = Pool(shards, slots, pages, probes)
    for shared, own in groups:
        pool.admit(samples(*own), shared, range(shards))
        for shard in range(shards):
            here = [row for row in pool.running.values() if row.slot // slots == shard]
            prefixes = {id(row.prefix): row.prefix for row in here}.values()
            taken = [page for prefix in prefixes for page in prefix.pages]
            taken += [page for row in here for page in row.pages + row.probe_pages]
            assert sorted(taken + pool.free_pages[shard]) == list(range(pages))
            assert all(bool(row.probe_pages) == pool.is_probe(row.slot) for row in here)
        if pool.running and random.random() < 0.5:
            pool.release(random.choice(sorted(pool.running)))
    for slot in sorted(pool.running):
        pool.release(slot)
    assert [sorted(free) for free in pool.free_pages] == [list(range(pages))] * shards
    assert [sorted(free) for free in pool.free_slots] == [[0, 1, 2], [3, 4, 5]]


def test_a_slot_that_is_not_taken_cannot_be_given_back():
    with pytest.raises(KeyError):
        Pool(shards=1, slots=1, pages=1).release(0)
