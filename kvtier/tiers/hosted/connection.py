"""Calls to a host and their answers, on the loop that uses the tier.

Turns of that loop are what a call costs in an engine that is busy with Python of its own:
whenever the loop waits or makes a system call, it gives up the interpreter lock and gets it
back 5 ms later. So a call is sent at once when it is made and not when it is first awaited, and
an answer is taken where its bytes arrive.
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
from kvtier.os.iopool import Kept, settled
from kvtier.tiers.hosted.frames import Frame, decode_error
from kvtier.tiers.hosted.process import HostProcess, aend, relog

__all__ = ["Connection"]

logger = get_logger(__name__)

_BURIAL_TIMEOUT_S: Final = 15.0
"""Longer than a host that ends, or can be killed, takes for it."""


class Connection(asyncio.Protocol):
    """An open connection to a running host."""

    def __init__(self, tier: str, host: HostProcess) -> None:
        self._tier = tier
        self._host = host
        self._transport: asyncio.WriteTransport
        self._burial: asyncio.Task[None]
        self._buried = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._calls = itertools.count()
        self._gone = False
        self._burial_deadline_s = 0.0

    @property
    def usable(self) -> bool:
        """Whether calls can be made."""
        return not self._gone

    async def open(self) -> None:
        """Begin to listen for answers on the running loop.

        Cancellation:
            Deferred until it does, which takes a turn of the loop; others may use it.
        """
        loop = asyncio.get_running_loop()
        opening = loop.create_task(
            loop.create_unix_connection(lambda: self, sock=self._host.connection)
        )
        try:
            await asyncio.shield(opening)
        finally:
            self._transport, _ = await opening

    def send(self, frame: Frame) -> None:
        """Send ``frame``, to which there is no answer."""
        if not self._gone:
            self._transport.write(frame.encode())

    def call(
        self, op: str, make: Callable[[dict[str, Any]], Frame] = Frame
    ) -> Coroutine[Any, Any, Frame]:
        """Send a frame now, and return what waits for its answer.

        Args:
            op: The operation.
            make: Completes the frame that begins with this header.

        Raises:
            KvtierError: What the tier raised, or TierUnavailableError when the host is gone.

        Cancellation:
            Deferred until the answer is there: the host may be using the caller's memory.
        """
        if self._gone:
            raise TierUnavailableError(self._tier, "its I/O process is gone")
        number = next(self._calls)
        answer: Kept[Frame] = Kept(loop=asyncio.get_running_loop())
        self._waiting[number] = answer
        self.send(make({"op": op, "call": number}))
        return settled(answer)

    async def close_tier(self, *, reset: bool) -> None:
        """Close the tier in the host, which then ends.

        Args:
            reset: Whether to reset it first.

        Raises:
            TierUnavailableError: The host ended without saying that all is committed.
            KvtierError: It was closed, and not reset.

        Cancellation:
            At once; nothing of the caller's is in use.
        """
        if self._gone:
            raise TierUnavailableError(self._tier, "its I/O process is gone")
        number = next(self._calls)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.send(Frame({"op": "close", "call": number, "reset": reset}))
        await answer

    async def aclose(self) -> None:
        """Close the socket and wait until the host has ended, one way or the other.

        Not for ever: a host that the operating system holds on to is left to it.
        """
        # Not close(), which first waits until a host that may hang has taken what it was sent.
        self._transport.abort()
        self._go()
        with contextlib.suppress(TierUnavailableError):
            await self.bury()

    async def bury(self) -> None:
        """Wait until the host has ended, which is gone as far as calls are concerned.

        However many wait, and however often: not for longer than it may take since it is gone.

        Raises:
            TierUnavailableError: It has not, and what it has open stays so.
        """
        if self._buried.is_set():
            return  # wait_for() of Python 3.11 would not even look once no time is left
        left_s = self._burial_deadline_s - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(self._buried.wait(), left_s)
        except TimeoutError as error:
            raise TierUnavailableError(
                self._tier,
                f"its I/O process {self._host.process.pid} is stuck in the operating system",
            ) from error

    @override
    def data_received(self, data: bytes) -> None:
        """Take the answers that are whole."""
        try:
            for frame in self._host.parser.feed(data):
                self._take(frame)
        except Exception:
            logger.exception("tier %s: its I/O process sent something strange", self._tier)
            self._transport.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the calls that wait, once the host has ended."""
        self._go()
        self._burial = asyncio.get_running_loop().create_task(self._end())

    def _go(self) -> None:
        if not self._gone:
            self._gone = True
            self._burial_deadline_s = asyncio.get_running_loop().time() + _BURIAL_TIMEOUT_S

    async def _end(self) -> None:
        """Fail the calls that wait, once the host's threads leave callers' memory alone."""
        process = self._host.process
        try:
            if not await aend(process):
                logger.error(
                    "tier %s: its I/O process %d is stuck in the operating system (said once)",
                    self._tier,
                    process.pid,
                )
                while not await aend(process):
                    pass
        finally:  # this is cancelled when the loop ends, and nobody uses the memory again
            error = f"its I/O process ended with exit code {process.returncode}"
            for answer in self._waiting.values():
                if not answer.cancelled():
                    answer.set_exception(TierUnavailableError(self._tier, error))
            self._waiting.clear()
        self._buried.set()

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
