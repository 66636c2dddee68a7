"""How an engine starts, closes and dies, and what tiers do to it that they should not."""

from __future__ import annotations

import asyncio
import itertools
import os
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier.errors import ClosedError
from kvtier.tiers.base import SlotOutcomes
from kvtier.transfer import Route
from kvtier.transfer import engine as engine_module
from kvtier.transfer.jobs import JobResults
from kvtier.types import Job, Outcome
from tests.support.threads import join_threads, loop_of
from tests.unit.transfer_engine.scripted import (
    DOWN,
    UP,
    MakeEngine,
    Scripted,
    cancelled,
    engine_of,
    job,
    outcomes,
    wait_for,
)


def test_closing_runs_what_is_queued_then_the_closers(route: Scripted) -> None:
    closed = threading.Event()

    async def closer() -> None:
        closed.set()

    async def broken_closer() -> None:
        raise OSError(5, "no")

    engine = engine_of(route, closers=[broken_closer, closer])
    work = [job() for _ in range(5)]
    for each in work:
        engine.submit(each)
    assert engine.close(timeout_s=10)
    assert closed.is_set()
    assert len(outcomes(engine.poll())) == 5
    assert engine.close(timeout_s=10)
    with pytest.raises(ClosedError):
        engine.submit(job())


def test_openers_run_at_the_start_and_an_engine_starts_without_one_that_fails(
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
    select = selectors.DefaultSelector.select

    def counted(
        selector: selectors.DefaultSelector, timeout_s: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        next(turns)
        return select(selector, timeout_s)

    monkeypatch.setattr(selectors.DefaultSelector, "select", counted)
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

    def wait(_: object, timeout_s: float) -> bool:
        nonlocal now_s
        now_s += timeout_s
        waited_s.append(timeout_s)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now_s))
        patch.setattr(JobResults, "wait_all", lambda own, *, timeout_s: wait(own, timeout_s))
        patch.setattr(threading.Thread, "join", wait)
        assert not engine.close(timeout_s=8)
    assert sum(waited_s) == 8
    assert waited_s[-1] >= 1, "what is left for the tiers"


class Odd(Route):
    """Ends a job in a way that a tier should not."""

    def __init__(self, way: Callable[[], Awaitable[Any]]) -> None:
        self._way = way

    async def run(self, job: Job) -> SlotOutcomes:
        found: SlotOutcomes = await self._way()
        return found

    def abandon(self, job: Job) -> None:
        pass


async def nothing() -> object:
    return None


async def no_outcomes() -> object:
    return SlotOutcomes(cast("Any", None))


async def too_few_outcomes() -> object:
    return SlotOutcomes([Outcome.DONE])


async def no_such_outcomes() -> object:
    return SlotOutcomes(cast("Any", ["done", "done"]))


async def leave() -> object:
    raise SystemExit(3)


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


def test_an_engine_without_a_free_descriptor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "eventfd", fail)
    with pytest.raises(ClosedError, match=r"engine test cannot start: .*Too many open files"):
        engine_of(Scripted())


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
    dying, submitted = threading.Event(), threading.Event()
    run = asyncio.run

    def run_and_wait(main: Coroutine[Any, Any, None]) -> None:
        try:
            run(main)
        finally:
            dying.set()
            assert submitted.wait(10)

    monkeypatch.setattr(asyncio, "run", run_and_wait)
    engine = make_engine()

    async def act() -> None:
        raise AssertionError

    def die() -> None:
        raise SystemExit(3)

    loop_of(engine).call_soon_threadsafe(die)
    assert dying.wait(10)
    jobs = [job(), job()]
    engine.submit(*jobs)
    submitted.set()
    assert wait_for(engine, *jobs) == {each.job_id: ([Outcome.FAILED], True) for each in jobs}
    with pytest.raises(ClosedError):
        engine.submit(job())
    assert engine.out_of_service() == [UP, DOWN]
    assert all(channel.out_of_service for channel in engine.statistics().values())
    with pytest.raises(ClosedError):
        engine.exclusively_each({"ram": act}, timeout_s=10)
    engine.cancel(jobs[0].job_id)
    join_threads("kvtier-test")
    assert engine.close(timeout_s=10)


def test_a_job_submitted_while_the_loop_ends_is_settled() -> None:
    engine, work = engine_of(Scripted()), job()
    ready, submitted = threading.Event(), threading.Event()

    async def submit_at_the_end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        ready.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.wait(others)
            engine.submit(work)
            submitted.set()
            await asyncio.sleep(0)  # the loop handles the submission

    def die() -> None:
        raise SystemExit(3)

    loop = loop_of(engine)
    asyncio.run_coroutine_threadsafe(submit_at_the_end(), loop)
    assert ready.wait(10)
    loop.call_soon_threadsafe(die)
    assert submitted.wait(10)
    assert wait_for(engine, work) == {work.job_id: ([Outcome.CANCELLED], True)}
    join_threads("kvtier-test")
    assert engine.close(timeout_s=10)
