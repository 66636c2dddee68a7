"""The engine's side of a hosted tier."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvtier.config import TierConfig
from kvtier.errors import CapacityError, ClosedError, KvtierError, TierUnavailableError
from kvtier.keys import ChunkKey
from kvtier.logs import get_logger
from kvtier.tiers.base import KeyFinder, SlotOutcomes, StorageTier, TierContext, check_batch
from kvtier.tiers.hosted.connection import Connection
from kvtier.tiers.hosted.frames import (
    Batch,
    Frame,
    decode_outcomes,
    decode_part_hashes,
    encode_part_hashes,
    pack_keys,
    unpack_keys,
)
from kvtier.tiers.hosted.process import HostProcess, Opened, shared_memory
from kvtier.tiers.part_hashes import (
    NO_PART_HASHES,
    PartHashes,
    PartHashKeeper,
    StoredPartHashes,
)
from kvtier.types import Outcome, Purpose, QuestionPart, SlotFileId

__all__ = ["HostedTier"]

logger = get_logger(__name__)

_CLOSE_TIMEOUT_S: Final = 30.0
_QUEUE_DELAY_S: Final = 1.0
_RESET_LOST: Final = (
    "; the reset was not carried out, and a restart recovers the chunks from before it: remove "
    "the tier's directory first"
)


class HostedTier(StorageTier, PartHashKeeper, KeyFinder):
    """A storage tier that runs in a process of its own, which this object owns.

    Buffers given to :meth:`read` and :meth:`write` must lie in the context's shared memory.
    """

    Options: ClassVar[type[TierConfig]] = TierConfig
    moves_in_process: ClassVar[bool] = False

    def __init__(
        self, options: TierConfig, context: TierContext, host: HostProcess, opened: Opened
    ) -> None:
        self.name = options.name
        self.is_local = opened.is_local
        self.slot_nbytes = context.slot_nbytes
        self.capacity_slots = opened.capacity_slots
        self._options = options
        self._context = context
        self._memory = shared_memory(options, context)
        self._recovered = opened.recovered
        self._part_hashes = opened.part_hashes
        self._slot_file = opened.slot_file
        self._retained = opened.retained
        self._host: HostProcess | None = host
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._close_ended = False
        self._closing = asyncio.Lock()
        self._reset_due = False
        self._was_reset = False
        self._start_failed = False
        self._queued: list[Frame] = []
        self._queue_lock = threading.Lock()
        self._queue_timer_set = False

    @classmethod
    @override
    def open(cls, options: TierConfig, context: TierContext) -> Self:
        """Start a host process that opens a tier of kind ``options.kind``. This call blocks.

        Raises:
            ConfigError: There is no shared memory.
            KvtierError: The error that opening the tier raised in the host.
            TierUnavailableError: The host could not be started, or the medium fails.
        """
        return cls(options, context, *HostProcess.start(options, context))

    @property
    def host_pid(self) -> int | None:
        """Process id of the host; None without a host."""
        return None if self._host is None else self._host.process.pid

    @override
    def recovered(self) -> Iterator[tuple[ChunkKey, int]]:
        while self._recovered:
            found = self._recovered.popleft()
            count = found.header["count"]
            slots = np.frombuffer(found.arrays, dtype=np.int64, count=count)
            keys = unpack_keys(found.header["widths"], count, found.arrays[slots.nbytes :])
            yield from zip(keys, slots.tolist(), strict=True)

    @property
    @override
    def slot_file(self) -> SlotFileId | None:
        return self._slot_file

    @override
    def recovered_part_hashes(self) -> StoredPartHashes:
        found, self._part_hashes = self._part_hashes, None
        return NO_PART_HASHES if found is None else decode_part_hashes(found)

    @override
    def keep_part_hashes(self, slots: Sequence[int], hashes: PartHashes) -> None:
        kept = StoredPartHashes(np.asarray(slots, dtype=np.int64), hashes)
        self._queue_frame(encode_part_hashes(kept))
        self._call_soon(self._send_queued)

    @override
    def retained(self) -> Mapping[int, int]:
        return self._retained

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
    async def find(
        self, keys: Sequence[ChunkKey], parts: Sequence[QuestionPart]
    ) -> SlotOutcomes:
        self._require_open()
        connection = await self._connect()
        widths, packed = pack_keys(keys)
        counts = {"count": len(keys), "widths": widths, "parts": parts}
        answer = await connection.call(
            "find", lambda header: Frame({**header, **counts}, packed)
        )
        return _outcomes_in(answer)

    @override
    def forget(self, slots: Sequence[int]) -> None:
        self._queue("forget", slots)
        self._call_soon(self._send_queued)

    @override
    def touch(self, slots: Sequence[int]) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.touch`; sent with the next call.

        Waiting for the next call saves one message per job. If no call follows within a second,
        a timer sends the uses, so that the index has roughly correct times.
        """
        lost = self._connection is not None and not self._connection.usable
        if self._host is not None and not lost:  # a new host does not need this frame
            self._queue("touch", slots)
            self._send_queued_soon()

    @override
    async def reset(self) -> None:
        """See :meth:`kvtier.tiers.base.StorageTier.reset`.

        A failed reset is retried before any other operation, by the same host or a new host.

        Raises:
            ClosedError: The tier was closed.
            TierUnavailableError: The reset is still due. Nothing is readable now, but a restart
                recovers the old chunks unless a later call or :meth:`aclose` does the reset.
        """
        self._require_open()
        self._recovered.clear()
        self._part_hashes = None
        self._reset_due = self._was_reset = True
        try:
            await self._connect()
        except TierUnavailableError:
            self._require_open()
            await self._connect()  # again, by another host if this one died

    @override
    async def aclose(self) -> None:
        self._closed = True
        async with self._closing:
            if not self._close_ended:
                await self._end_host()
                self._close_ended = True

    async def _end_host(self) -> None:
        """Do a pending reset, close the tier, and wait for the host to end; log any failure."""
        try:
            connection = await self._connect_to_close()
            if connection is not None:
                await self._close(connection)
        except (TimeoutError, KvtierError) as error:
            problem = str(error) or f"no answer within {_CLOSE_TIMEOUT_S:.0f} s"
            owed = _RESET_LOST if self._reset_due else ""
            logger.warning("tier %s: not closed cleanly: %s%s", self.name, problem, owed)
        self._reset_due = False  # else a waiting call would start a host for the reset

    def _move(
        self, op: str, batch: Batch, purpose: Purpose
    ) -> Coroutine[Any, Any, SlotOutcomes]:
        """Send ``batch`` now if a host is ready, and return a coroutine for the outcomes."""
        connection = self._ready
        if connection is None:
            return self._outcomes(self._send_later(op, batch, purpose), batch)
        return self._outcomes(self._send(connection, op, batch, purpose), batch)

    @property
    def _ready(self) -> Connection | None:
        """Return the connection if it can move chunks now; else None."""
        connection = self._connection
        if connection is None or not connection.usable or self._reset_due:
            return None
        return connection

    async def _send_later(self, op: str, batch: Batch, purpose: Purpose) -> Frame:
        return await self._send(await self._connect(), op, batch, purpose)

    def _send(
        self, connection: Connection, op: str, batch: Batch, purpose: Purpose
    ) -> Coroutine[Any, Any, Frame]:
        self._send_queued()
        return connection.call(
            op, lambda header: batch.frame({**header, "purpose": int(purpose)})
        )

    async def _outcomes(
        self, answering: Coroutine[Any, Any, Frame], batch: Batch
    ) -> SlotOutcomes:
        try:
            answer = await answering
        except TierUnavailableError as error:
            return SlotOutcomes([Outcome.FAILED] * len(batch.keys), str(error))
        return _outcomes_in(answer)

    async def _connect(self) -> Connection:
        """Return a usable connection; if a reset is due, do the reset first.

        Raises:
            ClosedError: The tier was closed; :meth:`aclose` does the reset.
            TierUnavailableError: No host runs and none can be started, or the reset failed.
        """
        if self._ready is not None:
            return self._ready
        async with self._connecting:
            connection = await self._reach_host()
            if self._reset_due:
                self._require_open()
                self._send_queued()
                await connection.call("reset")
                self._reset_due = False
        return connection

    async def _reach_host(self) -> Connection:
        """Return a usable connection; start a new host if the last one died."""
        if self._connection is not None and self._connection.usable:
            return self._connection
        if self._connection is not None:
            await self._connection.wait_for_exit()  # the old host locks the cache until then
            self._connection = self._host = None
        host = self._host or await self._start_wanted()
        connection = Connection(self.name, host)
        self._loop = asyncio.get_running_loop()
        try:
            await connection.open()
        except asyncio.CancelledError:
            self._connection = connection  # the connection is open nevertheless
            raise
        self._connection = connection
        return connection

    async def _connect_to_close(self) -> Connection | None:
        """Return the connection for closing the tier; None if there is nothing to close.

        If a reset is due and no host runs, a new host is started. A connection whose reset
        hangs is returned without waiting for that reset.
        """
        connection = self._connection
        if connection is not None and (connection.usable or not self._reset_due):
            return connection
        if self._host is None and not self._reset_due:
            return None
        async with self._connecting:
            if self._host is None and not self._reset_due:
                return None  # the host was started too late and was ended
            return await self._reach_host()

    async def _close(self, connection: Connection) -> None:
        """Do a reset if one is due, close the tier, and wait until the host has ended.

        Raises:
            TimeoutError: The reset or the close took too long.
            KvtierError: The host ended early or failed.
        """
        self._send_queued()
        closing = connection.close_tier(reset=self._reset_due)
        try:
            await asyncio.wait_for(closing, _CLOSE_TIMEOUT_S)
            self._reset_due = False
        finally:
            await connection.aclose()

    async def _start_wanted(self) -> HostProcess:
        """Start and return a new host, unless the tier no longer needs one.

        If the tier stops needing a host during the start, the new host is ended.

        Raises:
            TierUnavailableError: The tier needs no host, or none can be started.
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
        """Return whether the tier is closed and no reset is due, so that no host is needed."""
        return self._closed and not self._reset_due

    async def _start_again(self) -> HostProcess:
        """Start and return a new host after one died; ignore the chunks that it recovers.

        A series of failures is logged once; every caller gets the reason of its own failure.
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
        # Stored here, because the waiting task may be cancelled.
        context = dataclasses.replace(self._context, was_reset=self._was_reset)
        self._host, _ = HostProcess.start(self._options, context)
        return self._host

    def _queue(self, op: str, slots: Sequence[int]) -> None:
        """Queue a frame that gets no answer; the next call sends it."""
        self._queue_frame(Frame({"op": op}, np.asarray(slots, dtype=np.int64).tobytes()))

    def _queue_frame(self, frame: Frame) -> None:
        with self._queue_lock:
            self._queued.append(frame)

    def _send_queued(self) -> None:
        if self._connection is None or not self._connection.usable:
            return  # queued frames are kept for the next host
        with self._queue_lock:
            queued, self._queued = self._queued, []
        for frame in queued:
            self._connection.send(frame)

    def _send_queued_soon(self) -> None:
        if self._loop is not None and not self._queue_timer_set:
            self._queue_timer_set = True
            self._call_soon(self._loop.call_later, _QUEUE_DELAY_S, self._send_queued_now)

    def _call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Call ``callback`` on the tier's loop, unless the loop is missing or closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback, *args)

    def _send_queued_now(self) -> None:
        self._queue_timer_set = False
        if not self._closed:
            self._send_queued()

    def _batch(
        self, keys: Sequence[ChunkKey], slots: Sequence[int], views: Sequence[memoryview]
    ) -> Batch:
        self._require_open()
        check_batch(self, keys, slots, views)
        return Batch(keys, np.asarray(slots, dtype=np.int64), self._offsets(views))

    def _offsets(self, views: Sequence[memoryview]) -> npt.NDArray[np.int64]:
        """Return the offsets of ``views`` in the shared memory."""
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


def _outcomes_in(answer: Frame) -> SlotOutcomes:
    return SlotOutcomes(decode_outcomes(answer.arrays), answer.header["failure"])
