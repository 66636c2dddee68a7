"""A pool of threads for blocking calls, with priorities.

asyncio's own executor is unsafe for I/O into borrowed buffers. A cancellation of
``asyncio.to_thread`` *abandons* the thread: the coroutine ends while the thread still writes
into memory that the caller reuses. A cache would then serve one user's tokens to another. In
this pool, cancellation waits until the call returns.

asyncio's executor has two more problems. It is first-in first-out, so a load for a waiting
request would queue behind a gigabyte of stores. And at exit the interpreter joins the
executor's threads, so one stuck system call would block the engine's shutdown for ever.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from typing_extensions import override

from kvtier.errors import CapacityError, ClosedError, KvtierError
from kvtier.logs import get_logger

__all__ = ["IoPool", "UncancellableFuture", "start_thread", "wait_uncancelled"]

logger = get_logger(__name__)

T = TypeVar("T")


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``; raise an error with a remedy if the system allows no more threads.

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


class UncancellableFuture(asyncio.Future[T]):
    """A future that ignores cancellation, because its work uses memory of the caller.

    If a task is cancelled while it awaits the future, the cancellation takes effect when the
    work is done. ``asyncio.shield`` or a second future would need another iteration of the
    loop. An iteration takes 5 ms while another thread runs Python code.
    """

    @override
    def cancel(self, msg: Any | None = None) -> bool:
        return False


async def wait_uncancelled(work: UncancellableFuture[T]) -> T:
    """Wait until ``work`` ends, even if the waiting task is cancelled meanwhile.

    ``work`` uses the caller's memory until it ends.

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
        # An error's traceback refers to this frame, and the future to the error. The cycle
        # would keep the callers' buffers until the garbage collector runs.
        del work


class _Round:
    """Calls that are awaited together, and their future."""

    __slots__ = ("_errors", "_left", "_lock", "_loop", "_results", "future")

    def __init__(self, calls: int, loop: asyncio.AbstractEventLoop) -> None:
        self.future: UncancellableFuture[list[Any]] = UncancellableFuture(loop=loop)
        self._loop = loop
        self._left = calls
        self._lock = threading.Lock()
        self._results: list[Any] = [None] * calls
        self._errors: list[BaseException] = []

    def execute(self, number: int, call: Callable[[], Any]) -> None:
        """Run one call. The last call of the round passes all results to the loop."""
        self._results[number], error = _attempt(call)
        if error is not None:
            self._errors.append(error)
            del error  # its traceback must not refer to this frame
        with self._lock:
            self._left -= 1
            if self._left:
                return
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed: close() gave up on this round, so nothing waits for it.
            return

    def _deliver(self) -> None:
        if self._errors:
            self.future.set_exception(self._errors[0])
        else:
            self.future.set_result(self._results)


def _attempt(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return (result, None), or (None, error) if ``call`` raises.

    The error's traceback does not refer to a future.
    """
    try:
        return call(), None
    except StopIteration as raised:  # no future accepts it, so the waiter would hang
        error = RuntimeError("a blocking call raised StopIteration")
        error.__cause__ = raised
        return None, error
    except BaseException as raised:  # noqa: BLE001 - delivered to the awaiting task
        return None, raised


class _Call(NamedTuple):
    """One blocking call, ordered by urgency and then by age."""

    priority: int
    sequence: int
    number: int
    call: Callable[[], Any]
    round: _Round


class IoPool:
    """A fixed number of daemon threads that run blocking calls, most urgent first.

    If the system allows fewer threads, these threads run all calls.

    Args:
        threads: Largest number of calls in progress.
        name: Prefix of the threads' names.
        prepare: Function that each thread calls first. The constructor waits until all threads
            are prepared.

    Raises:
        CapacityError: Not even one thread could be started.
        KvtierError: ``prepare`` raised in its thread; that error is the cause.

    Attributes:
        name: Prefix of the threads' names.
        threads: Number of threads.
    """

    def __init__(
        self, threads: int, *, name: str, prepare: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self._prepare = prepare
        self._prepare_error: BaseException | None = None
        self._heap: list[_Call] = []
        self._sequence = itertools.count()
        self._wakeup = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        with self._wakeup:  # until the number of threads is known
            self._start(threads, name)
            self.threads = len(self._threads)
            self._prepared = threading.Barrier(self.threads + 1)
        if prepare is not None and not self._wait_prepared():
            error = self._prepare_error
            raise KvtierError(f"a thread of pool {name} cannot be prepared: {error}") from error

    async def run(self, call: Callable[[], T], *, priority: int) -> T:
        """Run ``call`` in a thread of the pool; calls with a smaller ``priority`` run first.

        Raises:
            ClosedError: The pool was closed.

        Cancellation:
            Deferred until the call has returned. The thread may be filling the caller's buffer,
            and the caller may reuse the buffer as soon as this method raises.
        """
        return (await self.run_all([call], priority=priority))[0]

    async def run_all(self, calls: Sequence[Callable[[], T]], *, priority: int) -> list[T]:
        """Run ``calls`` concurrently in threads of the pool and wait for all of them.

        The loop wakes up only once, when the last call has returned.

        Returns:
            The results, in the order of the calls.

        Raises:
            ClosedError: The pool was closed. No call was run.
            BaseException: The first error of a call, raised after all calls have returned.

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
            return await wait_uncancelled(together.future)
        finally:
            del together  # as in wait_uncancelled()

    def close(self, *, timeout_s: float) -> bool:
        """Finish the queued calls, then end the threads.

        Returns:
            Whether every thread ended in time. If not, a thread is stuck in a system call. Such
            a thread is a daemon and ends with the process.
        """
        with self._wakeup:
            self._closed = True
            self._wakeup.notify_all()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
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
        if self._prepare is not None and not self._get_ready(self._prepare):
            return
        while True:
            with self._wakeup:
                while not self._heap and not self._closed:
                    self._wakeup.wait()
                if not self._heap:
                    return
                job = heapq.heappop(self._heap)
            job.round.execute(job.number, job.call)
            # Otherwise the thread keeps the last call and its buffers alive.
            del job

    def _get_ready(self, prepare: Callable[[], None]) -> bool:
        """Prepare this thread; return whether all threads could be prepared."""
        with self._wakeup:
            prepared = self._prepared
        try:
            prepare()
        except BaseException as error:  # noqa: BLE001 - raised again by the constructor
            self._prepare_error = error
            prepared.abort()
            return False
        return self._wait_prepared()

    def _wait_prepared(self) -> bool:
        """Wait until every thread is prepared; return False if one failed."""
        try:
            self._prepared.wait()
        except threading.BrokenBarrierError:
            return False
        return True
