"""Loads whose chunks workers read from the tier themselves: no RAM, pinned, once."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from kvtier.manager import NO_GENERATION, NO_SLOT, GroupReach, ManagerLimits
from kvtier.types import Outcome
from tests.support.fakes import FakeGdsSlots
from tests.support.workbench import Workbench, prefix

LIMITS = ManagerLimits(
    pin_budget=4, reserve=0.0, queue=64, direct_loads=True, load_timeout_s=7.0
)


def warmed(*capacities: int, chunks: int = 8, **options: Any) -> tuple[Workbench, FakeGdsSlots]:
    """Return a bench whose second tier has the head of a prompt."""
    gds = FakeGdsSlots(32)
    bench = Workbench(*capacities, **{"limits": LIMITS, "gds": gds, **options})
    first = min(3, capacities[1] - chunks)
    bench.manager.recover(1, zip(prefix(chunks), range(first, first + chunks), strict=True))
    return bench, gds


def test_chunks_that_workers_can_read_take_no_ram_and_no_job() -> None:
    bench, gds = warmed(2, 16)
    assert bench.look(prefix(8)) == 8
    plan = bench.manager.prepare_load(prefix(8), "reader")
    bench.check()
    assert plan.slots == [NO_SLOT] * 8
    assert plan.generations == [NO_GENERATION] * 8
    assert plan.origins == [1] * 8
    assert plan.wait_s == 7.0
    assert plan.gds is not None
    assert (plan.gds.positions, plan.gds.slots) == (list(range(8)), list(range(3, 11)))
    assert plan.gds.part_hashes == struct.pack("=8Q", *range(3, 11))
    assert bench.step() == []
    bench.manager.complete_load("reader")
    bench.check()
    assert bench.resident(0) == set()
    assert bench.tiers[1].counters.hits == 8
    assert gds.touched == list(range(3, 11))


def test_a_load_mixes_ram_promotions_and_reads_in_the_order_of_its_keys() -> None:
    bench, gds = warmed(8, 16)
    gds.known -= {5}
    bench.store(prefix(1))
    bench.settle()
    assert bench.look(prefix(4)) == 4
    plan = bench.manager.prepare_load(prefix(4), "reader")
    bench.check()
    assert plan.origins == [0, 1, 1, 1]
    assert plan.gds is not None
    assert (plan.gds.positions, plan.gds.slots) == ([1, 3], [4, 6])
    assert [slot == NO_SLOT for slot in plan.slots] == [False, True, False, True]
    (job,) = bench.manager.take_jobs()
    assert job.keys == [prefix(4)[2]]
    bench.finish(job)
    bench.manager.complete_load("reader")
    bench.check()
    assert (bench.ram.counters.hits, bench.tiers[1].counters.hits) == (1, 3)


def test_a_copy_is_not_evicted_while_workers_read_it() -> None:
    bench, _ = warmed(4, 8)
    assert bench.look(prefix(8)) == 8
    plan = bench.manager.prepare_load(prefix(8), "reader")
    assert plan.gds is not None
    bench.store(prefix(2, of=9), "writer")
    bench.settle()
    assert bench.resident(1) == set(prefix(8)), "no copy gave way"
    bench.manager.complete_load("reader")
    bench.store(prefix(2, of=8), "writer")
    bench.settle()
    assert not set(prefix(2, of=8)) - bench.resident(1)


def test_hashes_are_forgotten_before_a_slot_is_written_again() -> None:
    bench, gds = warmed(4, 8)
    bench.store(prefix(2, of=9), "writer")
    (job,) = bench.step()
    assert gds.overwritten == job.destination_slots
    bench.finish(job)
    bench.settle()


def test_wrong_bytes_leave_the_tier_and_the_request_gets_misses() -> None:
    bench, gds = warmed(2, 16)
    bench.manager.begin_request("reader")
    assert bench.look(prefix(8)) == 8
    bench.manager.prepare_load(prefix(8), "reader")
    failed = {2: Outcome.CORRUPT, 5: Outcome.EXPIRED}
    bench.manager.complete_load("reader", failed_reads=failed)
    bench.check()
    assert bench.manager.take_corrupt() == [(1, 5)]
    assert bench.resident(1) == {*prefix(8)} - {prefix(8)[2]}
    counters = bench.tiers[1].counters
    assert (counters.corrupt, counters.expired, counters.hits) == (1, 1, 2)
    assert sorted(gds.touched) == [3, 4, 6, 7, 9, 10]
    assert bench.look(prefix(8)) == 0
    assert bench.look(prefix(8), "another") == 2


@pytest.mark.parametrize(
    ("outcome", "counter"),
    [
        (Outcome.FAILED, "read_failed"),
        (Outcome.EXPIRED, "expired"),
        (Outcome.REFUSED, "shut_out"),
        (Outcome.CANCELLED, ""),
    ],
)
def test_a_failed_read_without_wrong_bytes_keeps_the_chunk_and_is_counted_by_its_cause(
    outcome: Outcome, counter: str
) -> None:
    bench, _ = warmed(2, 16)
    bench.manager.begin_request("reader")
    bench.look(prefix(3))
    bench.manager.prepare_load(prefix(3), "reader")
    bench.manager.complete_load("reader", failed_reads=dict.fromkeys(range(3), outcome))
    bench.check()
    assert bench.resident(1) == set(prefix(8))
    counters = bench.tiers[1].counters
    for name in ("hits", "read_failed", "expired", "shut_out", "corrupt"):
        assert getattr(counters, name) == (3 if name == counter else 0), name
    assert bench.look(prefix(3)) == 0
    assert bench.look(prefix(3), "another") == 3


def test_where_workers_cannot_read_chunks_come_through_ram() -> None:
    bench, gds = warmed(4, 16)
    gds.is_off = True
    assert bench.look(prefix(3)) == 3
    plan = bench.manager.prepare_load(prefix(3), "reader")
    assert plan.gds is None
    (job,) = bench.manager.take_jobs()
    assert job.keys == prefix(3)
    bench.finish(job)
    bench.manager.complete_load("reader")
    bench.check()
    assert bench.resident(0) == set(prefix(3))


def test_reads_that_stop_between_lookup_and_load_need_room_in_ram() -> None:
    bench, gds = warmed(2, 16)
    bench.manager.begin_request("reader")
    assert bench.look(prefix(4)) == 4
    gds.is_off = True
    plan = bench.manager.prepare_load(prefix(4), "reader")
    bench.check()
    assert plan.gds is None
    assert plan.slots == [NO_SLOT] * 4, "the load fails, and the request is computed"
    bench.manager.complete_load("reader")
    bench.check()
    assert bench.look(prefix(4)) == 0


def test_a_reset_ends_reads_and_their_slots_are_free() -> None:
    bench, _ = warmed(2, 8)
    bench.look(prefix(8))
    bench.manager.prepare_load(prefix(8), "reader")
    bench.manager.reset()
    bench.check()
    assert bench.tiers[1].slots.free == 8
    bench.manager.complete_load("reader", failed_reads={0: Outcome.CORRUPT})
    bench.check()
    assert bench.manager.take_corrupt() == []


def test_a_copy_that_another_load_found_wrong_keeps_its_slot_until_the_end() -> None:
    bench, gds = warmed(2, 8)
    for req_id in ("one", "two"):
        assert bench.look(prefix(2), req_id) == 2
        bench.manager.prepare_load(prefix(2), req_id)
    bench.manager.complete_load("one", failed_reads={0: Outcome.CORRUPT})
    bench.check()
    assert bench.tiers[1].slots.free == 0
    bench.manager.complete_load("two")
    bench.check()
    assert bench.tiers[1].slots.free == 1
    assert 0 not in gds.touched


def test_several_groups_are_read_group_by_group() -> None:
    gds = FakeGdsSlots(32)
    groups = [GroupReach(chunk_tokens=1), GroupReach(chunk_tokens=1)]
    bench = Workbench(2, 16, limits=LIMITS, gds=gds, groups=groups)
    keys = [*prefix(3), *prefix(3, group=1)]
    bench.manager.recover(1, zip(keys, range(6), strict=True))
    assert bench.look(keys) == 3
    plan = bench.manager.prepare_load(keys, "reader")
    assert plan.gds is not None
    assert plan.gds.positions == list(range(6))
    bench.manager.complete_load("reader", failed_reads={4: Outcome.FAILED})
    bench.check()
    assert bench.tiers[1].counters.hits == 0, "the engine computes everything"


def test_staged_loads_do_not_read() -> None:
    limits = ManagerLimits(pin_budget=4, reserve=0.0, queue=64)
    bench, _ = warmed(4, 16, limits=limits)
    assert bench.look(prefix(2)) is None
    (job,) = bench.step()
    bench.finish(job, Outcome.DONE)
    assert bench.look(prefix(2)) == 2
    assert bench.load(prefix(2)).gds is None
