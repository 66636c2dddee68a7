"""The index's tables from version to version, and whether a file or the machine is damaged.

Version 2 added times, hits and the trail; version 3 keeps another thing of the keys in it. An
older index is brought up in place when it is opened for writing. A version this kvtier does not
know is not touched.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Final

from kvtier.tiers.slab.trail import TRAIL_SCHEMA_2, TRAIL_SCHEMA_3

__all__ = [
    "RESET_NOTE",
    "IndexDamagedError",
    "IndexMissingError",
    "blame",
    "bring_up",
    "check_identity",
    "is_full",
    "lacks_shared_memory",
]

RESET_NOTE: Final = "reset"
"""Name of the note that the cache was reset and what was stored since is doubted.

Its value is when, in seconds since the epoch. Why, says :mod:`kvtier.tiers.slab.opening`.
"""

_APPLICATION_ID: Final = 0x6B767469  # "kvti"
_VERSION: Final = 3
_SCHEMA_1: Final = """
CREATE TABLE chunks(
    slot INTEGER PRIMARY KEY,
    key BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    last_use INTEGER NOT NULL
);
CREATE TABLE meta(name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_FROM_1_TO_2: Final = f"""
ALTER TABLE chunks ADD COLUMN stored_at INTEGER NOT NULL DEFAULT 0;
ALTER TABLE chunks ADD COLUMN used_at INTEGER NOT NULL DEFAULT 0;
ALTER TABLE chunks ADD COLUMN hits INTEGER NOT NULL DEFAULT 0;
{TRAIL_SCHEMA_2}
"""
_BRING_UP: Final = {
    0: _SCHEMA_1 + _FROM_1_TO_2 + TRAIL_SCHEMA_3,
    1: _FROM_1_TO_2 + TRAIL_SCHEMA_3,
    2: TRAIL_SCHEMA_3,
}
"""What makes an empty file, or one of an older version, one of this version."""
_CHUNKS_1: Final = ["slot", "key", "checksum", "generation", "last_use"]
_SINCE_2: Final = {
    "chunks": [*_CHUNKS_1, "stored_at", "used_at", "hits"],
    "meta": ["name", "value"],
}
_TABLES: Final = {
    1: {"chunks": _CHUNKS_1, "meta": ["name", "value"]},
    2: {**_SINCE_2, "departures": ["end", "at", "reason", "key_hashes"]},
    3: {**_SINCE_2, "departures": ["end", "at", "reason", "key_hashes", "marked"]},
}
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


class IndexDamagedError(Exception):
    """The file is not an index this version wrote, or no longer."""


class IndexMissingError(IndexDamagedError):
    """There is no such file."""


def bring_up(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty file, and bring those of an older version up to this one.

    Raises:
        IndexDamagedError: See :func:`check_identity`.
    """
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    version = 0 if empty else check_identity(connection)
    if version in _BRING_UP:
        _build(connection, _BRING_UP[version])
    check_identity(connection)


def check_identity(connection: sqlite3.Connection) -> int:
    """Return the version of the index that ``connection`` has open.

    Raises:
        IndexDamagedError: It is not an index, or of a version that this one does not know.
    """
    run = connection.execute
    mark, version = (
        run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if mark != _APPLICATION_ID or version not in _TABLES:
        raise IndexDamagedError(f"it is not an index of version {_VERSION} or older")
    for table, columns in _TABLES[version].items():
        if [row[1] for row in run(f"PRAGMA table_info({table})")] != columns:
            raise IndexDamagedError(f"table {table} has other columns")
    return int(version)


@contextlib.contextmanager
def blame() -> Iterator[None]:
    """Tell damage to the file from trouble with the machine."""
    try:
        yield
    except (sqlite3.NotSupportedError, IndexDamagedError):
        raise
    except sqlite3.DatabaseError as error:
        if _code_of(error) & 0xFF in _BLAMELESS or lacks_shared_memory(error):
            raise
        raise IndexDamagedError(str(error)) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise IndexDamagedError(f"it holds values of other types: {error}") from error


def is_full(error: sqlite3.Error) -> bool:
    """Return whether ``error`` is about room, which somebody may make."""
    return _code_of(error) & 0xFF == sqlite3.SQLITE_FULL


def lacks_shared_memory(error: sqlite3.Error) -> bool:
    """Return whether ``error`` is about room for the file that readers share with a writer."""
    return _code_of(error) == sqlite3.SQLITE_IOERR_SHMSIZE


def _code_of(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0))


def _build(connection: sqlite3.Connection, statements: str) -> None:
    """Bring the file to this version, all of it or nothing."""
    connection.executescript(
        f"BEGIN IMMEDIATE; {statements} PRAGMA application_id={_APPLICATION_ID};"
        f"PRAGMA user_version={_VERSION}; COMMIT"
    )
