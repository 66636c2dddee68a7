"""The cache that an import fills: its lock, its free slots and its index.

The cache must have the archive's model and settings, or be new. An import uses only free slots
and evicts no chunk. An existing slot file keeps its size unless the caller gives a larger
capacity.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvtier.archive.manifest import Manifest, differences
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.os.block_io import BlockIo
from kvtier.printable import printable
from kvtier.tiers.slab.index import Change, IndexDatabase
from kvtier.tiers.slab.inspect import StoredNamespace, find_directories
from kvtier.tiers.slab.maintain import hold
from kvtier.tiers.slab.namespace import LAYOUT, SLOTS, Layout, Namespace, nbytes_of, open_root
from kvtier.tiers.slab.piece_io import hash_key
from kvtier.tiers.slab.schema import LATEST, damage_raised
from kvtier.tiers.slab.slots import SlotFile, SlotFileSpec, no_room
from kvtier.tiers.slab.start_plan import room_needed
from kvtier.units import approximate_size

__all__ = ["Target", "namespace_for", "open_target"]

_TIER: Final = "nvme"  # for messages
_SIGN: Final = 1 << 63


class Target:
    """An open cache with the archive's layout.

    Attributes:
        directory: Directory of the namespace.
        file: The file with the slots.
    """

    def __init__(self, directory: Path, file: SlotFile, database: IndexDatabase) -> None:
        self.directory = directory
        self.file = file
        self._database = database
        self._keys: set[int] = set()
        self._used = bytearray()
        self._clock = 0

    def read_rows(self, capacity_slots: int) -> None:
        """Read the used slots, the keys and the latest logical time from the index.

        Raises:
            IndexDamagedError: The index cannot be used.
            sqlite3.Error: The index failed.
        """
        self._used = bytearray(capacity_slots)
        with damage_raised():
            for rows in self._database.packed_rows(capacity_slots):
                numbers = [
                    int(rows.numbers[at : at + 16], 16)
                    for at in range(0, len(rows.numbers), 16)
                ]
                for slot in numbers[::4]:
                    self._used[slot] = 1
                self._clock = max(self._clock, *numbers[2::4], *numbers[3::4])
                keys = map(bytes.fromhex, rows.keys.split(","))
                self._keys.update(map(hash_key, keys))
        self._first_use = self._clock + 1

    @property
    def free_count(self) -> int:
        """Number of free slots."""
        return self._used.count(0)

    def free_slots(self) -> Iterator[int]:
        """Yield the free slots in ascending order."""
        slot = self._used.find(0)
        while slot >= 0:
            yield slot
            slot = self._used.find(0, slot + 1)

    def has(self, key: ChunkKey) -> bool:
        """Return whether the cache has ``key``, or ``key`` was claimed."""
        return hash_key(key) in self._keys

    def claim(self, key: ChunkKey) -> None:
        """Record that ``key`` is being copied."""
        self._keys.add(hash_key(key))

    def commit(self, rows: Sequence[tuple[int, ChunkKey, int, int]]) -> None:
        """Commit the index rows of written chunks. A row is (slot, key, checksum, last use).

        The new chunks keep the order of their last uses. All of them count as more recently
        used than the chunks that the cache had before.

        Raises:
            sqlite3.Error: The index failed.
        """
        change = Change()
        for slot, key, checksum, last_use in rows:
            self._clock += 1
            signed = checksum - 2 * _SIGN if checksum >= _SIGN else checksum
            used = min(self._first_use + last_use, LATEST // 2)
            change.rows[slot] = (slot, key, signed, self._clock, used)
        self._database.apply(change)

    def finish(self) -> None:
        """Make the written chunks durable.

        Raises:
            OSError: The file system failed.
        """
        self.file.sync()


def namespace_for(layout: Layout, directory: Path) -> StoredNamespace:
    """Return the namespace of ``layout``. ``directory`` is this namespace or a tier's path."""
    root = directory.parent if (directory / LAYOUT).exists() else directory
    return StoredNamespace(root / layout.fingerprint.namespace(), layout)


@contextlib.contextmanager
def open_target(
    manifest: Manifest, directory: Path, capacity_bytes: int | None
) -> Iterator[Target]:
    """Lock and yield the cache that receives an archive's chunks; create a missing cache.

    Raises:
        ConfigError: See :func:`kvtier.archive.importing.import_chunks`.
        IndexDamagedError: The index cannot be used.
        OSError: The file system failed.
        sqlite3.Error: The index failed.
    """
    io = BlockIo()
    space = namespace_for(manifest.layout, directory)
    root = space.directory.parent
    _require_same(directory, root, manifest.layout, io)
    if not space.directory.exists():
        with open_root(_TIER, root, io):
            pid = os.getpid()
            Namespace.open(_TIER, root, manifest.layout, io, owner_pid=pid).close()
    with hold(space, "stop that engine first"), contextlib.ExitStack() as stack:
        spec = _plan_slots(manifest, space, capacity_bytes)
        _require_room(spec, space, io)
        file = SlotFile.open(spec, io)
        stack.callback(file.close)
        database = IndexDatabase.open(space.index_path, io, durability="process")
        stack.callback(database.close)
        _require_trusted(space, database, spec)
        # Read before the file grows: later, its size does not tell which slots were written.
        with damage_raised():
            database.drop_beyond(file.found_nbytes // spec.slot_nbytes)
        file.reserve()
        target = Target(space.directory, file, database)
        target.read_rows(spec.capacity_slots)
        yield target


def _require_same(directory: Path, root: Path, layout: Layout, io: BlockIo) -> None:
    """Raise ConfigError if the directory has caches, but none with the archive's layout."""
    if not root.is_dir():
        return
    found = [directory] if root != directory else []
    spaces = [
        each
        for each in find_directories(root, io)
        if (each.is_namespace or each.problem) and each.directory in (found or [each.directory])
    ]
    if not spaces or any(each.layout == layout for each in spaces):
        return
    differing = "; ".join(
        f"{each.directory}: {_difference(each.layout, layout)}" for each in spaces
    )
    raise ConfigError(f"the archive is of another cache: {differing}; give it its own path")


def _difference(theirs: Layout | None, ours: Layout) -> str:
    if theirs is None:
        return "it is of another version of kvtier, or cannot be read"
    return ", ".join(differences(theirs, ours))


def _plan_slots(
    manifest: Manifest, space: StoredNamespace, capacity_bytes: int | None
) -> SlotFileSpec:
    """Return the slot file to write, sized by the given capacity if there is one.

    Raises:
        ConfigError: The capacity is smaller than one slot or than the present size.
    """
    path = space.directory / SLOTS
    slot_nbytes = manifest.layout.slot_nbytes
    present = nbytes_of(path) // slot_nbytes
    slots = present or manifest.chunks
    if capacity_bytes is not None:
        slots = capacity_bytes // slot_nbytes
        least = max(present, 1)
        if slots < least:
            raise ConfigError(
                f"--capacity {approximate_size(capacity_bytes)}: {printable(str(path))} needs "
                f"{approximate_size(least * slot_nbytes)}; give that or more"
            )
    return SlotFileSpec(_TIER, path, max(slots, 1), slot_nbytes, "auto")


def _require_room(spec: SlotFileSpec, space: StoredNamespace, io: BlockIo) -> None:
    present = nbytes_of(spec.path), nbytes_of(space.index_path)
    slots_nbytes, index_nbytes = room_needed(spec.nbytes, spec.capacity_slots, *present)
    free_nbytes = io.free_nbytes(space.directory)
    if free_nbytes is not None and free_nbytes < slots_nbytes + index_nbytes:
        raise no_room(spec, free_nbytes, index_nbytes)


def _require_trusted(
    space: StoredNamespace, database: IndexDatabase, spec: SlotFileSpec
) -> None:
    """Raise ConfigError if a reset would make the next engine drop the imported chunks."""
    if not database.has_reset_record():
        return
    if not database.count_within(0, spec.capacity_slots):
        database.clear()
        return
    raise ConfigError(
        f"{space.directory}: the cache was reset, and the next start drops what was stored "
        "since, imported chunks too; run: kvtier cache evict --all, then import again"
    )
