"""How soon an evicted chunk is asked for again."""

from __future__ import annotations

import hashlib

import pytest

from kvtier.keys import ChunkKey, make_key
from kvtier.manager.reports import SAMPLING_BYTE, ReuseGaps
from tests.support.workbench import Workbench, prefix


def keys(count: int) -> list[ChunkKey]:
    return [make_key(number.to_bytes(4, "big"), 0) for number in range(count)]


def hashed(count: int, *, of: int) -> list[ChunkKey]:
    """Return keys as an engine makes them: no byte is less random than another."""
    names = (f"{of}.{depth}".encode() for depth in range(count))
    return [make_key(hashlib.sha256(name).digest(), 0) for name in names]


def test_the_gap_is_from_the_step_of_the_eviction_to_the_step_of_the_request() -> None:
    gaps = ReuseGaps(8)
    gaps.record_evicted(keys(2))
    gaps.end_step(100.0)
    gaps.record_wanted(keys(1)[0])
    gaps.end_step(142.5)
    assert gaps.take() == [42.5]
    assert gaps.take() == []


def test_an_eviction_counts_once() -> None:
    gaps = ReuseGaps(8)
    gaps.record_evicted(keys(1))
    gaps.end_step(1.0)
    for now in (2.0, 3.0):
        gaps.record_wanted(keys(1)[0])
        gaps.end_step(now)
    assert gaps.take() == [1.0]


def test_a_chunk_that_was_never_evicted_has_no_gap() -> None:
    gaps = ReuseGaps(8)
    gaps.record_wanted(keys(1)[0])
    gaps.end_step(1.0)
    assert gaps.take() == []


def test_remembered_evictions_are_bounded_and_the_latest_are_kept() -> None:
    gaps = ReuseGaps(8)
    for now, key in enumerate(keys(100_000)):
        gaps.record_evicted([key])
        gaps.end_step(float(now))
    remembered = gaps.recently_evicted(keys(100_000))
    for key in keys(100_000):
        gaps.record_wanted(key)
    gaps.end_step(100_000.0)
    found = gaps.take()
    assert len(found) == len(remembered)
    assert not gaps.recently_evicted(keys(100_000))
    assert 16_384 <= len(found) <= 2 * 16_384
    assert min(found) == 1.0


def test_of_a_large_tier_a_sample_is_kept_chosen_by_the_key() -> None:
    gaps = ReuseGaps(1_000_000)
    sample = keys(4096)
    followed = gaps.record_evicted(sample)
    gaps.end_step(0.0)
    for key in sample:
        gaps.record_wanted(key)
    gaps.end_step(1.0)
    assert len(gaps.take()) == followed == 4096 // 256


def test_the_manager_notes_gaps_in_every_tier_that_was_passed() -> None:
    bench = Workbench(2, 4)
    first, second = prefix(2, of=1), prefix(2, of=2)
    bench.store(first)
    bench.settle()
    bench.store(second)
    bench.manager.end_step(now=10.0)
    bench.settle()
    bench.manager.end_step(now=10.0)
    bench.look(first, "again")
    bench.manager.end_step(now=15.0)
    ram, nvme = bench.manager.take_reuse_gaps()
    assert len(ram) == 2
    assert nvme == []


@pytest.mark.parametrize(("slots", "sampled"), [(200, 1), (512, 4)])
def test_gaps_are_a_share_of_the_evicted_chunks_that_are_followed(
    slots: int, sampled: int
) -> None:
    bench = Workbench(slots)
    first, second = (hashed(slots, of=number) for number in range(2))
    for chunks in (first, second, first):
        bench.store(chunks)
        bench.manager.end_step(now=1.0)
    (ram,) = bench.manager.snapshot().tiers
    (gaps,) = bench.manager.take_reuse_gaps()
    came_back, left = (
        sum(key[SAMPLING_BYTE] % sampled == 0 for key in keys) for keys in (first, second)
    )
    assert 0 < came_back == len(gaps)
    assert ram.counters.followed == came_back + left
    assert ram.counters.evicted == 2 * slots


def test_every_chunk_of_a_prefix_that_left_the_slowest_tier_has_its_gap() -> None:
    bench = Workbench(10, 10)
    first, second = prefix(10, of=1), prefix(10, of=2)
    for keys in (first, second):
        bench.store(keys)
        bench.settle()
    bench.manager.end_step(now=10.0)
    assert not bench.resident(1).intersection(first)
    assert bench.look(first, "again") == 0, "and the other nine are not looked up"
    bench.store(first, "again")
    bench.manager.end_step(now=15.0)
    ram, nvme = bench.manager.take_reuse_gaps()
    assert len(ram) == len(nvme) == 10


def test_a_chunk_that_a_slower_tier_still_has_is_no_gap_there() -> None:
    bench = Workbench(4, 8)
    first, second = prefix(4, of=1), prefix(4, of=2)
    for keys in (first, second):
        bench.store(keys)
        bench.settle()
    bench.store(first, "computed all the same")
    bench.manager.end_step(now=5.0)
    ram, nvme = bench.manager.take_reuse_gaps()
    assert (len(ram), nvme) == (4, [])


def test_a_store_that_is_put_off_counts_when_it_is_taken_and_once() -> None:
    bench = Workbench(4)
    first, second = prefix(2, of=1), prefix(4, of=2)
    bench.store(first)
    bench.store(second)
    bench.manager.end_step(now=10.0)
    bench.look(second, "loads")
    bench.manager.prepare_load(second, "loads")
    bench.manager.begin_request("waiting")
    assert bench.store(first, "waiting") is None
    bench.manager.end_step(now=11.0)
    assert bench.manager.take_reuse_gaps() == [[]]
    bench.manager.complete_load("loads")
    for now in (12.0, 13.0):
        bench.store(first, "waiting")
        bench.manager.end_step(now=now)
    assert [len(gaps) for gaps in bench.manager.take_reuse_gaps()] == [2]


def test_of_a_large_tier_the_share_of_the_sample_is_counted_whatever_is_looked_up() -> None:
    bench = Workbench(4096)
    mask = ReuseGaps(4096).mask
    first, second = hashed(4096, of=1), hashed(4096, of=2)
    bench.store(first)
    bench.store(second)
    bench.manager.end_step(now=10.0)
    bench.look(first, "again")
    bench.store(first, "again")
    bench.manager.end_step(now=15.0)
    (gaps,) = bench.manager.take_reuse_gaps()
    # The first is looked up, in the sample or not, but was kept only if it is.
    assert len(gaps) == sum(not key[SAMPLING_BYTE] & mask for key in first)
    assert 0.5 < len(gaps) * (mask + 1) / 4096 < 2
    assert mask == 31


def test_a_reset_forgets_evicted_keys() -> None:
    bench = Workbench(2)
    first, second = prefix(2, of=1), prefix(2, of=2)
    bench.store(first)
    bench.store(second)
    bench.manager.end_step(now=10.0)
    bench.manager.reset()
    bench.look(first, "again")
    bench.manager.end_step(now=15.0)
    assert bench.manager.take_reuse_gaps() == [[]]
