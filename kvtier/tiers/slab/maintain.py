"""Changing a store that no engine has open."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.tiers.slab.change import Change, Notes
from kvtier.tiers.slab.direct_io import BlockIo
from kvtier.tiers.slab.index import IndexDatabase, IndexSpec
from kvtier.tiers.slab.inspect import (
    Entry,
    StoredNamespace,
    holder_of,
    index_nbytes,
    nothing_opened,
)
from kvtier.tiers.slab.lock import (
    PATIENCE,
    Patience,
    is_tool,
    name_holder,
    try_acquire,
)
from kvtier.tiers.slab.namespace import find_strangers_file
from kvtier.tiers.slab.trail import Reason, mark_keys

__all__ = ["CompactedIndex", "compact_index", "drop_chunks", "hold"]


@dataclass(frozen=True, slots=True)
class CompactedIndex:
    """Bytes of an index and its log, before and after."""

    before_nbytes: int
    after_nbytes: int


@contextlib.contextmanager
def hold(space: StoredNamespace, remedy: str, patience: Patience = PATIENCE) -> Iterator[None]:
    """Keep engines out of ``space``, as one that has it open would.

    One of another model that needs its room waits a while for the end of this, and says so.

    Args:
        space: What to lock.
        remedy: What to do if an engine has it, for the message.
        patience: For those who only look, and have its lock for a moment.

    Raises:
        ConfigError: It is in use, just being opened, or another user's.
        OSError: The file system failed.
    """
    if stranger := find_strangers_file(space.directory):
        raise ConfigError(f"{stranger}; run this as the user that runs the engine")
    fd = _acquire(space, remedy, patience)
    try:
        yield
    finally:
        BlockIo().close(fd)


def _acquire(space: StoredNamespace, remedy: str, patience: Patience) -> int:
    holder: str | None = None
    for _ in patience.attempts():
        # An engine that starts sees either nobody here or the right name, and removes nothing.
        with (
            contextlib.suppress(BlockingIOError),
            nothing_opened(space.directory.parent, patience),
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
    space: StoredNamespace, entries: Sequence[Entry], on_sign: Callable[[], None]
) -> None:
    """Remove ``entries`` from the index of ``space``, which is held; durable.

    Args:
        space: Where they are.
        entries: What to remove.
        on_sign: Called every now and then, as a sign of life.

    Raises:
        IndexDamagedError: The index cannot be used.
        OSError: The file system failed.
        sqlite3.Error: The index cannot be written.
    """
    notes = Notes()
    notes.depart(Reason.DROPPED, mark_keys([entry.key for entry in entries]))
    with _index(space, on_sign) as database:
        database.apply(Change(rows=dict.fromkeys(entry.slot for entry in entries), notes=notes))


def compact_index(space: StoredNamespace, on_sign: Callable[[], None]) -> CompactedIndex:
    """Write the index of ``space``, which is held, anew without gaps.

    Args:
        space: Whose index.
        on_sign: Called every now and then, as a sign of life: how much is left, SQLite does
            not say.

    Raises:
        IndexDamagedError: The index cannot be used.
        OSError: The file system failed.
        sqlite3.Error: The index cannot be written, for lack of room for example.
    """
    before_nbytes = index_nbytes(space)
    with _index(space, on_sign) as database:
        database.compact()
    return CompactedIndex(before_nbytes, index_nbytes(space))


@contextlib.contextmanager
def _index(space: StoredNamespace, on_sign: Callable[[], None]) -> Iterator[IndexDatabase]:
    spec = IndexSpec(space.index_path, durability="power")
    database = IndexDatabase.open(spec, BlockIo())
    try:
        with database.giving_signs(on_sign):
            yield database
    finally:
        database.close()
