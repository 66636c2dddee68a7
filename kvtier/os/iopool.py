"""Threads for blocking calls, taken by priority.

asyncio's own executor cannot be used for I/O into borrowed buffers. Cancelling
``asyncio.to_thread`` *abandons* the thread: the coroutine is told that all is over while the
thread goes on writing into memory that the caller now gives to somebody else. That is how a
cache serves one user's tokens to another. Here cancellation waits for the call to return.

Two more reasons for a pool of our own: the standard one is first-in first-out, so a load that
a request waits for would queue behind a gigabyte of stores; and its threads are joined at
interpreter exit, so one stuck system call would hang the engine's shutdown for ever.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from typing_extensions import override

from kvtier.errors import CapacityError, ClosedError
from kvtier.logs import get_logger

__all__ = ["IoPool", "Kept", "settled", "start_thread"]

logger = get_logger(__name__)

T = TypeVar("T")


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``.

    Raises:
        CapacityError: The system allows no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise CapacityError(
            f"thread {thread.name} cannot be started: {error}; allow this user (ulimit -u) and "
            "its control group (pids.max) more processes, or free memory"
        ) from error


class Kept(asyncio.Future[T]):
    """A future that cannot be cancelled, because its work goes on in borrowed memory.

    A task that awaits it and is cancelled learns so when the work is done. Nothing stands
    between the two, no shield and no second future: each of those is one more turn of the loop,
    and beside a thread that computes in Python every turn costs 5 ms.
    """

    @override
    def cancel(self, msg: Any | None = None) -> bool:
        return False


async def settled(work: Kept[T]) -> T:
    """Wait for ``work``, which goes on in the caller's memory until it is done.

    Cancellation:
        Deferred until ``work`` is done.
    """
    try:
        return await work
    except asyncio.CancelledError:
        if work.done():
            work.exception()  # retrieved, so asyncio does not report it as lost
        raise
    finally:
        # An error's traceback names this frame, and the future names the error: a circle, which
        # would keep the callers' buffers until the garbage collector comes by.
        del work


class _Round:
    """Calls that are waited for together, and the future that waits for them."""

    __slots__ = ("_errors", "_left", "_lock", "_loop", "_results", "future")

    def __init__(self, calls: int, loop: asyncio.AbstractEventLoop) -> None:
        self.future: Kept[list[Any]] = Kept(loop=loop)
        self._loop = loop
        self._left = calls
        self._lock = threading.Lock()
        self._results: list[Any] = [None] * calls
        self._errors: list[BaseException] = []

    def execute(self, number: int, call: Callable[[], Any]) -> None:
        """Run one call on this thread; the last one hands all results to the loop."""
        self._results[number], error = _attempt(call)
        if error is not None:
            self._errors.append(error)
            del error  # it is the loop's, whose traceback must not lead back to it
        with self._lock:
            self._left -= 1
            if self._left:
                return
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed: close() gave up on this round, so nobody waits for it.
            return

    def _deliver(self) -> None:
        if self._errors:
            self.future.set_exception(self._errors[0])
        else:
            self.future.set_result(self._results)


def _attempt(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what ``call`` returned, or what it raised; in a frame that knows of no future."""
    try:
        return call(), None
    except StopIteration as raised:  # which no future takes, so nobody would ever be told
        error = RuntimeError("a blocking call raised StopIteration")
        error.__cause__ = raised
        return None, error
    except BaseException as raised:  # noqa: BLE001 - delivered to the awaiting task
        return None, raised


class _Call(NamedTuple):
    """One blocking call; ordered by urgency, then by age."""

    priority: int
    sequence: int
    number: int
    call: Callable[[], Any]
    round: _Round


class IoPool:
    """A fixed number of daemon threads that run blocking calls, most urgent first.

    Where the system does not allow so many, those that there are do all of the work.

    Args:
        threads: How many calls may be in progress at once.
        name: Prefix of the threads' names.
        prepare: What each thread does first; with it the constructor waits until all have.

    Raises:
        CapacityError: Not one thread could be started.
        BrokenBarrierError: ``prepare`` raised, in its thread.

    Attributes:
        threads: How many there are.
    """

    def __init__(
        self, threads: int, *, name: str, prepare: Callable[[], None] | None = None
    ) -> None:
        self._prepare = prepare
        self._heap: list[_Call] = []
        self._sequence = itertools.count()
        self._wakeup = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        with self._wakeup:  # until it is known how many there are
            self._start(threads, name)
            self.threads = len(self._threads)
            self._prepared = threading.Barrier(self.threads + 1)
        if prepare is not None:
            self._prepared.wait()

    async def run(self, call: Callable[[], T], *, priority: int) -> T:
        """Run ``call`` on a thread of the pool; a smaller ``priority`` goes first.

        Raises:
            ClosedError: The pool was closed.

        Cancellation:
            Deferred until the call returned. The thread may be filling a buffer that the
            caller owns, and the caller is free to reuse it the moment this raises.
        """
        return (await self.run_all([call], priority=priority))[0]

    async def run_all(self, calls: Sequence[Callable[[], T]], *, priority: int) -> list[T]:
        """Run ``calls`` on threads of the pool, side by side, and wait for all of them.

        The loop is woken once, when the last has returned, and not once for each.

        Returns:
            Their results, in the order of the calls.

        Raises:
            ClosedError: The pool was closed; none was run.
            BaseException: The first that a call raised; all have returned.

        Cancellation:
            Deferred until all calls returned.
        """
        if not calls:
            return []
        together = _Round(len(calls), asyncio.get_running_loop())
        with self._wakeup:
            if self._closed:
                raise ClosedError("the I/O pool is closed")
            for number, call in enumerate(calls):
                order = next(self._sequence)
                heapq.heappush(self._heap, _Call(priority, order, number, call, together))
            self._wakeup.notify(len(calls))
        try:
            return await settled(together.future)
        finally:
            del together  # as in settled()

    def close(self, *, timeout_s: float) -> bool:
        """Let queued calls finish, then end the threads.

        Returns:
            Whether every thread ended in time. One that did not is stuck in a system call; it
            is a daemon and dies with the process.
        """
        with self._wakeup:
            self._closed = True
            self._wakeup.notify_all()
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self, threads: int, name: str) -> None:
        for number in range(threads):
            thread = threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            try:
                start_thread(thread)
            except CapacityError as error:
                if not self._threads:
                    raise
                logger.warning("%d of %d threads do the work: %s", number, threads, error)
                return
            self._threads.append(thread)

    def _work(self) -> None:
        if self._prepare is not None:
            self._get_ready(self._prepare)
        while True:
            with self._wakeup:
                while not self._heap and not self._closed:
                    self._wakeup.wait()
                if not self._heap:
                    return
                job = heapq.heappop(self._heap)
            job.round.execute(job.number, job.call)
            # Without this the thread keeps the last call, and the buffers it captured, alive.
            del job

    def _get_ready(self, prepare: Callable[[], None]) -> None:
        with self._wakeup:
            prepared = self._prepared
        try:
            prepare()
        except BaseException:
            prepared.abort()  # the pool's owner learns that it has no such thread
            raise
        prepared.wait()
