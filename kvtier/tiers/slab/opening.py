"""Open a cache: find every problem before the engine serves.

**Chunks stored after a reset** are not served by the next engine. A reset can mean that the
weights of a running engine were updated. But the namespace still belongs to the weights on
disk, which the next engine loads. So a reset is recorded in the index's metadata, in the
transaction that deletes the rows. The next engine deletes all rows and the record in one
transaction. Only a new I/O process of the same engine keeps the rows. That process records the
reset again, because the index may be new. With the option ``keep_after_reset``, for weights
that never change at run time, no reset is recorded.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.config import NvmeTierConfig, Remark
from kvtier.errors import CacheDamagedError, CacheLockedError, ConfigError, TierUnavailableError
from kvtier.logs import get_logger
from kvtier.os.block_io import PAGE_NBYTES, BlockIo
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab.index import IndexDatabase
from kvtier.tiers.slab.inspect import Found, find_directories
from kvtier.tiers.slab.lock import PATIENCE
from kvtier.tiers.slab.namespace import SLOTS, Layout, Namespace, open_root
from kvtier.tiers.slab.neighbours import Neighbour, describe, unusable
from kvtier.tiers.slab.removals import RemovalReason
from kvtier.tiers.slab.schema import (
    IndexDamagedError,
    IndexVersionError,
    damage_raised,
    is_full,
)
from kvtier.tiers.slab.slots import SlotFile, SlotFileSpec, no_room
from kvtier.tiers.slab.start_plan import Opening, plan_start, room_needed
from kvtier.tiers.slab.stored_rows import StoredRows, load_rows, no_rows
from kvtier.units import approximate_size

__all__ = ["OpenSlab", "open_slab", "release_slab"]

logger = get_logger(__name__)

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
class OpenSlab:
    """An open slab: its locked namespace, its slot file and its index."""

    namespace: Namespace
    file: SlotFile
    database: IndexDatabase


def open_slab(
    options: NvmeTierConfig, context: TierContext, io: BlockIo
) -> tuple[OpenSlab, StoredRows]:
    """Open the namespace of ``context.fingerprint``; return it and earlier engines' rows.

    The errors are those of :meth:`kvtier.tiers.slab.tier.SlabTier.open`.
    """
    opener = _Opener(options, context, io)
    try:
        return opener.open()
    except OSError as error:
        raise _explain(options, error) from error
    except sqlite3.Error as error:
        remedy = _MAKE_ROOM if is_full(error) else _CHECK_INDEX
        problem = f"{options.path}: the index cannot be opened: {error}; {remedy}"
        raise TierUnavailableError(options.name, problem) from error


def release_slab(store: OpenSlab) -> None:
    """Close the index and the slot file, then release the lock, even if a step fails."""
    with contextlib.ExitStack() as stack:
        stack.callback(store.namespace.close)
        stack.callback(store.file.close)
        stack.callback(store.database.close)


class _Opener:
    """Opens one namespace. An error closes the files and releases the locks."""

    def __init__(self, options: NvmeTierConfig, context: TierContext, io: BlockIo) -> None:
        self._options = options
        self._context = context
        self._io = io
        self._spec = SlotFileSpec(
            tier=options.name,
            path=options.path / context.fingerprint.namespace() / SLOTS,
            capacity_slots=_slots_within(options, context),
            slot_nbytes=context.slot_nbytes,
            direct_io=options.direct_io,
        )
        self._opening = Opening(context.fingerprint.fields, self._spec.nbytes)

    def open(self) -> tuple[OpenSlab, StoredRows]:
        """Open the namespace, the slot file and the index; return them and the stored rows."""
        with contextlib.ExitStack() as stack:
            namespace = self._open_namespace(stack)
            file = SlotFile.open(self._spec, self._io)
            stack.callback(file.close)
            # On a full disk the index uses the room that a lower capacity frees. The file's
            # size still says which slots exist, whenever this is interrupted.
            file.truncate()
            database, rows = self._open_index(namespace, file)
            stack.callback(database.close)
            # Rows without slots are deleted durably before the file grows. After that its size
            # no longer says which slots were written, and their chunks would all be misses.
            file.reserve()
            if self._options.durability == "power":
                namespace.sync()
            stack.pop_all()
        return OpenSlab(namespace, file, database), rows

    # -- the namespace ------------------------------------------------------------------------

    def _root_locked(self) -> contextlib.AbstractContextManager[None]:
        return open_root(self._options.name, self._options.path, self._io)

    def _open_namespace(self, stack: contextlib.ExitStack) -> Namespace:
        name, path, context = self._options.name, self._options.path, self._context
        layout = Layout(context.fingerprint, context.slot_nbytes)
        with self._root_locked():
            namespace = Namespace.open(
                name, path, layout, self._io, owner_pid=context.owner_pid
            )
            stack.callback(namespace.close)
        if self._options.durability == "power":
            namespace.sync()  # if this fails, nothing has been removed yet
        is_blank = not namespace.slots_nbytes and not namespace.index_nbytes
        try:
            self._make_room(namespace)
        except BaseException:
            if is_blank:  # a refused start leaves no directory
                with self._root_locked():
                    namespace.remove()
            raise
        return namespace

    def _make_room(self, own: Namespace) -> None:
        """Remove other namespaces until the slot files fit the capacity.

        If a short-lived process has such a namespace open, this method waits until that process
        ends. Between attempts, this method releases the cache directory's lock, because that
        process may need the lock.

        Raises:
            CacheLockedError: A process keeps a namespace open for longer than PATIENCE.
        """

        def attempt(*, patient: bool) -> Neighbour | None:
            with self._root_locked(), contextlib.ExitStack() as stack:
                return self._remove_others(own, stack, patient=patient)

        for _ in PATIENCE.attempts():
            if attempt(patient=True) is None:
                return
        if (awaited := attempt(patient=False)) is not None:
            raise CacheLockedError(
                self._options.name,
                awaited.directory,
                awaited.holder,
                "the capacity is not enough beside it: let that finish, or end it, and start "
                "again",
            )

    def _remove_others(
        self, own: Namespace, stack: contextlib.ExitStack, *, patient: bool
    ) -> Neighbour | None:
        """Remove idle namespaces until the slot file of ``own`` fits into the capacity.

        The capacity limits the slot files only. Each index needs some 120 bytes per slot, and
        20 MiB. This room must be free when a slot file is created or grows. If the removals
        would free too little, nothing is removed.

        Returns:
            None if the slot files are within the capacity now. Otherwise the namespace to wait
            for; then nothing was removed.
        """
        root = own.directory.parent
        found = [
            each for each in find_directories(root, self._io) if each.directory != own.directory
        ]
        neighbours, locked = self._lock_idle(found, stack, patient=patient)
        plan = plan_start(self._opening, neighbours, self._options)
        if plan.refusals:
            raise ConfigError("\n".join(map(self._line, plan.refusals)))
        if plan.awaited is not None:
            return plan.awaited
        for remark in unusable(found):
            logger.warning("%s", self._line(remark))
        self._require_room(own, plan.reclaimed_nbytes)
        for remark in plan.warnings:
            logger.warning("%s", self._line(remark))
        for each in plan.removed:
            if not each.slots_nbytes:
                name = self._options.name
                logger.info("tier %s: removing the rest of %s", name, each.directory)
            locked[each.directory].remove()
        return None

    def _lock_idle(
        self, found: Sequence[Found], stack: contextlib.ExitStack, *, patient: bool
    ) -> tuple[list[Neighbour], Mapping[Path, Namespace]]:
        """Return all namespaces, and the locks of the idle ones, which ``stack`` releases."""
        neighbours, locked = list[Neighbour](), dict[Path, Namespace]()
        for each in found:
            if not each.is_namespace:
                continue
            idle = Namespace.open_idle(each.directory, self._io)
            if idle is not None:
                stack.callback(idle.close)
                locked[each.directory] = idle
            neighbours.append(describe(each, is_locked=idle is None, patient=patient))
        return neighbours, locked

    def _line(self, remark: Remark) -> str:
        return f"tier {self._options.name}: {remark.problem}; {remark.remedy}"

    def _require_room(self, own: Namespace, reclaimed_nbytes: int) -> None:
        """Raise ConfigError if the disk cannot hold the slot file and its index."""
        spec = self._spec
        slots_nbytes, index_nbytes = room_needed(
            spec.nbytes, spec.capacity_slots, own.slots_nbytes, own.index_nbytes
        )
        free_nbytes = self._io.free_nbytes(own.directory)
        wanted_nbytes = slots_nbytes + index_nbytes
        if free_nbytes is not None and free_nbytes + reclaimed_nbytes < wanted_nbytes:
            raise no_room(spec, free_nbytes, index_nbytes)

    # -- the index ----------------------------------------------------------------------------

    def _open_index(
        self, namespace: Namespace, file: SlotFile
    ) -> tuple[IndexDatabase, StoredRows]:
        """Open the index; replace an unusable one by an empty one, if the options allow it."""
        name, path = self._options.name, namespace.index_path
        try:
            return self._load_index(path, file)
        except IndexDamagedError as error:
            if isinstance(error, IndexVersionError) and self._options.on_mismatch == "refuse":
                raise ConfigError(
                    f"tier {name}: {path}: {error}; start the kvtier that wrote it, or set "
                    "on_mismatch: remove, which starts with an empty cache"
                ) from error
            aside = namespace.set_index_aside()
            logger.warning(
                "tier %s: the index cannot be used (%s); starting with an empty cache, the old "
                "index is now %s",
                name,
                error,
                aside,
            )
        try:
            return self._load_index(path, file, is_new=True)
        except IndexDamagedError as error:
            raise CacheDamagedError(
                name, f"{namespace.directory} cannot keep an index: {error}; check the disk"
            ) from error

    def _load_index(
        self, path: Path, file: SlotFile, *, is_new: bool = False
    ) -> tuple[IndexDatabase, StoredRows]:
        """Open the index and read its rows; ``is_new`` means that a damaged index was moved."""
        database = IndexDatabase.open(path, self._io, durability=self._options.durability)
        try:
            with damage_raised():
                if is_new:
                    database.log_removals(RemovalReason.DAMAGED, b"")
                rows = self._load_trusted(database, file)
                if self._context.was_reset and not self._options.keep_after_reset:
                    self._record_reset(database)
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # the first error says more
                database.close()
            raise
        return database, rows

    def _load_trusted(self, database: IndexDatabase, file: SlotFile) -> StoredRows:
        """Return the rows that may be used, and delete the others."""
        name, capacity_slots = self._options.name, self._spec.capacity_slots
        written_slots = min(capacity_slots, file.found_nbytes // self._spec.slot_nbytes)
        if database.has_reset_record() and not self._context.was_reset:
            logger.warning(
                "tier %s: starting with an empty cache: the last engine had its cache reset, "
                "and later chunks may be of other weights than those on disk; if weights never "
                "change while an engine runs, set keep_after_reset: true",
                name,
            )
            try:
                removed = load_rows(database, written_slots).packed_marks()
                database.clear()
                database.log_removals(RemovalReason.AFTER_RESET, removed)
            except sqlite3.OperationalError as error:
                if not is_full(error):
                    raise
                database.call_later(database.clear)
                return no_rows()
        # Rows beyond a lowered capacity are deleted without a warning.
        cut_off = database.count_within(written_slots, capacity_slots)
        if cut_off:
            logger.warning(
                "tier %s: %d chunks are lost: %s was removed or cut short, and has only %s",
                name,
                cut_off,
                file.path,
                approximate_size(file.found_nbytes),
            )
        return load_rows(database, written_slots)

    def _record_reset(self, database: IndexDatabase) -> None:
        """Record a reset in the index now, or before the next change if the disk is full.

        The engine may serve chunks before the record is written, because the record concerns
        only chunks stored later.
        """
        if database.has_reset_record():
            return
        try:
            database.record_reset()
        except sqlite3.OperationalError as error:
            if not is_full(error):
                raise
            database.call_later(database.record_reset)
            logger.warning(
                "tier %s: the disk of %s is full: stored chunks are served, and no chunk is "
                "stored until there is room",
                self._options.name,
                self._options.path,
            )


def _slots_within(options: NvmeTierConfig, context: TierContext) -> int:
    """Return the number of slots that fit the capacity; raise a ConfigError if none fits."""
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


def _explain(options: NvmeTierConfig, error: OSError) -> Exception:
    place = error.filename or options.path
    if error.errno == errno.ELOOP:
        return CacheDamagedError(
            options.name, f"{place} is a symbolic link, which is not followed; remove it"
        )
    if error.errno == errno.EIO:
        return TierUnavailableError(options.name, f"{place}: {error.strerror}; check the disk")
    remedy = _REMEDIES.get(
        error.errno, "give the tier a directory of a local disk that this user may write"
    )
    return ConfigError(f"tier {options.name}: {place}: {error.strerror}; {remedy}")
