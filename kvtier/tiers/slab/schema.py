"""The tables of the index, their size, and the classification of SQLite errors.

``kvtier check`` imports this module, which needs no numpy.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvtier.errors import KvtierError

__all__ = [
    "CREATE_RETAINED",
    "LATEST",
    "REMOVAL_LOG_NBYTES",
    "RESET_METADATA",
    "IndexDamagedError",
    "IndexMissingError",
    "IndexVersionError",
    "Removal",
    "check_schema",
    "create_tables",
    "damage_raised",
    "has_retained",
    "index_room_nbytes",
    "is_full",
    "lacks_shared_memory",
]

LATEST: Final = 1 << 62
"""Greatest valid time of the logical clock; with one tick per chunk, it is centuries away."""

REMOVAL_LOG_NBYTES: Final = 8 << 20
"""Limit of the removal log, about a million removals; the row that crosses it is kept too.

Without that row, the first eviction after a reset of a large cache would delete all marks of
the reset. On disk the log is less than twice this size.
"""

RESET_METADATA: Final = "reset"
"""Name of the metadata that records a reset; later chunks may come from other weights.

Its value is the time of the reset in seconds since the epoch.
:mod:`kvtier.tiers.slab.opening` explains this.
"""

_ROW_NBYTES: Final = 120  # with the digest of an adapter, and free space in the B-tree
_LOG_NBYTES: Final = 4 << 20  # SQLite checkpoints the log at a thousand pages
_APPLICATION_ID: Final = 0x6B767469  # "kvti"
_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE chunks(
    slot INTEGER PRIMARY KEY,
    key BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    last_use INTEGER NOT NULL,
    stored_at INTEGER NOT NULL,
    used_at INTEGER NOT NULL,
    hits INTEGER NOT NULL
);
CREATE TABLE meta(name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE removals(
    end INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    key_marks BLOB NOT NULL
);
"""
CREATE_RETAINED: Final = """
CREATE TABLE IF NOT EXISTS retained(
    slot INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    until INTEGER NOT NULL
)
"""
"""SQL that creates the table of retained chunks, once a chunk is retained."""

_COLUMNS: Final = {
    "chunks": "slot key checksum generation last_use stored_at used_at hits",
    "meta": "name value",
    "removals": "end at reason key_marks",
}
_MACHINE_ERRORS: Final = frozenset(
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
"""Codes of SQLite errors whose cause is the machine, not the content of the index."""


class IndexDamagedError(KvtierError):
    """The file is not a usable index."""


class IndexMissingError(IndexDamagedError):
    """The index file does not exist."""


class IndexVersionError(IndexDamagedError):
    """Another version of kvtier made the index."""


@dataclass(frozen=True, slots=True)
class Removal:
    """One row of the removal log; ``reason`` is a value of RemovalReason.

    Attributes:
        at: Seconds since the epoch.
        key_marks: Marks as little-endian 64-bit numbers; empty if the keys are unknown.
    """

    at: int
    reason: str
    key_marks: bytes


def index_room_nbytes(capacity_slots: int) -> int:
    """Return the bytes to reserve for an index: table, removal log and write-ahead log.

    The write-ahead log may grow larger while a process reads an old state of the index.
    """
    return capacity_slots * _ROW_NBYTES + 2 * REMOVAL_LOG_NBYTES + _LOG_NBYTES


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables if the file is empty, and check them with :func:`check_schema`."""
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        connection.executescript(
            f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA application_id={_APPLICATION_ID};"
            f"PRAGMA user_version={_VERSION}; COMMIT"
        )
    check_schema(connection)


def check_schema(connection: sqlite3.Connection) -> None:
    """Check that ``connection`` has an index of this version open.

    Raises:
        IndexVersionError: The file is an index of another version.
        IndexDamagedError: The file is not an index.
    """
    run = connection.execute
    application_id, version = (
        run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if application_id != _APPLICATION_ID:
        raise IndexDamagedError("it is not an index of kvtier")
    if version != _VERSION:
        raise IndexVersionError(f"it has version {version}, and this kvtier reads {_VERSION}")
    for table, columns in _COLUMNS.items():
        if " ".join(row[1] for row in run(f"PRAGMA table_info({table})")) != columns:
            raise IndexDamagedError(f"table {table} has other columns")


def has_retained(connection: sqlite3.Connection) -> bool:
    """Return whether the table of :data:`CREATE_RETAINED` exists."""
    found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'retained'")
    return bool(found.fetchone())


@contextlib.contextmanager
def damage_raised() -> Iterator[None]:
    """Convert errors of a damaged file into IndexDamagedError; pass on other errors."""
    try:
        yield
    except (sqlite3.NotSupportedError, IndexDamagedError):
        raise
    except sqlite3.DatabaseError as error:
        if _code_of(error) & 0xFF in _MACHINE_ERRORS or lacks_shared_memory(error):
            raise
        raise IndexDamagedError(str(error)) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise IndexDamagedError(f"it holds values of other types: {error}") from error


def is_full(error: sqlite3.Error) -> bool:
    """Return whether ``error`` reports a full disk."""
    return _code_of(error) & 0xFF == sqlite3.SQLITE_FULL


def lacks_shared_memory(error: sqlite3.Error) -> bool:
    """Return whether ``error`` reports a lack of disk room for SQLite's ``-shm`` file."""
    return _code_of(error) == sqlite3.SQLITE_IOERR_SHMSIZE


def _code_of(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0))
