"""Run blocking calls for a thread that must not wait long, such as an engine's scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from kvtier.os.iopool import start_thread

__all__ = ["TimedCalls", "call_within"]

T = TypeVar("T")


def call_within(call: Callable[[], T], timeout_s: float, *, name: str) -> T:
    """Run a blocking call in a daemon thread, and wait a limited time for the result.

    Args:
        call: The call.
        timeout_s: Longest wait.
        name: Name of the thread.

    Raises:
        TimeoutError: The call did not end in time, or raised TimeoutError itself. A late call
            goes on in its thread.
        BaseException: Another error of ``call``.
    """
    calls = TimedCalls(name=name)
    try:
        return calls.begin(call).result(timeout_s)
    finally:
        calls.close()


class TimedCalls:
    """Runs blocking calls on a daemon thread, one at a time. Only one thread may start calls.

    A call to a hanging file server cannot be interrupted. So the caller waits for the result
    with a timeout. While a call is late, no other call is accepted; otherwise callers would
    wait for the same server again and again.

    Args:
        name: Name of the thread, which starts with the first call.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._last: Future[Any] | None = None

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Start ``call`` and return its future.

        Raises:
            TimeoutError: The previous call has not ended. ``call`` is not run.
            CapacityError: The system allows no more threads.
        """
        if self._last is None:
            start_thread(threading.Thread(target=self._work, name=self._name, daemon=True))
        elif not self._last.done():
            raise TimeoutError("the previous call has not ended")
        self._last = future = Future[T]()
        future.set_running_or_notify_cancel()  # no waiter can cancel it
        self._queue.put((future, call))
        return future

    def close(self) -> None:
        """Tell the thread to end after its current call; return at once. Idempotent.

        A thread that is stuck in its call ends with the process.
        """
        self._queue.put(None)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            future, call = work
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - delivered to the caller
                future.set_exception(error)
            else:
                future.set_result(result)
