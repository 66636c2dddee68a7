"""System calls that fail, move too few bytes, lie or hang on request.

Every call and every SQL statement runs through :meth:`FaultyIo.run` under a name: the name of
the method, or ``sql`` and the first word of the statement. A test can record the calls of a
scenario and repeat it with a fault at each of them, as ``test_slab_faults_matrix.py`` does.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from kvtier.os.block_io import BlockIo

__all__ = ["Fault", "FaultyIo"]

T = TypeVar("T")

_TRANSFERS: Final = ("preadv", "pwritev")
_CHANGES: Final = ("INSERT", "UPDATE", "DELETE", "BEGIN")
_DAMAGE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one call.

    Attributes:
        error: The error number; of a statement, SQLite's error code.
        late: Whether the call has its effect all the same, and fails only then.
        lasting: Whether every later call of that name goes wrong as well.
        longest_nbytes: Instead of failing, a read or write moves no more than this.
    """

    error: int = errno.EIO
    late: bool = False
    lasting: bool = False
    longest_nbytes: int | None = None

    def exception(self, call: str) -> Exception:
        """Return the exception that the call raises."""
        if not call.startswith("sql"):
            return OSError(self.error, os.strerror(self.error))
        kind = sqlite3.DatabaseError if self.error in _DAMAGE else sqlite3.OperationalError
        raised = kind(f"injected SQLite error {self.error}")
        raised.sqlite_errorcode = self.error
        return raised


@dataclass(frozen=True, slots=True)
class _Failure:
    call: str
    error: int
    offsets: range | None
    """Range of the file that fails; None for the whole file."""

    def strikes(self, call: str, offset: int, nbytes: int) -> bool:
        if call != self.call:
            return False
        return self.offsets is None or (
            offset < self.offsets.stop and self.offsets.start < offset + nbytes
        )


class _FaultyConnection(sqlite3.Connection):
    """A database whose statements run through :class:`FaultyIo`."""

    io: FaultyIo
    full = False

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> sqlite3.Cursor:  # type: ignore[override]
        word = sql.split(maxsplit=1)[0]
        if self.full and word in _CHANGES:
            raise sqlite3.OperationalError("database or disk is full")
        inherited = super().execute
        return self.io.run(f"sql {word}", lambda: inherited(sql, parameters))

    def executescript(self, sql: str) -> sqlite3.Cursor:
        inherited = super().executescript
        return self.io.run("sql script", lambda: inherited(sql))

    def close(self) -> None:
        self.io.run("sql close", super().close)


class FaultyIo(BlockIo):
    """Runs every call, except those that a test makes fail.

    Attributes:
        calls: Name of every call and statement so far, in order.
        longest_transfer_nbytes: No read or write moves more than this at once.
        struck: Whether the fault of :meth:`strike` has struck.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.longest_transfer_nbytes: int | None = None
        self.struck = False
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._strike: tuple[str, int, Fault] | None = None
        self._failures: list[_Failure] = []
        self._held = threading.Event()
        self._stalled: Mapping[str, int] = {}
        self._reached = threading.Event()
        self._torn_after: int | None = None
        self._connections: list[_FaultyConnection] = []
        self._free_nbytes: int | None = None

    def fail(self, call: str, error: int, *, offsets: range | None = None) -> None:
        """Make ``call`` fail with ``error``; with ``offsets``, only where it touches them."""
        self._failures.append(_Failure(call, error, offsets))

    def strike(self, call: str, number: int, fault: Fault) -> None:
        """Inject ``fault`` into the call number ``number`` of this name, counted from 0."""
        self._strike = (call, number, fault)

    def heal(self) -> None:
        """Remove all faults."""
        self._failures.clear()
        self._strike = None
        self.longest_transfer_nbytes = None
        self._torn_after = None
        self.fill_index(full=False)

    def tear_writes(self, *, after_nbytes: int) -> None:
        """Make each write store only its first ``after_nbytes`` and report success."""
        self._torn_after = after_nbytes

    def fill_index(self, *, full: bool = True) -> None:
        """Make the disk of the index full, or end that."""
        for connection in self._connections:
            connection.full = full

    def offer(self, free_nbytes: int) -> None:
        """Report ``free_nbytes`` as free on the disk."""
        self._free_nbytes = free_nbytes

    def stall(self, *calls: str, after: int = 0) -> threading.Event:
        """Make calls hang until the returned event is set. It replaces an earlier event.

        Args:
            *calls: Names of the calls; all reads and writes if there are none.
            after: How many calls of each name are let through first.
        """
        self._reached.clear()
        self._held = threading.Event()
        with self._counting:
            counted = self._counts
            self._stalled = {call: counted[call] + after for call in calls or _TRANSFERS}
        return self._held

    def wait_until_stalled(self, *, timeout_s: float) -> bool:
        """Block until a call hangs, and return whether one does."""
        return self._reached.wait(timeout_s)

    def open(self, path: Path, flags: int) -> int:
        call = "open_direct" if flags & os.O_DIRECT else "open"
        inherited = super().open
        # An open that fails after all may have made the file, but it leaves no descriptor.
        return self.run(call, lambda: inherited(path, flags), undo=super().close)

    def close(self, fd: int) -> None:
        """Close ``fd``; a failing close closes it as well, as on Linux."""
        inherited = super().close
        self.run("close", lambda: inherited(fd))

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        inherited = super().preadv
        fault = self._note("preadv", offset, sum(map(len, buffers)))
        asked = self._shortened(buffers, fault)
        return _carry_out("preadv", fault, lambda: inherited(fd, asked, offset))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        inherited = super().pwritev
        fault = self._note("pwritev", offset, sum(map(len, buffers)))
        if self._torn_after is not None:
            inherited(fd, _first(buffers, self._torn_after), offset)
            return sum(map(len, buffers))
        given = self._shortened(buffers, fault)
        return _carry_out("pwritev", fault, lambda: inherited(fd, given, offset))

    def allocate(self, fd: int, nbytes: int) -> None:
        inherited = super().allocate
        self.run("allocate", lambda: inherited(fd, nbytes))

    def truncate(self, fd: int, nbytes: int) -> None:
        inherited = super().truncate
        self.run("truncate", lambda: inherited(fd, nbytes))

    def sync_data(self, fd: int) -> None:
        inherited = super().sync_data
        self.run("sync_data", lambda: inherited(fd))

    def sync(self, fd: int) -> None:
        inherited = super().sync
        self.run("sync", lambda: inherited(fd))

    def lock(self, fd: int) -> None:
        inherited = super().lock
        self.run("lock", lambda: inherited(fd))

    def make_directory(self, path: Path) -> None:
        inherited = super().make_directory
        self.run("make_directory", lambda: inherited(path))

    def read_bytes(self, path: Path) -> bytes:
        inherited = super().read_bytes
        return self.run("read_bytes", lambda: inherited(path))

    def rename(self, source: Path, destination: Path) -> None:
        inherited = super().rename
        self.run("rename", lambda: inherited(source, destination))

    def unlink(self, path: Path) -> None:
        inherited = super().unlink
        self.run("unlink", lambda: inherited(path))

    def free_nbytes(self, directory: Path) -> int | None:
        offered = self._free_nbytes
        if offered is not None:
            return offered
        inherited = super().free_nbytes
        return self.run("free_nbytes", lambda: inherited(directory))

    def connect(self, path: Path) -> sqlite3.Connection:
        return self.run("sql connect", lambda: self._connect(path), undo=_close)

    def run(
        self, call: str, action: Callable[[], T], *, undo: Callable[[T], None] | None = None
    ) -> T:
        """Record ``call`` and run ``action``, unless a fault prevents it.

        Args:
            call: The call's name.
            action: What it does.
            undo: Gives back what a call that fails late would otherwise have returned.

        Raises:
            OSError: A fault of a system call.
            sqlite3.Error: A fault of a statement.
        """
        return _carry_out(call, self._note(call), action, undo)

    def _note(self, call: str, offset: int = 0, nbytes: int = 0) -> Fault | None:
        """Count the call, hang if requested, and return its fault."""
        with self._counting:
            self.calls.append(call)
            number = self._counts[call]
            self._counts[call] += 1
            hangs = number >= self._stalled.get(call, number + 1)
        if hangs:
            self._hang()
        for failure in self._failures:
            if failure.strikes(call, offset, nbytes):
                return Fault(failure.error)
        if self._strike is None:
            return None
        name, first, fault = self._strike
        if call != name or not (number == first or (fault.lasting and number > first)):
            return None
        self.struck = True
        return fault

    def _connect(self, path: Path) -> _FaultyConnection:
        connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, factory=_FaultyConnection
        )
        connection.io = self
        self._connections.append(connection)
        return connection

    def _hang(self) -> None:
        self._reached.set()
        if not self._held.wait(60):
            raise OSError(errno.ETIMEDOUT, "a test never released a stalled call")

    def _shortened(
        self, buffers: Sequence[memoryview], fault: Fault | None
    ) -> Sequence[memoryview]:
        longest_nbytes = self.longest_transfer_nbytes
        if fault is not None and fault.longest_nbytes is not None:
            longest_nbytes = fault.longest_nbytes
        return buffers if longest_nbytes is None else _first(buffers, longest_nbytes)


def _carry_out(
    call: str,
    fault: Fault | None,
    action: Callable[[], T],
    undo: Callable[[T], None] | None = None,
) -> T:
    if fault is None or fault.longest_nbytes is not None:
        return action()
    if fault.late:
        result = action()
        if undo is not None:
            undo(result)
    raise fault.exception(call)


def _close(connection: sqlite3.Connection) -> None:
    sqlite3.Connection.close(connection)


def _first(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    kept: list[memoryview] = []
    for buffer in buffers:
        if nbytes <= 0:
            break
        kept.append(buffer[:nbytes])
        nbytes -= len(kept[-1])
    return kept
