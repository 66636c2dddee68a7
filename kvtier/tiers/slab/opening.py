"""Opening a store: everything that can be wrong is found here, before the engine serves.

**What was stored after a reset** is not served by the next engine. An engine whose weights are
updated while it runs has its cache reset, and its store still has the name of the weights on
disk, which the next engine loads. So a reset leaves a note in the index, in the transaction
that deletes the rows, and whoever opens a store with that note begins with deleting rows and
note, in one transaction again. Only a process that replaces another of the same engine keeps
the rows, and sees that the note is there: the index may be a new one, if the old one was lost.
Where weights never change at run time, ``keep_after_reset`` lets a reset leave no note.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.config import NvmeTierConfig
from kvtier.errors import (
    ConfigError,
    StoreDamagedError,
    StoreLockedError,
    TierUnavailableError,
)
from kvtier.logs import get_logger
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab.budget import make_room
from kvtier.tiers.slab.direct_io import PAGE_NBYTES, BlockIo
from kvtier.tiers.slab.index import (
    IndexDamagedError,
    IndexDatabase,
    IndexSpec,
    StoredRows,
    no_rows,
)
from kvtier.tiers.slab.lock import PATIENCE
from kvtier.tiers.slab.namespace import Layout, Namespace, Occupied, open_root
from kvtier.tiers.slab.schema import RESET_NOTE, blame, is_full
from kvtier.tiers.slab.slots import SlotFile, SlotFileSpec
from kvtier.tiers.slab.trail import Reason, mark_keys
from kvtier.units import approximate_size

__all__ = ["OpenStore", "close_store", "open_store", "release_store", "slots_within"]

logger = get_logger(__name__)

_CHECKSUM_NOTE: Final = "checksum"
_BOOT_NOTE: Final = "boot"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MAKE_ROOM: Final = "make room on that disk"
_CHECK_INDEX: Final = (
    "check the disk, and how many files the engine may open (ulimit -n); without index.sqlite "
    "the cache starts empty"
)
_REMEDIES: Final[dict[int | None, str]] = {
    errno.EMFILE: "allow the engine more open files (ulimit -n)",
    errno.ENFILE: "allow the machine more open files (fs.file-max)",
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: "make room on that disk, or raise this user's quota there",
    **dict.fromkeys(
        (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP),
        "its file system has no locks for directories: use a local disk",
    ),
}


@dataclass(frozen=True, slots=True)
class OpenStore:
    """The parts of an open store.

    Attributes:
        namespace: The directory and its lock.
        file: The slots.
        database: The index.
    """

    namespace: Namespace
    file: SlotFile
    database: IndexDatabase


def open_store(
    options: NvmeTierConfig, context: TierContext, io: BlockIo
) -> tuple[OpenStore, StoredRows]:
    """Open the namespace of ``context.fingerprint`` in the store at ``options.path``.

    Returns:
        The store, and what an earlier run left in it.

    Raises:
        ConfigError: The options cannot work here.
        StoreLockedError: The namespace is open already, or a tool has one that must leave, and
            for too long.
        StoreDamagedError: What is at the path is not a store of this layout.
        TierUnavailableError: The medium fails.
    """
    capacity_slots = slots_within(options, context)
    try:
        with contextlib.ExitStack() as stack:
            namespace = _open_namespace(options, context, capacity_slots, io, stack)
            file_spec = _file_spec(options, context, namespace, capacity_slots)
            file = SlotFile.open_as_found(file_spec, io)
            stack.callback(file.close)
            # On a full disk the index takes the room that a lower capacity leaves. The file's
            # size still tells which slots there are, whenever this is interrupted.
            file.give_back(file_spec)
            database, rows = _open_index(options, context, namespace, file, io)
            stack.callback(database.close)
            # Rows without slots are gone, durably, before the file's size stops telling which
            # slots were ever written: without checksums a slot of zeros would count as a chunk.
            file.reserve(file_spec)
            if options.durability == "power":
                namespace.sync()
            stack.pop_all()
    except OSError as error:
        raise _explain(options, error) from error
    except sqlite3.Error as error:
        remedy = _MAKE_ROOM if is_full(error) else _CHECK_INDEX
        problem = f"{options.path}: the index cannot be opened: {error}; {remedy}"
        raise TierUnavailableError(options.name, problem) from error
    return OpenStore(namespace, file, database), rows


def slots_within(options: NvmeTierConfig, context: TierContext) -> int:
    """Return how many slots fit the capacity.

    Raises:
        ConfigError: Not even one.
    """
    slot_nbytes = context.slot_nbytes
    if slot_nbytes <= 0 or slot_nbytes % PAGE_NBYTES:
        raise ConfigError(
            f"tier {options.name}: slots of {slot_nbytes} bytes are not whole pages"
        )
    if options.capacity_bytes < slot_nbytes:
        raise ConfigError(
            f"tier {options.name}: capacity of {approximate_size(options.capacity_bytes)} is "
            f"less than one slot; give it {approximate_size(slot_nbytes)} or more"
        )
    return options.capacity_bytes // slot_nbytes


def close_store(store: OpenStore, options: NvmeTierConfig) -> None:
    """Note that all is whole, if without checksums somebody must, and release the files."""
    try:
        if options.checksum == "off":
            store.file.sync()
            store.database.set_note(_BOOT_NOTE, "")
    finally:
        release_store(store)


def release_store(store: OpenStore) -> None:
    """Release the files as they are, as a killed engine does.

    Raises:
        OSError: The file system failed; all of them are released.
        sqlite3.Error: So did the index.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(store.namespace.close)
        stack.callback(store.file.close)
        stack.callback(store.database.close)


def _open_namespace(
    options: NvmeTierConfig,
    context: TierContext,
    capacity_slots: int,
    io: BlockIo,
    stack: contextlib.ExitStack,
) -> Namespace:
    layout = Layout(context.fingerprint, context.slot_nbytes)
    with open_root(options.name, options.path, io):
        namespace = Namespace.open(
            options.name, options.path, layout, io, owner_pid=context.owner_pid
        )
        stack.callback(namespace.close)
    if options.durability == "power":
        namespace.sync()  # where that cannot be done, nothing is lost yet
    _make_room(options, namespace, _file_spec(options, context, namespace, capacity_slots), io)
    return namespace


def _make_room(
    options: NvmeTierConfig, namespace: Namespace, spec: SlotFileSpec, io: BlockIo
) -> None:
    """Keep to the capacity, and wait a while for those that keep us from it.

    The lock of the store is free in between: those who are waited for may need it.

    Raises:
        StoreLockedError: A tool takes longer than PATIENCE lasts.
    """

    def attempt(*, patient: bool) -> Occupied | None:
        with open_root(options.name, options.path, io):
            return make_room(namespace, spec, options, io, patient=patient)

    for _ in PATIENCE.attempts():
        if attempt(patient=True) is None:
            return
    if (occupied := attempt(patient=False)) is not None:
        raise StoreLockedError(
            options.name,
            occupied.directory,
            occupied.holder,
            "the capacity is not enough beside it: let that finish, or end it, and start again",
        )


def _file_spec(
    options: NvmeTierConfig, context: TierContext, namespace: Namespace, capacity_slots: int
) -> SlotFileSpec:
    return SlotFileSpec(
        tier=options.name,
        path=namespace.slots_path,
        capacity_slots=capacity_slots,
        slot_nbytes=context.slot_nbytes,
        direct_io=options.direct_io,
    )


def _open_index(
    options: NvmeTierConfig,
    context: TierContext,
    namespace: Namespace,
    file: SlotFile,
    io: BlockIo,
) -> tuple[IndexDatabase, StoredRows]:
    """Open the index, or start an empty one: a cache must start."""
    spec = IndexSpec(namespace.index_path, options.durability)
    try:
        return _load_index(options, context, spec, file, io)
    except IndexDamagedError as error:
        aside = namespace.set_index_aside()
        logger.warning(
            "tier %s: the index is damaged (%s); starting with an empty cache, the old index "
            "is now %s",
            options.name,
            error,
            aside,
        )
    try:
        return _load_index(options, context, spec, file, io, aside=aside)
    except IndexDamagedError as error:
        raise StoreDamagedError(
            options.name, f"{namespace.directory} cannot keep an index: {error}; check the disk"
        ) from error


def _load_index(
    options: NvmeTierConfig,
    context: TierContext,
    spec: IndexSpec,
    file: SlotFile,
    io: BlockIo,
    *,
    aside: Path | None = None,
) -> tuple[IndexDatabase, StoredRows]:
    database = IndexDatabase.open(spec, io)
    try:
        with blame():
            if aside:
                database.note_departures(Reason.DAMAGED, mark_keys([]))
            rows = _load_trusted(options, context, database, file)
            _keep_note(options, database, _CHECKSUM_NOTE, options.checksum)
            # With a sync before every row, or checksums, no power cut leaves a false row.
            unproven = options.checksum == "off" and options.durability == "process"
            if not unproven and database.note(_BOOT_NOTE):
                # These rows will count as proven, and an engine that was killed synced none.
                file.sync()
            _keep_note(options, database, _BOOT_NOTE, _boot_id() if unproven else "")
            if context.was_reset and not options.keep_after_reset:
                _keep_note(options, database, RESET_NOTE, database.note(RESET_NOTE) or "0")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # what went wrong first says more
            database.close()
        raise
    return database, rows


def _load_trusted(
    options: NvmeTierConfig, context: TierContext, database: IndexDatabase, file: SlotFile
) -> StoredRows:
    """Return the rows, after deleting them if they must not be used."""
    capacity_slots = slots_within(options, context)
    written_slots = min(capacity_slots, file.found_nbytes // context.slot_nbytes)
    doubt = _doubt(options, context, database)
    if doubt is not None:
        logger.warning("tier %s: starting with an empty cache: %s", options.name, doubt.words)
        try:
            leaving = database.load(written_slots).key_marks
            database.clear()
            database.note_departures(doubt.reason, leaving)
        except sqlite3.OperationalError as error:
            if not is_full(error):
                raise
            database.owe_clear()
            return no_rows()
    # Those of a capacity that was lowered go unsaid: they have no place any more.
    cut_off = database.count_within(written_slots, capacity_slots)
    if cut_off:
        logger.warning(
            "tier %s: %d chunks are lost: %s was removed or cut short, and has only %s",
            options.name,
            cut_off,
            file.path,
            approximate_size(file.found_nbytes),
        )
    return database.load(written_slots)


class _Doubt(NamedTuple):
    """Why the rows must not be used although they can be read, in words and for the trail."""

    words: str
    reason: Reason


def _doubt(
    options: NvmeTierConfig, context: TierContext, database: IndexDatabase
) -> _Doubt | None:
    """Say why the rows must not be used; None if they may."""
    if database.note(RESET_NOTE) and not context.was_reset:
        words = (
            "the last engine had its cache reset, and what it stored later may be of weights "
            "that were not those on disk; where weights never change while an engine runs, set "
            "keep_after_reset: true"
        )
        return _Doubt(words, Reason.AFTER_RESET)
    written_with = database.note(_CHECKSUM_NOTE) or options.checksum
    if written_with != options.checksum:
        return _Doubt(f"it was written with checksum: {written_with}", Reason.DOUBTED)
    boot = database.note(_BOOT_NOTE)
    if boot and boot != _boot_id():
        words = "the machine went down and without checksums nothing tells what was lost"
        return _Doubt(words, Reason.DOUBTED)
    return None


def _keep_note(options: NvmeTierConfig, database: IndexDatabase, name: str, value: str) -> None:
    """Write a note, or let it precede the next change where the disk is full.

    What is there may be served until then: a note is about what is stored from now on, and
    nothing is, for neither a row nor, without checksums, a payload goes ahead of it.
    """
    if database.owes_clear:  # it was said that there is no room
        database.owe_note(name, value)
        return
    try:
        database.set_note(name, value)
    except sqlite3.OperationalError as error:
        if not is_full(error):
            raise
        if database.note(name) == value:
            return
        database.owe_note(name, value)
        logger.warning(
            "tier %s: the disk of %s is full: what is there is served, and nothing is stored "
            "until there is room",
            options.name,
            options.path,
        )


def _boot_id() -> str:
    return _BOOT_ID.read_text("ascii").strip()


def _explain(options: NvmeTierConfig, error: OSError) -> Exception:
    place = error.filename or options.path
    if error.errno == errno.ELOOP:
        return StoreDamagedError(
            options.name, f"{place} is a symbolic link, which is not followed; remove it"
        )
    if error.errno == errno.EIO:
        return TierUnavailableError(options.name, f"{place}: {error.strerror}; check the disk")
    remedy = _REMEDIES.get(
        error.errno, "give the tier a directory of a local disk that this user may write"
    )
    return ConfigError(f"tier {options.name}: {place}: {error.strerror}; {remedy}")
