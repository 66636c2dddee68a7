"""Threads that run nothing until a test lets them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar

from typing_extensions import override

from kvtier.os.iopool import IoPool

__all__ = ["HeldThreads"]

_FIRST: Final = -1
_LAST: Final = 1 << 16
"""Priorities of calls before and after those of a tier."""

P = ParamSpec("P")
T = TypeVar("T")


class _HeldExecutor(ThreadPoolExecutor):
    """An executor whose calls wait for ``gate``."""

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


class HeldThreads:
    """While this is entered, no thread of ``pool`` and of the loop's executor runs a call.

    Leaving it lets them go on, and waits until they have nothing left to do.

    Args:
        pool: The threads of a tier.
    """

    def __init__(self, pool: IoPool) -> None:
        self._pool = pool
        self._gate = threading.Event()
        self._executor = _HeldExecutor(self._gate)

    async def __aenter__(self) -> Self:
        # The executor stays the loop's: once the gate is open it is one like any other.
        asyncio.get_running_loop().set_default_executor(self._executor)
        waits = [self._gate.wait] * self._pool.threads
        self._held = asyncio.create_task(self._pool.run_all(waits, priority=_FIRST))
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._gate.set()
        await self._held
        # Threads meet here only when none of them is in another call.
        meeting = threading.Barrier(self._pool.threads)
        await self._pool.run_all([meeting.wait] * self._pool.threads, priority=_LAST)
        wait(self._executor.calls)
