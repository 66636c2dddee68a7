from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier.errors import ClosedError, TierUnavailableError
from kvtier.keys import make_key
from kvtier.tiers.base import SlotOutcomes
from kvtier.transfer import EngineLimits, Route, TransferEngine
from kvtier.transfer import engine as engine_module
from kvtier.types import Job, Outcome, TransferResult, Why

CHUNK_NBYTES = 4096
IDS = itertools.count()

MakeEngine = Callable[..., TransferEngine]
Seen = dict[int, tuple[list[Outcome], bool]]


class Scripted(Route):
    """Does what the test says: waits at a gate, answers with given outcomes, or raises."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.gates: dict[int, threading.Event] = {}
        self.entered: dict[int, threading.Event] = {}
        self.answers: dict[int, Outcome | list[Outcome] | Exception] = {}
        self.abandoned: list[int] = []

    def abandon(self, job: Job) -> None:
        self.abandoned.append(job.job_id)

    def hold(self, job: Job) -> threading.Event:
        self.entered[job.job_id] = threading.Event()
        return self.gates.setdefault(job.job_id, threading.Event())

    async def run(self, job: Job) -> SlotOutcomes:
        self.began.append(job.job_id)
        if job.job_id in self.entered:
            self.entered[job.job_id].set()
        gate = self.gates.get(job.job_id)
        if gate is not None:
            await asyncio.get_running_loop().run_in_executor(None, gate.wait)
        answer = self.answers.get(job.job_id, Outcome.DONE)
        if isinstance(answer, Exception):
            raise answer
        error = "" if answer is Outcome.DONE else "scripted"
        each = answer if isinstance(answer, list) else [answer] * len(job.keys)
        return SlotOutcomes(each, error)


def job(why: Why = Why.PROMOTE, *, chunks: int = 1, timeout_s: float = 30.0) -> Job:
    source, destination = ("ram", "nvme") if why is Why.DEMOTE else ("nvme", "ram")
    slots = list(range(chunks))
    keys = [bytes([slot]) for slot in slots]
    return Job(next(IDS), why, source, destination, keys, slots, slots, timeout_s)


@pytest.fixture
def route() -> Scripted:
    return Scripted()


@pytest.fixture
def make_engine(route: Scripted) -> Iterator[MakeEngine]:
    engines: list[TransferEngine] = []

    def make(
        openers: Sequence[Callable[[], Awaitable[None]]] = (), **limits: Any
    ) -> TransferEngine:
        defaults = {"queued_bytes": 1 << 20, "running_bytes": CHUNK_NBYTES}
        engine = TransferEngine(
            "test",
            {("nvme", "ram"): route, ("ram", "nvme"): route},
            chunk_nbytes=CHUNK_NBYTES,
            limits=EngineLimits(**{**defaults, **limits}),
            openers=openers,
        )
        engines.append(engine)
        return engine

    yield make
    for gate in route.gates.values():
        gate.set()
    for engine in engines:
        engine.close(timeout_s=10)


def outcomes(results: Iterable[TransferResult]) -> Seen:
    return {result.job_id: (list(result.outcomes), result.settled) for result in results}


def wait_for(engine: TransferEngine, *jobs: Job) -> Seen:
    assert engine.wait([job.job_id for job in jobs], timeout_s=10)
    return outcomes(engine.poll())


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
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    named = "chunk 0101010101010101/1, of 2 lost"
    assert warned == [f"job {work.job_id}, nvme -> ram: {named}: scripted"]


def test_the_urgent_job_starts_first(make_engine: MakeEngine, route: Scripted) -> None:
    engine = make_engine()
    first, slow, urgent = job(), job(Why.STORE), job(Why.LOAD)
    gate = route.hold(first)
    engine.submit(first)
    assert route.entered[first.job_id].wait(10)
    engine.submit(slow)
    engine.submit(urgent)
    gate.set()
    wait_for(engine, first, slow, urgent)
    assert route.began == [first.job_id, urgent.job_id, slow.job_id]


def test_a_full_queue_refuses_and_never_blocks(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine(queued_bytes=2 * CHUNK_NBYTES)
    held, waiting, refused = job(), job(), job()
    route.hold(held)
    engine.submit(held)
    engine.submit(waiting)
    engine.submit(refused)
    assert outcomes(engine.poll()) == {refused.job_id: ([Outcome.REFUSED], True)}
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


def test_a_tier_that_keeps_failing_is_taken_out_of_service(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine(breaker_failures=2, breaker_backoff_s=1000.0)
    for _ in range(2):
        failing = job()
        route.answers[failing.job_id] = Outcome.FAILED
        engine.submit(failing)
        wait_for(engine, failing)
    refused, other = job(), job(Why.DEMOTE)
    engine.submit(refused)
    engine.submit(other)
    seen = wait_for(engine, refused, other)
    assert seen[refused.job_id] == ([Outcome.REFUSED], True)
    assert seen[other.job_id] == ([Outcome.DONE], True)
    assert engine.statistics()["nvme", "ram"].out_of_service


def test_a_corrupt_chunk_does_not_count_against_the_medium(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine(breaker_failures=1, breaker_backoff_s=1000.0)
    for answer in (Outcome.CORRUPT, Outcome.DONE):
        work = job()
        route.answers[work.job_id] = answer
        engine.submit(work)
        assert wait_for(engine, work) == {work.job_id: ([answer], True)}


def test_an_exclusive_action_waits_for_what_runs_cancels_what_waits_and_delays_the_rest(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine()
    running, waiting, later = job(), job(), job()
    gate = route.hold(running)
    engine.submit(running)
    assert route.entered[running.job_id].wait(10)
    engine.submit(waiting)
    seen: list[list[int]] = []

    async def act() -> None:
        seen.append(list(route.began))

    assert not engine.exclusively_each({"ram": act}, timeout_s=0.01)
    engine.submit(later)
    assert not engine.wait([later.job_id], timeout_s=0.01)
    assert engine.wait([waiting.job_id], timeout_s=10)
    gate.set()
    wait_for(engine, running, waiting, later)
    assert sorted(route.abandoned) == [running.job_id, waiting.job_id]
    assert seen == [[running.job_id]]
    assert route.began == [running.job_id, later.job_id]


def test_what_is_done_exclusively_to_a_tier_that_hangs_keeps_no_other_tier_waiting(
    route: Scripted,
) -> None:
    engine = TransferEngine(
        "test",
        {("nvme", "ram"): route, ("ram", "nvme"): route, ("tape", "ram"): route},
        chunk_nbytes=CHUNK_NBYTES,
        limits=EngineLimits(queued_bytes=1 << 20, running_bytes=CHUNK_NBYTES),
    )
    hung, waiting = job(), job()
    gate = route.hold(hung)
    engine.submit(hung)
    assert route.entered[hung.job_id].wait(10)
    engine.submit(waiting)
    reset: list[str] = []
    release, tape_is_reset = threading.Event(), threading.Event()

    async def reset_nvme() -> None:
        await asyncio.get_running_loop().run_in_executor(None, release.wait)
        reset.append("nvme")

    async def reset_tape() -> None:
        reset.append("tape")
        tape_is_reset.set()

    def check_that_only_nvme_waits() -> None:
        behind, beside = job(Why.DEMOTE), job()._replace(source="tape")
        engine.submit(behind, beside)
        assert wait_for(engine, beside)[beside.job_id] == ([Outcome.DONE], True)
        assert reset == ["tape"]
        assert behind.job_id not in route.began

    actions = {"nvme": reset_nvme, "tape": reset_tape}
    assert not engine.exclusively_each(actions, timeout_s=0.01)
    assert tape_is_reset.wait(10)
    check_that_only_nvme_waits()  # for a job that hangs
    gate.set()
    wait_for(engine, hung)
    check_that_only_nvme_waits()  # for a reset that hangs
    release.set()
    assert engine.close(timeout_s=10)
    assert reset == ["tape", "nvme"]


def test_what_goes_wrong_with_one_tier_is_told_when_all_are_over(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    reset: list[str] = []

    async def reset_ram() -> None:
        reset.append("ram")

    with pytest.raises(ExceptionGroup) as raised:
        engine.exclusively_each({"nvme": cancelled_tier, "ram": reset_ram}, timeout_s=10)
    assert [type(error) for error in raised.value.exceptions] == [TierUnavailableError]
    assert reset == ["ram"]


async def cancelled_tier() -> None:
    inner = asyncio.get_running_loop().create_future()
    inner.cancel()
    await inner


def test_closing_runs_what_is_queued_then_the_closers(route: Scripted) -> None:
    closed = threading.Event()

    async def closer() -> None:
        closed.set()

    async def broken_closer() -> None:
        raise OSError(5, "no")

    engine = TransferEngine(
        "test",
        {("nvme", "ram"): route},
        chunk_nbytes=CHUNK_NBYTES,
        limits=EngineLimits(queued_bytes=1 << 20, running_bytes=CHUNK_NBYTES),
        closers=[broken_closer, closer],
    )
    work = [job() for _ in range(5)]
    for each in work:
        engine.submit(each)
    assert engine.close(timeout_s=10)
    assert closed.is_set()
    assert len(outcomes(engine.poll())) == 5
    assert engine.close(timeout_s=10)
    with pytest.raises(ClosedError):
        engine.submit(job())


def test_tiers_get_ready_before_the_engine_is_there_and_one_that_cannot_is_no_reason_not_to_be(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    ready: list[str] = []

    async def fail() -> None:
        raise OSError(5, "not now")

    async def get_ready() -> None:
        ready.append("second")

    engine = make_engine(openers=[fail, get_ready])
    assert ready == ["second"]
    assert "not now" in caplog.text
    work = job()
    engine.submit(work)
    assert wait_for(engine, work) == {work.job_id: ([Outcome.DONE], True)}


def test_closing_with_a_stuck_job_gives_up_and_cancels_what_waits(
    make_engine: MakeEngine, route: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    turns = itertools.count()
    admit = engine._runner._admit

    def counted() -> None:
        next(turns)
        admit()

    monkeypatch.setattr(engine._runner, "_admit", counted)
    stuck, waiting = job(), job()
    gate = route.hold(stuck)
    engine.submit(stuck)
    assert route.entered[stuck.job_id].wait(10)
    engine.submit(waiting)
    assert not engine.close(timeout_s=0.01)
    assert next(turns) < 20, "the loop turns without anything to do while it waits"
    assert wait_for(engine, waiting) == {waiting.job_id: ([Outcome.CANCELLED], True)}
    gate.set()
    assert wait_for(engine, stuck) == {stuck.job_id: ([Outcome.DONE], True)}


def test_closing_takes_no_longer_than_it_may_and_keeps_some_of_that_for_the_tiers(
    make_engine: MakeEngine, route: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    stuck = job()
    route.hold(stuck)
    engine.submit(stuck)
    assert route.entered[stuck.job_id].wait(10)
    now_s = 0.0
    waited_s: list[float] = []

    def wait(timeout_s: float) -> None:
        nonlocal now_s
        now_s += timeout_s
        waited_s.append(timeout_s)

    def wait_for(predicate: Callable[[], bool], timeout: float) -> bool:
        wait(timeout)
        return predicate()

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now_s))
        patch.setattr(engine._answers.changed, "wait_for", wait_for)
        patch.setattr(engine._thread, "join", wait)
        assert not engine.close(timeout_s=8)
    assert waited_s == [6, 2]


def test_a_job_without_a_route_is_the_callers_mistake(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(KeyError):
        engine.submit(Job(next(IDS), Why.STORE, "gpu", "moon", [b""], [0], [0], 1.0))


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


def test_jobs_that_expire_behind_a_reset_that_hangs_count_against_the_tier(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(breaker_failures=2, breaker_backoff_s=0.0)
    release = threading.Event()

    async def hang() -> None:
        await asyncio.get_running_loop().run_in_executor(None, release.wait)

    assert not engine.exclusively_each({"nvme": hang}, timeout_s=0.01)
    late, refused = [job(timeout_s=0.01), job(timeout_s=0.01)], [job(), job()]
    engine.submit(refused[0], *late)
    seen = wait_for(engine, *late, refused[0])
    assert [seen[each.job_id] for each in late] == [([Outcome.EXPIRED], True)] * 2
    assert seen[refused[0].job_id] == ([Outcome.REFUSED], True), "it waits for nothing"
    assert ("nvme", "ram") in engine.out_of_service(), "though its back-off time has passed"
    engine.submit(refused[1])
    assert wait_for(engine, refused[1]) == {refused[1].job_id: ([Outcome.REFUSED], True)}
    release.set()
    answer = [Outcome.REFUSED]
    for _ in range(10_000):  # until the reset is over, and it is the probe
        probe = job()
        engine.submit(probe)
        answer, _ = wait_for(engine, probe)[probe.job_id]
        if answer != [Outcome.REFUSED]:
            break
    assert answer == [Outcome.DONE]
    assert not engine.out_of_service()


def test_overlapping_exclusive_actions_each_keep_others_out(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine()
    running, later = job(), job()
    gate = route.hold(running)
    engine.submit(running)
    assert route.entered[running.job_id].wait(10)
    seen: list[str] = []
    release = threading.Event()

    async def first() -> None:
        seen.append("first")

    async def second() -> None:
        await asyncio.get_running_loop().run_in_executor(None, release.wait)
        seen.append("second")

    for act in (second, first):
        assert not engine.exclusively_each({"ram": act}, timeout_s=0.01)
    engine.submit(later)
    gate.set()
    wait_for(engine, running)
    assert not engine.wait([later.job_id], timeout_s=0.05)
    release.set()
    wait_for(engine, later)
    assert seen == ["first", "second"]
    assert engine.idle


def test_jobs_that_are_submitted_together_wake_the_engine_once(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(running_bytes=1 << 20)
    wakes: list[object] = []
    call = engine._loop.call_soon_threadsafe

    def spy(*what: Any) -> None:
        wakes.append(what)
        call(*what)

    monkeypatch.setattr(engine._loop, "call_soon_threadsafe", spy)
    jobs = [job() for _ in range(5)]
    engine.submit(*jobs)
    assert wait_for(engine, *jobs) == {each.job_id: ([Outcome.DONE], True) for each in jobs}
    assert len(wakes) == 1
    engine.submit()
    assert len(wakes) == 1


def test_of_jobs_without_a_route_none_is_queued(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stray = Job(next(IDS), Why.LOAD, "nvme", "tape", (), (), (), 1.0)
    with pytest.raises(KeyError, match="tape"):
        engine.submit(job(), stray)
    assert engine.idle


class Odd(Route):
    """Ends a job in a way that a tier should not."""

    def __init__(self, way: Callable[[], Awaitable[Any]]) -> None:
        self._way = way

    async def run(self, job: Job) -> SlotOutcomes:
        found: SlotOutcomes = await self._way()
        return found


async def nothing() -> object:
    return None


async def no_outcomes() -> object:
    return SlotOutcomes(cast("Any", None))


async def too_few_outcomes() -> object:
    return SlotOutcomes([Outcome.DONE])


async def no_such_outcomes() -> object:
    return SlotOutcomes(cast("Any", ["done", "done"]))


async def cancelled() -> object:
    inner = asyncio.get_running_loop().create_future()
    inner.cancel()
    return await inner


async def leave() -> object:
    raise SystemExit(3)


def engine_of(route: Route, **options: Any) -> TransferEngine:
    return TransferEngine(
        "test",
        {("nvme", "ram"): route},
        chunk_nbytes=CHUNK_NBYTES,
        limits=EngineLimits(queued_bytes=1 << 20, running_bytes=CHUNK_NBYTES),
        **options,
    )


@pytest.mark.parametrize(
    "way", [nothing, no_outcomes, too_few_outcomes, no_such_outcomes, cancelled, leave]
)
def test_a_tier_that_breaks_its_word_fails_its_job_and_the_engine_lives_on(
    way: Callable[[], Awaitable[Any]],
) -> None:
    engine = engine_of(Odd(way))
    for _ in range(2):
        work = job(chunks=2)
        engine.submit(work)
        assert wait_for(engine, work) == {work.job_id: ([Outcome.FAILED] * 2, True)}
    assert engine.close(timeout_s=10)


def test_an_opener_that_is_cancelled_is_one_that_failed() -> None:
    engine = engine_of(Scripted(), openers=[cancelled])
    work = job()
    engine.submit(work)
    assert wait_for(engine, work) == {work.job_id: ([Outcome.DONE], True)}
    assert engine.close(timeout_s=10)


def test_an_engine_whose_loop_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(main: Coroutine[Any, Any, None]) -> None:
        main.close()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio, "run", fail)
    with pytest.raises(ClosedError, match="cannot start") as raised:
        engine_of(Scripted())
    assert isinstance(raised.value.__cause__, OSError)


def test_an_engine_does_not_wait_for_ever_until_its_tiers_are_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "_START_TIMEOUT_S", 0.01)
    ready, closed = threading.Event(), threading.Event()

    async def hang() -> None:
        await asyncio.get_running_loop().run_in_executor(None, ready.wait)

    async def close() -> None:
        closed.set()

    with pytest.raises(ClosedError, match="has not started within"):
        engine_of(Scripted(), openers=[hang], closers=[close])
    ready.set()
    assert closed.wait(10), "what it opened is closed all the same"


def test_a_thread_that_dies_answers_every_job(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()

    async def act() -> None:
        raise AssertionError

    def die() -> None:
        raise SystemExit(3)

    monkeypatch.setattr(engine._runner, "_admit", die)
    jobs = [job(), job()]
    engine.submit(*jobs)
    assert wait_for(engine, *jobs) == {each.job_id: ([Outcome.FAILED], True) for each in jobs}
    with pytest.raises(ClosedError):
        engine.submit(job())
    with pytest.raises(ClosedError):
        engine.exclusively_each({"ram": act}, timeout_s=10)
    engine.cancel(jobs[0].job_id)
    engine._thread.join(10)
    assert engine.close(timeout_s=10)
