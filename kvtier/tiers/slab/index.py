"""The index on disk, which records the chunk in each slot.

The index is a table in SQLite with the slot as the primary key. A new chunk's row replaces the
row of the slot's old chunk, so an eviction needs no statement of its own. Every access is one
statement for many rows, because each call of SQLite may wait 5 ms for the interpreter lock.

A logical clock (``generation``, ``last_use``) orders the rows. ``stored_at`` and ``used_at``
(seconds since the epoch, 0 if unknown) and ``hits`` (number of loads of a chunk) are for
people. No decision depends on them, so a wall clock that goes backwards is harmless.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self

from kvtier.keys import ChunkKey
from kvtier.os.block_io import BlockIo
from kvtier.tiers.slab import part_hash_table
from kvtier.tiers.slab.removals import PackedMarks, RemovalReason, make_rows, pack_marks
from kvtier.tiers.slab.schema import (
    CREATE_RETAINED,
    LATEST,
    REMOVAL_LOG_NBYTES,
    RESET_METADATA,
    IndexDamagedError,
    create_tables,
    damage_raised,
    has_retained,
    lacks_shared_memory,
)

if TYPE_CHECKING:
    from kvtier.tiers.part_hashes import StoredPartHashes

__all__ = [
    "Change",
    "IndexDatabase",
    "LazyRecords",
    "PackedRows",
    "Row",
]

Row = tuple[int, ChunkKey, int, int, int]
"""Slot, key, checksum as signed 64 bits, generation, last use."""

Statement = tuple[str, Sequence[object]]
"""SQL and its parameters."""

Durability = Literal["process", "power"]
"""With ``power``, commits wait for the device and survive a power loss."""

_SLOTS_PER_STEP: Final = 1 << 16
_INSTRUCTIONS_PER_CALLBACK: Final = 4096  # of SQLite's machine: some 0.2 ms
_OLDEST_SQLITE: Final = (3, 33)  # UPDATE ... FROM
_LONGEST_LOG_NBYTES: Final = 64 << 20  # a longer log is truncated at a checkpoint
_LEAST_SLOT, _GREATEST_SLOT = -(1 << 63), (1 << 63) - 1
_ROWS_PER_STATEMENT: Final = 4096  # five variables each, of the 32766 a statement may have
_NEW_ROW: Final = "(?,?,?,?,?,?1,?1,0)"  # an unnumbered variable follows the largest so far
_FIRST_NEW_ROW: Final = "(?2,?3,?4,?5,?6,?1,?1,0)"
_TOUCH: Final = """
UPDATE chunks SET last_use = max(chunks.last_use, uses.last_use),
                  used_at = ?, hits = chunks.hits + uses.hits
FROM (SELECT json_extract(value, '$[0]') AS slot, json_extract(value, '$[1]') AS last_use,
             json_extract(value, '$[2]') AS hits
      FROM json_each(?)) AS uses
WHERE chunks.slot = uses.slot
"""
_DELETE: Final = "DELETE FROM chunks WHERE slot IN (SELECT value FROM json_each(?))"
_RESET_RECORD: Final = f"SELECT 1 FROM meta WHERE name = '{RESET_METADATA}'"
_RECORD_RESET: Final = f"INSERT OR REPLACE INTO meta VALUES ('{RESET_METADATA}', ?)"
_DROP_RESET_RECORD: Final = f"DELETE FROM meta WHERE name = '{RESET_METADATA}'"
_CLEAR_RETAINED: Final = "DELETE FROM retained"
_RETAIN: Final = "INSERT OR REPLACE INTO retained VALUES (?,?,?)"
_RETAINED: Final = """
SELECT slot, until FROM retained JOIN chunks USING (slot, generation) WHERE until > ?
"""
_APPEND: Final = "INSERT INTO removals VALUES (?,?,?,?)"
_TRIM: Final = "DELETE FROM removals WHERE end <= ?"
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


class PackedRows(NamedTuple):
    """Rows of the index, as hex text that one SQL statement returns.

    Attributes:
        numbers: Slot, checksum, generation and last use of each row, 16 hex digits each.
        keys: The keys in hex, separated by commas.
    """

    row_count: int
    numbers: str
    keys: str


@dataclass(slots=True)
class LazyRecords:
    """Uses, removals and part hashes that are committed later; a crash may lose them.

    Attributes:
        uses: Logical time of each used slot's last use.
        hits: Number of uses of each used slot.
        removals: Marks of the removed keys, by reason.
        part_hashes: Hashes of the parts of each slot's chunk.
    """

    uses: dict[int, int] = field(default_factory=dict)
    hits: Counter[int] = field(default_factory=Counter)
    removals: dict[RemovalReason, list[PackedMarks]] = field(default_factory=dict)
    part_hashes: dict[int, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.uses or self.removals or self.part_hashes)

    def add_uses(self, slots: Sequence[int], first_tick: int) -> None:
        """Record one use of each of ``slots``, in this order."""
        self.uses.update(zip(slots, range(first_tick, first_tick + len(slots)), strict=True))
        self.hits.update(slots)

    def drop_slots(self, slots: Iterable[int]) -> None:
        """Discard uncommitted uses and part hashes of the former chunks in ``slots``."""
        if self.uses or self.part_hashes:
            for slot in slots:
                self.uses.pop(slot, None)
                self.hits.pop(slot, None)
                self.part_hashes.pop(slot, None)

    def add_removals(self, reason: RemovalReason, key_marks: PackedMarks) -> None:
        """Record that the chunks with these marks were removed for ``reason``."""
        if key_marks or reason is RemovalReason.DAMAGED:
            self.removals.setdefault(reason, []).append(key_marks)


@dataclass(slots=True)
class Change:
    """A change of the index, applied in this order: clear, rows, records.

    ``clear`` is a transaction by itself; rows and records are one transaction.

    Attributes:
        clear: Whether to delete all older rows, durably.
        after_reset: Whether ``clear`` also records a reset, so that other engines do not serve
            chunks that are stored later.
        rows: New row of each slot; None deletes the slot's row.
    """

    clear: bool = False
    after_reset: bool = False
    rows: dict[int, Row | None] = field(default_factory=dict)
    records: LazyRecords = field(default_factory=LazyRecords)

    def statements(self, now: int) -> Iterator[Statement]:
        """Yield the SQL statements for rows, uses, hits and part hashes; ``now`` is the time.

        :meth:`IndexDatabase.apply` handles ``clear`` and the removals itself.
        """
        deleted = [slot for slot, row in self.rows.items() if row is None]
        if deleted:
            yield _DELETE, (json.dumps(deleted),)
        rows = iter([row for row in self.rows.values() if row is not None])
        while batch := list(islice(rows, _ROWS_PER_STATEMENT)):
            values = ",".join([_FIRST_NEW_ROW, *[_NEW_ROW] * (len(batch) - 1)])
            yield f"INSERT OR REPLACE INTO chunks VALUES {values}", [now, *chain(*batch)]
        uses, hits = self.records.uses, self.records.hits
        if uses:
            listed = list(zip(uses, uses.values(), map(hits.__getitem__, uses), strict=True))
            yield _TOUCH, (now, json.dumps(listed))
        if self.records.part_hashes:
            yield part_hash_table.keep(self.records.part_hashes)


class IndexDatabase:
    """An open index; used by one thread at a time.

    Every method raises :class:`sqlite3.Error` when the database fails.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, durability: Durability
    ) -> None:
        self._connection = connection
        self._synchronous = "FULL" if durability == "power" else "NORMAL"
        self._log_path = path.with_name(f"{path.name}-wal")
        self._removals_end = 0
        self._has_retained = self._has_part_hashes = False
        self._due: list[Callable[[], None]] = []

    @classmethod
    def open(cls, path: Path, io: BlockIo, *, durability: Durability) -> Self:
        """Open or create the index at ``path``.

        Raises:
            IndexDamagedError: The file exists and is not a usable index.
        """
        # SQLite gives its side files the mode of the database, which the umask would set.
        io.close(io.open(path, os.O_RDWR | os.O_CREAT))
        try:
            return cls._open(path, io, durability, locking="NORMAL")
        except sqlite3.OperationalError as error:
            if not lacks_shared_memory(error):
                raise
            # The disk is full. Only other readers need the missing file, so start anyway.
            return cls._open(path, io, durability, locking="EXCLUSIVE")

    @classmethod
    def _open(cls, path: Path, io: BlockIo, durability: Durability, *, locking: str) -> Self:
        connection = io.connect(path)
        try:
            database = cls(connection, path, durability)
            with damage_raised():
                connection.execute(f"PRAGMA locking_mode={locking}").fetchall()
                database._prepare()
        except BaseException:
            connection.close()
            raise
        return database

    def packed_rows(self, capacity_slots: int) -> Iterator[PackedRows]:
        """Yield the rows of the first ``capacity_slots`` slots, in batches."""
        for first in range(0, capacity_slots, _SLOTS_PER_STEP):
            end = min(first + _SLOTS_PER_STEP, capacity_slots)
            found = PackedRows(*self._connection.execute(_LOAD, (first, end)).fetchone())
            if found.row_count:
                yield found

    def drop_beyond(self, capacity_slots: int) -> None:
        """Durably delete the rows of slots beyond the capacity, and log the removals."""
        beyond = [(_LEAST_SLOT, -1), (capacity_slots, _GREATEST_SLOT)]
        marks = [pack_marks(keys) for ends in beyond for keys in self._keys_between(*ends)]
        if marks:
            with self._durably():
                self._connection.execute(
                    "DELETE FROM chunks WHERE slot < 0 OR slot >= ?", (capacity_slots,)
                )
            self.log_removals(RemovalReason.BEYOND, b"".join(marks))

    def retained(self) -> dict[int, int]:
        """Return the slots that :meth:`retain` protects, each with the protection's end."""
        if not self._has_retained:
            return {}
        return dict(self._connection.execute(_RETAINED, (_now(),)).fetchall())

    def retain(self, chunks: Iterable[tuple[int, int]], until: int) -> None:
        """Durably record that chunks must not be evicted before ``until``.

        Each of ``chunks`` is a slot and a generation. The record has no effect if the slot
        holds another chunk.
        """
        rows = [(slot, generation, until) for slot, generation in chunks]
        with self._durably():
            self._connection.execute(CREATE_RETAINED)
            self._has_retained = True
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(_RETAIN, rows)
            self._connection.execute("COMMIT")

    def load_part_hashes(self, capacity_slots: int, parts: int) -> StoredPartHashes:
        """Return the part hashes of the chunks that have ``parts`` hashes each.

        This call also creates the table of part hashes, so that later changes can contain
        hashes.
        """
        with damage_raised():
            part_hash_table.create(self._connection)
            self._has_part_hashes = True
            return part_hash_table.load(self._connection, capacity_slots, parts)

    def count_within(self, first_slot: int, end_slot: int) -> int:
        """Return the number of rows of slots ``first_slot`` to ``end_slot - 1``."""
        counted = self._connection.execute(_COUNT, (first_slot, end_slot)).fetchone()
        return int(counted[0])

    def apply(self, change: Change) -> None:
        """Commit ``change``. If this method raises, at most ``change.clear`` is committed."""
        while self._due:
            self._due[0]()
            del self._due[0]
        if change.clear:
            self.clear(after_reset=change.after_reset)
        now = _now()
        writes = [*change.statements(now), *self._removal_rows(change.records, now)]
        if len(writes) == 1:
            self._connection.execute(*writes[0])
        elif writes:
            self._transact(writes)

    def clear(self, *, after_reset: bool = False) -> None:
        """Delete all rows.

        The deletion survives a power loss under both ``durability`` settings. The same
        transaction records a reset if ``after_reset``, so that no other engine serves chunks
        stored later; else it deletes an earlier record of a reset.
        """
        record: Statement = (_DROP_RESET_RECORD, ())
        if after_reset:
            record = (_RECORD_RESET, (str(_now()),))
        writes: list[Statement] = [("DELETE FROM chunks", ()), record]
        # Generations may come again, so no record of a deleted chunk may stay.
        if self._has_retained:
            writes.append((_CLEAR_RETAINED, ()))
        if self._has_part_hashes:
            writes.append((part_hash_table.CLEAR, ()))
        with self._durably():
            self._transact(writes)

    def call_later(self, write: Callable[[], None]) -> None:
        """Call ``write`` just before the next change. That change fails if ``write`` fails."""
        self._due.append(write)

    def log_removals(self, reason: RemovalReason, key_marks: PackedMarks) -> None:
        """Append ``key_marks`` to the removal log without changing the chunks' rows."""
        records = LazyRecords()
        records.add_removals(reason, key_marks)
        self.apply(Change(records=records))

    def has_reset_record(self) -> bool:
        """Return whether the index records a reset."""
        return bool(self._connection.execute(_RESET_RECORD).fetchone())

    def record_reset(self) -> None:
        """Record a reset at an unknown time; the record survives a power loss."""
        with self._durably():
            self._connection.execute(_RECORD_RESET, ("0",))

    @property
    def log_nbytes(self) -> int:
        """Bytes of the write-ahead log; 0 if the log is missing or not accessible."""
        try:
            return self._log_path.stat().st_size
        except OSError:  # a failure here must not fail a commit
            return 0

    @contextlib.contextmanager
    def reporting_progress(self, on_progress: Callable[[], None]) -> Iterator[None]:
        """Call ``on_progress`` regularly while a statement runs in the body.

        A user's interrupt raises KeyboardInterrupt, and the statement then changed nothing.
        """

        def callback() -> int:
            on_progress()
            return 0

        self._connection.set_progress_handler(callback, _INSTRUCTIONS_PER_CALLBACK)
        try:
            yield
        except sqlite3.OperationalError as error:
            # SQLite loses an exception raised in the handler, and reports an interrupt.
            if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                raise KeyboardInterrupt from error
            raise
        finally:
            self._connection.set_progress_handler(None, 0)

    def compact(self) -> None:
        """Durably rewrite the index file without the free space of deleted rows."""
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute("VACUUM")
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Checkpoint the log and close the database."""
        try:
            # close() does this itself, but not beside a reader.
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._connection.close()

    @contextlib.contextmanager
    def _durably(self) -> Iterator[None]:
        """Make commits in the body survive a power loss."""
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
        create_tables(self._connection)
        run("PRAGMA journal_mode=WAL").fetchall()
        run(f"PRAGMA journal_size_limit={_LONGEST_LOG_NBYTES}").fetchall()
        run(f"PRAGMA synchronous={self._synchronous}")
        self._has_retained = has_retained(self._connection)
        self._has_part_hashes = part_hash_table.exists(self._connection)
        self._removals_end = run("SELECT coalesce(max(end), 0) FROM removals").fetchone()[0]
        if self._removals_end > LATEST:
            raise IndexDamagedError(f"its removal log ends at {self._removals_end}")

    def _keys_between(self, first: int, last: int) -> Iterator[list[ChunkKey]]:
        """Yield the keys in slots ``first`` to ``last``, in batches."""
        while first <= last:
            some = self._connection.execute(_SOME_KEYS, (first, last, _SLOTS_PER_STEP))
            count, greatest, keys_text = some.fetchone()
            if not count:
                return
            yield [bytes.fromhex(key) for key in keys_text.split(",")]
            first = greatest + 1

    def _removal_rows(self, records: LazyRecords, now: int) -> Iterator[Statement]:
        rows = make_rows(records.removals, end=self._removals_end, at=now)
        for row in rows:
            self._removals_end = row[0]  # if the commit fails, the numbers have a harmless gap
            yield _APPEND, row
        if rows:
            yield _TRIM, (self._removals_end - REMOVAL_LOG_NBYTES,)

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


def _now() -> int:
    return int(datetime.now(UTC).timestamp())
