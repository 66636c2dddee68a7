"""The engine's end of a hosted tier."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvtier.config import TierConfig
from kvtier.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    KvtierError,
    TierUnavailableError,
)
from kvtier.keys import ChunkKey
from kvtier.logs import get_logger
from kvtier.tiers.base import (
    SlotOutcomes,
    StorageTier,
    TierContext,
    check_batch,
)
from kvtier.tiers.hosted.connection import Connection
from kvtier.tiers.hosted.frames import Batch, Frame, decode_outcomes, unpack_keys
from kvtier.tiers.hosted.process import HostProcess, Opened
from kvtier.types import Outcome, Purpose, SharedMemory

__all__ = ["HostedTier"]

logger = get_logger(__name__)

_CLOSE_TIMEOUT_S: Final = 30.0
_NOTES_DELAY_S: Final = 1.0
_RESET_LOST: Final = (
    "; the reset was not carried out, and a restart brings back what it was to remove: remove "
    "the tier's directory before"
)


class HostedTier(StorageTier):
    """A storage tier that runs in a process of its own.

    Buffers given to :meth:`read` and :meth:`write` must lie in the context's shared memory.

    Args:
        options: Options of the tier that is hosted.
        context: Its context, with ``memory``.
        host: The process; owned by this object from now on.
        opened: What it said until the tier was open.
    """

    Options: ClassVar[type[TierConfig]] = TierConfig

    def __init__(
        self, options: TierConfig, context: TierContext, host: HostProcess, opened: Opened
    ) -> None:
        self.name = options.name
        self.slot_nbytes = context.slot_nbytes
        self.capacity_slots = opened.capacity_slots
        self._options = options
        self._context = context
        self._memory = _require_memory(options, context)
        self._recovered = opened.recovered
        self._host: HostProcess | None = host
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._reset_owed = False
        self._was_reset = False
        self._start_failed = False
        self._notes: list[Frame] = []
        self._notes_lock = threading.Lock()
        self._notes_due = False

    @classmethod
    @override
    def open(cls, options: TierConfig, context: TierContext) -> Self:
        """Start a host that opens the tier ``options.kind`` names; blocks.

        Raises:
            ConfigError: There is no shared memory, or the tier's options cannot work here.
            StoreLockedError: Another process has the store open.
            StoreDamagedError: The store's files are not what they should be.
            TierUnavailableError: The host could not be started, or the medium fails.
        """
        return cls(options, context, *_start(options, context))

    @property
    def host_pid(self) -> int | None:
        """Process id of the host, None while there is none."""
        return None if self._host is None else self._host.process.pid

    @override
    def recovered(self) -> Iterator[tuple[ChunkKey, int]]:
        while self._recovered:
            found = self._recovered.popleft()
            count = found.header["count"]
            slots = np.frombuffer(found.arrays, dtype=np.int64, count=count)
            keys = unpack_keys(found.header["widths"], count, found.arrays[slots.nbytes :])
            yield from zip(keys, slots.tolist(), strict=True)

    @override
    async def aopen(self) -> None:
        await self._connect()

    @override
    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        return await self.begin_write(keys, slots, sources, purpose=purpose)

    @override
    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        return await self.begin_read(keys, slots, into, purpose=purpose)

    @override
    def begin_write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> Coroutine[Any, Any, SlotOutcomes]:
        return self._move("write", self._batch(keys, slots, sources), purpose)

    @override
    def begin_read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> Coroutine[Any, Any, SlotOutcomes]:
        return self._move("read", self._batch(keys, slots, into), purpose)

    @override
    def forget(self, slots: Sequence[int]) -> None:
        self._note("forget", slots)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._send_notes)

    @override
    def touch(self, slots: Sequence[int]) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.touch`; sent with the next call, or soon.

        Waiting saves a message for each job of a busy tier. Waiting for a call alone would
        keep the latest uses of an engine at rest out of the index, and give them the time of
        whatever request comes next.
        """
        lost = self._connection is not None and not self._connection.usable
        if self._host is not None and not lost:  # not worth keeping for another host
            self._note("touch", slots)
            self._send_notes_soon()

    @override
    async def reset(self) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.reset`.

        One that fails is owed: it is done before anything else is, by this host or another.

        Raises:
            ClosedError: The tier was closed.
            TierUnavailableError: It is still owed. Nothing is readable now, but a restart
                brings back what was there, unless a later call or :meth:`aclose` makes up
                for it.
        """
        self._require_open()
        self._recovered.clear()
        self._reset_owed = self._was_reset = True
        try:
            await self._connect()
        except TierUnavailableError:
            self._require_open()
            await self._connect()  # once more: by another host if this one died

    @override
    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            connection = await self._connect_to_close()
            if connection is not None:
                await self._close(connection)
        except (TimeoutError, KvtierError) as error:
            problem = str(error) or f"no answer within {_CLOSE_TIMEOUT_S:.0f} s"
            owed = _RESET_LOST if self._reset_owed else ""
            logger.warning("tier %s: not closed cleanly: %s%s", self.name, problem, owed)
        self._reset_owed = False  # or a call that still waits would start a host for it

    def _move(
        self, op: str, batch: Batch, purpose: Purpose
    ) -> Coroutine[Any, Any, SlotOutcomes]:
        """Send ``batch`` now if there is a host, and return what waits for the outcomes."""
        connection = self._ready
        if connection is None:
            return self._outcomes(self._send_later(op, batch, purpose), batch)
        return self._outcomes(self._send(connection, op, batch, purpose), batch)

    @property
    def _ready(self) -> Connection | None:
        """The connection, if there is one through which chunks may be moved now."""
        connection = self._connection
        if connection is None or not connection.usable or self._reset_owed:
            return None
        return connection

    async def _send_later(self, op: str, batch: Batch, purpose: Purpose) -> Frame:
        return await self._send(await self._connect(), op, batch, purpose)

    def _send(
        self, connection: Connection, op: str, batch: Batch, purpose: Purpose
    ) -> Coroutine[Any, Any, Frame]:
        self._send_notes()
        return connection.call(op, lambda header: batch.frame({**header, "why": int(purpose)}))

    async def _outcomes(
        self, answering: Coroutine[Any, Any, Frame], batch: Batch
    ) -> SlotOutcomes:
        try:
            answer = await answering
        except TierUnavailableError as error:
            return SlotOutcomes([Outcome.FAILED] * len(batch.keys), str(error))
        outcomes = decode_outcomes(answer.header["outcomes"], answer.arrays, len(batch.keys))
        return SlotOutcomes(outcomes, answer.header["words"])

    async def _connect(self) -> Connection:
        """Return a usable connection to a tier that owes no reset.

        Raises:
            ClosedError: The tier was closed, and closing it sees to the reset.
            TierUnavailableError: There is no host and none can be started, or the reset failed.
        """
        if self._ready is not None:
            return self._ready
        async with self._connecting:
            connection = await self._reach_host()
            if self._reset_owed:
                self._require_open()
                self._send_notes()
                await connection.call("reset")
                self._reset_owed = False
        return connection

    async def _reach_host(self) -> Connection:
        """Return a usable connection, starting a host again if the last one is gone.

        Raises:
            TierUnavailableError: There is none and none can be started.
        """
        if self._connection is not None and self._connection.usable:
            return self._connection
        if self._connection is not None:
            await self._connection.bury()  # or its successor would find the store locked
            self._connection = self._host = None
        host = self._host or await self._start_wanted()
        connection = Connection(self.name, host)
        self._loop = asyncio.get_running_loop()
        try:
            await connection.open()
        except asyncio.CancelledError:
            self._connection = connection  # it is open all the same
            raise
        self._connection = connection
        return connection

    async def _connect_to_close(self) -> Connection | None:
        """Return the connection through which to close; None if there is nothing to do.

        A reset that is owed is worth starting a host for. One that hangs in it has a
        connection, and keeps nobody waiting here.

        Raises:
            TierUnavailableError: It is not to be had.
        """
        connection = self._connection
        if connection is not None and (connection.usable or not self._reset_owed):
            return connection
        if self._host is None and not self._reset_owed:
            return None
        async with self._connecting:
            if self._host is None and not self._reset_owed:
                return None  # it was started too late, and is ended
            return await self._reach_host()

    async def _close(self, connection: Connection) -> None:
        """Close the tier, after the reset if one is owed, and see its host end.

        Raises:
            TimeoutError: It took too long.
            KvtierError: The host ended before, or could not do it.
        """
        self._send_notes()
        closing = connection.close_tier(reset=self._reset_owed)
        try:
            await asyncio.wait_for(closing, _CLOSE_TIMEOUT_S)
            self._reset_owed = False
        finally:
            await connection.aclose()

    async def _start_wanted(self) -> HostProcess:
        """Start a host again, and end it if the tier was closed meanwhile: nobody else would.

        Raises:
            TierUnavailableError: It was, or there is none to be had.
        """
        if not self._is_over():
            host = await self._start_again()
            if not self._is_over():
                return host
            unwanted = Connection(self.name, host)
            await unwanted.open()
            await unwanted.aclose()
            self._host = None
        raise TierUnavailableError(self.name, "it is closed")

    def _is_over(self) -> bool:
        """Whether the tier was closed and has nothing to make up for."""
        return self._closed and not self._reset_owed

    async def _start_again(self) -> HostProcess:
        """Start a host in place of one that died; what it recovers is known already.

        Said once, however often it fails: whoever wanted it is told why.
        """
        if not self._start_failed:
            logger.warning("tier %s: starting its I/O process again", self.name)
        try:
            host = await self._context.pool.run(self._host_again, priority=int(Purpose.LOAD))
        except KvtierError as error:
            self._start_failed = True
            raise TierUnavailableError(
                self.name, f"its I/O process could not be started again: {error}"
            ) from error
        self._start_failed = False
        return host

    def _host_again(self) -> HostProcess:
        # Kept from here on: who waits for it may be cancelled.
        context = dataclasses.replace(self._context, was_reset=self._was_reset)
        self._host, _ = _start(self._options, context)
        return self._host

    def _note(self, op: str, slots: Sequence[int]) -> None:
        """Keep a frame that nobody waits for until something else is sent."""
        frame = Frame({"op": op}, np.asarray(slots, dtype=np.int64).tobytes())
        with self._notes_lock:
            self._notes.append(frame)

    def _send_notes(self) -> None:
        if self._connection is None or not self._connection.usable:
            return  # what is to be forgotten is kept for the next host
        with self._notes_lock:
            notes, self._notes = self._notes, []
        for frame in notes:
            self._connection.send(frame)

    def _send_notes_soon(self) -> None:
        if self._loop is not None and not self._notes_due:
            self._notes_due = True
            self._loop.call_soon_threadsafe(
                self._loop.call_later, _NOTES_DELAY_S, self._send_due_notes
            )

    def _send_due_notes(self) -> None:
        self._notes_due = False
        if not self._closed:
            self._send_notes()

    def _batch(
        self, keys: Sequence[ChunkKey], slots: Sequence[int], views: Sequence[memoryview]
    ) -> Batch:
        self._require_open()
        check_batch(self, keys, slots, views)
        return Batch(keys, np.asarray(slots, dtype=np.int64), self._offsets(views))

    def _offsets(self, views: Sequence[memoryview]) -> npt.NDArray[np.int64]:
        """Return where ``views`` are in the shared memory."""
        first = ctypes.c_char.from_buffer
        addresses = [ctypes.addressof(first(view)) for view in views]
        offsets = np.array(addresses, dtype=np.int64) - self._memory.address
        last = self._memory.nbytes - self.slot_nbytes
        if offsets.size and not 0 <= offsets.min() <= offsets.max() <= last:
            raise CapacityError(f"tier {self.name}: a buffer is not in the shared memory")
        return offsets

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self.name} is closed")


def _require_memory(options: TierConfig, context: TierContext) -> SharedMemory:
    if context.memory is None:
        raise ConfigError(f"tier {options.name}: a process of its own needs shared memory")
    return context.memory


def _start(options: TierConfig, context: TierContext) -> tuple[HostProcess, Opened]:
    opening = {
        "options": options.model_dump(mode="json"),
        "slot_nbytes": context.slot_nbytes,
        "fingerprint": dict(context.fingerprint.fields),
        "label": context.fingerprint.label,
        "piece_nbytes": context.piece_nbytes,
        "threads": context.pool.threads,
        "was_reset": context.was_reset,
    }
    return HostProcess.start(options.name, opening, _require_memory(options, context))
