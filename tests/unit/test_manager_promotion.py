"""Bringing chunks up for a request that waits."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.manager import GroupReach, ManagerLimits
from kvtier.types import Job, Outcome, Purpose, TransferResult
from tests.support.fakes import FakeSlotStatus
from tests.support.workbench import Workbench, prefix

BELOW = 8
"""Chunks of each prompt that the slower tier holds."""


def warmed(*capacities: int, prompts: int = 1, tier: int = 1, **options: Any) -> Workbench:
    """Return a bench whose tier number ``tier`` holds the heads of some prompts."""
    bench = Workbench(*capacities, **options)
    keys = [key for prompt in range(prompts) for key in prefix(BELOW, of=prompt)]
    bench.manager.recover(tier, zip(keys, range(len(keys)), strict=True))
    return bench


def limits(**values: Any) -> ManagerLimits:
    return ManagerLimits(**{"pin_budget": 4, "reserve": 0.0, "queue": 64, **values})


def asked(bench: Workbench, chunks: int, req_id: str = "reader", *, of: int = 0) -> Job:
    """Let a request ask for a prefix that is below; return the job it causes."""
    assert bench.look(prefix(chunks, of=of), req_id) is None
    (job,) = bench.step()
    return job


def test_a_chunk_in_a_slower_tier_is_promoted_and_then_a_hit() -> None:
    bench = warmed(4, 8)
    job = asked(bench, 3)
    assert (job.purpose, job.source, job.destination) == (Purpose.PROMOTE, "nvme", "ram")
    assert (job.keys, job.source_slots, job.destination_slots) == (
        prefix(3),
        [0, 1, 2],
        [0, 1, 2],
    )
    bench.finish(job)
    assert bench.look(prefix(4)) == 3
    plan = bench.load(prefix(3))
    assert bench.slot_status.published == list(zip(plan.slots, plan.generations, strict=True))
    assert bench.tiers[1].counters.hits == 3
    assert bench.resident(1) == {*prefix(BELOW)}, "the slower copy is kept"


def test_the_second_load_of_a_promoted_chunk_is_a_hit_of_ram() -> None:
    bench = warmed(4, 8)
    bench.finish(asked(bench, 1))
    assert bench.load(prefix(1)).origins == [1]
    assert bench.load(prefix(1)).origins == [0]
    assert (bench.tiers[1].counters.hits, bench.ram.counters.hits) == (1, 1)


def test_a_promoted_chunk_stays_until_it_is_loaded() -> None:
    bench = warmed(4, 8)
    bench.finish(asked(bench, 3))
    bench.manager.begin_request("writer")
    assert bench.store(prefix(2, of=9)) is None
    for _ in range(5):
        bench.settle()
        assert bench.look(prefix(3)) == 3
    bench.load(prefix(3))
    assert bench.manager.snapshot().granted == 0
    assert bench.store(prefix(2, of=9)) is not None


def test_resident_chunks_of_the_prefix_stay_while_the_rest_is_promoted() -> None:
    bench = warmed(4, 8)
    bench.store(prefix(1))
    bench.settle()
    assert bench.look(prefix(2)) is None
    (job,) = bench.step()
    assert job.keys == prefix(2)[1:]
    assert bench.manager.snapshot().granted == 2
    assert bench.ram.available == 2


@pytest.mark.parametrize(
    "outcome",
    [each for each in Outcome if each is not Outcome.DONE],
    ids=lambda each: each.value,
)
def test_a_promotion_that_does_not_arrive_is_a_miss_and_gives_its_slot_back(
    outcome: Outcome,
) -> None:
    bench = warmed(4, 8)
    bench.finish(asked(bench, 3), Outcome.DONE, outcome, Outcome.DONE)
    assert bench.look(prefix(3)) == 1
    assert bench.resident() == {prefix(3)[0], prefix(3)[2]}
    assert bench.ram.slots.free == 2
    failures = bench.tiers[1].counters
    assert failures.read_failed == (outcome in {Outcome.FAILED, Outcome.OVERWRITTEN})
    assert failures.expired == (outcome is Outcome.EXPIRED)
    assert failures.shut_out == (outcome is Outcome.REFUSED)
    assert failures.corrupt == (outcome is Outcome.CORRUPT)
    bench.step(started=["reader"])
    assert bench.manager.snapshot().granted == 0


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.EXPIRED, Outcome.REFUSED])
def test_a_chunk_that_could_not_be_read_was_of_no_use_there(outcome: Outcome) -> None:
    bench = Workbench(4, 3)
    bench.manager.recover(1, zip(prefix(3), range(3), strict=True))
    bench.finish(asked(bench, 3), Outcome.DONE, outcome, Outcome.DONE)
    bench.store(prefix(1, of=1))
    bench.settle()
    first, unread, third = prefix(3)
    assert bench.resident(1) == {first, third, *prefix(1, of=1)}, f"{unread!r} goes first"


def test_a_corrupt_chunk_leaves_the_slower_tier_for_good() -> None:
    bench = warmed(4, 8)
    bench.finish(asked(bench, 2), Outcome.DONE, Outcome.CORRUPT)
    assert prefix(2)[1] not in bench.tiers[1].copies
    assert bench.manager.take_corrupt() == [(1, 1)]
    assert bench.manager.take_corrupt() == []
    assert bench.look(prefix(2), "other") == 1


def test_a_deadline_answers_at_once_while_the_slot_stays_out_of_use() -> None:
    bench = warmed(2, 8)
    job = asked(bench, 2)
    bench.finish(job, Outcome.EXPIRED, settled=False)
    assert bench.look(prefix(2)) == 0
    bench.step(started=["reader"])
    assert bench.look(prefix(2), "other") == 0, "a late chunk is nothing to wait for"
    assert not bench.manager.has_work()
    assert bench.ram.available == 0
    bench.finish(job, Outcome.EXPIRED)
    assert bench.ram.slots.free == 2
    assert bench.manager.snapshot().jobs == 0
    assert bench.tiers[1].counters.expired == 2, "counted when its deadline passed"


def test_a_late_chunk_that_arrives_after_all_is_a_hit_for_the_next_request() -> None:
    bench = warmed(2, 8)
    job = asked(bench, 2)
    bench.finish(job, Outcome.EXPIRED, settled=False)
    bench.finish(job)
    bench.manager.apply(TransferResult(job.job_id, [Outcome.DONE] * 2))
    bench.check()
    assert bench.look(prefix(2), "other") == 2


def test_a_request_asks_for_late_chunks_only_up_to_them() -> None:
    bench = warmed(4, 8)
    late = asked(bench, 1, "a")
    bench.look(prefix(1), "b")
    bench.finish(late, Outcome.EXPIRED, settled=False)
    bench.step()
    assert bench.look(prefix(1), "b") == 0
    bench.finish(late)


def test_two_requests_share_one_promotion() -> None:
    bench = warmed(4, 8)
    bench.look(prefix(2), "a")
    bench.look(prefix(3), "b")
    first, second = bench.step()
    assert (first.keys, second.keys) == (prefix(2), prefix(3)[2:])
    assert bench.manager.snapshot().granted == 3
    bench.finish(first)
    assert bench.look(prefix(2), "a") == 2
    assert bench.look(prefix(3), "b") is None
    bench.load(prefix(2), "a")
    bench.finish(second)
    assert bench.look(prefix(3), "b") == 3


def test_a_chunk_that_is_being_stored_is_found_but_not_there_yet() -> None:
    bench = Workbench(4, 8)
    bench.manager.prepare_store(prefix(2), "writer")
    assert bench.look(prefix(2)) is None


def test_a_prefix_that_can_never_fit_the_budget_is_cut_to_its_head() -> None:
    bench = warmed(8, 8, limits=limits(pin_budget=3))
    job = asked(bench, 5)
    assert job.keys == prefix(3)
    bench.finish(job)
    assert bench.look(prefix(5)) == 3


def test_a_prefix_larger_than_ram_is_cut_to_what_is_free() -> None:
    bench = warmed(2, 8, limits=limits(pin_budget=8, max_queue_steps=1))
    assert asked(bench, 5).keys == prefix(2)


def test_a_chunk_behind_one_that_finds_no_slot_is_not_kept() -> None:
    bench = warmed(2, 16, limits=limits(max_queue_steps=1))
    bench.store([*prefix(1, of=7), prefix(3)[2]])
    bench.settle()
    bench.manager.prepare_load(prefix(1, of=7), "holder")
    assert bench.look(prefix(3)) is None
    assert bench.step() == []
    assert bench.manager.snapshot().granted == 0
    assert bench.look(prefix(3)) == 0


def test_the_budget_is_for_all_requests_and_first_come_is_first_served() -> None:
    bench = warmed(8, 32, prompts=3, limits=limits(pin_budget=4))
    for prompt, chunks in enumerate((3, 3, 1)):
        bench.look(prefix(chunks, of=prompt), f"r{prompt}")
    (first,) = bench.step()
    assert first.keys == prefix(3)
    assert bench.manager.snapshot().waiting == 3
    bench.finish(first)
    assert bench.step() == [], "the third would fit, but the second was first"
    bench.look(prefix(3), "r0")
    bench.load(prefix(3), "r0")
    second, third = bench.step()
    assert (second.keys, third.keys) == (prefix(3, of=1), prefix(1, of=2))


def test_patience_ends_and_the_request_takes_what_there_is() -> None:
    bench = warmed(8, 32, prompts=2, limits=limits(pin_budget=4, max_queue_steps=3))
    asked(bench, 3, "a")
    bench.look(prefix(3, of=1), "b")
    assert [len(bench.step()) for _ in range(3)] == [0, 0, 1]
    assert bench.manager.snapshot().granted == 4


def test_a_blocked_request_waits_for_room_that_pins_hold() -> None:
    bench = warmed(2, 16)
    bench.store(prefix(2, of=9))
    bench.settle()
    bench.manager.prepare_load(prefix(2, of=9), "other")
    bench.look(prefix(2))
    assert bench.step() == []
    assert bench.look(prefix(2)) is None
    bench.manager.complete_load("other")
    assert [job.keys for job in bench.step()] == [prefix(2)]


def test_an_aborted_request_ends_its_grants_and_cancels_its_own_jobs() -> None:
    bench = warmed(4, 8)
    bench.look(prefix(2), "a")
    bench.look(prefix(3)[2:], "b")
    first, second = bench.step()
    bench.look(prefix(3)[2:], "c")
    bench.step()
    bench.manager.end_request("a")
    bench.manager.end_request("b")
    assert bench.manager.take_cancels() == [first.job_id]
    assert bench.manager.take_cancels() == []
    bench.finish(first, Outcome.CANCELLED)
    bench.finish(second)
    assert bench.manager.snapshot().granted == 1
    bench.manager.end_request("c")
    assert (bench.manager.snapshot().granted, bench.ram.slots.free) == (0, 3)


def test_a_queued_or_asking_request_may_end() -> None:
    bench = warmed(4, 16, prompts=2)
    asked(bench, 4, "a")
    bench.look(prefix(2, of=1), "b")
    bench.step()
    bench.look(prefix(2, of=1), "c")
    for req_id in ("b", "c"):
        bench.manager.end_request(req_id)
    assert bench.step() == []


def test_a_preempted_request_asks_afresh() -> None:
    bench = warmed(4, 8)
    bench.finish(asked(bench, 3))
    bench.load(prefix(2))
    assert bench.manager.snapshot().granted == 0
    bench.step(preempted=["reader"])
    assert bench.look(prefix(4)) is None
    (job,) = bench.step()
    assert job.keys == prefix(4)[3:]


def test_a_request_that_starts_without_its_load_releases_its_grants() -> None:
    bench = warmed(4, 8)
    job = asked(bench, 3)
    bench.step(started=["reader"])
    assert bench.manager.snapshot().granted == 0
    assert bench.manager.take_cancels() == [job.job_id]
    bench.finish(job)
    assert bench.resident() == {*prefix(3)}


def test_a_request_that_finds_all_in_ram_is_granted_nothing() -> None:
    bench = warmed(4, 8)
    bench.store(prefix(2))
    bench.look(prefix(2))
    bench.settle()
    assert bench.manager.snapshot().granted == 0
    assert bench.look(prefix(2)) == 2


def test_a_corrupt_chunk_is_a_miss_for_a_queued_request() -> None:
    bench = warmed(4, 8)
    bench.look(prefix(1), "a")
    bench.look(prefix(3)[2:], "b")
    other, bad = bench.step()
    assert bench.look(prefix(3)) is None
    bench.finish(bad, Outcome.CORRUPT)
    (job,) = bench.step()
    assert job.keys == prefix(2)[1:]
    bench.finish(other)
    bench.finish(job)
    assert bench.look(prefix(3)) == 2


# -- three tiers -----------------------------------------------------------------------------


def test_the_fastest_slower_tier_is_read_with_one_job_per_tier() -> None:
    bench = warmed(4, 8, 8, tier=2)
    bench.manager.recover(1, [(prefix(1)[0], 5)])
    bench.look(prefix(3))
    nvme, remote = bench.step()
    assert (nvme.source, nvme.keys, nvme.source_slots) == ("nvme", prefix(1), [5])
    assert (remote.source, remote.keys) == ("remote", prefix(3)[1:])
    bench.finish(nvme)
    assert bench.look(prefix(3)) is None
    bench.finish(remote)
    assert bench.look(prefix(3)) == 3


def test_a_long_prefix_is_promoted_in_several_jobs_of_one_run_each() -> None:
    keys = prefix(300)
    limits = ManagerLimits(pin_budget=len(keys), reserve=0.0, queue=1024, batch=200)
    bench = Workbench(len(keys), len(keys), limits=limits)
    bench.manager.recover(1, [(key, slot) for slot, key in enumerate(keys)])
    assert bench.look(keys) is None
    jobs = bench.step()
    assert [len(job.keys) for job in jobs] == [200, 100]
    for job in jobs:
        assert list(job.source_slots) == list(
            range(job.source_slots[0], job.source_slots[-1] + 1)
        )
        bench.finish(job)
    assert bench.look(keys) == len(keys)
    assert bench.manager.snapshot().tiers[0].counters.misses == len(keys)


def test_the_wait_for_a_chunk_of_another_request_is_bounded() -> None:
    limits = ManagerLimits(pin_budget=4, reserve=0.0, queue=4, max_arrival_steps=3)
    bench = Workbench(4, 0, limits=limits, slot_status=FakeSlotStatus(driven=True))
    plan = bench.manager.prepare_store(prefix(2), "writer")
    assert plan is not None
    assert bench.look(prefix(2)) is None
    for _ in range(3):
        bench.step()
        assert bench.look(prefix(2)) is None
    bench.step()
    assert bench.look(prefix(2)) == 0


def resumed(bench: Workbench) -> None:
    """Let a request settle with grants and then run without loading, unannounced."""
    assert bench.look(prefix(4)) is None
    (job,) = bench.step()
    bench.finish(job, Outcome.FAILED, Outcome.DONE)
    assert bench.look(prefix(4)) == 0
    assert bench.manager.snapshot().granted == 3


def test_grants_end_when_a_request_is_no_longer_looked_up() -> None:
    limits = ManagerLimits(pin_budget=8, reserve=0.0, queue=8, max_idle_grant_steps=3)
    bench = warmed(8, 8, limits=limits)
    resumed(bench)
    for _ in range(3):
        bench.step()
        assert bench.manager.snapshot().granted == 3
    bench.step()
    assert bench.manager.snapshot().granted == 0
    assert bench.look(prefix(1)) is None, "it may ask afresh"


def test_only_chunks_that_arrived_count_as_promoted() -> None:
    bench = Workbench(4, 8)
    bench.manager.recover(1, zip(prefix(2), (0, 1), strict=True))
    bench.look(prefix(2))
    (job,) = bench.step()
    bench.finish(job, Outcome.DONE, Outcome.FAILED)
    assert bench.tiers[1].counters.promoted == 1


def test_of_several_groups_no_useless_chunk_is_promoted() -> None:
    both = [*prefix(4), *prefix(4, group=1)]
    for bound in (limits(pin_budget=6), limits(pin_budget=8, max_queue_steps=1, max_queue_s=0)):
        bench = Workbench(8, 16, limits=bound, groups=[GroupReach(1), GroupReach(1)])
        bench.manager.recover(1, zip(both, range(8), strict=True))
        bench.store(prefix(4, of=1))
        bench.settle()
        bench.manager.prepare_load(prefix(4, of=1), "other")
        assert bench.look(both) is None
        assert bench.step() == []
        assert bench.look(both) == 0
        assert bench.manager.snapshot().granted == 0


def test_promoted_chunks_of_an_earlier_engine_get_parents_and_depths() -> None:
    keys = prefix(3)
    bench = warmed(BELOW, BELOW, limits=limits())
    bench.finish(asked(bench, 3))
    for tier in bench.tiers:
        copies = [tier.copies[key] for key in keys]
        assert [copy.parent for copy in copies] == [None, *keys[:2]]
        assert [copy.depth for copy in copies] == [0, 1, 2]


def test_a_stuck_read_does_not_delay_other_requests() -> None:
    bench = warmed(8, 16, prompts=2, limits=limits())
    bench.finish(asked(bench, 2, "stuck"), Outcome.EXPIRED, settled=False)
    job = asked(bench, 3, of=1)
    assert job.keys == prefix(2, of=1), "all that fits beside it"
    bench.finish(job)
    assert bench.look(prefix(3, of=1)) == 2


def test_all_requests_that_wait_for_one_prefix_are_served_by_one_job() -> None:
    bench = warmed(BELOW, BELOW, limits=limits(pin_budget=BELOW))
    waiting = [f"reader{number}" for number in range(5)]
    for req_id in waiting:
        bench.look(prefix(BELOW), req_id)
    (job,) = bench.step()
    for req_id in waiting[2:]:
        bench.manager.end_request(req_id)
    bench.finish(job)
    for req_id in waiting[:2]:
        assert bench.look(prefix(BELOW), req_id) == BELOW
    bench.step(started=waiting)
    assert bench.manager.snapshot().granted == 0
