"""Demoting victims to free slots while the slower tier lacks free slots itself."""

from __future__ import annotations

from kvtier.keys import ChunkKey
from kvtier.manager import ManagerLimits
from kvtier.types import Job, Outcome, Purpose
from tests.support.workbench import Workbench, prefix
from tests.unit.test_manager_progress import Exclusive


def evicting(*capacities: int, reserve: float, queue: int = 64) -> Workbench:
    limits = ManagerLimits(pin_budget=8, reserve=reserve, queue=queue)
    return Workbench(*capacities, write="evict", limits=limits)


def test_victims_wait_while_every_slower_slot_is_being_written() -> None:
    bench = evicting(4, 1, reserve=0.5)
    bench.store(prefix(4))
    (first,) = bench.step()
    assert first.keys == prefix(4)[3:]
    assert bench.step() == [], "the one slot below is being written"
    assert (bench.ram.counters.lost, bench.ram.counters.evicted) == (0, 0)
    assert bench.resident() == {*prefix(4)}
    bench.finish(first)
    (second,) = bench.step()
    assert second.keys == [prefix(4)[2]]
    bench.finish(second)
    assert bench.resident(1) == {prefix(4)[2]}
    assert bench.ram.counters.lost == 0


def test_a_victim_that_had_to_wait_is_still_the_next_to_go() -> None:
    bench = evicting(4, 8, reserve=0.75, queue=1)
    bench.store(prefix(4))
    sent: list[ChunkKey] = []
    for _ in range(3):
        (job,) = bench.step()
        for _ in range(3):
            assert bench.step() == [], "the queue is full; nobody is picked and put back"
        sent += job.keys
        bench.finish(job)
    assert sent == prefix(4)[:0:-1], "the deepest first, however often it had to wait"


def test_no_slower_copy_is_evicted_for_a_slot_that_a_promotion_is_about_to_free() -> None:
    bench = Workbench(
        2,
        2,
        placement=Exclusive(tiers=2, write="evict"),
        limits=ManagerLimits(pin_budget=2, reserve=0.5, queue=64),
    )
    below = prefix(1, of=1) + prefix(1, of=2)
    bench.manager.recover(1, zip(below, (0, 1), strict=True))
    bench.manager.begin_request("reader")
    assert bench.look(below[:1]) is None
    (promotion,) = bench.step()
    assert promotion.purpose is Purpose.PROMOTE
    bench.store(prefix(1))
    assert bench.step() == [], "its victim waits for the slot of the chunk on its way up"
    assert below[1] in bench.resident(1)
    assert bench.ram.counters.lost == 0
    bench.finish(promotion)
    (demotion,) = bench.step()
    assert demotion.keys == prefix(1)


def test_nothing_waits_for_a_slower_tier_without_slots() -> None:
    bench = evicting(2, 0, reserve=0.5)
    bench.store(prefix(2))
    assert bench.step() == []
    assert bench.ram.counters.lost == 1
    assert bench.ram.slots.free == 1


def dropped_while_on_its_way_down() -> tuple[Workbench, Job]:
    """Return a bench whose one chunk left RAM before the job that brings it down ended."""
    bench = evicting(2, 4, reserve=1.0)
    bench.store(prefix(1))
    (first,) = bench.step()
    plan = bench.manager.prepare_load(prefix(1), "reader")
    bench.slot_status.record_failed_loads(plan.slots, plan.generations)
    bench.manager.complete_load("reader")
    assert bench.resident() == set(), "a worker could not load it"
    return bench, first


def test_a_victim_that_is_being_demoted_is_not_sent_again() -> None:
    bench, first = dropped_while_on_its_way_down()
    bench.store(prefix(1))
    assert bench.step() == [], "or two jobs would write it to two slots"
    assert bench.resident() == set()
    bench.finish(first)
    assert bench.resident(1) == {*prefix(1)}
    assert not bench.manager.has_work()


def test_a_victim_whose_demotion_fails_is_lost_once() -> None:
    bench, first = dropped_while_on_its_way_down()
    bench.store(prefix(1))
    assert bench.step() == []
    bench.finish(first, Outcome.FAILED)
    assert bench.ram.counters.lost == 1
    assert bench.resident() == bench.resident(1) == set()
    bench.store(prefix(1))
    bench.settle()
    assert bench.resident(1) == {*prefix(1)}


def test_a_manager_steps_on_while_an_eviction_makes_room_for_a_demotion() -> None:
    limits = ManagerLimits(pin_budget=3, reserve=0.34, queue=8)
    bench = Workbench(3, 1, 0, write="evict", limits=limits)
    bench.store(prefix(2, of=1))
    bench.step()
    bench.store(prefix(1, of=2))
    for job in bench.step():
        bench.finish(job)
    bench.step()
    bench.store(prefix(1, of=3))
    assert not bench.step(), "the tier below makes room in this step, and is found full before"
    assert not bench.manager.can_skip_step
    (job,) = bench.step()
    assert (job.source, job.destination) == ("ram", bench.tiers[1].name)
    bench.finish(job)
    bench.step()
    assert bench.manager.can_skip_step
