"""A connection to a tier's host process: calls and their answers, on the tier's event loop.

While the engine runs Python code, each turn of the loop costs time. Whenever the loop waits or
makes a system call, it releases the interpreter lock, and gets the lock back 5 ms later. So a
call is sent at once, before the caller awaits it. The callback that receives an answer's bytes
handles the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Final

from typing_extensions import override

from kvtier.errors import TierUnavailableError
from kvtier.logs import get_logger
from kvtier.os.iopool import UncancellableFuture, wait_uncancelled
from kvtier.tiers.hosted.frames import Frame, decode_error
from kvtier.tiers.hosted.process import HostProcess, aend, relog

__all__ = ["Connection"]

logger = get_logger(__name__)

_END_TIMEOUT_S: Final = 15.0
"""Seconds to wait for the end of a host; only a stuck host takes longer."""


class Connection(asyncio.Protocol):
    """An open connection to a running host, the process of a hosted tier."""

    def __init__(self, tier: str, host: HostProcess) -> None:
        self._tier = tier
        self._host = host
        self._transport: asyncio.WriteTransport
        self._ending: asyncio.Task[None]
        self._ended = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._calls = itertools.count()
        self._gone = False
        self._end_deadline_s = 0.0

    @property
    def usable(self) -> bool:
        """Whether calls can be made."""
        return not self._gone

    async def open(self) -> None:
        """Start to listen for answers on the running loop.

        Cancellation:
            Deferred until the connection listens, because other tasks may use the connection.
            This takes one turn of the loop.
        """
        loop = asyncio.get_running_loop()
        opening = loop.create_task(
            loop.create_unix_connection(lambda: self, sock=self._host.connection)
        )
        cancelled: asyncio.CancelledError | None = None
        while not opening.done():
            try:
                await asyncio.wait([opening])
            except asyncio.CancelledError as error:
                cancelled = error
        self._transport, _ = opening.result()
        if cancelled is not None:
            raise cancelled

    def send(self, frame: Frame) -> None:
        """Send a frame that gets no answer."""
        if not self._gone:
            self._transport.write(frame.encode())

    def call(
        self, op: str, make: Callable[[dict[str, Any]], Frame] = Frame
    ) -> Coroutine[Any, Any, Frame]:
        """Send a frame now, and return a coroutine for its answer.

        ``make`` returns a frame with the given header.

        Raises:
            KvtierError: The tier's error, or TierUnavailableError if the host is gone.

        Cancellation:
            Deferred until the answer arrives, because the host may be using the caller's
            memory.
        """
        if self._gone:
            raise TierUnavailableError(self._tier, "its I/O process is gone")
        number = next(self._calls)
        loop = asyncio.get_running_loop()
        answer: UncancellableFuture[Frame] = UncancellableFuture(loop=loop)
        self._waiting[number] = answer
        self.send(make({"op": op, "call": number}))
        return wait_uncancelled(answer)

    async def close_tier(self, *, reset: bool) -> None:
        """Make the host close its tier, after a reset if ``reset`` is true; the host then ends.

        Raises:
            TierUnavailableError: The host ended without confirming that all is committed.
            KvtierError: The tier was closed, but the reset failed.

        Cancellation:
            Immediate; the host uses no memory of the caller.
        """
        if self._gone:
            raise TierUnavailableError(self._tier, "its I/O process is gone")
        number = next(self._calls)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.send(Frame({"op": "close", "call": number, "reset": reset}))
        await answer

    async def aclose(self) -> None:
        """Close the socket, and wait for the end of the host, up to a time limit."""
        # Not close(), which waits until the host, which may hang, has read everything.
        self._transport.abort()
        self._mark_gone()
        with contextlib.suppress(TierUnavailableError):
            await self.wait_for_exit()

    async def wait_for_exit(self) -> None:
        """Wait until the host has ended. The connection must be lost or closed already.

        The deadline counts from the end of the connection. Repeated calls do not extend it.

        Raises:
            TierUnavailableError: The host has not ended and keeps its files open.
        """
        if self._ended.is_set():
            return  # in Python 3.11, wait_for() with timeout 0 would always raise TimeoutError
        left_s = self._end_deadline_s - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(self._ended.wait(), left_s)
        except TimeoutError as error:
            raise TierUnavailableError(
                self._tier,
                f"its I/O process {self._host.process.pid} is stuck in the operating system",
            ) from error

    @override
    def data_received(self, data: bytes) -> None:
        """Handle the frames that ``data`` completes."""
        try:
            for frame in self._host.parser.feed(data):
                self._take(frame)
        except Exception:
            logger.exception("tier %s: its I/O process sent an invalid frame", self._tier)
            self._transport.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Start a task that waits for the host to end, then makes the waiting calls fail."""
        self._mark_gone()
        self._ending = asyncio.get_running_loop().create_task(self._end())

    def _mark_gone(self) -> None:
        if not self._gone:
            self._gone = True
            self._end_deadline_s = asyncio.get_running_loop().time() + _END_TIMEOUT_S

    async def _end(self) -> None:
        """Wait until the host process has ended, then make the waiting calls fail.

        Until then the host's threads may access the memory of these calls.
        """
        process = self._host.process
        try:
            if not await aend(process):
                logger.error(
                    "tier %s: its I/O process %d is stuck in the operating system "
                    "(logged once)",
                    self._tier,
                    process.pid,
                )
                while not await aend(process):
                    pass
        finally:  # also when the loop is ended: then no caller uses the memory any more
            error = f"its I/O process ended with exit code {process.returncode}"
            for answer in self._waiting.values():
                if not answer.cancelled():
                    answer.set_exception(TierUnavailableError(self._tier, error))
            self._waiting.clear()
        self._ended.set()

    def _take(self, frame: Frame) -> None:
        if frame.header["op"] == "log":
            relog(frame)
            return
        answer = self._waiting.pop(frame.header["call"], None)
        if answer is None or answer.cancelled():
            return
        if "error" in frame.header:
            answer.set_exception(decode_error(frame.header["error"]))
        else:
            answer.set_result(frame)
