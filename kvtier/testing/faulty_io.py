"""System calls that fail, fall short, lie or hang where a test says so."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiers.slab.direct_io import BlockIo

__all__ = ["FaultyIo"]


@dataclass(frozen=True, slots=True)
class _Failure:
    call: str
    error: int
    offsets: range | None
    """Bytes of the file that cannot be touched; None for any call."""

    def strikes(self, call: str, offset: int, nbytes: int) -> bool:
        if call != self.call:
            return False
        return self.offsets is None or (
            offset < self.offsets.stop and self.offsets.start < offset + nbytes
        )


class _FailingConnection(sqlite3.Connection):
    """A database whose disk is full while ``full`` is set."""

    full = False

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> sqlite3.Cursor:  # type: ignore[override]
        if self.full and sql.lstrip().startswith(("INSERT", "UPDATE", "DELETE", "BEGIN")):
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, parameters)


class FaultyIo(BlockIo):
    """Passes every call on, except where it was told otherwise.

    Attributes:
        calls: Name of every call so far, in order.
        longest_transfer_nbytes: No read or write moves more than this at once.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.longest_transfer_nbytes: int | None = None
        self._failures: list[_Failure] = []
        self._held: threading.Event | None = None
        self._reached = threading.Event()
        self._torn_after: int | None = None
        self._connections: list[_FailingConnection] = []
        self._free_nbytes: int | None = None

    def fail(self, call: str, error: int, *, offsets: range | None = None) -> None:
        """Make ``call`` fail with ``error``, if it touches ``offsets`` where they are given."""
        self._failures.append(_Failure(call, error, offsets))

    def heal(self) -> None:
        """Stop failing, tearing and falling short."""
        self._failures.clear()
        self.longest_transfer_nbytes = None
        self._torn_after = None
        self.fill_index(full=False)

    def tear_writes(self, *, after_nbytes: int) -> None:
        """Make each write store only its first ``after_nbytes`` and claim to have done all."""
        self._torn_after = after_nbytes

    def fill_index(self, *, full: bool = True) -> None:
        """Let the index find its disk full, or no longer."""
        for connection in self._connections:
            connection.full = full

    def offer(self, free_nbytes: int) -> None:
        """Report so many free bytes on the disk."""
        self._free_nbytes = free_nbytes

    def stall(self) -> threading.Event:
        """Make every read and write hang until the returned event is set."""
        self._held = threading.Event()
        return self._held

    def wait_until_stalled(self, *, timeout_s: float) -> bool:
        """Wait until a call hangs; blocks. Returns whether one does."""
        return self._reached.wait(timeout_s)

    def open(self, path: Path, flags: int) -> int:
        """See :class:`BlockIo`."""
        self._enter("open_direct" if flags & os.O_DIRECT else "open")
        return super().open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See :class:`BlockIo`."""
        self._enter("preadv", offset, sum(map(len, buffers)))
        self._hang()
        return super().preadv(fd, self._shortened(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See :class:`BlockIo`."""
        self._enter("pwritev", offset, sum(map(len, buffers)))
        self._hang()
        if self._torn_after is not None:
            super().pwritev(fd, _first(buffers, self._torn_after), offset)
            return sum(map(len, buffers))
        return super().pwritev(fd, self._shortened(buffers), offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        """See :class:`BlockIo`."""
        self._enter("allocate")
        super().allocate(fd, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        """See :class:`BlockIo`."""
        self._enter("truncate")
        super().truncate(fd, nbytes)

    def sync_data(self, fd: int) -> None:
        """See :class:`BlockIo`."""
        self._enter("sync_data")
        super().sync_data(fd)

    def sync(self, fd: int) -> None:
        """See :class:`BlockIo`."""
        self._enter("sync")
        super().sync(fd)

    def lock(self, fd: int, *, wait: bool) -> None:
        """See :class:`BlockIo`."""
        self._enter("lock")
        super().lock(fd, wait=wait)

    def rename(self, source: Path, destination: Path) -> None:
        """See :class:`BlockIo`."""
        self._enter("rename")
        super().rename(source, destination)

    def unlink(self, path: Path) -> None:
        """See :class:`BlockIo`."""
        self._enter("unlink")
        super().unlink(path)

    def free_nbytes(self, directory: Path) -> int | None:
        """See :class:`BlockIo`."""
        return (
            super().free_nbytes(directory) if self._free_nbytes is None else self._free_nbytes
        )

    def connect(self, path: Path) -> sqlite3.Connection:
        """See :class:`BlockIo`."""
        self._enter("connect")
        connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, factory=_FailingConnection
        )
        self._connections.append(connection)
        return connection

    def _enter(self, call: str, offset: int = 0, nbytes: int = 0) -> None:
        self.calls.append(call)
        for failure in self._failures:
            if failure.strikes(call, offset, nbytes):
                raise OSError(failure.error, os.strerror(failure.error))

    def _hang(self) -> None:
        if self._held is not None:
            self._reached.set()
            if not self._held.wait(60):
                raise OSError(errno.ETIMEDOUT, "a test never released a stalled call")

    def _shortened(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        if self.longest_transfer_nbytes is None:
            return buffers
        return _first(buffers, self.longest_transfer_nbytes)


def _first(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    kept: list[memoryview] = []
    for buffer in buffers:
        if nbytes <= 0:
            break
        kept.append(buffer[:nbytes])
        nbytes -= len(kept[-1])
    return kept
