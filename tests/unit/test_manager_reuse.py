"""How soon an evicted chunk is asked for again."""

from __future__ import annotations

from kvtier.keys import ChunkKey, make_key
from kvtier.manager.reuse import ReuseGaps
from kvtier.testing.workbench import Workbench, prefix


def keys(count: int) -> list[ChunkKey]:
    return [make_key(number.to_bytes(4, "big"), 0) for number in range(count)]


def test_the_gap_is_from_the_step_of_the_eviction_to_the_step_of_the_request() -> None:
    gaps = ReuseGaps(8)
    gaps.evicted(keys(2))
    gaps.end_step(100.0)
    gaps.asked(keys(1)[0])
    gaps.end_step(142.5)
    assert gaps.take() == [42.5]
    assert gaps.take() == []


def test_an_eviction_counts_once() -> None:
    gaps = ReuseGaps(8)
    gaps.evicted(keys(1))
    gaps.end_step(1.0)
    for now in (2.0, 3.0):
        gaps.asked(keys(1)[0])
        gaps.end_step(now)
    assert gaps.take() == [1.0]


def test_what_never_left_has_no_gap() -> None:
    gaps = ReuseGaps(8)
    gaps.asked(keys(1)[0])
    gaps.end_step(1.0)
    assert gaps.take() == []


def test_what_is_remembered_is_bounded_and_the_latest_is_kept() -> None:
    gaps = ReuseGaps(8)
    for now, key in enumerate(keys(100_000)):
        gaps.evicted([key])
        gaps.end_step(float(now))
    for key in keys(100_000):
        gaps.asked(key)
    gaps.end_step(100_000.0)
    found = gaps.take()
    assert 16_384 <= len(found) <= 2 * 16_384
    assert min(found) == 1.0


def test_of_a_large_tier_a_sample_is_kept_chosen_by_the_key() -> None:
    gaps = ReuseGaps(1_000_000)
    sample = keys(4096)
    gaps.evicted(sample)
    gaps.end_step(0.0)
    for key in sample:
        gaps.asked(key)
    gaps.end_step(1.0)
    assert len(gaps.take()) == 4096 // 256


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


def test_a_reset_forgets_what_left() -> None:
    bench = Workbench(2)
    first, second = prefix(2, of=1), prefix(2, of=2)
    bench.store(first)
    bench.store(second)
    bench.manager.end_step(now=10.0)
    bench.manager.reset()
    bench.look(first, "again")
    bench.manager.end_step(now=15.0)
    assert bench.manager.take_reuse_gaps() == [[]]
