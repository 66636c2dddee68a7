"""Threads for blocking calls: order, errors, cancellation and the end of the pool."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from kvtier.errors import CapacityError, ClosedError, KvtierError
from kvtier.os.iopool import IoPool
from kvtier.os.memory import PageMapper


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(1, name="kvtier-test")
    yield pool
    assert pool.close(timeout_s=5)


@pytest.fixture
def pair() -> Iterator[IoPool]:
    pool = IoPool(2, name="kvtier-test")
    yield pool
    assert pool.close(timeout_s=5)


async def test_a_call_returns_its_result(pool: IoPool) -> None:
    assert await pool.run(lambda: 7, priority=0) == 7


async def test_a_call_that_raises_raises_in_the_task(pool: IoPool) -> None:
    def fail() -> None:
        raise OSError(5, "broken")

    with pytest.raises(OSError, match="broken"):
        await pool.run(fail, priority=0)


async def test_an_iterator_that_ends_in_a_call_is_an_error_of_the_task(pool: IoPool) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(pool.run(lambda: next(iter(())), priority=0), 5)


async def test_calls_run_together_and_answer_in_their_order(pair: IoPool) -> None:
    meeting = threading.Barrier(2)

    def meet(name: str) -> str:
        meeting.wait(5)
        return name

    calls = [functools.partial(meet, name) for name in "abcd"]
    assert await pair.run_all(calls, priority=0) == list("abcd")
    assert await pair.run_all([], priority=0) == []


async def test_when_one_of_many_calls_raises_the_others_are_over_too(pool: IoPool) -> None:
    over: list[str] = []

    def fail() -> None:
        raise OSError(5, "broken")

    calls: list[Callable[[], None]] = [fail]
    calls += [functools.partial(over.append, name) for name in "ab"]
    with pytest.raises(OSError, match="broken"):
        await pool.run_all(calls, priority=0)
    assert over == ["a", "b"]


async def test_the_urgent_call_overtakes_those_that_wait(pool: IoPool) -> None:
    gate = threading.Event()
    order: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pool.run(gate.wait, priority=0))
        await asyncio.sleep(0)
        for name, priority in (("demote", 3), ("store", 2), ("load", 0)):
            tasks.create_task(
                pool.run(functools.partial(order.append, name), priority=priority)
            )
        await asyncio.sleep(0)
        gate.set()
    assert order == ["load", "store", "demote"]


async def test_cancellation_waits_until_the_thread_left_the_buffer(pool: IoPool) -> None:
    inside, gate = threading.Event(), threading.Event()
    buffer = bytearray(4)

    def write() -> None:
        inside.set()
        gate.wait()
        buffer[:] = b"done"

    task = asyncio.create_task(pool.run(write, priority=0))
    await asyncio.get_running_loop().run_in_executor(None, inside.wait)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert buffer == b"done"


async def close(pool: IoPool, *, timeout_s: float) -> bool:
    call = functools.partial(pool.close, timeout_s=timeout_s)
    return await asyncio.get_running_loop().run_in_executor(None, call)


async def test_a_closed_pool_says_so() -> None:
    pool = IoPool(2, name="kvtier-test")
    assert await close(pool, timeout_s=5)
    with pytest.raises(ClosedError):
        await pool.run(lambda: None, priority=0)


async def test_closing_a_pool_with_a_stuck_call_gives_up_and_says_so() -> None:
    pool = IoPool(1, name="kvtier-test")
    gate, inside = threading.Event(), threading.Event()

    def stick() -> None:
        inside.set()
        gate.wait()

    task = asyncio.create_task(pool.run(stick, priority=0))
    await asyncio.get_running_loop().run_in_executor(None, inside.wait)
    assert not await close(pool, timeout_s=0.01)
    gate.set()
    await task


def test_every_thread_of_a_pool_may_use_all_of_the_time_to_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts_s: list[float | None] = []
    join = threading.Thread.join

    def record_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        timeouts_s.append(timeout)
        join(thread, timeout)

    pool = IoPool(4, name="kvtier-test")
    monkeypatch.setattr(threading.Thread, "join", record_and_join)
    assert pool.close(timeout_s=1000)
    assert timeouts_s == [pytest.approx(1000, abs=100)] * 4


def test_a_pool_whose_thread_cannot_be_prepared_raises_with_the_cause() -> None:
    def fail() -> None:
        raise OSError(5, "no")

    before = threading.active_count()
    with pytest.raises(
        KvtierError, match=r"pool kvtier-test cannot be prepared: .* no"
    ) as raised:
        IoPool(3, name="kvtier-test", prepare=fail)
    assert isinstance(raised.value.__cause__, OSError)
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier-test"):
            thread.join(10)
    assert threading.active_count() == before


def test_every_thread_is_prepared_before_the_pool_is_there() -> None:
    prepared: set[int] = set()
    pool = IoPool(3, name="kvtier-test", prepare=lambda: prepared.add(threading.get_ident()))
    assert len(prepared) == 3
    assert asyncio.run(pool.run(threading.get_ident, priority=0)) in prepared
    assert pool.close(timeout_s=5)


def allow_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the system allow no more than ``count`` threads from now on."""
    start, started = threading.Thread.start, itertools.count(1)

    def start_one(thread: threading.Thread) -> None:
        if next(started) > count:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)


@pytest.mark.parametrize("prepare", [None, lambda: None])
def test_where_the_system_allows_few_threads_these_do_all_of_the_work(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    prepare: Callable[[], None] | None,
) -> None:
    allow_threads(monkeypatch, 2)
    pool = IoPool(4, name="kvtier-test", prepare=prepare)
    assert pool.threads == 2
    assert "2 of 4 threads do the work" in caplog.text
    assert "pids.max" in caplog.text

    async def work() -> list[int]:
        calls = [functools.partial(int, number) for number in range(8)]
        return await pool.run_all(calls, priority=0)

    assert asyncio.run(work()) == list(range(8))
    assert pool.close(timeout_s=5)


def test_a_pool_without_a_thread_says_what_to_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_threads(monkeypatch, 0)
    with pytest.raises(CapacityError, match=r"kvtier-test-0 cannot be started.*ulimit -u"):
        IoPool(4, name="kvtier-test")


def test_pages_that_no_thread_maps_are_mapped_when_they_are_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allow_threads(monkeypatch, 0)
    mapper = PageMapper(0, 4096)
    mapper.join()
    mapper.close()
