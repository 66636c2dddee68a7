"""The index on disk: which slot holds which chunk.

A table in SQLite, keyed by slot: a chunk written over another replaces its row, so evictions
cost nothing here. Every access is one statement for many rows, because each step of a statement
gives up the interpreter lock and may wait 5 ms to get it back.

A logical clock (``generation``, ``last_use``) gives the order. ``stored_at``, ``used_at`` and
``hits`` are for people: seconds since the epoch, 0 where unknown, and how often a chunk was
loaded. Nothing depends on them, so a clock that goes backwards harms nothing.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.keys import ChunkKey
from kvtier.tiers.slab.change import Change, Notes, Statement, statements_of
from kvtier.tiers.slab.checksum import hash_key
from kvtier.tiers.slab.direct_io import BlockIo
from kvtier.tiers.slab.schema import (
    RESET_NOTE,
    IndexDamagedError,
    blame,
    bring_up,
    lacks_shared_memory,
)
from kvtier.tiers.slab.trail import TRAIL_NBYTES, KeyMarks, Reason, make_rows, mark_keys

__all__ = [
    "IndexDamagedError",
    "IndexDatabase",
    "IndexSpec",
    "StoredRows",
    "hash_keys",
    "index_room_nbytes",
    "no_rows",
]

KeyArray: TypeAlias = npt.NDArray[Any]
"""Keys as ``V<width>``, or as objects where they differ in length."""

_SLOTS_PER_STEP: Final = 1 << 16
_INSTRUCTIONS_PER_SIGN: Final = 4096  # of SQLite's machine: some 0.2 ms
_LATEST: Final = 1 << 62  # an honest clock, one tick per chunk, takes centuries to get there
_OLDEST_SQLITE: Final = (3, 33)  # UPDATE ... FROM
_ROW_NBYTES: Final = 120  # with the digest of an adapter, and what a B-tree leaves empty
_LOG_NBYTES: Final = 4 << 20  # SQLite folds it into the database at a thousand pages
_LONGEST_LOG_NBYTES: Final = 64 << 20  # kept when it is folded; what is longer is cut off
_LEAST_SLOT, _GREATEST_SLOT = -(1 << 63), (1 << 63) - 1
_KEEP_NOTE: Final = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
_APPEND: Final = "INSERT INTO departures VALUES (?,?,?,?,?)"
_TRIM: Final = "DELETE FROM departures WHERE end <= ?"
_COUNT: Final = "SELECT count(*) FROM chunks WHERE slot >= ? AND slot < ?"
_SOME_KEYS: Final = """
SELECT count(*), max(slot), group_concat(hex(key))
FROM (SELECT slot, key FROM chunks WHERE slot BETWEEN ? AND ? ORDER BY slot LIMIT ?)
"""
_LOAD: Final = """
SELECT count(*),
       group_concat(printf('%016x%016x%016x%016x', slot, checksum, generation, last_use), ''),
       group_concat(hex(key))
FROM chunks WHERE slot >= ? AND slot < ?
"""


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """What an index should be.

    Attributes:
        path: The database file.
        durability: Whether commits wait for the device.
    """

    path: Path
    durability: Literal["process", "power"]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The index's content, least recently used first; no key occurs twice.

    Attributes:
        keys: The chunks' keys; an array, for a million objects leave holes in the heap when
            they go.
        slots: Where they are.
        key_hashes: 64 bits that stand for each key.
        key_marks: What the trail keeps of each key when it leaves.
        checksums: Checksum of each payload.
        outdated: Slots whose key has a newer row elsewhere.
        clock: A time later than any in the index.
    """

    keys: KeyArray
    slots: npt.NDArray[np.int64]
    key_hashes: npt.NDArray[np.uint64]
    key_marks: KeyMarks
    checksums: npt.NDArray[np.uint64]
    outdated: npt.NDArray[np.int64]
    clock: int

    def __iter__(self) -> Iterator[tuple[ChunkKey, int]]:
        """Yield keys and slots, in order."""
        for keys, slots in zip(_by_step(self.keys), _by_step(self.slots), strict=True):
            yield from zip(keys, slots, strict=True)


class IndexDatabase:
    """An open index. Not thread-safe: one thread at a time.

    Everything here raises :class:`sqlite3.Error` when the database fails.
    """

    def __init__(self, connection: sqlite3.Connection, spec: IndexSpec) -> None:
        self._connection = connection
        self._synchronous = "FULL" if spec.durability == "power" else "NORMAL"
        self._log_path = spec.path.with_name(f"{spec.path.name}-wal")
        self._trail_end = 0
        self._owes_clear = False
        self._owed_notes: dict[str, str] = {}

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
        try:
            return cls._open(spec, io, locking="NORMAL")
        except sqlite3.OperationalError as error:
            if not lacks_shared_memory(error):
                raise
            # A full disk is no reason not to start: only other readers need that file.
            return cls._open(spec, io, locking="EXCLUSIVE")

    @classmethod
    def _open(
        cls, spec: IndexSpec, io: BlockIo, *, locking: Literal["NORMAL", "EXCLUSIVE"]
    ) -> Self:
        connection = io.connect(spec.path)
        try:
            database = cls(connection, spec)
            with blame():
                connection.execute(f"PRAGMA locking_mode={locking}").fetchall()
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
        with blame():
            self._drop_beyond(capacity_slots)
            return _order(*self._fetch(capacity_slots))

    def count_within(self, first_slot: int, end_slot: int) -> int:
        """Return how many rows the slots from ``first_slot`` to before ``end_slot`` have."""
        counted = self._connection.execute(_COUNT, (first_slot, end_slot)).fetchone()
        return int(counted[0])

    def apply(self, change: Change) -> None:
        """Commit ``change``: all of it or, if this raises, at most its ``clear``."""
        if self._owes_clear:
            self.clear()
        while self._owed_notes:
            name, value = next(iter(self._owed_notes.items()))
            self.set_note(name, value)
        if change.clear:
            self.clear(doubt=change.doubt)
        now = _now()
        writes = [*statements_of(change, now), *self._departures(change.notes, now)]
        if len(writes) == 1:
            self._connection.execute(*writes[0])
        elif writes:
            self._transact(writes)

    def clear(self, *, doubt: bool = False) -> None:
        """Delete all rows; this survives loss of power, whatever the durability.

        Args:
            doubt: Whether to note along with it that what is stored from now on is not to be
                served by another engine; otherwise such a note goes with the rows.
        """
        note: Statement = ("DELETE FROM meta WHERE name = ?", (RESET_NOTE,))
        if doubt:
            note = (_KEEP_NOTE, (RESET_NOTE, str(_now())))
        with self._durably():
            self._transact([("DELETE FROM chunks", ()), note])
        self._owes_clear = False

    @property
    def owes_clear(self) -> bool:
        """Whether all rows are to be deleted before the next change."""
        return self._owes_clear

    def owe_clear(self) -> None:
        """Delete all rows before the next change, or let that fail."""
        self._owes_clear = True

    def note_departures(self, reason: Reason, key_marks: KeyMarks) -> None:
        """Add to the trail why chunks left; their rows are the caller's business."""
        notes = Notes()
        notes.depart(reason, key_marks)
        self.apply(Change(notes=notes))

    def note(self, name: str) -> str:
        """Return the note of this name, empty if there is none."""
        found = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,))
        row = found.fetchone()
        return str(row[0]) if row else ""

    def set_note(self, name: str, value: str) -> None:
        """Keep ``value`` as the note ``name``; this survives loss of power, as clear() does.

        A note may say that the rows are not to be trusted after a loss of power. It is there
        before the first payload is written, or it is of no use. And it may vouch for the rows,
        so those that are to be deleted go first.
        """
        if self._owes_clear:
            self.clear()
        with self._durably():
            self._connection.execute(_KEEP_NOTE, (name, value))
        self._owed_notes.pop(name, None)

    def owe_note(self, name: str, value: str) -> None:
        """Keep ``value`` as the note ``name`` before the next change, or let that fail."""
        self._owed_notes[name] = value

    @property
    def log_nbytes(self) -> int:
        """Bytes of the log; 0 if there is none, or the disk does not say."""
        try:
            return self._log_path.stat().st_size
        except OSError:  # whoever commits must not fail for this
            return 0

    @contextlib.contextmanager
    def giving_signs(self, on_sign: Callable[[], None]) -> Iterator[None]:
        """Call ``on_sign`` every now and then while a statement runs in the body.

        Raises:
            KeyboardInterrupt: The user interrupted a statement, which did nothing then.
        """

        def sign() -> int:
            on_sign()
            return 0

        self._connection.set_progress_handler(sign, _INSTRUCTIONS_PER_SIGN)
        try:
            yield
        except sqlite3.OperationalError as error:
            # What is raised in the handler is lost; only that it was raised is known.
            if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                raise KeyboardInterrupt from error
            raise
        finally:
            self._connection.set_progress_handler(None, 0)

    def compact(self) -> None:
        """Write the file anew, without the room that deleted rows left; durable."""
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute("VACUUM")
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Fold the log into the database and close it."""
        try:
            # Done by close() itself in most cases, but not beside a reader.
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._connection.close()

    @contextlib.contextmanager
    def _durably(self) -> Iterator[None]:
        """Let what is committed in the body survive loss of power."""
        self._connection.execute("PRAGMA synchronous=FULL")
        try:
            yield
        finally:
            self._connection.execute(f"PRAGMA synchronous={self._synchronous}")

    def _prepare(self) -> None:
        run = self._connection.execute
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            raise sqlite3.NotSupportedError(
                f"SQLite {sqlite3.sqlite_version} is too old; 3.33 or later is needed"
            )
        bring_up(self._connection)
        run("PRAGMA journal_mode=WAL").fetchall()
        run(f"PRAGMA journal_size_limit={_LONGEST_LOG_NBYTES}").fetchall()
        run(f"PRAGMA synchronous={self._synchronous}")
        self._trail_end = run("SELECT coalesce(max(end), 0) FROM departures").fetchone()[0]
        if self._trail_end > _LATEST:
            raise IndexDamagedError(f"its trail ends at {self._trail_end}")

    def _drop_beyond(self, capacity_slots: int) -> None:
        """Delete the rows of slots there are none of; this survives loss of power."""
        beyond = [(_LEAST_SLOT, -1), (capacity_slots, _GREATEST_SLOT)]
        marks = [mark_keys(keys) for ends in beyond for keys in self._keys_between(*ends)]
        if marks:
            with self._durably():
                self._connection.execute(
                    "DELETE FROM chunks WHERE slot < 0 OR slot >= ?", (capacity_slots,)
                )
            self.note_departures(Reason.BEYOND, np.concatenate(marks))

    def _keys_between(self, first: int, last: int) -> Iterator[list[ChunkKey]]:
        """Yield the keys in slots ``first`` to ``last``, some at a time."""
        while first <= last:
            some = self._connection.execute(_SOME_KEYS, (first, last, _SLOTS_PER_STEP))
            count, greatest, keys_text = some.fetchone()
            if not count:
                return
            yield [bytes.fromhex(key) for key in keys_text.split(",")]
            first = greatest + 1

    def _departures(self, notes: Notes, now: int) -> Iterator[Statement]:
        rows = make_rows(notes.departures, end=self._trail_end, at=now)
        for row in rows:
            self._trail_end = row[0]  # if this fails, the log has a gap, which harms nothing
            yield _APPEND, row
        if rows:
            yield _TRIM, (self._trail_end - TRAIL_NBYTES,)

    def _fetch(self, capacity_slots: int) -> tuple[KeyArray, npt.NDArray[np.int64]]:
        """Return the keys and, row by row, the four numbers that go with each."""
        keys: list[KeyArray] = []
        numbers = [np.empty((0, 4), dtype=np.int64)]
        for first in range(0, capacity_slots, _SLOTS_PER_STEP):
            end = min(first + _SLOTS_PER_STEP, capacity_slots)
            found = self._connection.execute(_LOAD, (first, end))
            count, numbers_text, keys_text = found.fetchone()
            if count:
                keys.append(_decode_keys(keys_text, count))
                packed = np.frombuffer(bytes.fromhex(numbers_text), dtype=">i8")
                numbers.append(packed.reshape(-1, 4).astype(np.int64))
        if len({some.dtype for some in keys}) > 1:
            keys = [_of_objects(some.tolist()) for some in keys]
        return np.concatenate(keys or [_of_objects([])]), np.concatenate(numbers)

    def _transact(self, writes: Iterable[Statement]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for statement, parameters in writes:
                self._connection.execute(statement, parameters)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


def _decode_keys(text: str, count: int) -> KeyArray:
    """Return ``count`` keys in hexadecimal, with a comma between two."""
    width, rest = divmod(len(text) + 1, count)
    if not rest and text[width - 1 :: width] == "," * (count - 1):
        return np.frombuffer(bytes.fromhex(text.replace(",", "")), dtype=f"V{width // 2}")
    return _of_objects([bytes.fromhex(key) for key in text.split(",")])


def _of_objects(keys: Sequence[ChunkKey]) -> KeyArray:
    """Return ``keys``, which differ in length, as an array."""
    array = np.empty(len(keys), dtype=np.object_)
    array[:] = keys
    return array


def _by_step(values: npt.NDArray[Any]) -> Iterator[list[Any]]:
    """Yield ``values`` as lists of Python objects, some at a time."""
    for first in range(0, len(values), _SLOTS_PER_STEP):
        yield values[first : first + _SLOTS_PER_STEP].tolist()


def _order(keys: KeyArray, numbers: npt.NDArray[np.int64]) -> StoredRows:
    """Sort rows by last use and keep the newest of each key.

    Keys are told apart by 64 bits: two that share them cost one chunk, never a wrong one.
    """
    if len(numbers) != len(keys):
        raise IndexDamagedError("its columns differ in length")
    slots, checksums, generations, last_uses = np.ascontiguousarray(numbers.T)
    key_hashes = np.concatenate([hash_keys(()), *map(hash_keys, _by_step(keys))])
    by_key = np.lexsort((generations, key_hashes))
    newest = np.ones(len(keys), dtype=np.bool_)
    newest[:-1] = key_hashes[by_key][1:] != key_hashes[by_key][:-1]
    kept = by_key[newest]
    kept = kept[np.argsort(last_uses[kept], kind="stable")]
    kept_keys = keys[kept]
    latest = max(generations.max(initial=0), last_uses.max(initial=0))
    if latest > _LATEST:
        raise IndexDamagedError(f"its clock stands at {latest}")
    return StoredRows(
        keys=kept_keys,
        slots=slots[kept],
        key_hashes=key_hashes[kept],
        key_marks=np.concatenate([mark_keys(()), *map(mark_keys, _by_step(kept_keys))]),
        checksums=checksums[kept].view(np.uint64),
        outdated=slots[by_key[~newest]],
        clock=int(latest) + 1,
    )


def no_rows() -> StoredRows:
    """Return what an empty index holds."""
    return _order(_of_objects([]), np.empty((0, 4), dtype=np.int64))


def index_room_nbytes(capacity_slots: int) -> int:
    """Return how much room the index of so many slots takes: table, trail and log.

    The log takes more while somebody reads an old state of the index.
    """
    return capacity_slots * _ROW_NBYTES + 2 * TRAIL_NBYTES + _LOG_NBYTES


def hash_keys(keys: Sequence[ChunkKey]) -> npt.NDArray[np.uint64]:
    """Return 64 bits for each of ``keys``."""
    return np.fromiter(map(hash_key, keys), dtype=np.uint64, count=len(keys))


def _now() -> int:
    return int(datetime.now(UTC).timestamp())
