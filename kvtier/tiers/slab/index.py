"""The index on disk: which slot holds which chunk.

A table in SQLite, keyed by slot: a chunk written over another replaces its row, so evictions
cost nothing here. Every access is one statement for many rows, because each step of a statement
gives up the interpreter lock and may wait 5 ms to get it back.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final, Literal, Self

import numpy as np
import numpy.typing as npt

from kvtier.keys import ChunkKey
from kvtier.tiers.slab.checksum import hash_key
from kvtier.tiers.slab.direct_io import BlockIo

__all__ = ["Change", "IndexDamagedError", "IndexDatabase", "IndexSpec", "Row", "StoredRows"]

_APPLICATION_ID: Final = 0x6B767469  # "kvti"
_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE chunks(
    slot INTEGER PRIMARY KEY,
    key BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    last_use INTEGER NOT NULL
);
CREATE TABLE meta(name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_ROWS_PER_STATEMENT: Final = 4096  # five variables each, of the 32766 a statement may have
_SLOTS_PER_STEP: Final = 1 << 16
_LATEST: Final = 1 << 62  # an honest clock, one tick per chunk, takes centuries to get there
_OLDEST_SQLITE: Final = (3, 33)  # UPDATE ... FROM

_LOAD: Final = """
SELECT count(*),
       group_concat(printf('%016x%016x%016x%016x', slot, checksum, generation, last_use), ''),
       group_concat(hex(key))
FROM chunks WHERE slot >= ? AND slot < ?
"""
_TOUCH: Final = """
UPDATE chunks SET last_use = max(chunks.last_use, uses.last_use)
FROM (SELECT json_extract(value, '$[0]') AS slot, json_extract(value, '$[1]') AS last_use
      FROM json_each(?)) AS uses
WHERE chunks.slot = uses.slot
"""
_DELETE: Final = "DELETE FROM chunks WHERE slot IN (SELECT value FROM json_each(?))"
_BLAMELESS: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)
"""Errors that say something about the machine and nothing about the file."""

Row = tuple[int, ChunkKey, int, int, int]
"""Slot, key, checksum as signed 64 bits, generation, last use."""


class IndexDamagedError(Exception):
    """The file is not an index this version wrote, or no longer."""


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """What an index should be.

    Attributes:
        path: The database file.
        checksum: What the checksum column holds.
        durability: Whether commits wait for the device.
    """

    path: Path
    checksum: Literal["xxh3", "off"]
    durability: Literal["process", "power"]


@dataclass(slots=True)
class Change:
    """What the next transaction does, in this order: clear, then rows, then uses.

    Attributes:
        clear: Whether everything older is deleted, durably.
        rows: New row of each slot; None deletes the slot's row.
        uses: Last use of each slot that was touched.
    """

    clear: bool = False
    rows: dict[int, Row | None] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The index's content, least recently used first; no key occurs twice.

    Attributes:
        keys: The chunks' keys.
        slots: Where they are.
        key_hashes: 64 bits of each key.
        checksums: Checksum of each payload.
        outdated: Slots whose key has a newer row elsewhere.
        clock: A time later than any in the index.
    """

    keys: Sequence[ChunkKey]
    slots: npt.NDArray[np.int64]
    key_hashes: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]
    outdated: npt.NDArray[np.int64]
    clock: int


class IndexDatabase:
    """An open index. Not thread-safe: one thread at a time.

    Everything here raises :class:`sqlite3.Error` when the database fails.
    """

    def __init__(self, connection: sqlite3.Connection, spec: IndexSpec) -> None:
        self._connection = connection
        self._synchronous = "FULL" if spec.durability == "power" else "NORMAL"

    @classmethod
    def open(cls, spec: IndexSpec, io: BlockIo) -> Self:
        """Open or create the index.

        Raises:
            IndexDamagedError: The file is there and cannot be used.
            OSError: The file system failed.
            sqlite3.Error: Something other than the file's content is wrong.
        """
        # SQLite takes the modes of its side files from the database and that from the umask.
        io.close(io.open(spec.path, os.O_RDWR | os.O_CREAT))
        connection = io.connect(spec.path)
        try:
            database = cls(connection, spec)
            with _damage():
                database._prepare()
        except BaseException:
            connection.close()
            raise
        return database

    def load(self, capacity_slots: int) -> StoredRows:
        """Return the rows of the first ``capacity_slots`` slots and delete all others.

        Raises:
            IndexDamagedError: The rows cannot be read.
        """
        with _damage():
            self._connection.execute(
                "DELETE FROM chunks WHERE slot < 0 OR slot >= ?", (capacity_slots,)
            )
            return _order(*self._fetch(capacity_slots))

    def apply(self, change: Change) -> None:
        """Commit ``change``: all of it or, if this raises, at most its ``clear``."""
        if change.clear:
            self.clear()
        writes = list(_statements(change))
        if len(writes) == 1:
            self._connection.execute(*writes[0])
        elif writes:
            self._transact(writes)

    def clear(self) -> None:
        """Delete all rows; this survives loss of power, whatever the durability."""
        self._execute_durably("DELETE FROM chunks")

    def note(self, name: str) -> str:
        """Return the note of this name, empty if there is none."""
        found = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,))
        row = found.fetchone()
        return str(row[0]) if row else ""

    def set_note(self, name: str, value: str) -> None:
        """Keep ``value`` as the note ``name``; this survives loss of power, as clear() does.

        A note may say that the rows are not to be trusted after a loss of power. It is there
        before the first payload is written, or it is of no use.
        """
        self._execute_durably("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def close(self) -> None:
        """Fold the log into the database and close it."""
        try:
            # Done by close() itself in most cases, but not beside a reader.
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._connection.close()

    def _execute_durably(self, statement: str, parameters: Sequence[object] = ()) -> None:
        self._connection.execute("PRAGMA synchronous=FULL")
        try:
            self._connection.execute(statement, parameters)
        finally:
            self._connection.execute(f"PRAGMA synchronous={self._synchronous}")

    def _prepare(self) -> None:
        run = self._connection.execute
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            raise sqlite3.NotSupportedError(
                f"SQLite {sqlite3.sqlite_version} is too old; 3.33 or later is needed"
            )
        tables = run("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables == 0:
            self._connection.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id={_APPLICATION_ID};"
                f"PRAGMA user_version={_VERSION}; COMMIT"
            )
        self._check_identity()
        run("PRAGMA journal_mode=WAL").fetchall()
        run(f"PRAGMA synchronous={self._synchronous}")

    def _check_identity(self) -> None:
        run = self._connection.execute
        found = [
            run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        ]
        if found != [_APPLICATION_ID, _VERSION]:
            raise IndexDamagedError(f"it is not an index of version {_VERSION}")
        for table, columns in (
            ("chunks", ["slot", "key", "checksum", "generation", "last_use"]),
            ("meta", ["name", "value"]),
        ):
            if [row[1] for row in run(f"PRAGMA table_info({table})")] != columns:
                raise IndexDamagedError(f"table {table} has other columns")

    def _fetch(self, capacity_slots: int) -> tuple[list[ChunkKey], npt.NDArray[np.int64]]:
        """Return the keys and, row by row, the four numbers that go with each."""
        keys: list[ChunkKey] = []
        numbers = [np.empty((0, 4), dtype=np.int64)]
        for first in range(0, capacity_slots, _SLOTS_PER_STEP):
            end = min(first + _SLOTS_PER_STEP, capacity_slots)
            found = self._connection.execute(_LOAD, (first, end))
            count, numbers_text, keys_text = found.fetchone()
            if count:
                keys += map(bytes.fromhex, keys_text.split(","))
                packed = np.frombuffer(bytes.fromhex(numbers_text), dtype=">i8")
                numbers.append(packed.reshape(-1, 4).astype(np.int64))
        return keys, np.concatenate(numbers)

    def _transact(self, writes: Iterable[tuple[str, Sequence[object]]]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for statement, parameters in writes:
                self._connection.execute(statement, parameters)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Tell damage to the file from trouble with the machine."""
    try:
        yield
    except (sqlite3.NotSupportedError, IndexDamagedError):
        raise
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _BLAMELESS:
            raise
        raise IndexDamagedError(str(error)) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise IndexDamagedError(f"it holds values of other types: {error}") from error


def _statements(change: Change) -> Iterable[tuple[str, Sequence[object]]]:
    gone = [slot for slot, row in change.rows.items() if row is None]
    if gone:
        yield _DELETE, (json.dumps(gone),)
    rows = iter([row for row in change.rows.values() if row is not None])
    while batch := list(islice(rows, _ROWS_PER_STATEMENT)):
        marks = ",".join(["(?,?,?,?,?)"] * len(batch))
        yield f"INSERT OR REPLACE INTO chunks VALUES {marks}", [x for row in batch for x in row]
    if change.uses:
        yield _TOUCH, (json.dumps(list(change.uses.items())),)


def _order(keys: list[ChunkKey], numbers: npt.NDArray[np.int64]) -> StoredRows:
    """Sort rows by last use and keep the newest of each key.

    Keys are told apart by 64 bits: two that share them cost one chunk, never a wrong one.
    """
    if len(numbers) != len(keys):
        raise IndexDamagedError("its columns differ in length")
    slots, checksums, generations, last_uses = np.ascontiguousarray(numbers.T)
    key_hashes = np.fromiter(map(hash_key, keys), dtype=np.uint64, count=len(keys))
    by_key = np.lexsort((generations, key_hashes))
    newest = np.ones(len(keys), dtype=np.bool_)
    newest[:-1] = key_hashes[by_key][1:] != key_hashes[by_key][:-1]
    kept = by_key[newest]
    kept = kept[np.argsort(last_uses[kept], kind="stable")]
    latest = max(generations.max(initial=0), last_uses.max(initial=0))
    if latest > _LATEST:
        raise IndexDamagedError(f"its clock stands at {latest}")
    return StoredRows(
        keys=[keys[position] for position in kept.tolist()],
        slots=slots[kept],
        key_hashes=key_hashes[kept],
        checksums=checksums[kept].view(np.uint64),
        outdated=slots[by_key[~newest]],
        clock=int(latest) + 1,
    )
