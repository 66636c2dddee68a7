"""A simulated disk that loses power, with every state that may remain.

A write that returned is in a cache: of the kernel, of the drive, or both. Until a sync
returned, a loss of power may keep all of it, some of it or nothing, in any order.
:class:`PowerCutDisk` does all calls on a real directory and remembers what was synced when.
Its :meth:`~PowerCutDisk.cut` takes the power away at any moment of the past and returns a
:class:`~tests.support.disk_state.PowerCut`, which can make a directory in every state that was
possible then::

    disk = PowerCutDisk(directory)
    tier = SlabTier.open(options, context, io=disk)
    ...  # write, forget, reset, close
    for moment in range(disk.moment + 1):
        cut = disk.cut(moment)
        for pick in cut.every_pick():  # or some numbers below cut.choices
            cut.restore(pick, elsewhere)  # open a tier there and judge what it serves

What may happen follows what file systems and drives promise:

* **Payload.** Each sector holds what was last synced or any version written since, whatever
  its neighbours hold: that is loss, tearing and reordering at once. A sector is 512 bytes
  by default, the least that any drive writes whole; larger ones give fewer states.
* **Sizes.** A file has its last synced size or any it was given since.
* **Names.** What is created, renamed and unlinked keeps the directory's order, as on journaling
  file systems, and may be lost from any point on until the directory itself is synced.
* **The index.** Python gives no access to SQLite's own calls, so its files are copied after
  every statement. SQLite appends to its log, and syncs it at a commit with
  ``synchronous=FULL`` and at a checkpoint. What was not synced may be cut at any byte, or any
  one of its sectors may be an old one. The database file changes in checkpoints only, and their
  order is SQLite's affair.

Modes, times and what a lock file says are not kept. To enumerate the states after a crash
instead of hoping to meet them is the idea of Pillai et al., "All File Systems Are Not Created
Equal" (OSDI 2014), and of CrashMonkey (Mohan et al., OSDI 2018).
"""

from __future__ import annotations

import functools
import itertools
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvtier.os.block_io import BlockIo
from tests.support.disk_state import DirectoryState, DiskState, FileState, IndexFiles, PowerCut

__all__ = ["PowerCutDisk"]

_FULL: Final = 2
"""Value of ``PRAGMA synchronous`` under which commits are durable."""

_Event = Callable[[DiskState], None]


class PowerCutDisk(BlockIo):
    """Runs every call and records what a loss of power could undo.

    Args:
        root: Directory to record; it need not exist, its parent must.
        sector_nbytes: Bytes that the drive writes atomically.
        log_step_nbytes: Distance between the possible ends of a truncated log of SQLite.

    Attributes:
        root: The directory.
    """

    def __init__(
        self, root: Path, *, sector_nbytes: int = 512, log_step_nbytes: int = 1
    ) -> None:
        self.root = root
        self._sector_nbytes = sector_nbytes
        self._log_step_nbytes = log_step_nbytes
        self._lock = threading.RLock()
        self._events: list[_Event] = []
        self._now = self._empty()
        self._open: dict[int, Path] = {}
        self._numbers = itertools.count()

    @property
    def moment(self) -> int:
        """Number of events so far, for :meth:`cut`."""
        return len(self._events)

    def settle(self) -> None:
        """Make everything durable, as ``sync`` does."""

        def event(state: DiskState) -> None:
            for directory in state.directories.values():
                directory.sync()
            for number, file in state.files.items():
                file.sync(state.sector_nbytes)
                state.sync_index(number)

        self._happen(event)

    def cut(self, moment: int | None = None) -> PowerCut:
        """Cut the power at ``moment``, by default now."""
        state = self._empty()
        with self._lock:
            for event in self._events[:moment]:
                event(state)
        return PowerCut(state, self.root, self._log_step_nbytes)

    def open(self, path: Path, flags: int) -> int:
        with self._lock:
            fd = super().open(path, flags)
            self._open[fd] = path
            if flags & os.O_CREAT and self._now.number(path) is None:
                self._create(path)
            if flags & os.O_TRUNC:
                self._change_file(path, lambda file: file.resize(0))
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._open.pop(fd, None)
            super().close(fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = super().pwritev(fd, buffers, offset)
        written = b"".join(buffers)[:count]
        sector_nbytes = self._sector_nbytes
        self._change_file(
            self._open[fd], lambda file: file.write(offset, written, sector_nbytes)
        )
        return count

    def allocate(self, fd: int, nbytes: int) -> None:
        super().allocate(fd, nbytes)
        self._change_file(self._open[fd], lambda file: file.resize(max(nbytes, file.sizes[-1])))

    def truncate(self, fd: int, nbytes: int) -> None:
        super().truncate(fd, nbytes)
        self._change_file(self._open[fd], lambda file: file.resize(nbytes))

    def sync_data(self, fd: int) -> None:
        """See :class:`BlockIo`. The size a file needs to be read is synced with its data."""
        super().sync_data(fd)
        self._sync(self._open[fd])

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._sync(self._open[fd])

    def make_directory(self, path: Path) -> None:
        with self._lock:
            super().make_directory(path)
            number = next(self._numbers)

            def event(state: DiskState) -> None:
                state.directories[path] = DirectoryState()
                state.change_names(path.parent, (path.name, number))

            self._happen(event)

    def rename(self, source: Path, destination: Path) -> None:
        with self._lock:
            super().rename(source, destination)
            number = self._now.number(source)
            if number is not None:  # a side file of SQLite goes where its database goes
                change = ((source.name, None), (destination.name, number))
                self._happen(lambda state: state.change_names(source.parent, *change))

    def unlink(self, path: Path) -> None:
        with self._lock:
            super().unlink(path)
            if self._now.number(path) is not None:
                self._happen(lambda state: state.change_names(path.parent, (path.name, None)))

    def connect(self, path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, factory=_WatchedConnection
        )
        number = self._now.number(path)
        if number is None:
            raise ValueError(f"{path} was not made through this disk")
        connection.changed = functools.partial(self._keep_index, path, number)
        return connection

    def _empty(self) -> DiskState:
        state = DiskState(self._sector_nbytes)
        state.directories[self.root.parent] = DirectoryState()
        return state

    def _happen(self, event: _Event) -> None:
        with self._lock:
            self._events.append(event)
            event(self._now)

    def _create(self, path: Path) -> None:
        number = next(self._numbers)

        def event(state: DiskState) -> None:
            state.files[number] = FileState()
            state.change_names(path.parent, (path.name, number))

        self._happen(event)

    def _change_file(self, path: Path, change: Callable[[FileState], None]) -> None:
        number = self._now.number(path)
        if number is not None and not path.name.endswith("lock"):
            self._happen(lambda state: change(state.files[number]))

    def _sync(self, path: Path) -> None:
        number = self._now.number(path)

        def event(state: DiskState) -> None:
            if path in state.directories:
                state.directories[path].sync()
            elif number is not None:
                state.files[number].sync(state.sector_nbytes)

        self._happen(event)

    def _keep_index(self, path: Path, number: int, *, durable: bool) -> None:
        with self._lock:
            if self._now.number(path) != number:
                return  # set aside: nobody will read it again
            log = path.with_name(path.name + "-wal")
            files = IndexFiles(path.read_bytes(), log.read_bytes() if log.exists() else b"")
            if files == self._now.files[number].index:
                return
            self._happen(lambda state: state.keep_index(number, files))
            if durable:
                self._happen(lambda state: state.sync_index(number))


class _WatchedConnection(sqlite3.Connection):
    """A connection that records whether changes are durable after each statement."""

    changed: Callable[..., None]

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> sqlite3.Cursor:  # type: ignore[override]
        cursor = super().execute(sql, parameters)
        self._look()
        return cursor

    def executescript(self, sql: str) -> sqlite3.Cursor:
        cursor = super().executescript(sql)
        self._look()
        return cursor

    def close(self) -> None:
        super().close()
        self.changed(durable=True)

    def _look(self) -> None:
        if not self.in_transaction:
            [level] = super().execute("PRAGMA synchronous").fetchone()
            self.changed(durable=level >= _FULL)
