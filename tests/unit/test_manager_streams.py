"""Direct loads: a chunk on disk is a hit at once; its slot is reserved, its bytes awaited."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvtier.manager import NO_GENERATION, NO_SLOT, CostModel, LoadPlan, ManagerLimits
from kvtier.memory import ControlBlock
from kvtier.policies import CopyState
from kvtier.types import Job, Outcome, TransferResult
from tests.support.fakes import FakeSlotStatus
from tests.support.workbench import Workbench, prefix


def streaming(ram: int, *, below: int, budget: int | None = None, **changes: Any) -> Workbench:
    """Return a bench whose disk kept a prefix of ``below`` chunks, and whose RAM is empty."""
    limits = ManagerLimits(
        pin_budget=ram if budget is None else budget,
        reserve=0.0,
        queue=64,
        retained=ram,
        direct_loads=True,
    )
    bench = Workbench(ram, 64, limits=limits, **changes)
    bench.manager.recover(1, zip(prefix(below), range(below), strict=True))
    return bench


def begin(bench: Workbench, chunks: int, req_id: str = "reader") -> tuple[LoadPlan, list[Job]]:
    """Plan a load, and take the jobs as an engine must: at once."""
    plan = bench.manager.prepare_load(prefix(chunks), req_id)
    bench.check()
    return plan, bench.manager.take_jobs()


def test_a_chunk_on_disk_is_a_hit_at_once_and_its_load_promotes_it() -> None:
    bench = streaming(4, below=3)
    assert bench.look(prefix(3)) == 3
    assert bench.ram.slots.free == 4
    plan, (job,) = begin(bench, 3)
    assert list(job.destination_slots) == list(plan.slots)
    assert list(job.payload) == list(plan.generations)
    assert list(plan.origins) == [1, 1, 1]
    assert plan.wait_s == ManagerLimits(pin_budget=1, reserve=0, queue=1).load_timeout_s
    assert bench.slot_status.published == []
    bench.finish(job)
    assert bench.slot_status.published == list(zip(plan.slots, plan.generations, strict=True))
    assert bench.ram.available == 1
    bench.manager.complete_load("reader")
    bench.check()
    assert bench.resident() == {*prefix(3)}
    assert bench.ram.available == 4
    assert bench.look(prefix(3), "other") == 3


def test_a_slot_has_no_generation_while_its_next_chunk_is_on_its_way() -> None:
    """Or it might be loaded while it changes, or be taken for one that will not be filled."""
    control = ControlBlock(memoryview(bytearray(ControlBlock.nbytes(2, 1))), slots=2, ranks=1)
    bench = streaming(2, below=2, slot_status=cast("FakeSlotStatus", control))
    bench.manager.recover(1, zip(prefix(2, of=1), (8, 9), strict=True))
    without = [False, False]
    plan = LoadPlan((), (), ())
    for of in range(2):
        keys = prefix(2, of=of)
        assert bench.look(keys) == 2
        plan = bench.manager.prepare_load(keys, "reader")
        assert control.arrivals(0, plan.slots, plan.generations) == (without, without)
        (job,) = bench.manager.take_jobs()
        bench.finish(job)
        bench.manager.complete_load("reader")
    store = bench.manager.prepare_store(prefix(2, of=2), "writer")
    assert store is not None
    assert set(store.slots) == set(plan.slots)
    assert control.arrivals(0, plan.slots, plan.generations) == (without, without)


def test_a_lookup_alone_takes_no_slots_and_plans_no_jobs() -> None:
    bench = streaming(4, below=4)
    for _ in range(3):
        assert bench.look(prefix(4)) == 4
        assert bench.step() == []
    assert (bench.ram.slots.free, len(bench.ram.copies)) == (4, 0)
    assert bench.tiers[1].available == 64


def test_chunks_in_ram_load_from_there_beside_streamed_chunks() -> None:
    bench = streaming(4, below=3)
    bench.store(prefix(1))
    bench.step()
    assert bench.look(prefix(3)) == 3
    plan, jobs = begin(bench, 3)
    assert [len(job.keys) for job in jobs] == [2]
    assert list(plan.origins) == [0, 1, 1]


def test_the_worker_may_be_done_before_the_manager_heard_of_the_bytes() -> None:
    bench = streaming(4, below=2)
    bench.look(prefix(2))
    _, (job,) = begin(bench, 2)
    bench.manager.complete_load("reader")
    bench.check()
    assert bench.ram.available == 2
    bench.finish(job)
    assert bench.resident() == {*prefix(2)}
    assert bench.ram.available == 4


def test_a_prefix_larger_than_ram_waits_and_is_loaded_in_part() -> None:
    bench = streaming(2, below=8)
    assert bench.look(prefix(8)) is None
    (job,) = bench.step()
    bench.finish(job)
    assert bench.look(prefix(8)) == 2


def test_a_reservation_counts_what_the_request_has_in_ram_already() -> None:
    bench = streaming(3, below=4)
    bench.store(prefix(2))
    bench.settle()
    # Two of the three slots could be evicted, but the same request needs what is in them.
    assert bench.look(prefix(4)) is None


def test_chunks_that_a_lookup_finds_in_ram_make_no_room_for_its_reservation() -> None:
    bench = streaming(3, below=1)
    bench.store(prefix(4)[1:])
    bench.settle()
    assert bench.ram.available == 3
    assert bench.look(prefix(4)) is None
    (job,) = bench.step()
    bench.finish(job)
    assert bench.look(prefix(4)) == 3
    plan, jobs = begin(bench, 3)
    assert NO_SLOT not in plan.slots
    assert not jobs


def test_reservations_of_several_requests_of_a_step_add_up_and_end_with_it() -> None:
    bench = streaming(4, below=3)
    bench.manager.recover(1, zip(prefix(3, of=1), range(3, 6), strict=True))
    assert bench.look(prefix(3), "a") == 3
    assert bench.look(prefix(3, of=1), "b") is None
    bench.manager.end_request("b")
    bench.step()
    assert bench.look(prefix(3, of=1), "c") == 3


def test_reservations_and_streams_keep_to_the_pin_budget() -> None:
    bench = streaming(8, below=4, budget=5)
    bench.manager.recover(1, zip(prefix(3, of=1), range(4, 7), strict=True))
    bench.look(prefix(4), "a")
    _, (job,) = begin(bench, 4, "a")
    assert bench.look(prefix(3, of=1), "b") is None
    bench.manager.end_request("b")
    bench.finish(job)
    bench.manager.complete_load("a")
    bench.step()
    assert bench.look(prefix(3, of=1), "c") == 3


def test_asking_twice_in_a_step_reserves_once() -> None:
    bench = streaming(3, below=3)
    for _ in range(4):
        assert bench.look(prefix(3)) == 3


def test_a_chunk_that_another_load_promotes_is_awaited_and_read_once() -> None:
    bench = streaming(4, below=2)
    bench.look(prefix(2), "a")
    _, (job,) = begin(bench, 2, "a")
    assert bench.look(prefix(2), "b") is None
    assert bench.step() == []
    bench.finish(job)
    assert bench.look(prefix(2), "b") == 2


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CORRUPT, Outcome.REFUSED])
def test_a_chunk_that_does_not_come_fails_the_load_and_is_a_miss_for_its_request(
    outcome: Outcome,
) -> None:
    bench = streaming(4, below=3)
    bench.look(prefix(3))
    plan, (job,) = begin(bench, 3)
    bench.finish(job, Outcome.DONE, outcome, Outcome.DONE)
    bad = (plan.slots[1], plan.generations[1])
    assert bench.slot_status.lost == {bad}
    assert bench.ram.slots.free == 1, "a worker may still look at the slot"
    bench.slot_status.record_failed_loads([bad[0]], [bad[1]])
    bench.manager.complete_load("reader")
    bench.check()
    assert [tier.counters.hits for tier in bench.tiers] == [0, 1]
    assert bench.ram.counters.load_failed == 0, "it failed on its way up, and counts there"
    assert bench.ram.available == 4
    assert bench.look(prefix(3)) == 0
    found = bench.look(prefix(3), "other")
    assert found == (1 if outcome is Outcome.CORRUPT else 3)


def test_a_chunk_that_comes_after_the_worker_gave_up_is_a_hit_for_others() -> None:
    bench = streaming(4, below=2)
    bench.look(prefix(2))
    plan, (job,) = begin(bench, 2)
    bench.finish(job, Outcome.EXPIRED, settled=False)
    bench.slot_status.record_failed_loads(plan.slots, plan.generations)
    bench.manager.complete_load("reader")
    bench.check()
    assert bench.ram.counters.load_failed == 0
    assert bench.ram.available == 2, "a thread may still write the slots"
    assert bench.look(prefix(2), "other") == 0
    bench.finish(job)
    assert bench.look(prefix(2), "third") == 2
    assert bench.look(prefix(2)) == 0


@pytest.mark.parametrize("arrives_first", [True, False])
def test_a_chunk_that_came_too_late_for_one_load_is_loaded_by_the_next_and_stays(
    *, arrives_first: bool
) -> None:
    bench = streaming(4, below=2)
    bench.look(prefix(2))
    plan, (job,) = begin(bench, 2)
    bench.finish(job, Outcome.EXPIRED, settled=False)
    bench.slot_status.record_failed_loads(plan.slots, plan.generations)
    if arrives_first:
        bench.finish(job)
    bench.manager.complete_load("reader")
    if not arrives_first:
        bench.finish(job)
    assert bench.look(prefix(2), "other") == 2
    again = bench.load(prefix(2), "other")
    assert list(again.generations) == list(plan.generations), "they are the same bytes"
    assert bench.resident() == {*prefix(2)}
    assert bench.tiers[0].counters.hits + bench.tiers[1].counters.hits == 2
    assert bench.look(prefix(2), "other") == 2, "its load worked"
    assert bench.look(prefix(2)) == 0, "its own did not"


def test_an_expired_promotion_that_two_loads_awaited_is_kept_until_both_end() -> None:
    bench = streaming(4, below=1)
    assert bench.look(prefix(1), "a") == bench.look(prefix(1), "b") == 1
    plan, (job,) = begin(bench, 1, "a")
    assert begin(bench, 1, "b")[0].slots == plan.slots
    bench.finish(job, Outcome.EXPIRED, settled=False)
    bench.slot_status.record_failed_loads(plan.slots, plan.generations)
    bench.manager.complete_load("a")
    bench.manager.complete_load("b")
    assert bench.look(prefix(1), "b") == 0
    bench.finish(job)
    assert bench.look(prefix(1), "b") == 0
    assert bench.look(prefix(1), "c") == 1
    bench.load(prefix(1), "c")
    assert bench.resident() == {*prefix(1)}
    assert bench.look(prefix(1), "c") == 1


def test_a_chunk_that_came_too_late_stays_for_a_load_that_found_it_there_meanwhile() -> None:
    bench = streaming(4, below=1)
    bench.look(prefix(1), "a")
    plan, (job,) = begin(bench, 1, "a")
    bench.finish(job, Outcome.EXPIRED, settled=False)
    bench.slot_status.record_failed_loads(plan.slots, plan.generations)
    bench.finish(job)
    assert bench.look(prefix(1), "b") == 1
    assert begin(bench, 1, "b")[0].generations == plan.generations
    bench.manager.complete_load("a")
    bench.manager.complete_load("b")
    bench.check()
    assert bench.resident() == {*prefix(1)}
    assert bench.look(prefix(1), "c") == 1
    bench.load(prefix(1), "c")
    assert bench.look(prefix(1), "c") == 1, "its load worked"


def test_a_load_does_not_wait_for_a_store_in_progress() -> None:
    bench = streaming(4, below=2)
    assert bench.look(prefix(2)) == 2
    store = bench.manager.prepare_store(prefix(1), "writer")
    assert store is not None
    plan, _ = begin(bench, 2)
    assert plan.generations[0] == NO_GENERATION, "if the store fails nobody says so"
    assert plan.slots[0] == NO_SLOT
    bench.slot_status.not_stored = set(store.slots)
    bench.manager.complete_store(store.keys)
    bench.manager.complete_load("reader")
    bench.check()
    assert bench.look(prefix(2)) == 0


def test_reads_that_are_stuck_leave_the_rest_of_ram_to_others() -> None:
    bench = streaming(8, below=4, budget=4)
    bench.manager.recover(1, zip(prefix(4, of=1), range(4, 8), strict=True))
    bench.look(prefix(4), "a")
    plan, (job,) = begin(bench, 4, "a")
    bench.finish(job, Outcome.EXPIRED, settled=False)
    bench.slot_status.record_failed_loads(plan.slots, plan.generations)
    bench.manager.complete_load("a")
    assert bench.look(prefix(4, of=1), "b") is None
    assert bench.step() == []
    assert bench.ram.slots.free == 4
    bench.finish(job)
    bench.manager.end_request("b")
    assert bench.look(prefix(4, of=1), "c") == 4


def test_an_engine_that_loads_later_than_it_looked_up_gets_a_load_that_fails() -> None:
    bench = streaming(2, below=2)
    bench.look(prefix(2))
    bench.store(prefix(2, of=7), "writer")
    bench.manager.prepare_load(prefix(2, of=7), "holder")
    plan, jobs = begin(bench, 2)
    assert list(plan.slots) == [NO_SLOT] * 2
    assert list(plan.generations) == [NO_GENERATION] * 2
    assert jobs == []
    bench.manager.complete_load("reader")
    bench.check()
    assert [tier.counters.hits for tier in bench.tiers] == [0, 0]
    assert bench.look(prefix(2)) == 0


def test_no_more_is_reserved_than_arrives_in_time() -> None:
    cost_model = CostModel(
        tiers=2, chunk_nbytes=1 << 20, chunk_tokens=16, recompute_s_per_token=1.0
    )
    bench = streaming(32, below=24, cost_model=cost_model)
    cost_model.record_job(77, 1, 2)
    cost_model.record_result(
        TransferResult(77, [Outcome.DONE] * 2, seconds=2.0), timeout_s=10.0, now=0.0
    )
    assert bench.look(prefix(5), "a") == 5
    assert bench.look(prefix(24), "b") is None
    _, jobs = begin(bench, 5, "a")
    assert bench.look(prefix(5), "b") is None
    assert sum(len(job.keys) for job in bench.step()) == 3
    assert sum(len(job.keys) for job in jobs) == 5


def test_a_request_that_ends_while_it_streams_leaves_nothing_behind() -> None:
    bench = streaming(4, below=2)
    bench.look(prefix(2))
    _, (job,) = begin(bench, 2)
    bench.manager.end_request("reader")
    bench.step()
    bench.finish(job)
    bench.manager.complete_load("reader")
    bench.check()
    assert bench.ram.available == 4
    assert all(copy.state == CopyState.RESIDENT for copy in bench.ram.copies.values())


def test_a_reset_while_chunks_stream_keeps_their_slots_until_job_and_worker_are_done() -> None:
    bench = streaming(4, below=2)
    bench.look(prefix(2))
    plan, (job,) = begin(bench, 2)
    bench.slot_status.not_acknowledged = set(plan.slots)
    bench.manager.reset()
    bench.check()
    assert bench.look(prefix(2), "other") == 0
    bench.finish(job)
    bench.step()
    assert bench.ram.slots.free == 2
    bench.slot_status.not_acknowledged = set()
    bench.step()
    assert bench.ram.slots.free == 4
    bench.manager.complete_load("reader")
    bench.check()


def test_a_reset_frees_the_slot_of_a_chunk_that_had_failed_before_it() -> None:
    bench = streaming(4, below=1)
    bench.look(prefix(1))
    plan, (job,) = begin(bench, 1)
    bench.finish(job, Outcome.FAILED)
    bench.slot_status.not_acknowledged = set(plan.slots)
    bench.manager.reset()
    bench.step()
    assert bench.ram.slots.free == 3
    bench.slot_status.not_acknowledged = set()
    bench.step()
    assert bench.ram.slots.free == 4


def test_a_tier_out_of_service_is_passed_over_at_once() -> None:
    bench = streaming(4, below=2)
    bench.manager.set_out_of_service({1})
    assert bench.look(prefix(2)) == 0
    bench.manager.set_out_of_service(())
    assert bench.look(prefix(2), "other") == 2


def test_a_tier_out_of_service_is_passed_over_by_those_who_wait_for_their_turn() -> None:
    bench = Workbench(4, 8)
    bench.manager.recover(1, zip(prefix(2), range(2), strict=True))
    assert bench.look(prefix(2)) is None
    bench.manager.set_out_of_service({1})
    assert bench.look(prefix(2), "other") == 0
    assert bench.step() == []
    assert bench.look(prefix(2)) == 0


def test_a_load_that_may_not_pay_is_staged() -> None:
    cost_model = CostModel(
        tiers=2, chunk_nbytes=1 << 20, chunk_tokens=16, recompute_s_per_token=1e-3
    )
    bench = streaming(4, below=2, cost_model=cost_model)
    assert bench.look(prefix(2)) == 2
    cost_model.record_job(77, 1, 1)
    cost_model.record_result(
        TransferResult(77, [Outcome.DONE], seconds=60.0), timeout_s=90.0, now=0.0
    )
    bench.step()
    assert bench.look(prefix(2)) is None
