"""Change a namespace that no engine has open: drop or protect chunks, compact the index.

All but :func:`hold` raise IndexDamagedError if the index cannot be used, and sqlite3.Error if
it cannot be written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

from kvtier.errors import ConfigError
from kvtier.os.block_io import BlockIo
from kvtier.tiers.slab.index import Change, IndexDatabase, LazyRecords
from kvtier.tiers.slab.index_reader import Entry
from kvtier.tiers.slab.inspect import StoredNamespace, holder_of, index_nbytes, root_locked
from kvtier.tiers.slab.lock import PATIENCE, Patience, is_tool, name_holder, try_acquire
from kvtier.tiers.slab.namespace import find_foreign_file
from kvtier.tiers.slab.removals import RemovalReason, pack_marks

__all__ = ["compact_index", "drop_chunks", "hold", "retain_chunks"]


@contextlib.contextmanager
def hold(space: StoredNamespace, remedy: str, patience: Patience = PATIENCE) -> Iterator[None]:
    """Hold the lock of ``space`` in the body, so that no engine opens the namespace.

    An engine of another model that needs the namespace's room waits for the lock.

    Args:
        space: The namespace.
        remedy: What the user can do if an engine has the namespace open; part of the message.
        patience: How long to wait for readers, which hold the lock for a moment.

    Raises:
        ConfigError: The namespace is in use, is just being opened, belongs to another user, or
            is writable for others.
    """
    if problem := find_foreign_file(space.directory):
        raise ConfigError(f"{problem}; run this as the user that runs the engine")
    fd = _acquire(space, remedy, patience)
    try:
        yield
    finally:
        BlockIo().close(fd)


def _acquire(space: StoredNamespace, remedy: str, patience: Patience) -> int:
    holder: str | None = None
    for _ in patience.attempts():
        # A starting engine sees either no lock or the right name, and removes nothing.
        with (
            contextlib.suppress(BlockingIOError),
            root_locked(space.directory.parent, patience),
        ):
            return _acquire_and_name(space)
        holder = holder_of(space.directory, patience)
        if holder is not None:
            break
    who = holder or "another process"
    if is_tool(who):
        remedy = "let it finish, or end it"
    raise ConfigError(f"{space.directory} is in use by {who}; {remedy}")


def _acquire_and_name(space: StoredNamespace) -> int:
    io = BlockIo()
    fd = try_acquire(space.directory, io)
    try:
        name_holder(space.directory, os.getpid(), io, tool=True)
    except BaseException:
        io.close(fd)
        raise
    return fd


def drop_chunks(
    space: StoredNamespace, entries: Sequence[Entry], on_progress: Callable[[], None]
) -> None:
    """Durably remove ``entries`` from the index of ``space``, which the caller has locked."""
    records = LazyRecords()
    records.add_removals(RemovalReason.DROPPED, pack_marks([entry.key for entry in entries]))
    rows = dict.fromkeys(entry.slot for entry in entries)
    with _index(space, on_progress) as database:
        database.apply(Change(rows=rows, records=records))


def retain_chunks(
    space: StoredNamespace, entries: Sequence[Entry], until: int, *, quota_chunks: int
) -> int:
    """Protect ``entries`` from eviction until ``until``; the caller has locked ``space``.

    The first entries have priority, and chunks that are protected already count against the
    quota too.

    Returns:
        The number of ``entries`` that are now protected until ``until``.
    """
    with _index(space, lambda: None) as database:
        others = database.retained().keys() - {entry.slot for entry in entries}
        kept = entries[: max(quota_chunks - len(others), 0)]
        database.retain([(entry.slot, entry.generation) for entry in kept], until)
    return len(kept)


def compact_index(space: StoredNamespace, on_progress: Callable[[], None]) -> tuple[int, int]:
    """Rewrite the index of ``space`` without unused bytes; the caller has locked ``space``.

    Return the bytes of the index and its log, before and after.
    """
    before_nbytes = index_nbytes(space)
    with _index(space, on_progress) as database:
        database.compact()
    return before_nbytes, index_nbytes(space)


@contextlib.contextmanager
def _index(space: StoredNamespace, on_progress: Callable[[], None]) -> Iterator[IndexDatabase]:
    database = IndexDatabase.open(space.index_path, BlockIo(), durability="power")
    try:
        with database.reporting_progress(on_progress):
            yield database
    finally:
        database.close()
