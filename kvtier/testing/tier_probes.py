"""Finds blocking calls, holds threads idle and kills a process, for the tier contract.

Timing cannot find blocking calls. A read from the page cache takes microseconds, but the same
read takes seconds when the disk hangs. So blocking calls are found by name: system calls for
files, sockets and processes, SQL statements, sleeps, and waits for threads. Page faults in
mapped memory are not found.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final, ParamSpec, Self, TypeVar

from typing_extensions import override

from kvtier.os.iopool import IoPool

__all__ = [
    "blocking_calls",
    "cancel_after",
    "cancel_with_held_threads",
    "clear_buffers",
    "run_and_kill",
]

_MODULES: Final = frozenset(["_io", "_sqlite3", "sqlite3"])
"""Modules in which every function may block."""
_SOCKET: Final = "_socket"
"""The module of sockets. Calls on a non-blocking socket do not count as blocking."""
_FUNCTIONS: Final = {
    "fcntl": frozenset(["flock", "lockf"]),
    "mmap": frozenset(["flush"]),
    "select": frozenset(["epoll", "poll", "select"]),
    "time": frozenset(["sleep"]),
}
_HARMLESS: Final = frozenset(["close", "fspath", "getpid", "strerror", "urandom"])
"""Public functions of ``posix`` that never block. All other functions may block."""
_WAITS: Final = frozenset(["_wait_for_tstate_lock", "join", "wait"])
"""Functions of ``threading`` that wait for another thread."""
_EXEMPT: Final = frozenset(["asyncio", "linecache", "logging", "selectors", "warnings"])
"""Modules of Python whose blocking calls are ignored: the event loop and error reporting."""
_TRANSPARENT: Final = sys.stdlib_module_names | {"blockbuster"}
"""Modules that are never reported as a caller: Python's own, and wrappers of system calls."""
_TIMEOUT_S: Final = 60.0
_FIRST: Final = -1
_LAST: Final = 1 << 16
"""A priority before, and a priority after, all calls of a tier."""

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def blocking_calls() -> Iterator[list[str]]:
    """Collect this thread's blocking calls in the ``with`` block, each with its caller.

    Calls by the event loop itself are ignored.
    """
    found: list[str] = []

    def on_call(frame: types.FrameType, event: str, called: Any) -> None:  # noqa: ANN401 - as sys says
        if event == "c_call" and (name := _blocking_name(frame, called)):
            place = _caller(frame)
            if place is not None:
                found.append(f"{name} in {place}")

    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _blocking_name(frame: types.FrameType, called: Any) -> str:  # noqa: ANN401 - as sys says
    """Return the name of the called C function if it may block, else an empty string."""
    owner = getattr(called, "__self__", None)
    kind = owner if isinstance(owner, types.ModuleType | type) else type(owner)
    module = getattr(called, "__module__", None) or getattr(kind, "__module__", "")
    name = called.__name__
    if module == "_thread":
        waits = frame.f_globals.get("__name__") == "threading"
        return "threading.wait" if waits and frame.f_code.co_name in _WAITS else ""
    if module == _SOCKET:
        blocks = getattr(owner, "gettimeout", lambda: None)() != 0
        return f"socket.{name}" if blocks and name not in {"gettimeout", "fileno"} else ""
    if module in _MODULES:
        in_memory = kind.__name__ in {"BytesIO", "StringIO"}
        return "" if in_memory else f"{module}.{name}"
    if module == "posix":
        return "" if name in _HARMLESS or name.startswith("_") else f"posix.{name}"
    return f"{module}.{name}" if name in _FUNCTIONS.get(str(module), ()) else ""


def _caller(frame: types.FrameType | None) -> str | None:
    """Return the module and line of a call; None if Python itself is the caller."""
    starts_thread = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        if package in _EXEMPT or starts_thread:
            return None
        if package not in _TRANSPARENT:
            return f"{name}:{frame.f_lineno}"
        starts_thread = name == "threading" and frame.f_code.co_name == "start"
        frame = frame.f_back
    return None


class _HeldExecutor(ThreadPoolExecutor):
    """An executor that starts no call before the event ``gate`` is set."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(thread_name_prefix="asyncio_held")
        self._gate = gate
        self.calls: list[Future[Any]] = []

    @override
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        def held() -> T:
            self._gate.wait()
            return fn(*args, **kwargs)

        call = super().submit(held)
        self.calls.append(call)
        return call


class _HeldThreads:
    """Keeps the threads of ``pool`` and of the loop's executor from starting any call.

    The threads are held in a ``with`` block. The end of this block releases the threads and
    waits until they are idle.
    """

    def __init__(self, pool: IoPool) -> None:
        self._pool = pool
        self._gate = threading.Event()
        self._executor = _HeldExecutor(self._gate)

    async def __aenter__(self) -> Self:
        # The loop keeps this executor: with an open gate it works like any other.
        asyncio.get_running_loop().set_default_executor(self._executor)
        waits = [self._gate.wait] * self._pool.threads
        self._held = asyncio.create_task(self._pool.run_all(waits, priority=_FIRST))
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._gate.set()
        await self._held
        # The barrier opens when no thread of the pool runs another call.
        meeting = threading.Barrier(self._pool.threads)
        await self._pool.run_all([meeting.wait] * self._pool.threads, priority=_LAST)
        wait(self._executor.calls)


async def cancel_after(turns: int, call: Coroutine[Any, Any, object]) -> None:
    """Cancel ``call`` after ``turns`` rounds of the event loop, and wait until it ends."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def cancel_with_held_threads(
    moving: Coroutine[Any, Any, object], buffers: Sequence[memoryview], pool: IoPool
) -> None:
    """Cancel ``moving`` while all threads are held; clear ``buffers`` when ``moving`` ends.

    This function returns when the threads are idle.
    """
    async with _HeldThreads(pool):
        task = asyncio.ensure_future(moving)
        task.add_done_callback(lambda _: clear_buffers(buffers))
        for _ in range(4):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(4):
            await asyncio.sleep(0)
    await asyncio.wait([task])


def clear_buffers(buffers: Iterable[memoryview]) -> None:
    """Fill ``buffers`` with zeros."""
    for buffer in buffers:
        buffer[:] = bytes(buffer.nbytes)


def run_and_kill(
    work: Callable[[], Coroutine[Any, Any, object]],
    *,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Run ``work`` in a forked process, run ``meanwhile`` here, then kill the forked process.

    The signal is SIGKILL, so the forked process closes nothing. ``work`` runs on a new event
    loop; if it raises or takes too long, so does this function.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, there), daemon=True)
    with warnings.catch_warnings():
        # A thread may hold a lock at a fork; the process never joins a thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()
    try:
        problem = _receive_error(here)
        if problem:
            raise AssertionError(problem)
        meanwhile()
    finally:
        here.close()
        process.kill()
        process.join(_TIMEOUT_S)


def _receive_error(connection: Connection) -> str:
    """Return the error text that the process sends; empty if there is no error."""
    if not connection.poll(_TIMEOUT_S):
        return f"the other process was not done after {_TIMEOUT_S:g} s"
    try:
        return str(connection.recv())
    except EOFError:
        return "the other process ended early"


def _run(work: Callable[[], Coroutine[Any, Any, object]], connection: Connection) -> None:
    async def until_killed() -> None:
        await work()
        connection.send("")
        await asyncio.sleep(2 * _TIMEOUT_S)

    try:
        asyncio.run(until_killed())
    except BaseException:
        connection.send(traceback.format_exc())
        raise
