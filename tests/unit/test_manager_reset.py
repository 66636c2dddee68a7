"""A reset makes everything a miss and gives no slot away that somebody may still touch."""

from __future__ import annotations

import pytest

from kvtier.testing.probes import count_steps
from kvtier.types import Outcome
from tests.support.fakes import FakeSlotStatus
from tests.support.workbench import Workbench, prefix


def test_after_a_reset_everything_is_a_miss_in_every_tier() -> None:
    bench = Workbench(4, 8, 8)
    bench.store(prefix(3))
    bench.settle()
    bench.manager.reset()
    bench.check()
    assert bench.look(prefix(3)) == 0
    assert [tier.slots.free for tier in bench.tiers] == [4, 8, 8]
    removed = {event.tier for event in bench.manager.take_events() if event.removed}
    assert removed == {0, 1, 2}


def test_slots_that_workers_may_touch_are_in_quarantine_until_all_is_acknowledged() -> None:
    slot_status = FakeSlotStatus(driven=True)
    bench = Workbench(4, 0, slot_status=slot_status)
    plan = bench.manager.prepare_store(prefix(2), "a")
    assert plan is not None
    bench.manager.reset()
    bench.check()
    assert bench.ram.slots.free == 2
    assert bench.manager.snapshot().tiers[0].quarantined == 2
    assert bench.manager.has_work()
    slot_status.set_generation(plan.slots[:1], plan.generation)
    slot_status.acknowledge(plan.slots[:1])
    bench.step()
    assert bench.ram.slots.free == 3
    slot_status.acknowledge(plan.slots[1:])
    bench.step()
    assert bench.ram.slots.free == 4
    assert not bench.manager.has_work()


def test_a_load_in_flight_keeps_its_slots_until_it_is_over() -> None:
    bench = Workbench(2, 0)
    bench.store(prefix(2))
    bench.settle()
    bench.slot_status.not_acknowledged = {0}
    bench.manager.prepare_load(prefix(1), "a")
    bench.manager.reset()
    bench.manager.complete_load("a")
    assert bench.ram.slots.free == 1
    bench.slot_status.not_acknowledged = set()
    bench.step()
    assert bench.ram.slots.free == 2


def test_a_promotion_in_flight_only_frees_slots_when_it_ends() -> None:
    bench = Workbench(4, 8)
    bench.manager.recover(1, zip(prefix(3), range(3), strict=True))
    bench.look(prefix(3))
    (job,) = bench.step()
    bench.manager.reset()
    bench.check()
    assert (bench.ram.slots.free, bench.tiers[1].slots.free) == (1, 5)
    assert bench.manager.snapshot().granted == 0
    bench.finish(job)
    assert (bench.ram.slots.free, bench.tiers[1].slots.free) == (4, 8)
    assert bench.look(prefix(3)) == 0


def test_a_demotion_in_flight_must_not_come_back_after_a_restart() -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(2))
    (job,) = bench.step()
    bench.manager.reset()
    bench.finish(job, Outcome.EXPIRED, settled=False)
    assert not bench.manager.has_work()
    assert (bench.ram.slots.free, bench.tiers[1].slots.free) == (2, 6)
    bench.finish(job)
    assert bench.manager.take_corrupt() == [(1, 0), (1, 1)]
    assert (bench.ram.slots.free, bench.tiers[1].slots.free) == (4, 8)
    assert bench.resident(1) == set()


def test_a_slot_is_free_when_its_job_and_its_workers_have_ended() -> None:
    for job_first in (True, False):
        bench = Workbench(1, 8)
        bench.store(prefix(1))
        (job,) = bench.step()
        bench.slot_status.not_acknowledged = {0}
        bench.manager.prepare_load(prefix(1), "a")
        bench.manager.reset()
        if job_first:
            bench.finish(job)
        else:
            bench.slot_status.not_acknowledged = set()
            bench.step()
        assert bench.ram.slots.free == 0
        bench.slot_status.not_acknowledged = set()
        bench.step()
        if not job_first:
            bench.finish(job)
        assert bench.ram.slots.free == 1


def test_chunks_queued_for_a_demotion_are_forgotten() -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(2))
    bench.manager.reset()
    assert bench.step() == []
    assert bench.ram.slots.free == 4


def test_a_dropped_chunk_that_waits_for_its_demotion_frees_its_slot() -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(2))
    bench.slot_status.not_loaded = {bench.ram.copies[prefix(1)[0]].slot}
    bench.load(prefix(2))
    assert bench.ram.slots.free == 2, "what waits to be sent keeps its slot"
    bench.manager.reset()
    bench.step()
    assert bench.ram.slots.free == 4
    assert not bench.manager.has_work()


def test_a_second_reset_leaves_the_quarantine_as_it_is() -> None:
    bench = Workbench(2, 0)
    bench.slot_status.not_acknowledged = {0}
    bench.manager.prepare_store(prefix(1), "a")
    bench.manager.reset()
    bench.manager.reset()
    bench.check()
    assert bench.ram.slots.free == 1
    bench.slot_status.not_acknowledged = set()
    bench.step()
    assert bench.ram.slots.free == 2


def test_requests_live_on_and_ask_afresh() -> None:
    bench = Workbench(4, 16)
    bench.manager.recover(1, zip(prefix(8), range(8), strict=True))
    bench.look(prefix(4), "granted")
    (job,) = bench.step()
    bench.finish(job)
    bench.look(prefix(8)[4:], "queued")
    bench.step()
    assert bench.manager.snapshot().waiting == 1
    bench.manager.reset()
    snapshot = bench.manager.snapshot()
    assert (snapshot.requests, snapshot.waiting, snapshot.granted) == (2, 0, 0)
    bench.store(prefix(2))
    assert bench.look(prefix(2), "granted") == 2
    bench.settle(started=["granted", "queued"])


def test_the_same_key_stored_after_a_reset_is_a_new_chunk() -> None:
    bench = Workbench(2, 0)
    bench.slot_status.not_acknowledged = {0}
    bench.manager.prepare_store(prefix(1), "a")
    bench.manager.reset()
    plan = bench.store(prefix(1), "b")
    assert plan is not None
    assert plan.slots == [1]
    bench.slot_status.not_acknowledged = set()
    bench.settle()
    assert bench.resident() == {*prefix(1)}
    assert bench.ram.slots.free == 1


def test_jobs_that_were_not_handed_out_yet_never_are() -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(3))
    bench.manager.end_step()
    bench.manager.reset()
    bench.check()
    assert bench.manager.take_jobs() == []
    assert [tier.slots.free for tier in bench.tiers] == [4, 8]
    assert not bench.manager.has_work()


def test_chunks_computed_before_a_reset_are_not_stored_after_it() -> None:
    bench = Workbench(8, 8)
    for req_id in ("started", "stored", "loaded", "new"):
        bench.manager.begin_request(req_id)
    bench.store(prefix(1), "stored")
    bench.settle()
    bench.manager.prepare_load(prefix(1), "loaded")
    bench.step(started=["started"])
    bench.manager.reset()
    for req_id in ("started", "stored", "loaded"):
        plan = bench.manager.prepare_store(prefix(2), req_id)
        assert plan is not None
        assert not plan.keys, req_id
    bench.step(preempted=["started"])
    for req_id, chunks in (("new", prefix(2)), ("started", prefix(3))):
        plan = bench.manager.prepare_store(chunks, req_id)
        assert plan is not None
        assert len(plan.keys) == len(chunks) - (req_id == "started") * 2
    bench.check()


def test_a_request_that_runs_again_after_a_preemption_has_kv_of_before_a_reset() -> None:
    bench = Workbench(8, 8)
    bench.manager.begin_request("a")
    bench.store(prefix(2), "a")
    bench.step(preempted=["a"])
    bench.step()  # it is scheduled again, which nobody says
    bench.manager.reset()
    plan = bench.manager.prepare_store(prefix(2), "a")
    assert plan is not None
    assert not plan.keys
    assert bench.look(prefix(2), "b") == 0


def full_bench(chunks: int, *, record_events: bool) -> Workbench:
    """Return tiers of the same size that hold this many chunks each."""
    bench = Workbench(2000, 2000, record_events=record_events)
    bench.manager.recover(1, [(key, slot) for slot, key in enumerate(prefix(chunks, of=1))])
    bench.store(prefix(chunks))
    bench.settle()
    return bench


@pytest.mark.untraced
@pytest.mark.parametrize("record_events", [False, True])
def test_a_reset_takes_as_many_steps_for_many_chunks_as_for_few(record_events: bool) -> None:
    steps = {
        chunks: count_steps(
            full_bench(chunks, record_events=record_events).manager.reset,
            packages={"kvtier"},
        )
        for chunks in (10, 1000)
    }
    assert steps[1000] == steps[10]


def test_the_chunks_that_a_reset_removed_are_freed_over_several_steps() -> None:
    bench = Workbench(4, 30_000, record_events=False)
    bench.manager.recover(1, [(key, slot) for slot, key in enumerate(prefix(30_000))])
    bench.manager.reset()
    steps = 0
    while not bench.manager.can_skip_step:
        bench.manager.end_step()
        steps += 1
    assert 3 <= steps <= 30
    assert bench.manager.take_events() == []


def test_the_part_of_a_store_that_is_not_complete_is_in_quarantine_after_a_reset() -> None:
    bench = Workbench(4, 0)
    plan = bench.manager.prepare_store(prefix(3), "a")
    assert plan is not None
    bench.manager.complete_store(plan.keys[:1])
    assert bench.manager.has_worker_jobs
    bench.slot_status.not_acknowledged = {*plan.slots}
    bench.manager.reset()
    bench.check()
    assert bench.ram.slots.free == 2
    bench.slot_status.not_acknowledged = set()
    bench.step()
    assert bench.ram.slots.free == 4
