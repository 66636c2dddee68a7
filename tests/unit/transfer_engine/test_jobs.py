"""Jobs: their order, deadlines, outcomes, and when a tier gets none."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from kvtier.keys import make_key
from kvtier.os.wakeups import LoopWaker
from kvtier.types import Job, Outcome, Purpose
from tests.unit.transfer_engine.scripted import (
    CHUNK_NBYTES,
    IDS,
    MakeEngine,
    Scripted,
    job,
    outcomes,
    wait_for,
)
from tests.unit.warned import warnings_in


def test_a_job_ends_in_one_settled_result_with_an_outcome_per_chunk(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    work = job(chunks=3)
    engine.submit(work)
    assert wait_for(engine, work) == {work.job_id: ([Outcome.DONE] * 3, True)}
    assert engine.poll() == []
    stats = engine.statistics()["nvme", "ram"]
    assert (stats.jobs, stats.nbytes, stats.queued_bytes) == (1, 3 * CHUNK_NBYTES, 0)


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.FAILED])
def test_a_chunk_that_is_lost_is_named_as_an_operator_may_ask_for_it(
    make_engine: MakeEngine,
    route: Scripted,
    caplog: pytest.LogCaptureFixture,
    outcome: Outcome,
) -> None:
    engine = make_engine()
    keys = [make_key(bytes([chunk]) * 32, chunk) for chunk in range(3)]
    work = job(chunks=3)._replace(keys=keys)
    route.answers[work.job_id] = [Outcome.DONE, outcome, outcome]
    engine.submit(work)
    wait_for(engine, work)
    warned = warnings_in(caplog)
    named = "chunk 0101010101010101/1 and 1 more failed"
    assert warned == [f"job {work.job_id}, nvme -> ram: {named}: scripted"]


def test_the_urgent_job_starts_first(make_engine: MakeEngine, route: Scripted) -> None:
    engine = make_engine()
    first, slow, urgent = job(), job(Purpose.STORE), job(Purpose.LOAD)
    gate = route.hold(first)
    engine.submit(first)
    assert route.entered[first.job_id].wait(10)
    engine.submit(slow)
    engine.submit(urgent)
    gate.set()
    wait_for(engine, first, slow, urgent)
    assert route.began == [first.job_id, urgent.job_id, slow.job_id]


def test_a_large_job_is_not_overtaken_by_small_ones_for_which_there_is_room(
    make_engine: MakeEngine, route: Scripted
) -> None:
    """There may always be some, until the large one's deadline has passed."""
    engine = make_engine(running_bytes=2 * CHUNK_NBYTES)
    running, large, small, beside = job(), job(chunks=2), job(), job(Purpose.DEMOTE)
    gate = route.hold(running)
    engine.submit(running)
    assert route.entered[running.job_id].wait(10)
    engine.submit(large, small, beside)
    wait_for(engine, beside)  # by then the others were looked at
    assert route.began == [running.job_id, beside.job_id]
    gate.set()
    wait_for(engine, large, small)
    assert route.began[2:] == [large.job_id, small.job_id]


def test_a_full_queue_refuses_and_never_blocks(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine(queued_bytes=2 * CHUNK_NBYTES)
    held, waiting, refused = job(), job(), job()
    route.hold(held)
    engine.submit(held)
    engine.submit(waiting)
    engine.submit(refused)
    assert wait_for(engine, refused) == {refused.job_id: ([Outcome.REFUSED], True)}
    assert engine.statistics()["nvme", "ram"].refused == 1


def test_one_job_larger_than_the_queue_is_taken_when_the_queue_is_empty(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(queued_bytes=CHUNK_NBYTES)
    large = job(chunks=8)
    engine.submit(large)
    assert wait_for(engine, large) == {large.job_id: ([Outcome.DONE] * 8, True)}


def test_a_deadline_that_passes_in_the_queue_settles_the_job_unstarted(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine()
    held, late = job(), job(timeout_s=0.01)
    route.hold(held)
    engine.submit(held)
    engine.submit(late)
    assert wait_for(engine, late) == {late.job_id: ([Outcome.EXPIRED], True)}
    assert late.job_id not in route.began


def test_a_deadline_that_passes_while_running_frees_the_waiter_but_not_the_slots(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine()
    stuck = job(timeout_s=0.01)
    gate = route.hold(stuck)
    engine.submit(stuck)
    assert engine.wait_any(timeout_s=10)
    assert outcomes(engine.poll()) == {stuck.job_id: ([Outcome.EXPIRED], False)}
    assert not engine.wait([stuck.job_id], timeout_s=0.01)
    gate.set()
    assert wait_for(engine, stuck) == {stuck.job_id: ([Outcome.DONE], True)}
    assert engine.statistics()["nvme", "ram"].expired == 1


def test_an_unexpected_error_fails_the_job_and_the_engine_lives_on(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine()
    broken, fine = job(chunks=2), job()
    route.answers[broken.job_id] = ZeroDivisionError("a bug")
    engine.submit(broken)
    engine.submit(fine)
    seen = wait_for(engine, broken, fine)
    assert seen[broken.job_id] == ([Outcome.FAILED] * 2, True)
    assert seen[fine.job_id] == ([Outcome.DONE], True)


def test_a_cancelled_job_that_waits_is_dropped_and_one_that_runs_is_not(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine()
    running, waiting = job(), job()
    gate = route.hold(running)
    engine.submit(running)
    assert route.entered[running.job_id].wait(10)
    engine.submit(waiting)
    engine.cancel(waiting.job_id)
    engine.cancel(running.job_id)
    assert wait_for(engine, waiting) == {waiting.job_id: ([Outcome.CANCELLED], True)}
    gate.set()
    assert wait_for(engine, running) == {running.job_id: ([Outcome.DONE], True)}


def fail(_: Job) -> NoReturn:
    raise RuntimeError("broken")


def test_a_route_that_cannot_release_workers_loses_no_result(
    make_engine: MakeEngine, route: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "abandon", fail)
    engine = make_engine(queued_bytes=2 * CHUNK_NBYTES)
    held, waiting, refused, beside = job(), job(), job(), job()
    gate = route.hold(held)
    engine.submit(held)
    engine.submit(waiting, refused, beside)
    expected = ([Outcome.REFUSED], True)
    seen = wait_for(engine, refused, beside)
    assert seen == {refused.job_id: expected, beside.job_id: expected}
    gate.set()
    wait_for(engine, held, waiting)

    failing = job()
    with monkeypatch.context() as patch:
        patch.setattr(route, "run", fail)
        engine.submit(failing)
        assert wait_for(engine, failing) == {failing.job_id: ([Outcome.FAILED], True)}


def test_a_route_that_cannot_release_workers_keeps_no_tier_paused(
    make_engine: MakeEngine, route: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "abandon", fail)
    engine = make_engine()
    held, later = job(), job()
    acted = threading.Event()

    async def act() -> None:
        acted.set()

    gate = route.hold(held)
    engine.submit(held)
    assert route.entered[held.job_id].wait(10)
    assert not engine.exclusively_each({"ram": act}, timeout_s=0.01)
    engine.submit(later)
    gate.set()
    wait_for(engine, held, later)
    assert acted.is_set()


def test_a_tier_that_keeps_failing_is_taken_out_of_service(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine(breaker_failures=2, breaker_backoff_s=1000.0)
    for _ in range(2):
        failing = job()
        route.answers[failing.job_id] = Outcome.FAILED
        engine.submit(failing)
        wait_for(engine, failing)
    refused, other = job(), job(Purpose.DEMOTE)
    engine.submit(refused)
    engine.submit(other)
    seen = wait_for(engine, refused, other)
    assert seen[refused.job_id] == ([Outcome.REFUSED], True)
    assert seen[other.job_id] == ([Outcome.DONE], True)
    assert engine.statistics()["nvme", "ram"].out_of_service


def test_failures_of_a_tier_that_is_out_of_service_are_not_logged(
    make_engine: MakeEngine, route: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(breaker_failures=2, breaker_backoff_s=0.0)
    first, second, *probes, last = [job() for _ in range(6)]
    for work in (first, second, *probes, last):
        route.answers[work.job_id] = Outcome.DONE if work is last else Outcome.FAILED
        engine.submit(work)
        wait_for(engine, work)
    warned = warnings_in(caplog)
    lost = "chunk 00/0 failed: scripted"
    assert warned == [
        f"job {first.job_id}, nvme -> ram: {lost}",
        f"job {second.job_id}, nvme -> ram: {lost}",
        "nvme -> ram is out of service after repeated failures; retrying every 0.0 s",
        "nvme -> ram is in service again",
    ]


def test_a_probe_that_hangs_is_not_logged_either(
    make_engine: MakeEngine, route: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(breaker_failures=1, breaker_backoff_s=0.0)
    failing, probe = job(), job(timeout_s=0.01)
    route.answers[failing.job_id] = Outcome.FAILED
    engine.submit(failing)
    wait_for(engine, failing)
    route.hold(probe)
    engine.submit(probe)
    assert engine.wait_any(timeout_s=10)
    assert outcomes(engine.poll()) == {probe.job_id: ([Outcome.EXPIRED], False)}
    assert "no answer" not in caplog.text
    assert caplog.text.count("out of service") == 1


def test_a_corrupt_chunk_does_not_count_against_the_medium(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine(breaker_failures=1, breaker_backoff_s=1000.0)
    for answer in (Outcome.CORRUPT, Outcome.DONE):
        work = job()
        route.answers[work.job_id] = answer
        engine.submit(work)
        assert wait_for(engine, work) == {work.job_id: ([answer], True)}


def test_a_cancelled_job_does_not_reset_the_breaker(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine(breaker_failures=2, breaker_backoff_s=1000.0)
    for answer in (Outcome.FAILED, Outcome.CANCELLED, Outcome.FAILED):
        work = job(chunks=2)
        route.answers[work.job_id] = answer
        engine.submit(work)
        assert wait_for(engine, work) == {work.job_id: ([answer] * 2, True)}
    assert engine.statistics()["nvme", "ram"].out_of_service


def test_a_probe_that_was_given_up_leaves_its_turn_to_the_next_job(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine(breaker_failures=1, breaker_backoff_s=0.0)
    for answer in (Outcome.FAILED, Outcome.CANCELLED, Outcome.DONE):
        work = job()
        route.answers[work.job_id] = answer
        engine.submit(work)
        assert wait_for(engine, work) == {work.job_id: ([answer], True)}
    assert not engine.statistics()["nvme", "ram"].out_of_service


def test_a_job_that_works_after_its_deadline_does_not_make_up_for_being_late(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine(breaker_failures=1, breaker_backoff_s=1000.0)
    late = job(timeout_s=0.01)
    gate = route.hold(late)
    engine.submit(late)
    assert engine.wait_any(timeout_s=10)
    assert outcomes(engine.poll()) == {late.job_id: ([Outcome.EXPIRED], False)}
    gate.set()
    assert wait_for(engine, late) == {late.job_id: ([Outcome.DONE], True)}
    assert engine.statistics()["nvme", "ram"].out_of_service


def test_jobs_that_expire_behind_one_that_hangs_count_against_the_tier(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine(breaker_failures=3, breaker_backoff_s=1000.0)
    stuck = job(timeout_s=0.01)
    route.hold(stuck)
    engine.submit(stuck)
    assert engine.wait_any(timeout_s=10)
    behind = [job(timeout_s=0.01) for _ in range(2)]
    for late in behind:
        engine.submit(late)
    wait_for(engine, *behind)
    assert engine.statistics()["nvme", "ram"].out_of_service
    refused = job()
    engine.submit(refused)
    assert wait_for(engine, refused) == {refused.job_id: ([Outcome.REFUSED], True)}


def test_jobs_that_are_submitted_together_wake_the_engine_once(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(running_bytes=1 << 20)
    wakes: list[LoopWaker] = []
    wake = LoopWaker.wake

    def spy(waker: LoopWaker) -> None:
        wakes.append(waker)
        wake(waker)

    monkeypatch.setattr(LoopWaker, "wake", spy)
    jobs = [job() for _ in range(5)]
    engine.submit(*jobs)
    assert wait_for(engine, *jobs) == {each.job_id: ([Outcome.DONE], True) for each in jobs}
    assert len(wakes) == 1
    engine.submit()
    assert len(wakes) == 1


def test_a_job_without_a_route_fails_and_those_beside_it_run(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(running_bytes=1 << 20)
    key = make_key(bytes(32), 0)
    strays = [
        Job(next(IDS), Purpose.LOAD, "nvme", "tape", [key] * 2, (0, 1), (0, 1), 1.0)
        for _ in "ab"
    ]
    before, after = job(), job()
    engine.submit(before, *strays, after)
    assert wait_for(engine, before, after, *strays) == {
        before.job_id: ([Outcome.DONE], True),
        after.job_id: ([Outcome.DONE], True),
        **{stray.job_id: ([Outcome.FAILED] * 2, True) for stray in strays},
    }
    assert engine.idle
    assert caplog.text.count("no route leads from nvme to tape") == 1
    engine.abandon(*strays)


def test_waiters_of_an_unsubmitted_job_can_be_released(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine()
    work = job()
    engine.abandon(work)
    assert route.abandoned == [work.job_id]
    assert engine.idle
