"""Locks of namespaces and cache directories.

A namespace's lock is a kernel lock on the open directory, so the kernel releases the lock even
if the holder is killed. A lock on a file in the directory would be unsafe: after a deletion of
the file, a second engine could lock a new file. The file ``lock`` only names the holder for
people. It names the engine, even if the engine's I/O process holds the lock. After an engine
was killed, the I/O process finishes the engine's calls; a restart waits for that.

``kvtier cache`` holds the lock while it changes a namespace. The file then names a tool, so an
engine that needs the room can wait for the tool.

The cache directory has a lock too. It is held for a moment while a namespace is opened. Every
wait for a lock has a deadline, because a stopped process keeps its locks.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kvtier.errors import CacheLockedError
from kvtier.os.block_io import BlockIo, opened, write_fully

__all__ = [
    "LOCK",
    "PATIENCE",
    "Patience",
    "acquire",
    "is_tool",
    "last_opened",
    "name_holder",
    "passing_holder",
    "read_holder",
    "try_acquire",
]

LOCK: Final = "lock"
_HOLDER: Final = re.compile(r"pid (\d+) on host (\S+)")
_TOOL: Final = ", for kvtier cache"
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Patience:
    """The time limit for taking a lock; with a limit of 0 there is one attempt."""

    timeout_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def attempts(self) -> Iterator[None]:
        """Yield before each attempt; end when the time is over."""
        deadline_s = self.clock() + self.timeout_s
        yield
        while self.clock() < deadline_s:
            self.sleep(_POLL_S)
            yield

    def take(self, lock: Callable[[], None]) -> bool:
        """Call ``lock`` until it succeeds or the time is over; return whether it succeeded."""
        for _ in self.attempts():
            with contextlib.suppress(BlockingIOError):
                lock()
                return True
        return False


PATIENCE: Final = Patience()


def acquire(tier: str, directory: Path, io: BlockIo, patience: Patience = PATIENCE) -> int:
    """Take the lock of ``directory`` and return the descriptor that holds it; may block.

    Raises:
        CacheLockedError: Another engine or a tool holds the lock, or the I/O process of a dead
            engine takes too long to end.
        OSError: The file system failed, or has no locks.
    """
    holder = ""
    for _ in patience.attempts():
        try:
            return try_acquire(directory, io)
        except BlockingIOError:
            holder = read_holder(directory)
            if _is_alive(holder):
                break
    if is_tool(holder):
        remedy = "let it finish, or end it, and start again"
        raise CacheLockedError(tier, directory, holder, remedy)
    if not _is_alive(holder):
        remedy = (
            "no such process is found here: it is in another container, or it died and its I/O "
            f"has not ended, as on a disk that hangs; fuser -v {directory} names the process"
        )
        raise CacheLockedError(tier, directory, holder, remedy)
    raise CacheLockedError(tier, directory, holder or "another process")


def try_acquire(directory: Path, io: BlockIo) -> int:
    """Lock ``directory`` and return its descriptor; raise BlockingIOError if it is locked."""
    fd = io.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        io.lock(fd)
    except BaseException:
        io.close(fd)
        raise
    return fd


def passing_holder(directory: Path) -> str:
    """Return the text of a lock file if its holder is temporary; else an empty string.

    A temporary holder is a tool, or the I/O process of a probably dead engine.
    """
    holder = read_holder(directory)
    return holder if is_tool(holder) or not _is_alive(holder) else ""


def is_tool(holder: str) -> bool:
    """Return whether ``holder``, the text of a lock file, names a tool and not an engine."""
    return holder.endswith(_TOOL)


def name_holder(directory: Path, owner_pid: int, io: BlockIo, *, tool: bool = False) -> None:
    """Write the holder's name into the lock file of ``directory``, which the caller has locked.

    The file's modification time is the time when an engine last opened the namespace. A tool
    preserves this time.
    """
    since = datetime.now(UTC).isoformat(timespec="seconds")
    text = f"pid {owner_pid} on host {socket.gethostname()} since {since}"
    data = f"{text}{_TOOL if tool else ''}\n".encode()
    opened_ns = last_opened(directory)
    with opened(io, directory / LOCK, os.O_RDWR | os.O_CREAT) as fd:
        # Overwrite in place: on a full disk, another file could take the room of a new one.
        write_fully(io, fd, [memoryview(data)], 0)
        io.truncate(fd, len(data))
        if tool:
            os.utime(fd, ns=(opened_ns, opened_ns))


def read_holder(directory: Path) -> str:
    """Return the printable text of the lock file of ``directory``; empty without a file."""
    try:
        text = (directory / LOCK).read_bytes()[:200].decode("utf-8", "replace").strip()
    except FileNotFoundError:  # deleted, which does not release the lock
        return ""
    return "".join(filter(str.isprintable, text))


def last_opened(directory: Path) -> int:
    """Return the time when an engine last opened ``directory``, in ns since the epoch."""
    try:
        return (directory / LOCK).stat().st_mtime_ns
    except FileNotFoundError:  # the lock file was deleted
        return directory.stat().st_mtime_ns


def _is_alive(holder: str) -> bool:
    """Return whether the process named in ``holder``, a lock file's text, may still run.

    The result is False only if the process was on this host and has ended.
    """
    named = _HOLDER.match(holder)
    if named is None or named[2] != socket.gethostname():
        return True
    return Path(f"/proc/{named[1]}").exists()
