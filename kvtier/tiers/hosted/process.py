"""Start and end the process of a hosted tier."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from kvtier.config import TierConfig, child_environment
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.logs import get_logger
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted.frames import READ_NBYTES, Frame, FrameParser, decode_error
from kvtier.types import SharedMemory, SlotFileId

__all__ = ["HostProcess", "Opened", "aend", "relog", "run_host", "shared_memory"]

_OPEN_TIMEOUT_S: Final = 600.0
_EXIT_TIMEOUT_S: Final = 5.0
_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.05
_REMEDIES: Final[dict[int | None, str]] = {
    errno.ENOMEM: "free memory or give the RAM tier less",
    errno.EAGAIN: "allow this user and its container more processes",
    errno.EMFILE: "allow the engine more open files (ulimit -n)",
    errno.ENFILE: "allow the machine more open files (fs.file-max)",
}


class Opened(NamedTuple):
    """A host's report on the tier that it opened.

    Attributes:
        capacity_slots: Number of slots.
        is_local: Whether the medium is on this machine.
        recovered: Frames with the recovered chunks, least recently used first.
        retained: For each slot with a protected chunk, the time when the protection ends, in
            seconds since the epoch.
        part_hashes: A frame with the recovered part hashes; None without part hashes.
        slot_file: The tier's slot file; None without a slot file.
    """

    capacity_slots: int
    is_local: bool
    recovered: deque[Frame]
    retained: Mapping[int, int]
    part_hashes: Frame | None = None
    slot_file: SlotFileId | None = None


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A running host process, the socket to it, and the parser of its frames."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    parser: FrameParser

    @classmethod
    def start(cls, options: TierConfig, context: TierContext) -> tuple[Self, Opened]:
        """Start a host and wait until the host's tier is open. This call blocks.

        Raises:
            ConfigError: There is no shared memory.
            KvtierError: The error that opening the tier raised in the host.
            TierUnavailableError: The process did not start, ended early, or took too long.
        """
        tier, memory = options.name, shared_memory(options, context)
        try:
            host = cls._spawn(memory)
        except OSError as error:
            problem = _cannot_start(error)
            raise TierUnavailableError(tier, problem) from error
        try:
            return host, host.open(_opening(options, context))
        except BaseException as error:
            host.abandon()
            if isinstance(error, EOFError | OSError):
                problem = _cannot_open(error, host.process)
                raise TierUnavailableError(tier, problem) from error
            raise

    def open(
        self, opening: dict[str, Any], *, clock: Callable[[], float] = time.monotonic
    ) -> Opened:
        """Make the host open its tier and wait until the tier is open. This call blocks.

        ``opening`` has the options and the context of the tier, as JSON.

        Raises:
            KvtierError: The error that opening the tier raised in the host.
            TimeoutError: The tier was not open in time.
            EOFError: The process ended.
            OSError: The process ended during a system call on the socket.
        """
        deadline_s = clock() + _OPEN_TIMEOUT_S
        self.connection.settimeout(_OPEN_TIMEOUT_S)
        self.connection.sendall(Frame({"op": "open", **opening}).encode())
        recovered: deque[Frame] = deque()
        part_hashes: Frame | None = None
        while data := _receive(self.connection, deadline_s - clock()):
            for frame in self.parser.feed(data):
                match frame.header["op"]:
                    case "recovered":
                        recovered.append(frame)
                    case "part_hashes":
                        part_hashes = frame
                    case "opened":
                        self.connection.setblocking(False)  # noqa: FBT003 - its signature
                        return _opened(frame, recovered, part_hashes)
                    case "refused":
                        raise decode_error(frame.header["error"])
                    case _:
                        relog(frame)
        raise EOFError

    def abandon(self) -> None:
        """Close the connection and try to end the process. This call blocks."""
        self.connection.close()
        end(self.process)

    @classmethod
    def _spawn(cls, memory: SharedMemory) -> Self:
        """Start a process that waits for an ``open`` frame."""
        with contextlib.ExitStack() as stack:
            here, there = socket.socketpair()
            stack.enter_context(here)
            with there:
                process = run_host(there.fileno(), memory.descriptor)
            stack.pop_all()
        return cls(process, here, FrameParser())


def run_host(*descriptors: int) -> subprocess.Popen[bytes]:
    """Start a host that inherits the descriptors of the socket and of the memory."""
    arguments = [*map(str, descriptors), str(os.getpid())]
    # Without -P, modules in the working directory would shadow installed ones.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kvtier.tiers.hosted.host", *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        env=child_environment(),
    )


def _opened(frame: Frame, recovered: deque[Frame], part_hashes: Frame | None) -> Opened:
    file = frame.header.get("slot_file")
    slot_file = None if file is None else SlotFileId(*file)
    retained = dict(frame.header["retained"])
    slots, is_local = frame.header["capacity_slots"], frame.header["is_local"]
    return Opened(slots, is_local, recovered, retained, part_hashes, slot_file)


def shared_memory(options: TierConfig, context: TierContext) -> SharedMemory:
    """Return the memory that contains all buffers; raise a ConfigError if there is none."""
    if context.memory is None:
        raise ConfigError(
            f"tier {options.name}: own_process needs shared memory; set own_process: false"
        )
    return context.memory


def _opening(options: TierConfig, context: TierContext) -> dict[str, Any]:
    """Return a tier's options and context as header fields of an ``open`` frame."""
    return {
        "options": options.model_dump(mode="json"),
        "slot_nbytes": context.slot_nbytes,
        "fingerprint": dict(context.fingerprint.fields),
        "label": context.fingerprint.label,
        "groups": list(context.fingerprint.groups),
        "piece_nbytes": context.piece_nbytes,
        "threads": context.pool.threads,
        "was_reset": context.was_reset,
        "hash_parts": context.hash_parts,
    }


def _receive(connection: socket.socket, timeout_s: float) -> bytes:
    """Return the next bytes; empty at the end of the stream.

    Raises:
        TimeoutError: No bytes came in time.
    """
    if timeout_s <= 0:  # a socket does not wait at all with a timeout of 0
        raise TimeoutError
    connection.settimeout(timeout_s)
    return connection.recv(READ_NBYTES)


def _cannot_start(error: OSError) -> str:
    what = error.strerror or str(error)
    other = f"check that {sys.executable} exists and is executable"
    return (
        f"its I/O process could not be started: {what}; {_REMEDIES.get(error.errno, other)}, "
        "or run the tier in the engine's process with own_process: false"
    )


def _cannot_open(error: EOFError | OSError, process: subprocess.Popen[bytes]) -> str:
    if not isinstance(error, TimeoutError):
        return (
            f"its I/O process ended before the cache was open, exit code {process.returncode}; "
            "the engine's error output may say why"
        )
    fate = "was ended" if process.returncode is not None else "is stuck in the operating system"
    return (
        f"its I/O process {process.pid} had not opened the cache after {_OPEN_TIMEOUT_S:g} s "
        f"and {fate}; a hanging disk can cause this: look for its errors in the kernel's log, "
        "then start the engine again or give the tier a path on another disk"
    )


def relog(frame: Frame) -> None:
    """Log a record from the host, with the original time, source line and process id."""
    record = logging.makeLogRecord(frame.header["record"])
    logger = get_logger(frame.header["module"])
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for ``process`` to end, and kill it after a time limit. This call blocks.

    A process that is stuck in a system call survives the kill.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIMEOUT_S)
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIMEOUT_S)


async def aend(process: subprocess.Popen[bytes]) -> bool:
    """Wait on the event loop for ``process`` to end, and kill it after a time limit.

    This function uses no thread, because the engine's threads may be gone or hang on a disk.
    It returns whether the process ended; if not, it is stuck in a system call.
    """
    if await _has_ended_within(process, _EXIT_TIMEOUT_S):
        return True
    process.kill()
    return await _has_ended_within(process, _EXIT_TIMEOUT_S)


async def _has_ended_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while process.poll() is None:
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True
