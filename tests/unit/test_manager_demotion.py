"""Demotions: when a chunk is stored, and before RAM needs its slot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.keys import ChunkKey
from kvtier.manager import ManagerLimits
from kvtier.policies import Admission, ChunkCopy, PolicyContext
from kvtier.types import Outcome, Purpose
from tests.support.workbench import Workbench, prefix


def limits(*, reserve: float = 0.0, queue: int = 64) -> ManagerLimits:
    return ManagerLimits(pin_budget=8, reserve=reserve, queue=queue)


class Choosy(Admission):
    """Lets nothing but prompt 0 into slower tiers."""

    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        return copy.key.startswith(b"0.")


def test_no_job_has_more_chunks_than_one_may_have() -> None:
    bounds = ManagerLimits(pin_budget=8, reserve=0.5, queue=64, batch=4)
    bench = Workbench(20, 40, write="evict", limits=bounds)
    bench.store(prefix(20))
    bench.manager.end_step()
    assert [len(job.keys) for job in bench.manager.take_jobs()] == [4, 4, 2]


# -- write-through ---------------------------------------------------------------------------


def test_with_write_through_a_stored_chunk_is_demoted_at_the_end_of_the_step() -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(2))
    assert bench.ram.available == 2, "what must still go down is no victim"
    assert bench.manager.has_work()
    (job,) = bench.step()
    assert (job.purpose, job.source, job.destination, job.keys) == (
        Purpose.DEMOTE,
        "ram",
        "nvme",
        prefix(2),
    )
    assert bench.resident(1) == set()
    bench.finish(job)
    assert bench.resident(1) == {*prefix(2)}
    assert (bench.ram.available, bench.ram.dirty) == (4, 0)


def test_with_write_through_every_slower_tier_gets_it_from_ram() -> None:
    bench = Workbench(4, 8, 8)
    bench.store(prefix(1))
    nvme, remote = bench.step()
    assert (nvme.destination, remote.destination) == ("nvme", "remote")
    bench.finish(nvme)
    assert (bench.ram.dirty, bench.ram.available) == (1, 3)
    bench.finish(remote)
    assert (bench.ram.dirty, bench.ram.available) == (0, 4)


def test_a_chunk_that_a_slower_tier_has_is_not_written_again() -> None:
    bench = Workbench(4, 8)
    bench.manager.recover(1, [(prefix(1)[0], 3)])
    bench.store(prefix(1))
    assert bench.step() == []
    assert bench.ram.dirty == 0


@pytest.mark.parametrize(
    "outcome",
    [each for each in Outcome if each not in {Outcome.DONE, Outcome.MISSING}],
    ids=lambda each: each.value,
)
def test_a_demotion_that_failed_is_counted_as_lost_and_the_chunk_stays_a_hit(
    outcome: Outcome,
) -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(2))
    (job,) = bench.step()
    bench.finish(job, outcome, Outcome.DONE)
    assert bench.resident(1) == {prefix(2)[1]}
    assert bench.look(prefix(2)) == 2
    assert (bench.ram.counters.lost, bench.ram.dirty) == (1, 0)
    counters = bench.tiers[1].counters
    failed = {Outcome.FAILED, Outcome.CORRUPT, Outcome.OVERWRITTEN}
    assert counters.failed == (outcome in failed)
    assert counters.expired == (outcome is Outcome.EXPIRED)
    assert counters.shut_out == (outcome is Outcome.REFUSED)
    assert bench.ram.counters.demoted == 1
    assert bench.tiers[1].slots.free == 7


def test_a_late_demotion_makes_room_in_the_queue_once() -> None:
    bench = Workbench(8, 16, limits=limits(queue=2))
    bench.store(prefix(6))
    (stuck,) = bench.step()
    assert bench.step() == []
    bench.finish(stuck, Outcome.EXPIRED, settled=False)
    (beside,) = bench.step()
    bench.finish(stuck)
    assert bench.step() == [], "it has had its place back already"
    bench.finish(beside)
    (last,) = bench.step()
    assert [len(job.keys) for job in (stuck, beside, last)] == [2, 2, 2]


def test_a_chunk_dropped_while_it_waited_is_not_demoted() -> None:
    bench = Workbench(4, 8, limits=limits(queue=1))
    bench.store(prefix(2))
    (job,) = bench.step()
    plan = bench.manager.prepare_load(prefix(2), "reader")
    bench.slot_status.not_loaded = {plan.slots[1]}
    bench.manager.complete_load("reader")
    bench.finish(job)
    assert bench.step() == []
    assert bench.resident() == bench.resident(1) == {*prefix(1)}
    assert bench.ram.available == 4
    assert not bench.manager.has_work()


def test_a_late_demotion_keeps_both_slots_until_it_is_settled() -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(1))
    (job,) = bench.step()
    bench.finish(job, Outcome.EXPIRED, settled=False)
    assert (bench.ram.available, bench.tiers[1].available) == (3, 7)
    assert not bench.manager.has_work(), "a stuck job is nothing to wait for"
    bench.finish(job, Outcome.EXPIRED)
    assert (bench.ram.available, bench.tiers[1].available) == (4, 8)


def test_a_late_demotion_takes_nothing_of_the_pin_budget() -> None:
    """Its slot in RAM has a chunk that is a hit."""
    bench = Workbench(4, 8)
    bench.manager.recover(1, zip(prefix(4)[1:], range(3), strict=True))
    bench.store(prefix(1))
    (job,) = bench.step()
    bench.finish(job, Outcome.EXPIRED, settled=False)
    assert bench.look(prefix(4)) is None
    (promotion,) = bench.step()
    assert promotion.keys == prefix(4)[1:]
    assert bench.manager.snapshot().granted == 4


def test_no_more_chunks_are_on_their_way_than_the_queue_takes() -> None:
    bench = Workbench(8, 8, limits=limits(queue=3))
    bench.store(prefix(5))
    (first,) = bench.step()
    assert first.keys == prefix(3)
    assert bench.step() == []
    bench.finish(first)
    (second,) = bench.step()
    assert second.keys == prefix(5)[3:]


def test_a_chunk_without_a_slot_in_a_slower_tier_is_lost_and_evictable() -> None:
    bench = Workbench(4, 2)
    bench.store(prefix(3))
    (job,) = bench.step()
    assert job.keys == prefix(2)
    assert (bench.ram.counters.lost, bench.tiers[1].counters.refused) == (1, 1)
    bench.finish(job)
    assert (bench.ram.dirty, bench.ram.available) == (0, 4)


def test_without_a_slot_in_a_slower_tier_nothing_is_sent_and_nothing_waits() -> None:
    bench = Workbench(4, 0)
    bench.store(prefix(3))
    bench.settle()
    assert (bench.ram.counters.lost, bench.ram.available) == (3, 4)


def test_a_full_slower_tier_makes_room_by_its_own_order() -> None:
    bench = Workbench(4, 3)
    bench.store(prefix(3))
    bench.settle()
    bench.store(prefix(1, of=1))
    bench.settle()
    assert bench.resident(1) == {*prefix(2), *prefix(1, of=1)}


def test_chunks_that_an_admission_refuses_are_not_dirty() -> None:
    bench = Workbench(4, 8, conditions=[Choosy(capacity=12)])
    bench.store([*prefix(1), *prefix(1, of=1)])
    (job,) = bench.step()
    assert job.keys == prefix(1)
    assert bench.ram.available == 3


# -- write on evict --------------------------------------------------------------------------


def evicting(*capacities: int, reserve: float = 0.0, queue: int = 64) -> Workbench:
    return Workbench(*capacities, write="evict", limits=limits(reserve=reserve, queue=queue))


def test_with_write_on_evict_nothing_moves_while_the_reserve_is_free() -> None:
    bench = evicting(4, 8, reserve=0.5)
    bench.store(prefix(2))
    assert bench.step() == []
    assert (bench.ram.dirty, bench.ram.available) == (2, 2)


def test_the_reserve_is_freed_ahead_of_need_deepest_first() -> None:
    bench = evicting(4, 8, reserve=0.5)
    bench.store(prefix(3))
    (job,) = bench.step()
    assert job.keys == prefix(3)[2:]
    assert bench.step() == [], "it is on its way"
    bench.finish(job)
    assert bench.resident() == {*prefix(2)}
    assert bench.resident(1) == {*prefix(3)[2:]}
    assert bench.ram.counters.evicted == 1


def test_a_victim_that_is_looked_up_is_a_hit_and_stays() -> None:
    bench = evicting(4, 8, reserve=0.5)
    bench.store(prefix(3))
    (job,) = bench.step()
    assert bench.look(prefix(3)) == 3
    bench.finish(job)
    assert bench.resident() == {*prefix(3)}
    assert bench.resident(1) == {*prefix(3)[2:]}
    assert bench.ram.counters.evicted == 0


def test_a_store_that_found_no_room_is_made_room_for() -> None:
    bench = evicting(4, 8)
    bench.manager.begin_request("a")
    bench.store(prefix(4))
    assert bench.store(prefix(2, of=1), "a") is None
    bench.settle()
    assert bench.store(prefix(2, of=1), "a") is not None
    assert bench.resident(1) == {*prefix(4)[2:]}


def test_a_victim_that_is_loaded_stays() -> None:
    bench = evicting(2, 8, reserve=0.5)
    bench.store(prefix(2))
    (job,) = bench.step()
    bench.manager.prepare_load(prefix(2), "a")
    bench.finish(job)
    assert bench.resident() == {*prefix(2)}
    bench.manager.complete_load("a")
    assert bench.ram.dirty == 1
    assert bench.ram.available == 1


def test_a_victim_that_is_pinned_without_a_use_stays() -> None:
    bench = evicting(2, 8, reserve=0.5)
    bench.store(prefix(2))
    (job,) = bench.step()
    copy = bench.ram.copies[prefix(2)[1]]
    bench.ram.pin([copy])
    bench.finish(job)
    assert copy not in bench.ram.leaving
    bench.ram.unpin([copy])
    assert bench.resident() == {*prefix(2)}


def test_a_leaving_chunk_that_did_not_arrive_is_lost_and_makes_room() -> None:
    bench = evicting(2, 8, reserve=0.5)
    bench.store(prefix(2))
    (job,) = bench.step()
    bench.finish(job, Outcome.FAILED)
    assert bench.resident() == {*prefix(1)}
    assert (bench.ram.counters.lost, bench.ram.slots.free) == (1, 1)


def test_a_promoted_chunk_is_evicted_without_being_written_again() -> None:
    bench = evicting(2, 8, reserve=0.5)
    bench.manager.recover(1, [(prefix(1)[0], 0)])
    bench.store(prefix(1))
    bench.store(prefix(1, of=1))
    assert bench.step() == []
    assert bench.ram.available == 1
    bench.store(prefix(1, of=2))
    assert bench.resident() == {*prefix(1, of=1), *prefix(1, of=2)}


def test_a_clean_victim_goes_at_once_when_the_reserve_is_short() -> None:
    bench = evicting(3, 8, reserve=0.67)
    bench.manager.recover(1, [(prefix(1)[0], 0)])
    bench.store(prefix(1))
    bench.store(prefix(2, of=1))
    (job,) = bench.step()
    assert job.keys == prefix(2, of=1)[1:]
    assert bench.resident() == {*prefix(2, of=1)}


def test_a_chunk_just_promoted_outlives_colder_ones_that_must_be_copied() -> None:
    bench = evicting(4, 8, reserve=0.25)
    bench.manager.recover(1, [(prefix(1)[0], 0)])
    bench.store(prefix(2, of=1))
    bench.look(prefix(1))
    (up,) = bench.step()
    bench.finish(up)
    bench.load(prefix(1))
    bench.store(prefix(1, of=2))
    (down,) = bench.step()
    coldest = prefix(2, of=1)[1:]
    assert down.keys == coldest, "the coldest goes, though another needs no copying"
    bench.finish(down)
    assert bench.resident() == {*prefix(1, of=1), *prefix(1), *prefix(1, of=2)}


def test_a_clean_victim_whose_lower_copy_is_gone_is_copied_again() -> None:
    bench = evicting(2, 1, reserve=0.5)
    bench.manager.recover(1, [(prefix(1)[0], 0)])
    bench.store(prefix(1))
    assert bench.ram.dirty == 0
    lower = bench.tiers[1]
    lower.drop(lower.copies[prefix(1)[0]])
    bench.store(prefix(1, of=1))
    (job,) = bench.step()
    assert job.keys == prefix(1)
    bench.finish(job)
    assert (bench.resident(1), bench.ram.counters.lost) == ({*prefix(1)}, 0)


def test_a_victim_counts_as_a_use_of_its_copy_in_the_slower_tier() -> None:
    bench = evicting(2, 2, reserve=0.5)
    bench.manager.recover(1, [(prefix(1)[0], 0), (prefix(1, of=1)[0], 1)])
    bench.store(prefix(1))
    bench.store(prefix(1, of=2))
    assert bench.step() == [], "it left without being copied"
    bench.store(prefix(1, of=3))
    bench.settle()
    assert bench.resident(1) == {*prefix(1), *prefix(1, of=2)}


def test_a_victim_that_an_admission_refuses_is_lost() -> None:
    conditions = [Choosy(capacity=10)]
    bench = Workbench(2, 8, write="evict", conditions=conditions, limits=limits(reserve=1.0))
    bench.store([*prefix(1), *prefix(1, of=1)])
    (job,) = bench.step()
    assert job.keys == prefix(1)
    assert bench.resident() == {*prefix(1)}
    assert bench.ram.counters.lost == 1


def test_victims_that_the_queue_does_not_take_wait_for_the_next_step() -> None:
    bench = evicting(4, 8, reserve=1.0, queue=1)
    bench.store(prefix(4))
    sent: list[ChunkKey] = []
    for _ in range(4):
        (job,) = bench.step()
        sent += job.keys
        assert bench.step() == []
        bench.finish(job)
    assert set(sent) == {*prefix(4)}
    assert bench.ram.slots.free == 4


def test_three_tiers_demote_victims_and_the_last_one_evicts() -> None:
    bench = evicting(2, 2, 2, reserve=0.5)
    for prompt in range(6):
        bench.store(prefix(1, of=prompt))
        bench.settle()
    resident = [sorted(bench.resident(tier)) for tier in range(3)]
    assert resident == [prefix(1, of=5), prefix(1, of=4), prefix(1, of=2) + prefix(1, of=3)]
    assert [tier.counters.lost for tier in bench.tiers] == [0, 0, 0]


def test_a_middle_tier_without_a_reserve_is_made_room_in_on_demand() -> None:
    bench = evicting(2, 2, 8)
    bench.manager.begin_request("a")
    for prompt in range(3):
        while bench.store(prefix(2, of=prompt), "a") is None:
            bench.settle()
    bench.manager.flush()
    bench.settle()
    bench.store(prefix(2, of=3), "a")
    bench.settle()
    assert bench.tiers[2].counters.stored > 0


def test_a_corrupt_source_found_by_a_demotion_is_dropped() -> None:
    bench = evicting(1, 1, 2, reserve=1.0)
    bench.store(prefix(1))
    (down,) = bench.step()
    bench.finish(down)
    (further,) = bench.step()
    assert (further.source, further.destination) == ("nvme", "remote")
    bench.finish(further, Outcome.CORRUPT)
    assert bench.manager.take_corrupt() == [(1, 0)]
    assert bench.tiers[1].counters.corrupt == 1
    assert not any(bench.resident(tier) for tier in range(3))
    assert bench.tiers[1].slots.free == 1


# -- shutting down ---------------------------------------------------------------------------


def test_flush_demotes_every_dirty_chunk_and_keeps_it_in_ram() -> None:
    bench = evicting(4, 8)
    bench.store(prefix(3))
    assert bench.step() == []
    bench.manager.flush()
    bench.manager.flush()
    bench.settle()
    assert bench.resident(1) == {*prefix(3)}
    assert bench.resident() == {*prefix(3)}
    assert bench.ram.dirty == 0
    assert not bench.manager.has_work()


@pytest.mark.parametrize("kept_by", ["deadline", "request", "load"])
def test_flush_demotes_chunks_that_are_pinned_in_ram(kept_by: str) -> None:
    bounds = ManagerLimits(pin_budget=4, reserve=0.0, queue=64, retained=4)
    bench = Workbench(4, 8, write="evict", limits=bounds)
    bench.manager.recover(1, [(prefix(3)[2], 0)])
    bench.store(prefix(2))
    if kept_by == "deadline":
        assert bench.manager.retain(prefix(2), 1e9) == 2
    elif kept_by == "request":
        bench.look(prefix(3))
        bench.settle()
        assert bench.manager.snapshot().granted == 3
    else:
        bench.look(prefix(2))
        bench.manager.prepare_load(prefix(2), "reader")
    bench.manager.flush()
    (down,) = bench.manager.take_jobs()
    bench.manager.flush()
    assert bench.manager.take_jobs() == [], "it is on its way"
    bench.finish(down)
    bench.manager.flush()
    assert not bench.manager.has_work()
    assert bench.resident(1) >= {*prefix(2)}
    assert bench.ram.dirty == 0


def test_flush_after_write_through_has_nothing_to_add() -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(2))
    bench.manager.flush()
    (job,) = bench.manager.take_jobs()
    bench.finish(job)
    bench.manager.flush()
    assert bench.manager.take_jobs() == []


# -- surviving a restart ---------------------------------------------------------------------


def test_recovered_chunks_are_hits_and_the_least_recently_used_leave_first() -> None:
    bench = Workbench(2, 3)
    assert bench.manager.recover(1, zip(prefix(3), (2, 0, 1), strict=True)) == 3
    bench.store(prefix(1, of=1))
    bench.settle()
    assert bench.resident(1) == {*prefix(3)[1:], *prefix(1, of=1)}


def slots_of(bench: Workbench, tier: int) -> Sequence[int]:
    return sorted(copy.slot for copy in bench.tiers[tier].copies.values())


@pytest.mark.parametrize("recovered", [False, True])
def test_a_chunk_that_only_a_middle_tier_has_is_demoted_from_there(
    recovered: bool,
) -> None:
    bench = Workbench(4, 4, 16, write="evict", limits=limits())
    first = prefix(4, of=0)
    if recovered:
        bench.manager.recover(1, zip(first, range(4), strict=True))
    else:
        bench.store(first)
    for prompt in range(1, 6):
        while bench.store(prefix(4, of=prompt)) is None:
            bench.settle()
        bench.settle()
    assert {*first} <= bench.resident(2)
    assert [tier.counters.lost for tier in bench.tiers] == [0, 0, 0]


def test_a_recovered_chunk_owes_nothing_to_a_slower_tier_that_has_it_too() -> None:
    bench = Workbench(4, 4, 16, write="evict", limits=limits())
    both, alone = prefix(2, of=0), prefix(2, of=1)
    bench.manager.recover(2, zip(both, range(2), strict=True))
    bench.manager.recover(1, zip([*both, *alone], range(4), strict=True))
    assert bench.tiers[1].dirty == len(alone)


def test_recovered_chunks_keep_their_slots() -> None:
    bench = Workbench(2, 4)
    bench.manager.recover(1, [(prefix(1)[0], 2)])
    bench.store(prefix(2, of=1))
    bench.settle()
    assert slots_of(bench, 1) == [0, 1, 2]


def test_a_tier_that_hangs_does_not_keep_the_engine_stepping_for_ever() -> None:
    limits = ManagerLimits(pin_budget=4, reserve=0.0, queue=2)
    bench = Workbench(4, 8, limits=limits)
    bench.store(prefix(4))
    (stuck,) = bench.step()
    assert bench.step() == [], "the queue is full"
    bench.finish(stuck, Outcome.EXPIRED, settled=False)
    (refused,) = bench.step()
    bench.finish(refused, Outcome.REFUSED)
    assert bench.step() == []
    assert not bench.manager.has_work()
    assert bench.ram.counters.lost == 2
    bench.finish(stuck)
    assert bench.resident(1) == {*prefix(2)}
