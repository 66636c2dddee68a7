"""Looking into a store from outside, whether or not an engine has it open.

Nothing here writes into the store, and an engine notices nothing. How the index is opened
depends on who is there, because SQLite's readers are not all harmless:

* **An engine is running**: read-only. It has made the log's side files, and a reader beside it
  is what they are for.
* **Nobody is, and the log is empty**: as immutable. A plain reader would make side files, which
  changes the directory and is impossible on a read-only file system.
* **Nobody is, and a crash left a log**: a private copy. Reading it in place would rebuild the
  side file that a later recovery starts from.

An engine may start at any time, so who is there is asked again before every query.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Literal, Self
from urllib.parse import quote

from kvtier.config import RANK_PLACEHOLDER
from kvtier.errors import ConfigError, StoreDamagedError
from kvtier.keys import ChunkKey
from kvtier.tiers.slab.direct_io import BlockIo
from kvtier.tiers.slab.lock import PATIENCE, Patience, read_holder
from kvtier.tiers.slab.namespace import (
    INDEX,
    LAYOUT,
    Layout,
    is_named_as_one,
    nbytes_of,
    require_layout,
)
from kvtier.tiers.slab.schema import (
    RESET_NOTE,
    IndexDamagedError,
    IndexMissingError,
    blame,
    check_identity,
)
from kvtier.tiers.slab.trail import Departure

__all__ = [
    "Entry",
    "IndexReader",
    "Order",
    "StoredNamespace",
    "Totals",
    "count_chunks",
    "find_namespaces",
    "holder_of",
    "index_nbytes",
    "nothing_opened",
    "present_holder",
]

_WAL: Final = f"{INDEX}-wal"


def _cast(*columns: str) -> str:
    return ", ".join(f"CAST({column} AS INTEGER) AS {column}" for column in columns)


def _time(column: str) -> str:
    """Return a time as seconds of the years 1970 to 9999, and 0, unknown, for any other."""
    return (
        f"CASE WHEN CAST({column} AS INTEGER) BETWEEN 0 AND {_LATEST_S}"
        f" THEN CAST({column} AS INTEGER) ELSE 0 END AS {column}"
    )


_LATEST_S: Final = 253402300799
_COPIED_AT_ONCE: Final = 16 << 20
_INTEGERS: Final = ("checksum", "generation", "last_use")
# A value of another type reads as the number or bytes it resembles, as the engine reads it.
_COLUMNS_1: Final = (
    f"slot, CAST(key AS BLOB) AS key, {_cast(*_INTEGERS)}, "
    "0 AS stored_at, 0 AS used_at, 0 AS hits"
)
_COLUMNS: Final = (
    f"slot, CAST(key AS BLOB) AS key, {_cast(*_INTEGERS)}, "
    f"{_time('stored_at')}, {_time('used_at')}, {_cast('hits')}"
)
_TRAIL: Final = f"""(
    SELECT end, {_time("at")}, CAST(reason AS TEXT) AS reason,
           CAST(key_hashes AS BLOB) AS key_marks, {{marked}} AS marked
    FROM departures WHERE length(key_hashes) % 8 = 0
)"""
_TRAILS: Final = {
    2: _TRAIL.format(marked="0"),
    3: _TRAIL.format(marked="CAST(marked AS INTEGER)"),
}
_ORDERS: Final = {
    "last-use": "last_use DESC",
    "stored": "generation DESC",
    "hits": "hits DESC, last_use DESC",
}

_AT_ONCE: Final = Patience(timeout_s=0)

Order = Literal["last-use", "stored", "hits"]
_Parameters = Sequence[int | str]


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """One model's part of a store.

    Attributes:
        directory: Where its files are.
        layout: What its bytes mean.
    """

    directory: Path
    layout: Layout

    @property
    def name(self) -> str:
        """What the directory is called."""
        return self.directory.name

    @property
    def index_path(self) -> Path:
        """The index."""
        return self.directory / INDEX


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the index: what it says, which is a claim until the bytes are verified.

    Attributes:
        slot: Where the chunk is.
        key: Its key.
        checksum: Its checksum, unsigned.
        generation: Logical time of the store; never the same twice.
        last_use: Logical time of the last use.
        stored_at: Seconds since the epoch, 0 if unknown.
        used_at: Seconds since the epoch, 0 if unknown.
        hits: How often it was loaded from this tier.
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
    """An index summed up; times are seconds since the epoch, 0 where unknown."""

    chunks: int
    hits: int
    oldest_at: int
    newest_at: int
    departures: dict[str, int]


def find_namespaces(path: Path, name: str | None = None) -> list[StoredNamespace]:
    """Return the namespaces of the store at ``path``, or the one that ``path`` is.

    Args:
        path: A store or a namespace in it.
        name: Only this one.

    Raises:
        ConfigError: There is no such thing; the message says what to give instead.
    """
    try:
        candidates = _candidates(path)
    except PermissionError as error:
        raise ConfigError(_not_ours_to_read(path, error)) from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of an nvme tier") from error
    path = path.resolve()
    found = _with_layouts(candidates)
    if not found:
        raise ConfigError(
            f"{path} holds no store of an nvme tier, and those of other kinds are read by the "
            "tools of their packages; give the path of an nvme tier"
        )
    chosen = [space for space in found if name in {None, space.name}]
    if not chosen:
        names = ", ".join(space.name for space in found)
        raise ConfigError(f"{path} has no namespace {name}; it has {names}")
    return chosen


def _candidates(path: Path) -> list[Path]:
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        rank = (
            f", with a number for {RANK_PLACEHOLDER}" if RANK_PLACEHOLDER in str(path) else ""
        )
        raise ConfigError(f"{path} {what}; give the path of an nvme tier{rank}")
    path = path.resolve()  # its parent is asked for, which "." has not
    if (path / LAYOUT).exists():
        return [path]
    return sorted(filter(is_named_as_one, path.iterdir()))


def _with_layouts(directories: Iterable[Path]) -> list[StoredNamespace]:
    """Return those of ``directories`` that are namespaces.

    Raises:
        ConfigError: None of them is one that can be read, and one seems to be one.
    """
    found, problem = [], ""
    cause: Exception | None = None
    for directory in directories:
        try:
            found.append(StoredNamespace(directory, require_layout(directory, BlockIo())))
        except PermissionError as error:
            problem, cause = _not_ours_to_read(directory, error), error
        except ValueError as error:
            remedy = "copy it again, use the kvtier that wrote it, or move the directory away"
            problem, cause = f"{directory / LAYOUT}: {error}; {remedy}", error
        except (OSError, StoreDamagedError):
            continue  # somebody else's, though it is named like one
    if problem and not found:
        raise ConfigError(problem) from cause
    return found


def _not_ours_to_read(directory: Path, error: PermissionError) -> str:
    return f"{directory}: {error.strerror}; run this as the user that runs the engine"


def holder_of(directory: Path, patience: Patience = PATIENCE) -> str | None:
    """Return what the lock file of a namespace says of the process that has it open.

    The lock is tried for a moment, and only while the lock of the whole store keeps engines
    from opening anything: an engine that starts meanwhile waits instead of being refused.

    Returns:
        None if nobody has it open.

    Raises:
        ConfigError: A process keeps us from looking for longer than ``patience`` lasts.
        OSError: The files cannot be read.
    """
    with nothing_opened(directory.parent, patience):
        return present_holder(directory)


def present_holder(directory: Path) -> str | None:
    """Return what :func:`holder_of` returns, while :func:`nothing_opened` is in force.

    Raises:
        OSError: The files cannot be read.
    """
    with _shared(directory, _AT_ONCE) as free:
        if free:
            return None
        return read_holder(directory) or "another process"


@contextlib.contextmanager
def nothing_opened(root: Path, patience: Patience = PATIENCE) -> Iterator[None]:
    """Keep engines from opening or removing a namespace of the store at ``root``, for a moment.

    Raises:
        ConfigError: A process keeps us from it for longer than ``patience`` lasts.
        OSError: The directory cannot be opened.
    """
    with _shared(root, patience) as free:
        if not free:
            raise ConfigError(f"another process is opening {root}; try again")
        yield


def count_chunks(space: StoredNamespace) -> int | None:
    """Return how many chunks the next engine finds in a namespace that none has open.

    Returns:
        0 after a reset that the index notes; None if the index cannot be read.
    """
    try:
        with IndexReader(space, idle=True) as reader:
            return 0 if reader.reset_at() is not None else reader.chunks_from(0)
    except IndexMissingError:
        return 0
    except (IndexDamagedError, sqlite3.Error, OSError, ConfigError):
        return None


def index_nbytes(space: StoredNamespace) -> int:
    """Return the bytes of the index and its log."""
    return nbytes_of(space.index_path) + nbytes_of(space.directory / _WAL)


class IndexReader:
    """Reads the index of one namespace; a context manager. Not thread-safe.

    Its methods raise :class:`IndexDamagedError` for an index nobody can use,
    :class:`sqlite3.Error` and :class:`OSError` when the machine fails, what :func:`holder_of`
    raises, and :class:`ConfigError` where a copy is needed and there is no room for it.

    Args:
        space: The namespace.
        idle: Whether the caller keeps engines away from it.
    """

    def __init__(self, space: StoredNamespace, *, idle: bool = False) -> None:
        self._idle = idle
        self._directory = space.directory
        self._path = space.index_path
        self._resources = contextlib.ExitStack()
        self._connection: sqlite3.Connection | None = None
        self._beside_engine = False
        self._version = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    @property
    def live(self) -> bool:
        """Whether an engine had the store open at the last query."""
        return self._beside_engine

    def checksum(self) -> str:
        """Return how payloads are checksummed: ``xxh3`` or ``off``."""
        rows = self._query("SELECT value FROM meta WHERE name = 'checksum'")
        return str(rows[0][0]) if rows else "xxh3"

    def reset_at(self) -> int | None:
        """Return when the cache was reset if what was stored since goes at the next start.

        Returns:
            Seconds since the epoch, 0 if unknown; None if all of it stays.
        """
        rows = self._query(f"SELECT {_time('value')} FROM meta WHERE name = ?", (RESET_NOTE,))
        return int(rows[0][0]) if rows else None

    def totals(self) -> Totals:
        """Sum up the index."""
        ((chunks, hits, oldest, newest),) = self._query(
            "SELECT count(*), CAST(total(hits) AS INTEGER),"
            " CAST(min(nullif(stored_at, 0)) AS INTEGER), CAST(max(stored_at) AS INTEGER)"
            " FROM (SELECT {columns} FROM chunks)"
        )
        departures = self._departures("reason, sum(length(key_marks) / 8)", "GROUP BY reason")
        return Totals(chunks, hits, oldest or 0, newest or 0, dict(departures))

    def departures(self) -> Iterator[Departure]:
        """Yield the trail, newest first."""
        rows = self._departures("at, reason, key_marks, marked", "ORDER BY end DESC")
        for at, reason, key_marks, marked in rows:
            yield Departure(at, reason, key_marks, bool(marked))

    def chunks_from(self, slot: int) -> int:
        """Return how many chunks are in ``slot`` or a later one."""
        rows = self._query("SELECT count(*) FROM chunks WHERE slot >= ?", (slot,))
        return int(rows[0][0])

    def entries(self, order: Order, limit: int) -> list[Entry]:
        """Return the first ``limit`` rows in ``order``, all of them if it is negative."""
        return self._entries(f"1 ORDER BY {_ORDERS[order]} LIMIT ?", (limit,))

    def less_recent(self, entry: Entry) -> int:
        """Return how many chunks were used less recently than ``entry``."""
        rows = self._query("SELECT count(*) FROM chunks WHERE last_use < ?", (entry.last_use,))
        return int(rows[0][0])

    def entries_of_slots(self, first: int, end: int) -> list[Entry]:
        """Return the rows of slots ``first`` to ``end - 1``, in their order."""
        return self._entries("slot >= ? AND slot < ? ORDER BY slot", (first, end))

    def entries_of_prefix(self, digits: str) -> list[Entry]:
        """Return the rows whose key begins with ``digits``, in hex."""
        return self._entries("substr(hex(key), 1, ?) = ?", (len(digits), digits.upper()))

    def entries_unused_since(self, at: int) -> list[Entry]:
        """Return the rows of known age that were neither stored nor used from ``at`` on."""
        return self._entries("stored_at > 0 AND max(stored_at, used_at) < ?", (at,))

    def _entries(self, where: str, parameters: _Parameters) -> list[Entry]:
        sql = f"SELECT * FROM (SELECT {{columns}} FROM chunks) WHERE {where}"
        return [_entry(row) for row in self._query(sql, parameters)]

    def _departures(self, columns: str, tail: str) -> list[tuple[Any, ...]]:
        self._connect()
        if self._version == 1:
            return []
        return self._query(f"SELECT {columns} FROM {_TRAILS[self._version]} {tail}")

    def _query(self, sql: str, parameters: _Parameters = ()) -> list[tuple[Any, ...]]:
        connection = self._connect()
        with blame():
            columns = _COLUMNS_1 if self._version == 1 else _COLUMNS
            sql = sql.replace("{columns}", columns)
            return connection.execute(sql, parameters).fetchall()

    def _connect(self) -> sqlite3.Connection:
        occupied = not self._idle and holder_of(self._directory) is not None
        if self._connection is None or (occupied and not self._beside_engine):
            self._resources.close()
            self._beside_engine = occupied
            self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        if not self._path.exists():
            raise IndexMissingError("it is missing")
        if self._beside_engine:
            uri = _uri(self._path, "mode=ro")
        elif nbytes_of(self._directory / _WAL):
            return self._open_copy()
        else:
            uri = _uri(self._path, "mode=ro&immutable=1")
        return self._open_at(uri)

    def _open_copy(self) -> sqlite3.Connection:
        """Open a copy that has no name any more: however this process ends, it leaves none."""
        with contextlib.ExitStack() as stack:
            directory = _make_scratch(self._path, stack)
            for name in (INDEX, _WAL):
                with (self._directory / name).open("rb") as source:
                    _copy(self._path, source, directory / name)
            return self._open_at(_uri(directory / INDEX, "mode=rw"))

    def _open_at(self, uri: str) -> sqlite3.Connection:
        connection = sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)
        self._resources.callback(connection.close)
        with blame():  # and it opens the log, which is not done before the first statement
            self._version = check_identity(connection)
        return connection


@contextlib.contextmanager
def _shared(directory: Path, patience: Patience) -> Iterator[bool]:
    """Hold the lock of ``directory`` with other readers; yields whether it got free."""
    fd = os.open(directory.resolve(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield patience.take(lambda: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB))
    finally:
        os.close(fd)


def _make_scratch(index: Path, stack: contextlib.ExitStack) -> Path:
    """Make a directory for a copy of ``index`` that is gone when ``stack`` ends.

    Raises:
        ConfigError: There is no place for it.
    """
    try:
        return Path(stack.enter_context(tempfile.TemporaryDirectory()))
    except OSError as error:
        raise ConfigError(_no_copy(index, error)) from error


def _copy(index: Path, source: BinaryIO, destination: Path) -> None:
    """Copy a file of ``index``.

    Raises:
        ConfigError: The copy cannot be written.
        OSError: The file cannot be read.
    """
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
