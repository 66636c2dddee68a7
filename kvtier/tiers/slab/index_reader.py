"""Read the index of a namespace, even while an engine has it open.

This module neither writes into the cache nor disturbs an engine. Because some SQLite readers
create files, there are three ways to open the index:

* **An engine has it open**: read-only, with the engine's side files.
* **No engine, empty log**: as immutable. An ordinary reader would create side files, which
  changes the directory and fails on a read-only file system.
* **No engine, a crash left a log**: as a private copy. An ordinary reader would rebuild the
  side file from which a later recovery starts.

An engine may start at any time, so the state is checked before every query.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Literal, Self
from urllib.parse import quote

from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.tiers.slab.inspect import WAL, StoredNamespace, holder_of
from kvtier.tiers.slab.namespace import INDEX, nbytes_of
from kvtier.tiers.slab.schema import (
    RESET_METADATA,
    IndexDamagedError,
    IndexMissingError,
    IndexVersionError,
    Removal,
    check_schema,
    damage_raised,
)

__all__ = [
    "Entry",
    "IndexReader",
    "Order",
    "Totals",
    "count_chunks",
    "find_other_version",
]


def _cast(*columns: str) -> str:
    return ", ".join(f"CAST({column} AS INTEGER) AS {column}" for column in columns)


def _time(column: str) -> str:
    """Return SQL that reads a time in seconds, or 0 for years before 1970 or after 9999."""
    return (
        f"CASE WHEN CAST({column} AS INTEGER) BETWEEN 0 AND {_LATEST_S}"
        f" THEN CAST({column} AS INTEGER) ELSE 0 END AS {column}"
    )


_LATEST_S: Final = 253402300799
_COPIED_AT_ONCE: Final = 16 << 20
_KEYS_AT_ONCE: Final = 1 << 16
_KEYS: Final = "SELECT slot, CAST(key AS BLOB) FROM chunks WHERE slot > ? ORDER BY slot LIMIT ?"
_INTEGERS: Final = ("checksum", "generation", "last_use")
# Like the engine, read a value of another type as the number or bytes it resembles.
_COLUMNS: Final = (
    f"slot, CAST(key AS BLOB) AS key, {_cast(*_INTEGERS)}, "
    f"{_time('stored_at')}, {_time('used_at')}, {_cast('hits')}"
)
_REMOVALS: Final = f"""(
    SELECT end, {_time("at")}, CAST(reason AS TEXT) AS reason,
           CAST(key_marks AS BLOB) AS key_marks
    FROM removals WHERE length(key_marks) % 8 = 0
)"""
_ORDERS: Final = {
    "last-use": "last_use DESC",
    "stored": "generation DESC",
    "hits": "hits DESC, last_use DESC",
}

Order = Literal["last-use", "stored", "hits"]
_Parameters = Sequence[int | str]


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the index. The chunk's bytes may be damaged.

    Attributes:
        checksum: The chunk's checksum, unsigned.
        generation: Logical time of the store; unique.
        last_use: Logical time of the chunk's last use.
        stored_at: Time of the store in seconds since the epoch; 0 if unknown.
        used_at: Time of the last use in seconds since the epoch; 0 if unknown.
        hits: Number of loads of the chunk from this tier.
    """

    slot: int
    key: ChunkKey
    checksum: int
    generation: int
    last_use: int
    stored_at: int
    used_at: int
    hits: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of an index. Times are seconds since the epoch, 0 if unknown."""

    chunks: int
    hits: int
    oldest_at: int
    newest_at: int
    removals: dict[str, int]


class IndexReader:
    """Reads the index of one namespace; a context manager. Not thread-safe.

    Its methods raise :class:`IndexDamagedError` for an unusable index, :class:`sqlite3.Error`
    and :class:`OSError` when the machine fails, and :class:`ConfigError` if a copy is needed
    and the disk has no room for it. They also raise the errors of :func:`holder_of`.

    Args:
        space: The namespace.
        idle: Whether the caller knows that no engine has the namespace open.
    """

    def __init__(self, space: StoredNamespace, *, idle: bool = False) -> None:
        self._idle = idle
        self._directory = space.directory
        self._path = space.index_path
        self._resources = contextlib.ExitStack()
        self._connection: sqlite3.Connection | None = None
        self.live = False  # whether an engine had the namespace open at the last query

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    def reset_at(self) -> int | None:
        """Return the time of the recorded reset.

        If a reset is recorded, the next start deletes all chunks.

        Returns:
            Seconds since the epoch, 0 if unknown; None if no reset is recorded.
        """
        rows = self._query(
            f"SELECT {_time('value')} FROM meta WHERE name = ?", (RESET_METADATA,)
        )
        return int(rows[0][0]) if rows else None

    def totals(self) -> Totals:
        """Return the totals over all rows and over the removal log."""
        ((chunks, hits, oldest, newest),) = self._query(
            "SELECT count(*), CAST(total(hits) AS INTEGER),"
            " CAST(min(nullif(stored_at, 0)) AS INTEGER), CAST(max(stored_at) AS INTEGER)"
            " FROM (SELECT {columns} FROM chunks)"
        )
        removals = self._query(
            f"SELECT reason, sum(length(key_marks) / 8) FROM {_REMOVALS} GROUP BY reason"
        )
        return Totals(chunks, hits, oldest or 0, newest or 0, dict(removals))

    def retained(self, at: int) -> tuple[int, int]:
        """Return how many chunks are protected after ``at``, and the latest end time."""
        if not self._query("SELECT 1 FROM sqlite_master WHERE name = 'retained'"):
            return 0, 0
        rows = self._query(
            f"SELECT count(*), coalesce(max(until), 0) FROM ("
            f" SELECT {_time('until')} FROM retained JOIN chunks USING (slot, generation))"
            " WHERE until > ?",
            (at,),
        )
        return int(rows[0][0]), int(rows[0][1])

    def removals(self) -> Iterator[Removal]:
        """Yield the rows of the removal log, newest first."""
        sql = f"SELECT at, reason, key_marks FROM {_REMOVALS} ORDER BY end DESC"
        for row in self._query(sql):
            yield Removal(*row)

    def chunks_from(self, slot: int) -> int:
        """Return the number of chunks in ``slot`` and later slots."""
        return self._number("SELECT count(*) FROM chunks WHERE slot >= ?", (slot,))

    def all_keys(self) -> Iterator[list[ChunkKey]]:
        """Yield the keys of all rows in batches, in slot order."""
        after = -1
        while rows := self._query(_KEYS, (after, _KEYS_AT_ONCE)):
            after = rows[-1][0]
            yield [key for _, key in rows]

    def entries(self, order: Order, limit: int) -> list[Entry]:
        """Return the first ``limit`` rows in ``order``; all rows if ``limit`` is negative."""
        return self._entries(f"1 ORDER BY {_ORDERS[order]} LIMIT ?", (limit,))

    def first_use(self) -> int:
        """Return the smallest logical time of a chunk's last use; 0 without chunks."""
        sql = "SELECT coalesce(min(last_use), 0) FROM (SELECT {columns} FROM chunks)"
        return self._number(sql)

    def less_recent(self, entry: Entry) -> int:
        """Return the number of chunks used less recently than ``entry``."""
        sql = "SELECT count(*) FROM chunks WHERE last_use < ?"
        return self._number(sql, (entry.last_use,))

    def latest_generation(self) -> int:
        """Return the largest generation of all chunks; -1 without chunks."""
        sql = "SELECT coalesce(CAST(max(generation) AS INTEGER), -1) FROM chunks"
        return self._number(sql)

    def entries_of_slots(self, first: int, end: int, stored_after: int = -1) -> list[Entry]:
        """Return the rows of slots ``first`` to ``end - 1``, in slot order.

        Only rows of generations after ``stored_after`` count.
        """
        return self._entries(
            "slot >= ? AND slot < ? AND generation > ? ORDER BY slot",
            (first, end, stored_after),
        )

    def entries_of_prefix(self, digits: str) -> list[Entry]:
        """Return the rows with keys that begin with the hex digits ``digits``."""
        return self._entries("substr(hex(key), 1, ?) = ?", (len(digits), digits.upper()))

    def entries_unused_since(self, at: int) -> list[Entry]:
        """Return the rows stored and last used before ``at``; omit unknown times of storing."""
        return self._entries("stored_at > 0 AND max(stored_at, used_at) < ?", (at,))

    def _entries(self, where: str, parameters: _Parameters) -> list[Entry]:
        sql = f"SELECT * FROM (SELECT {{columns}} FROM chunks) WHERE {where}"
        return [_entry(row) for row in self._query(sql, parameters)]

    def _number(self, sql: str, parameters: _Parameters = ()) -> int:
        return int(self._query(sql, parameters)[0][0])

    def _query(self, sql: str, parameters: _Parameters = ()) -> list[tuple[Any, ...]]:
        connection = self._connect()
        with damage_raised():
            sql = sql.replace("{columns}", _COLUMNS)
            return connection.execute(sql, parameters).fetchall()

    def _connect(self) -> sqlite3.Connection:
        occupied = not self._idle and holder_of(self._directory) is not None
        if self._connection is None or (occupied and not self.live):
            self._resources.close()
            self.live = occupied
            self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        if not self._path.exists():
            raise IndexMissingError("it is missing")
        if self.live:
            uri = _uri(self._path, "mode=ro")
        elif nbytes_of(self._directory / WAL):
            return self._open_copy()
        else:
            uri = _uri(self._path, "mode=ro&immutable=1")
        return self._open_at(uri)

    def _open_copy(self) -> sqlite3.Connection:
        """Open a copy of the index.

        The copy's name is deleted at once, so a killed process leaves no file.
        """
        with contextlib.ExitStack() as stack:
            directory = _make_scratch(self._path, stack)
            for name in (INDEX, WAL):
                with (self._directory / name).open("rb") as source:
                    _copy(self._path, source, directory / name)
            return self._open_at(_uri(directory / INDEX, "mode=rw"))

    def _open_at(self, uri: str) -> sqlite3.Connection:
        connection = sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)
        self._resources.callback(connection.close)
        with damage_raised():  # the first statement also opens the log
            check_schema(connection)
        return connection


def count_chunks(space: StoredNamespace) -> int | None:
    """Return how many chunks the next start would find in an idle namespace.

    The number is 0 if the index is missing or records a reset; None if it cannot be read.
    """
    try:
        with IndexReader(space, idle=True) as reader:
            return 0 if reader.reset_at() is not None else reader.chunks_from(0)
    except IndexMissingError:
        return 0
    except (IndexDamagedError, sqlite3.Error, OSError, ConfigError):
        return None


def find_other_version(space: StoredNamespace) -> str:
    """Return a message if another version of kvtier wrote an idle index, else empty."""
    try:
        with IndexReader(space, idle=True) as reader:
            reader.reset_at()
    except IndexVersionError as error:
        return f"{space.index_path}: {error}"
    except (IndexDamagedError, sqlite3.Error, OSError, ConfigError):
        return ""
    return ""


def _make_scratch(index: Path, stack: contextlib.ExitStack) -> Path:
    """Create a directory for a copy of ``index``; the exit of ``stack`` deletes both."""
    try:
        return Path(stack.enter_context(tempfile.TemporaryDirectory()))
    except OSError as error:
        raise ConfigError(_no_copy(index, error)) from error


def _copy(index: Path, source: BinaryIO, destination: Path) -> None:
    """Append ``source``, a file of ``index``, to ``destination``."""
    while data := source.read(_COPIED_AT_ONCE):
        try:
            with destination.open("ab") as file:
                file.write(data)
        except OSError as error:
            raise ConfigError(_no_copy(index, error)) from error


def _no_copy(index: Path, error: OSError) -> str:
    return (
        f"{index}: a killed engine left a log, which is read in a copy, and none can be made "
        f"in the directory for temporary files: {error.strerror}; name one with room in TMPDIR"
    )


def _uri(path: Path, options: str) -> str:
    return f"file:{quote(str(path.absolute()))}?{options}"


def _entry(row: tuple[Any, ...]) -> Entry:
    slot, key, checksum, *others = row
    return Entry(slot, key, checksum & 0xFFFF_FFFF_FFFF_FFFF, *others)
