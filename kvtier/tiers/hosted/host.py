"""The host: the process of a hosted tier, started by :class:`~kvtier.tiers.hosted.HostedTier`.

The host inherits two descriptors, the socket to the engine and the shared memory. It gets the
engine's process id as an argument. The host ends when the engine sends a close frame, closes
the socket or dies. It ignores signals that a terminal or a supervisor sends to the whole
process group, because the engine still demotes chunks after such a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import islice
from typing import Any, Final

import numpy as np
from typing_extensions import override

from kvtier.config import options_of
from kvtier.logs import ENGINE, get_logger
from kvtier.os.iopool import IoPool
from kvtier.os.memory import (
    PageMapper,
    map_shared,
    paused_garbage_collection,
    set_malloc_mmap_threshold,
)
from kvtier.tiers.base import KeyFinder, SlotOutcomes, StorageTier, TierContext, check_outcomes
from kvtier.tiers.hosted.frames import (
    READ_NBYTES,
    Batch,
    Frame,
    FrameParser,
    decode_part_hashes,
    encode_error,
    encode_outcomes,
    encode_part_hashes,
    pack_keys,
    unpack_keys,
)
from kvtier.tiers.part_hashes import PartHashKeeper
from kvtier.tiers.registry import open_tier
from kvtier.types import LayoutFingerprint, Purpose, QuestionPart

__all__ = ["LogToEngine", "Server", "end_with", "main", "send_recovered", "until_closed"]

logger = get_logger("kvtier.tiers.hosted.host")  # __name__ is __main__ here

_CLOSE_TIMEOUT_S: Final = 30.0
_NICENESS: Final = 5
_RECOVERED_AT_ONCE: Final = 1 << 16
_PARENT_POLL_S: Final = 1.0
_STDERR: Final = "(kvtier I/O process pid=%(process)d) %(levelname)s %(asctime)s %(message)s"
"""Format of log records on stderr: other packages' records, and those that cannot be sent."""
_FIELDS: Final = (
    "name",
    "levelno",
    "levelname",
    "pathname",
    "lineno",
    "created",
    "msecs",
    "process",
    "processName",
)
"""The fields of a log record to send, such as its time and its source line."""

Send = Callable[[Frame], None]


class LogToEngine(logging.Handler):
    """Sends log records to the engine, which logs them.

    Args:
        loop: The loop on which frames are sent.
        send: Sends a frame to the engine.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        super().__init__()
        self._loop = loop
        self._send = send

    @override
    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: getattr(record, name) for name in _FIELDS}
        try:
            fields["msg"] = self.format(record)
        except Exception:  # noqa: BLE001 - a bad message must not end the I/O
            self.handleError(record)
            return
        module = record.name.removeprefix(f"{ENGINE}.")
        frame = Frame({"op": "log", "module": module, "record": fields})
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._send, frame)


class Server:
    """Handles the engine's frames: calls the open tier and sends its answers.

    Args:
        tier: The tier.
        memory: The memory shared with the engine.
        send: Sends a frame to the engine.
    """

    def __init__(self, tier: StorageTier, memory: memoryview, send: Send) -> None:
        self._tier = tier
        self._memory = memory
        self._send = send
        self._calls: set[asyncio.Task[None]] = set()

    def take(self, frame: Frame) -> None:
        """Handle ``frame``; slow calls run in their own tasks."""
        match frame.header["op"]:
            case "forget":
                self._tier.forget(np.frombuffer(frame.arrays, dtype=np.int64).tolist())
            case "touch":
                self._tier.touch(np.frombuffer(frame.arrays, dtype=np.int64).tolist())
            case "part_hashes":
                kept = decode_part_hashes(frame)
                assert isinstance(self._tier, PartHashKeeper)
                self._tier.keep_part_hashes(kept.slots.tolist(), kept.hashes)
            case "write":
                self._start(frame, functools.partial(self._move, frame, self._tier.write))
            case "read":
                self._start(frame, functools.partial(self._move, frame, self._tier.read))
            case "find":
                self._start(frame, functools.partial(self._find, frame))
            case "reset":
                self._start(frame, self._reset)
            case unknown:
                raise ValueError(f"no such operation: {unknown}")

    async def drain(self) -> None:
        """Wait until every started call has ended."""
        while self._calls:
            await asyncio.wait(self._calls)

    def _start(self, frame: Frame, call: Callable[[], Awaitable[Frame]]) -> None:
        task = asyncio.create_task(self._answer(frame, call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, frame: Frame, call: Callable[[], Awaitable[Frame]]) -> None:
        try:
            answer = await call()
        # This task is never cancelled: a CancelledError comes from what the tier awaited.
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised in the engine
            answer = Frame({"error": encode_error(error)})
        self._send(_answer_to(frame, answer))

    async def _move(self, frame: Frame, move: Callable[..., Awaitable[Any]]) -> Frame:
        batch = Batch.of(frame)
        nbytes = self._tier.slot_nbytes
        views = [self._memory[at : at + nbytes] for at in batch.offsets.tolist()]
        purpose = Purpose(frame.header["purpose"])
        moving = move(batch.keys, batch.slots.tolist(), views, purpose=purpose)
        return self._outcomes(await moving, len(batch.keys))

    async def _find(self, frame: Frame) -> Frame:
        count = frame.header["count"]
        assert isinstance(self._tier, KeyFinder)
        keys = unpack_keys(frame.header["widths"], count, frame.arrays)
        parts = [QuestionPart(*part) for part in frame.header["parts"]]
        return self._outcomes(await self._tier.find(keys, parts), count)

    def _outcomes(self, moved: SlotOutcomes, chunks: int) -> Frame:
        check_outcomes(moved, chunks, mover=f"tier {self._tier.name}")
        return Frame({"failure": moved.error}, encode_outcomes(moved.outcomes))

    async def _reset(self) -> Frame:
        await self._tier.reset()
        return Frame({})


async def _serve(connection: socket.socket, memory: memoryview, engine_pid: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)

    def send(frame: Frame) -> None:
        if not writer.is_closing():
            writer.write(frame.encode())

    _log_to_engine(send)
    end_with(engine_pid, writer.transport)
    frames = _frames(reader)
    opening = await anext(frames, None)
    if opening is None:
        return  # the engine ended
    try:
        pool = IoPool(opening.header["threads"], name="kvtier-io")
        tier = await pool.run(
            functools.partial(_open, opening, pool, engine_pid, memory), priority=0
        )
    except Exception as error:  # noqa: BLE001 - raised again in the engine's process
        send(Frame({"op": "refused", "error": encode_error(error)}))
        await writer.drain()
        return
    with contextlib.suppress(ConnectionError):  # an engine that ended is noticed below
        await send_recovered(tier, writer)
    opened = {
        "capacity_slots": tier.capacity_slots,
        "is_local": tier.is_local,
        "retained": list(tier.retained().items()),
    }
    send(Frame({"op": "opened", **opened, **_slot_file(tier)}))
    closing = await until_closed(frames, Server(tier, memory, send))
    outcome = await _close(tier, reset=closing is not None and closing.header["reset"])
    if not pool.close(timeout_s=_CLOSE_TIMEOUT_S):
        logger.warning("tier %s: I/O calls did not end in %.0f s", tier.name, _CLOSE_TIMEOUT_S)
        await asyncio.sleep(0)  # so that the warning is sent before the answer
    if closing is not None:
        send(_answer_to(closing, Frame(outcome)))
        with contextlib.suppress(OSError):
            await writer.drain()


def _answer_to(call: Frame, answer: Frame) -> Frame:
    """Return a frame with the content of ``answer`` and the call number of ``call``."""
    header = {"op": "answer", "call": call.header["call"]}
    return Frame({**header, **answer.header}, answer.arrays)


async def _close(tier: StorageTier, *, reset: bool) -> dict[str, Any]:
    """Close ``tier``, after a reset if requested; return the header of the answer."""
    outcome: dict[str, Any] = {}
    if reset:
        try:
            await tier.reset()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised in the engine
            outcome["error"] = encode_error(error)
    await tier.aclose()
    return outcome


def _open(opening: Frame, pool: IoPool, engine_pid: int, memory: memoryview) -> StorageTier:
    header = opening.header
    context = TierContext(
        slot_nbytes=header["slot_nbytes"],
        fingerprint=LayoutFingerprint(
            header["fingerprint"], header["label"], tuple(header["groups"])
        ),
        pool=pool,
        piece_nbytes=header["piece_nbytes"],
        owner_pid=engine_pid,
        was_reset=header["was_reset"],
        hash_parts=header["hash_parts"],
        mapped=memory,
    )
    options = options_of(header["options"]["kind"]).model_validate_json(
        json.dumps(header["options"])
    )
    with paused_garbage_collection():
        return open_tier(options, context)


def _log_to_engine(send: Send) -> None:
    log = logging.getLogger(f"{ENGINE}.kvtier")
    log.addHandler(LogToEngine(asyncio.get_running_loop(), send))
    log.setLevel(logging.INFO)
    log.propagate = False


def end_with(engine_pid: int, transport: asyncio.WriteTransport) -> None:
    """Close ``transport`` when the engine dies, even if another process holds the socket.

    The stream is ended only through the transport: data that arrives after the end is an error.
    """
    loop = asyncio.get_running_loop()
    try:
        engine = os.pidfd_open(engine_pid)
    except ProcessLookupError:
        transport.abort()
        return
    except (OSError, AttributeError):
        # A sandbox's kernel or a Python built on an old kernel may lack pidfd_open.
        _poll_parent(engine_pid, transport)
        return

    def engine_died() -> None:
        loop.remove_reader(engine)
        transport.abort()

    loop.add_reader(engine, engine_died)


def _poll_parent(engine_pid: int, transport: asyncio.WriteTransport) -> None:
    """Poll the parent of this process, and close ``transport`` once it is not the engine."""
    if os.getppid() != engine_pid:
        transport.abort()
        return
    loop = asyncio.get_running_loop()
    loop.call_later(_PARENT_POLL_S, _poll_parent, engine_pid, transport)


def _slot_file(tier: StorageTier) -> dict[str, Any]:
    """Return the slot file as a header field of an ``opened`` frame; empty without a file."""
    file = tier.slot_file if isinstance(tier, PartHashKeeper) else None
    return {} if file is None else {"slot_file": list(file)}


async def send_recovered(tier: StorageTier, writer: asyncio.StreamWriter) -> None:
    """Send the recovered chunks of ``tier`` and their part hashes to the engine."""
    chunks = 0
    if isinstance(tier, PartHashKeeper):
        kept = tier.recovered_part_hashes()
        if kept.slots.size:
            writer.write(encode_part_hashes(kept).encode())
            await writer.drain()
    with paused_garbage_collection():
        for frame in _recovered(tier):
            chunks += frame.header["count"]
            writer.write(frame.encode())
            await writer.drain()
        if chunks > _RECOVERED_AT_ONCE:
            # Objects that Python keeps for reuse are spread over the heap and hold its pages.
            # Collecting takes a while, so do it before the tier is open.
            gc.collect()


def _recovered(tier: StorageTier) -> Iterator[Frame]:
    """Yield the recovered chunks in small frames; large frames would fragment the heap."""
    recovered = tier.recovered()
    while found := list(islice(recovered, _RECOVERED_AT_ONCE)):
        keys, places = zip(*found, strict=True)
        widths, packed = pack_keys(keys)
        slots = np.array(places, dtype=np.int64).tobytes()
        header = {"op": "recovered", "count": len(keys), "widths": widths}
        yield Frame(header, b"".join((slots, packed)))


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[Frame]:
    """Yield the frames that the engine sends, until the engine ends."""
    parser = FrameParser()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(READ_NBYTES):
            for frame in parser.feed(data):
                yield frame


async def until_closed(frames: AsyncIterator[Frame], server: Server) -> Frame | None:
    """Serve until the engine sends a close frame or ends; return the close frame, else None."""
    try:
        async for frame in frames:
            if frame.header["op"] == "close":
                return frame
            server.take(frame)
    finally:
        await server.drain()
    return None


def main() -> None:
    """Serve the engine that started this process, until the engine closes the tier or ends."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    logging.basicConfig(format=_STDERR)
    # Lower the priority: if processors are scarce, the engine's model needs them first.
    os.nice(_NICENESS)
    set_malloc_mmap_threshold()
    descriptor, memory_descriptor, engine_pid = map(int, sys.argv[1:])
    memory = memoryview(map_shared(memory_descriptor))
    os.close(memory_descriptor)
    PageMapper(ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory.nbytes)
    connection = socket.socket(fileno=descriptor)
    with contextlib.suppress(ConnectionError):  # the engine ended
        asyncio.run(_serve(connection, memory, engine_pid))


if __name__ == "__main__":
    main()
