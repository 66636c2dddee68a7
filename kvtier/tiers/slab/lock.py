"""Who has a namespace open.

The lock is the kernel's, on the open directory, so it goes when its holder goes, however that
ends. It is not on a file in the directory: whoever deletes such a file lets a second engine in.
The file ``lock`` only names the holder for people: the engine, not the process that does its
I/O. An engine that was killed is gone at once while its I/O process finishes the calls it is
in; a restart waits for that, and only for that.

``kvtier cache`` holds it too while it changes a namespace, and its text says so: who needs the
room is to know that no engine serves from it.

The lock of the whole store, on its own directory, is held for moments, while one of its
namespaces is opened, and is waited for. No wait is without a deadline: a process that was
stopped keeps its locks.
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

from kvtier.errors import StoreLockedError
from kvtier.tiers.slab.direct_io import BlockIo, write_fully

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
    """How long to go on trying to get a lock.

    Attributes:
        timeout_s: For so long; 0 is once.
        clock: Returns seconds.
        sleep: Waits for so many of them.
    """

    timeout_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def attempts(self) -> Iterator[None]:
        """Yield before each attempt, and end when it is time to give up."""
        deadline_s = self.clock() + self.timeout_s
        yield
        while self.clock() < deadline_s:
            self.sleep(_POLL_S)
            yield

    def take(self, lock: Callable[[], None]) -> bool:
        """Call ``lock`` until it raises no BlockingIOError any more; return whether it did so.

        Raises:
            OSError: What else ``lock`` raised.
        """
        for _ in self.attempts():
            with contextlib.suppress(BlockingIOError):
                lock()
                return True
        return False


PATIENCE: Final = Patience()


def acquire(tier: str, directory: Path, io: BlockIo, patience: Patience = PATIENCE) -> int:
    """Take the lock of ``directory`` and return the descriptor that holds it; may block.

    Raises:
        StoreLockedError: Another engine or a tool has it, or the I/O of an engine that died
            takes too long.
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
        raise StoreLockedError(tier, directory, holder, remedy)
    if not _is_alive(holder):
        remedy = (
            "no such process is found here: it is in another container, or it died and its I/O "
            f"has not ended, as on a disk that hangs; fuser -v {directory} names who has it"
        )
        raise StoreLockedError(tier, directory, holder, remedy)
    raise StoreLockedError(tier, directory, holder or "another process")


def try_acquire(directory: Path, io: BlockIo) -> int:
    """Take the lock of ``directory`` and return the descriptor that holds it.

    Raises:
        BlockingIOError: It is taken.
        OSError: The file system failed.
    """
    fd = io.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        io.lock(fd)
    except BaseException:
        io.close(fd)
        raise
    return fd


def passing_holder(directory: Path) -> str:
    """Return who has the lock of ``directory``, empty if that may be an engine that serves.

    Who is named ends without being stopped: a tool, or, so it seems, the I/O of an engine that
    died.

    Raises:
        OSError: The file cannot be read.
    """
    holder = read_holder(directory)
    return holder if is_tool(holder) or not _is_alive(holder) else ""


def is_tool(holder: str) -> bool:
    """Return whether ``holder``, as a lock names it, is no engine."""
    return holder.endswith(_TOOL)


def name_holder(directory: Path, owner_pid: int, io: BlockIo, *, tool: bool = False) -> None:
    """Write into ``directory``, whose lock is held, which engine it is held for.

    The time of the file tells when an engine last had it; a tool leaves that as it is.

    Args:
        directory: What is locked.
        owner_pid: The engine, or the tool.
        io: What writes.
        tool: Whether it is a tool, which no engine's store is open for.

    Raises:
        OSError: The file system failed.
    """
    since = datetime.now(UTC).isoformat(timespec="seconds")
    text = f"pid {owner_pid} on host {socket.gethostname()} since {since}"
    data = f"{text}{_TOOL if tool else ''}\n".encode()
    opened_ns = last_opened(directory)
    fd = io.open(directory / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        # Over what is there, whose room another file would get on a full disk.
        write_fully(io, fd, [memoryview(data)], 0)
        io.truncate(fd, len(data))
        if tool:
            os.utime(fd, ns=(opened_ns, opened_ns))
    finally:
        io.close(fd)


def read_holder(directory: Path) -> str:
    """Return how ``directory`` names who has its lock, printable; empty if it does not.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        text = (directory / LOCK).read_bytes()[:200].decode("utf-8", "replace").strip()
    except FileNotFoundError:  # somebody deleted it, which frees nothing
        return ""
    return "".join(filter(str.isprintable, text))


def last_opened(directory: Path) -> int:
    """Return when an engine opened ``directory``, comparable with other namespaces' times.

    Raises:
        OSError: The file system failed.
    """
    try:
        return (directory / LOCK).stat().st_mtime_ns
    except FileNotFoundError:  # an engine was in it after whatever the other files say
        return directory.stat().st_mtime_ns


def _is_alive(holder: str) -> bool:
    """Return whether ``holder`` may still be running; a text nobody understands counts so."""
    named = _HOLDER.match(holder)
    if named is None or named[2] != socket.gethostname():
        return True
    return Path(f"/proc/{named[1]}").exists()
