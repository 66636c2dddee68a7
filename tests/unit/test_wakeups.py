"""Waking an event loop from other threads."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
from collections.abc import Callable

import pytest

from kvtier.os.wakeups import LoopWaker


def run(waker: LoopWaker, end: asyncio.Event, *, began: Callable[[], None]) -> None:
    """Run a loop to which ``waker`` is attached until ``end`` is set."""

    async def wait() -> None:
        waker.attach()
        began()
        await asyncio.wait_for(end.wait(), 10)

    asyncio.run(wait())


def nothing() -> None: ...


def test_a_wake_up_before_the_loop_runs_is_not_lost() -> None:
    end = asyncio.Event()
    waker = LoopWaker(end.set)
    waker.wake()
    run(waker, end, began=nothing)


def test_wake_ups_in_one_turn_of_the_loop_are_one_call() -> None:
    end = asyncio.Event()
    calls: list[int] = []

    def count() -> None:
        calls.append(1)
        asyncio.get_running_loop().call_soon(end.set)

    waker = LoopWaker(count)

    def wake() -> None:
        for _ in range(5):
            waker.wake()

    run(waker, end, began=wake)
    assert calls == [1]


def test_the_function_sees_all_that_threads_did_before_they_woke_the_loop() -> None:
    end = asyncio.Event()
    sent: list[int] = []

    def look() -> None:
        if len(sent) == 15_000:
            end.set()

    waker = LoopWaker(look)

    def send() -> None:
        for number in range(5000):
            sent.append(number)
            waker.wake()

    threads = [threading.Thread(target=send) for _ in range(3)]

    def start() -> None:
        for thread in threads:
            thread.start()

    run(waker, end, began=start)
    for thread in threads:
        thread.join()


def ended() -> LoopWaker:
    """Return a waker whose loop has ended."""
    end = asyncio.Event()
    waker = LoopWaker(end.set)
    waker.wake()
    run(waker, end, began=nothing)
    return waker


def test_a_wake_up_after_the_loop_has_ended_does_nothing() -> None:
    ended().wake()


def test_a_loop_without_a_free_descriptor_is_not_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    end = asyncio.Event()
    waker = LoopWaker(end.set)
    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd", fail)
        with pytest.raises(OSError, match="Too many open files"):
            run(waker, end, began=nothing)
    waker.wake()
    run(waker, end, began=nothing)


def test_the_descriptor_is_open_as_long_as_the_object_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []
    eventfd = os.eventfd

    def note(*args: int) -> int:
        opened.append(eventfd(*args))
        return opened[-1]

    monkeypatch.setattr(os, "eventfd", note)
    waker = ended()
    (event,) = opened
    os.fstat(event)
    del waker
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(event)
