"""What the service adds to the manager: hints that outlive requests, and resets that fail."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import override

from kvtier.errors import ClosedError
from kvtier.manager import NO_SLOT, ManagerLimits, Prompt
from kvtier.policies import ChunkCopy, Evictable, PolicyContext
from kvtier.policies.eviction import Lru
from kvtier.types import Job, Outcome, TransferResult
from tests.support.stepped import SteppedCache
from tests.support.workbench import prefix
from tests.unit.warned import warnings_in


@dataclass(frozen=True)
class Context:
    req_id: str
    kv_transfer_params: Mapping[str, Any] | None = None


class Clock:
    """The process's clock, which stands still."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


KEPT = {"kvtier": {"retain_s": 600}}


class Never(Lru):
    """Picks no victim."""

    @override
    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        return []


def make_cache(*, direct_loads: bool = False, shared: bool = False) -> SteppedCache:
    limits = ManagerLimits(
        pin_budget=8, reserve=0.0, queue=1024, retained=4, direct_loads=direct_loads
    )
    return SteppedCache(8, 16, limits=limits, shared=shared)


def store(cache: SteppedCache, context: Context, chunks: int, *, ends_first: bool) -> None:
    """Store as vLLM does: the last stores of a request complete after it ended."""
    service = cache.service
    service.begin_request(context)
    plan = service.prepare_store(prefix(chunks), context.req_id)
    assert plan is not None
    if ends_first:
        service.end_request(context)
    cache.finish(plan.slots, stored=plan.generation)
    service.complete_store(plan.keys, context)
    if not ends_first:
        service.end_request(context)


def look(cache: SteppedCache, chunks: int, req_id: str) -> int | None:
    """Return how many of a prompt's chunks can be loaded now, None if it has to wait."""
    return cache.service.lookup(req_id, Prompt([prefix(chunks)], 0, chunks))


def is_idle(cache: SteppedCache) -> bool:
    return cache.service.is_idle


def step(cache: SteppedCache) -> None:
    cache.tick()
    cache.service.end_step(started=(), preempted=())


def later_step(cache: SteppedCache, clock: Clock) -> None:
    """End a step in which notices are due."""
    clock.now_s += 2
    step(cache)


def retained(cache: SteppedCache) -> int:
    return cache.service.statistics().retained_chunks


@pytest.mark.parametrize("ends_first", [False, True])
def test_the_last_chunks_of_a_request_are_kept_as_it_asked(ends_first: bool) -> None:
    cache = make_cache()
    store(cache, Context("a", KEPT), 3, ends_first=ends_first)
    assert retained(cache) == 3
    store(cache, Context("a"), 5, ends_first=ends_first)
    assert retained(cache) == 3, "the hints ended with their request"


def test_a_request_of_an_id_that_is_used_again_has_its_own_hints() -> None:
    cache = make_cache()
    service = cache.service
    first, second = Context("a", KEPT), Context("a")
    service.begin_request(first)
    plan = service.prepare_store(prefix(2), "a")
    assert plan is not None
    service.end_request(first)
    service.begin_request(second)
    cache.finish(plan.slots, stored=plan.generation)
    service.complete_store(plan.keys, first)
    assert retained(cache) == 2
    service.end_request(second)
    store(cache, second, 4, ends_first=False)
    assert retained(cache) == 2


def test_a_retained_chunk_needs_one_step_a_second_only() -> None:
    cache = make_cache()
    service = cache.service
    store(cache, Context("a", KEPT), 2, ends_first=True)
    for _ in range(3):
        list(service.take_events())
        service.end_step(started=(), preempted=())
    assert service.is_idle, "so most steps that only generate are passed over"
    assert retained(cache) == 2
    assert not service.is_idle, "the engine has asked for figures, as it does once a second"


def test_a_wait_for_the_shared_tier_needs_no_step() -> None:
    cache = make_cache(shared=True)
    step(cache)
    cache.engine.hangs = True
    for _ in range(3):
        assert look(cache, 2, "a") is None
        assert is_idle(cache)
    cache.engine.hangs = False
    cache.tick()
    assert look(cache, 2, "a") is None, "the found chunks are being promoted"
    assert not is_idle(cache)
    step(cache)
    assert look(cache, 2, "a") == 2


def test_a_question_of_a_later_lookup_in_a_step_leaves_the_steps_work() -> None:
    cache = make_cache(shared=True)
    store(cache, Context("writer"), 2, ends_first=True)
    step(cache)
    step(cache)
    assert look(cache, 2, "a") == 2
    assert cache.service.lookup("b", Prompt([prefix(2, of=1)], 0, 2)) is None
    assert not is_idle(cache), "the hit of this step ends with it"


def test_a_request_does_not_wait_for_a_question_that_could_not_be_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache(shared=True)

    def fail(*_: Job) -> None:
        raise ZeroDivisionError("a bug of the transfer engine")

    monkeypatch.setattr(cache.engine, "submit", fail)
    assert look(cache, 2, "a") == 0
    assert look(cache, 2, "a") == 0
    assert cache.service.statistics().internal_errors == 1


def hold_in_nvme(cache: SteppedCache, chunks: int) -> None:
    """Let the slower tier alone hold the first chunks, as after a restart."""
    cache.bench.manager.recover(1, [(key, slot) for slot, key in enumerate(prefix(chunks))])


def test_chunks_that_were_promoted_for_a_load_are_retained_too() -> None:
    cache = make_cache(direct_loads=True)
    service, context = cache.service, Context("b", KEPT)
    hold_in_nvme(cache, 2)
    service.begin_request(context)
    assert look(cache, 2, "b") == 2
    plan = service.prepare_load(prefix(2), "b")
    service.end_request(context)
    for _ in range(4):
        step(cache)
    cache.slot_status.acknowledge(plan.slots)
    service.complete_load(prefix(2), context)
    assert retained(cache) == 2


def test_a_load_whose_chunks_cannot_be_retained_is_still_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache()
    service, context = cache.service, Context("b", KEPT)
    store(cache, Context("a"), 2, ends_first=False)
    for _ in range(4):
        step(cache)
    service.begin_request(context)
    assert look(cache, 2, "b") == 2
    plan = service.prepare_load(prefix(2), "b")
    cache.slot_status.acknowledge(plan.slots)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cache.bench.manager, "retain", fail)
    service.complete_load(prefix(2), context)
    service.end_request(context)
    assert cache.bench.ram.available == 8
    assert service.statistics().internal_errors == 1


def waiting_for_nvme(cache: SteppedCache, context: Context) -> None:
    """Let a request ask for two chunks that only the slower tier has."""
    hold_in_nvme(cache, 2)
    cache.service.begin_request(context)
    assert look(cache, 2, context.req_id) is None


def test_a_load_is_waited_for_from_the_first_question_to_its_end() -> None:
    cache = make_cache()
    service = cache.service
    waiting_for_nvme(cache, Context("b"))
    for _ in range(4):
        step(cache)
    assert look(cache, 2, "b") == 2
    plan = service.prepare_load(prefix(2), "b")
    assert service.take_load_waits() == []
    cache.slot_status.acknowledge(plan.slots)
    service.complete_load(prefix(2), Context("b"))
    (waited_s,) = service.take_load_waits()
    assert 0 < waited_s < 60
    service.end_request(Context("b"))
    assert service.take_load_waits() == []


def test_a_wait_without_a_load_lasts_until_the_request_starts() -> None:
    cache = make_cache()
    waiting_for_nvme(cache, Context("b"))
    cache.service.end_step(started=("b",), preempted=())
    assert len(cache.service.take_load_waits()) == 1
    cache.service.end_step(started=("c",), preempted=())
    assert cache.service.take_load_waits() == []


def test_a_request_that_ended_while_it_waited_is_not_counted() -> None:
    cache = make_cache()
    waiting_for_nvme(cache, Context("b"))
    cache.service.end_request(Context("b"))
    cache.service.begin_request(Context("b"))
    cache.service.end_step(started=("b",), preempted=())
    assert cache.service.take_load_waits() == []


def test_a_failed_reset_disables_the_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache()
    store(cache, Context("a"), 2, ends_first=False)
    assert look(cache, 2, "b") == 2

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cache.bench.manager, "reset", fail)
    cache.service.reset_cache()
    assert "nothing is loaded or stored any more" in caplog.text
    for _ in range(2):
        assert look(cache, 2, "b") == 0
        plan = cache.service.prepare_store(prefix(4), "b")
        assert plan is not None
        assert not plan.keys
        cache.service.end_step(started=(), preempted=())


@pytest.mark.parametrize("is_over", [True, False])
def test_a_reset_that_a_tier_has_not_finished_is_not_called_durable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_over: bool
) -> None:
    cache = make_cache()
    monkeypatch.setattr(cache.engine, "exclusively_each", lambda *_, **__: is_over)
    assert cache.service.reset_cache() is is_over
    assert ("reset again" in caplog.text) is not is_over


@pytest.mark.parametrize("broken", ["poll", "take_corrupt"])
def test_whatever_fails_before_in_a_reset_the_tiers_are_reset(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    cache = make_cache()
    reached: list[str] = []

    def note(actions: Mapping[str, Any], *, timeout_s: float) -> bool:
        reached.extend(actions)
        return True

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cache.engine, "exclusively_each", note)
    monkeypatch.setattr(cache.engine if broken == "poll" else cache.bench.manager, broken, fail)
    assert cache.service.reset_cache()
    assert reached == [cache.bench.tiers[1].name]
    assert cache.service.statistics().internal_errors == 1


def test_a_load_that_can_neither_be_planned_nor_given_up_is_a_load_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache()
    store(cache, Context("a"), 2, ends_first=False)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug of a policy")

    monkeypatch.setattr(cache.bench.manager, "prepare_load", fail)
    monkeypatch.setattr(cache.bench.manager, "fail_request", fail)
    plan = cache.service.prepare_load(prefix(2), "b")
    assert list(plan.slots) == [NO_SLOT] * 2
    assert cache.service.statistics().internal_errors == 2


def test_events_that_cannot_be_taken_neither_end_the_engine_nor_keep_it_stepping(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache()
    store(cache, Context("a"), 2, ends_first=False)

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cache.bench.manager, "take_events", fail)
    for _ in range(16):
        step(cache)
        assert not cache.service.take_events()
    assert "ZeroDivisionError: a bug" in caplog.text
    assert cache.service.statistics().internal_errors == 16
    assert cache.bench.manager.has_events
    assert not cache.service.has_pending_work()


def test_the_first_error_of_each_type_in_each_call_is_logged_and_all_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache()
    service = cache.service
    errors = iter([ValueError("first"), ValueError("again"), KeyError("other")])

    def fail(*_: object) -> None:
        raise next(errors)

    def fail_in_step(**_: object) -> None:
        raise ValueError("elsewhere")

    monkeypatch.setattr(cache.bench.manager, "lookup", fail)
    monkeypatch.setattr(cache.bench.manager, "end_step", fail_in_step)
    for _ in range(3):
        assert look(cache, 2, "a") == 0
    service.end_step(started=(), preempted=())
    logged = [line for line in caplog.text.splitlines() if line.startswith(("Val", "Key"))]
    assert logged == ["ValueError: first", "KeyError: 'other'", "ValueError: elsewhere"]
    assert service.statistics().internal_errors == 4


def test_jobs_that_cannot_be_submitted_are_jobs_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache()
    service, manager = cache.service, cache.bench.manager
    manager.recover(1, [(key, slot) for slot, key in enumerate(prefix(3))])

    def fail(*jobs: Job) -> None:
        raise ClosedError("its thread died")

    def abandon(job: Job) -> None:
        assert manager.has_work(), "its slots are its own until then"
        abandoned.append(job)

    abandoned: list[Job] = []
    monkeypatch.setattr(cache.engine, "submit", fail)
    monkeypatch.setattr(cache.engine, "abandon", abandon)
    service.begin_request(Context("a"))
    answers = []
    for _ in range(16):
        answers.append(look(cache, 1, "a"))
        step(cache)
    assert (answers[0], answers[-1]) == (None, 0)
    assert [job.keys for job in abandoned] == [prefix(1)]
    service.end_request(Context("a"))
    step(cache)
    assert not service.has_pending_work()


def test_jobs_that_may_have_been_queued_before_an_error_keep_their_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache()
    service, manager = cache.service, cache.bench.manager
    manager.recover(1, [(key, slot) for slot, key in enumerate(prefix(3))])

    def fail(*jobs: Job) -> None:
        queued.extend(jobs)
        raise RuntimeError("a bug behind the first job")

    queued: list[Job] = []
    monkeypatch.setattr(cache.engine, "submit", fail)
    service.begin_request(Context("a"))
    assert look(cache, 1, "a") is None
    step(cache)
    service.end_request(Context("a"))
    step(cache)
    assert cache.bench.ram.slots.free == 7, "a thread may be writing into one"
    assert service.statistics().internal_errors == 1
    (job,) = queued
    manager.apply(TransferResult(job.job_id, [Outcome.DONE]))
    assert not manager.has_work()


def test_a_tier_forgets_a_corrupt_chunk_before_its_slot_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = ManagerLimits(pin_budget=8, reserve=0.0, queue=1024)
    cache = SteppedCache(8, 1, limits=limits)
    service = cache.service
    cache.bench.manager.recover(1, [(prefix(1)[0], 0)])
    jobs: list[Job] = []
    done: list[tuple[str, list[int]]] = []

    def submit(*given: Job) -> None:
        jobs.extend(given)
        done.extend((job.purpose.name, list(job.destination_slots)) for job in given)

    def forget(slots: Sequence[int]) -> None:
        done.append(("forget", list(slots)))

    monkeypatch.setattr(cache.engine, "submit", submit)
    monkeypatch.setattr(cache.tiers[0], "forget", forget)
    service.begin_request(Context("reader"))
    assert look(cache, 1, "reader") is None
    step(cache)
    plan = service.prepare_store(prefix(1, of=1), "writer")
    assert plan is not None
    cache.finish(plan.slots, stored=plan.generation)
    service.complete_store(plan.keys, Context("writer"))
    cache.engine.posted.append(TransferResult(jobs[0].job_id, [Outcome.CORRUPT]))
    step(cache)
    assert done[1:] == [("forget", [0]), ("DEMOTE", [0])]


def test_a_tier_that_cannot_forget_a_corrupt_chunk_delays_no_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache(direct_loads=True)
    service = cache.service
    hold_in_nvme(cache, 2)
    submitted: list[Job] = []
    tried: list[int] = []

    def forget(slots: Sequence[int]) -> None:
        tried.extend(slots)
        raise ZeroDivisionError("a bug of a tier")

    monkeypatch.setattr(cache.engine, "submit", lambda *jobs: submitted.extend(jobs))
    monkeypatch.setattr(cache.bench.manager, "take_corrupt", lambda: [(1, 5), (1, 6)])
    monkeypatch.setattr(cache.tiers[0], "forget", forget)
    service.begin_request(Context("a"))
    assert look(cache, 2, "a") == 2
    service.prepare_load(prefix(2), "a")
    assert [job.keys for job in submitted] == [prefix(2)]
    assert tried == [5, 6]
    assert service.statistics().internal_errors == 2


@pytest.mark.usefixtures("clock")
def test_the_last_drops_are_logged_before_the_cache_closes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = ManagerLimits(pin_budget=8, reserve=0.0, queue=2, backlog=4)
    cache = SteppedCache(8, 16, limits=limits)
    step(cache)
    cache.engine.hangs = True
    store(cache, Context("a"), 6, ends_first=False)
    step(cache)
    assert "keep up" not in caplog.text
    cache.engine.hangs = False
    cache.service.shutdown()
    assert "does not keep up: 2 new chunks" in caplog.text


def figures(cache: SteppedCache, name: str) -> list[int]:
    return [getattr(tier, name) for tier in cache.service.statistics().tiers]


def test_write_through_to_a_disk_that_hangs_drops_the_newest_counts_and_warns_once(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    limits = ManagerLimits(pin_budget=8, reserve=0.0, queue=2, backlog=4)
    cache = SteppedCache(8, 16, limits=limits)
    cache.engine.hangs = True
    store(cache, Context("a"), 6, ends_first=False)
    assert warnings_in(caplog) == []
    later_step(cache, clock)
    (warning,) = warnings_in(caplog)
    assert "tier nvme does not keep up: 2 new chunks" in warning
    assert "were not copied to it and will not outlive RAM" in warning
    store(cache, Context("b"), 8, ends_first=False)
    later_step(cache, clock)
    assert figures(cache, "dropped_chunks") == [0, 4]
    assert warnings_in(caplog) == [warning], "the others are told when the minute is over"
    cache.engine.hangs = False
    for _ in range(8):
        step(cache)
    assert cache.bench.resident(1) == set(prefix(4))


def test_write_on_evict_to_a_disk_that_hangs_refuses_the_newest_counts_and_warns_once(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    cache = SteppedCache(8, 16, write="evict")
    service = cache.service
    cache.engine.hangs = True
    store(cache, Context("a"), 8, ends_first=False)
    service.begin_request(Context("b"))
    later = prefix(4, of=1)
    offers = 0
    while (plan := service.prepare_store(later, "b")) is None:
        step(cache)
        offers += 1
    assert not plan.keys
    assert offers == 16
    assert warnings_in(caplog) == []
    later_step(cache, clock)
    (warning,) = warnings_in(caplog)
    assert "tier ram is full of chunks that wait for a slower tier" in warning
    assert "4 new chunks" in warning
    assert "were not stored at all" in warning
    assert figures(cache, "refused_chunks") == [4, 0]
    assert figures(cache, "dropped_chunks") == [4, 0]
    service.prepare_store(later, "nobody, who is not asked to wait")
    later_step(cache, clock)
    assert figures(cache, "dropped_chunks") == [8, 0]
    assert warnings_in(caplog) == [warning], "the others are told when the minute is over"
    cache.engine.hangs = False
    for _ in range(4):
        step(cache)
    plan = service.prepare_store(later, "b")
    assert plan is not None
    assert plan.keys == later


def test_a_store_larger_than_ram_is_refused_without_a_word_about_the_disk(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    cache = SteppedCache(8, 16, write="evict")
    plan = cache.service.prepare_store(prefix(12), "a")
    assert plan is not None
    assert len(plan.keys) == 8
    later_step(cache, clock)
    assert figures(cache, "refused_chunks") == [4, 0]
    assert figures(cache, "dropped_chunks") == [0, 0]
    assert warnings_in(caplog) == []


def test_a_policy_that_picks_no_victim_is_warned_of_once_and_the_cache_goes_on(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache()
    cache.bench.ram.eviction = Never(8)
    keys = prefix(16)
    store(cache, Context("a"), 8, ends_first=False)
    for _ in range(3):
        later_step(cache, clock)
    assert look(cache, 8, "b") == 8
    assert not warnings_in(caplog)
    plan = cache.service.prepare_store(keys[8:], "c")
    assert plan is not None
    assert plan.keys == keys[8:]
    for _ in range(3):
        later_step(cache, clock)
    name = f"{Never.__module__}:Never"
    (warning,) = [line for line in warnings_in(caplog) if name in line]
    assert warning.startswith(f"eviction policy {name} picks too few victims although more ")
