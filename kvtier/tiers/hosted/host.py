"""The process that runs a hosted tier; started by :class:`~kvtier.tiers.hosted.HostedTier`.

It inherits two descriptors, the socket to the engine and the shared memory, and is told the
engine's process id. It ends when the engine asks it to, closes the socket or dies; a signal
that a terminal or a supervisor sends to the whole group does not end it, because the engine
still has chunks to bring down then.
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
from kvtier.logs import ENGINE
from kvtier.os.iopool import IoPool
from kvtier.os.memory import (
    PageMapper,
    map_shared,
    paused_garbage_collection,
    set_malloc_mmap_threshold,
)
from kvtier.tiers.base import StorageTier, TierContext, check_outcomes
from kvtier.tiers.hosted.frames import (
    READ_NBYTES,
    Batch,
    Frame,
    FrameParser,
    encode_error,
    encode_outcomes,
    pack_keys,
)
from kvtier.tiers.registry import open_tier
from kvtier.types import LayoutFingerprint, Purpose

__all__ = ["main"]

_CLOSE_TIMEOUT_S: Final = 30.0
_NICENESS: Final = 5
_RECOVERED_AT_ONCE: Final = 1 << 16
_LOOK_EVERY_S: Final = 1.0
_STDERR: Final = "(kvtier I/O process pid=%(process)d) %(levelname)s %(asctime)s %(message)s"
"""Of what packages log and of what nobody can be sent any more."""
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
"""What a line of a log may show of where and when it was made."""

Send = Callable[[Frame], None]


class _LogToEngine(logging.Handler):
    """Hands log records to the engine, whose log is the one somebody reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        super().__init__()
        self._loop = loop
        self._send = send

    @override
    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: getattr(record, name) for name in _FIELDS}
        try:
            fields["msg"] = self.format(record)
        except Exception:  # noqa: BLE001 - a message that cannot be formatted ends no I/O
            self.handleError(record)
            return
        module = record.name.removeprefix(f"{ENGINE}.")
        frame = Frame({"op": "log", "module": module, "record": fields})
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._send, frame)


class _Server:
    """Answers frames about one open tier."""

    def __init__(self, tier: StorageTier, memory: memoryview, send: Send) -> None:
        self._tier = tier
        self._memory = memory
        self._send = send
        self._calls: set[asyncio.Task[None]] = set()

    def take(self, frame: Frame) -> None:
        """Act on ``frame``; what takes time goes on in a task of its own."""
        match frame.header["op"]:
            case "forget":
                self._tier.forget(np.frombuffer(frame.arrays, dtype=np.int64).tolist())
            case "touch":
                self._tier.touch(np.frombuffer(frame.arrays, dtype=np.int64).tolist())
            case "write":
                self._start(frame, functools.partial(self._move, frame, self._tier.write))
            case "read":
                self._start(frame, functools.partial(self._move, frame, self._tier.read))
            case "reset":
                self._start(frame, self._reset)
            case unknown:
                raise ValueError(f"no such operation: {unknown}")

    async def drain(self) -> None:
        """Wait until every call that was started is over."""
        while self._calls:
            await asyncio.wait(self._calls)

    def _start(self, frame: Frame, call: Callable[[], Awaitable[Frame]]) -> None:
        task = asyncio.create_task(self._answer(frame, call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, frame: Frame, call: Callable[[], Awaitable[Frame]]) -> None:
        try:
            answer = await call()
        except Exception as error:  # noqa: BLE001 - raised again in the engine's process
            answer = Frame({"error": encode_error(error)})
        self._send(_answer_to(frame, answer))

    async def _move(self, frame: Frame, move: Callable[..., Awaitable[Any]]) -> Frame:
        batch = Batch.of(frame)
        nbytes = self._tier.slot_nbytes
        views = [self._memory[at : at + nbytes] for at in batch.offsets.tolist()]
        purpose = Purpose(frame.header["why"])
        moving = move(batch.keys, batch.slots.tolist(), views, purpose=purpose)
        moved = check_outcomes(await moving, len(batch.keys))
        word, codes = encode_outcomes(moved.outcomes)
        return Frame({"outcomes": word, "words": moved.error}, codes)

    async def _reset(self) -> Frame:
        await self._tier.reset()
        return Frame({})


async def _serve(connection: socket.socket, memory: memoryview, engine_pid: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)

    def send(frame: Frame) -> None:
        if not writer.is_closing():
            writer.write(frame.encode())

    _log_to_engine(send)
    _end_with(engine_pid, writer.transport)
    frames = _frames(reader)
    opening = await anext(frames, None)
    if opening is None:
        return  # the engine went away
    try:
        pool = IoPool(opening.header["threads"], name="kvtier-io")
        tier = await pool.run(functools.partial(_open, opening, pool, engine_pid), priority=0)
    except Exception as error:  # noqa: BLE001 - raised again in the engine's process
        send(Frame({"op": "refused", "error": encode_error(error)}))
        await writer.drain()
        return
    with contextlib.suppress(ConnectionError):  # an engine that went away is noticed below
        await _tell_recovered(tier, writer)
    send(Frame({"op": "opened", "capacity_slots": tier.capacity_slots}))
    closing = await _until_closed(frames, _Server(tier, memory, send))
    outcome = await _close(tier, reset=closing is not None and closing.header["reset"])
    pool.close(timeout_s=_CLOSE_TIMEOUT_S)
    if closing is not None:
        send(_answer_to(closing, Frame(outcome)))
        with contextlib.suppress(OSError):
            await writer.drain()


def _answer_to(call: Frame, answer: Frame) -> Frame:
    """Return ``answer`` with what tells the engine which call it is for."""
    header = {"op": "answer", "call": call.header["call"]}
    return Frame({**header, **answer.header}, answer.arrays)


async def _close(tier: StorageTier, *, reset: bool) -> dict[str, Any]:
    """Close ``tier``, after resetting it if asked to; returns what to say of that."""
    outcome: dict[str, Any] = {}
    if reset:
        try:
            await tier.reset()
        except Exception as error:  # noqa: BLE001 - raised again in the engine's process
            outcome["error"] = encode_error(error)
    await tier.aclose()
    return outcome


def _open(opening: Frame, pool: IoPool, engine_pid: int) -> StorageTier:
    header = opening.header
    context = TierContext(
        slot_nbytes=header["slot_nbytes"],
        fingerprint=LayoutFingerprint(header["fingerprint"], header["label"]),
        pool=pool,
        piece_nbytes=header["piece_nbytes"],
        owner_pid=engine_pid,
        was_reset=header["was_reset"],
    )
    options = options_of(header["options"]["kind"]).model_validate_json(
        json.dumps(header["options"])
    )
    with paused_garbage_collection():
        return open_tier(options, context)


def _log_to_engine(send: Send) -> None:
    log = logging.getLogger(f"{ENGINE}.kvtier")
    log.addHandler(_LogToEngine(asyncio.get_running_loop(), send))
    log.setLevel(logging.INFO)
    log.propagate = False


def _end_with(engine_pid: int, transport: asyncio.WriteTransport) -> None:
    """Close ``transport`` when the engine dies, whoever else may hold the socket.

    The transport alone ends its reader: one that is told the end and then fed what still
    arrives fails.
    """
    loop = asyncio.get_running_loop()
    try:
        engine = os.pidfd_open(engine_pid)
    except ProcessLookupError:
        transport.abort()
        return
    except (OSError, AttributeError):
        # A sandbox's kernel may not have it, nor a Python that was compiled on an old one.
        _look_for_parent(engine_pid, transport)
        return

    def engine_died() -> None:
        loop.remove_reader(engine)
        transport.abort()

    loop.add_reader(engine, engine_died)


def _look_for_parent(engine_pid: int, transport: asyncio.WriteTransport) -> None:
    """Close ``transport`` soon after the engine died: this process is somebody else's then."""
    if os.getppid() != engine_pid:
        transport.abort()
        return
    loop = asyncio.get_running_loop()
    loop.call_later(_LOOK_EVERY_S, _look_for_parent, engine_pid, transport)


async def _tell_recovered(tier: StorageTier, writer: asyncio.StreamWriter) -> None:
    chunks = 0
    with paused_garbage_collection():
        for frame in _recovered(tier):
            chunks += frame.header["count"]
            writer.write(frame.encode())
            await writer.drain()
        if chunks > _RECOVERED_AT_ONCE:
            # What Python keeps of them for reuse lies all over the heap and holds its pages. It
            # takes a while, so it is done before the tier is open.
            gc.collect()


def _recovered(tier: StorageTier) -> Iterator[Frame]:
    """Yield what survived, some at a time: a million objects leave holes in the heap."""
    recovered = tier.recovered()
    while found := list(islice(recovered, _RECOVERED_AT_ONCE)):
        keys, places = zip(*found, strict=True)
        widths, packed = pack_keys(keys)
        slots = np.array(places, dtype=np.int64).tobytes()
        header = {"op": "recovered", "count": len(keys), "widths": widths}
        yield Frame(header, b"".join((slots, packed)))


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[Frame]:
    """Yield what the engine sends, until it is gone."""
    parser = FrameParser()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(READ_NBYTES):
            for frame in parser.feed(data):
                yield frame


async def _until_closed(frames: AsyncIterator[Frame], server: _Server) -> Frame | None:
    """Serve until the engine closes the tier; returns that call, None if the engine is gone."""
    try:
        async for frame in frames:
            if frame.header["op"] == "close":
                return frame
            server.take(frame)
    finally:
        await server.drain()
    return None


def main() -> None:
    """Serve the engine that started this process until it is gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    logging.basicConfig(format=_STDERR)
    # Where processors are short the engine goes first: it waits for its model, not for a disk.
    os.nice(_NICENESS)
    set_malloc_mmap_threshold()
    descriptor, memory_descriptor, engine_pid = map(int, sys.argv[1:])
    memory = memoryview(map_shared(memory_descriptor))
    os.close(memory_descriptor)
    PageMapper(ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory.nbytes)
    connection = socket.socket(fileno=descriptor)
    with contextlib.suppress(ConnectionError):  # the engine went away
        asyncio.run(_serve(connection, memory, engine_pid))


if __name__ == "__main__":
    main()
