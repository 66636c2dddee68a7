"""A complete example of a storage tier, which keeps its data in two files.

``slots`` holds the payloads. ``table`` has a row for each slot and is mapped into memory, so
that :meth:`FileTier.forget` and :meth:`FileTier.touch` do not block and survive SIGKILL. A
power loss may leave a row incomplete. Then the chunk of this row fails its checksum.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Self

import xxhash

from kvtier.config import FilePath, TierConfig
from kvtier.errors import CacheLockedError, CapacityError, ClosedError, ConfigError
from kvtier.keys import ChunkKey
from kvtier.tiers import SlotOutcomes, StorageTier, TierContext, check_batch
from kvtier.types import Outcome, Purpose

__all__ = ["FileTier", "FileTierConfig"]

_ROW: Final = struct.Struct("<QQQ64p")


class FileTierConfig(TierConfig):
    """Two files in a directory."""

    kind: str = "file"
    """Two files in a directory."""
    path: FilePath
    """Absolute directory of the files; the tier creates it if its parent exists."""


class _Row(NamedTuple):
    """A row of the table.

    Attributes:
        written_at: Logical time of the write; 0 for an empty slot.
        used_at: Logical time of the last use.
        checksum: Checksum of key and payload.
        key: Key of the chunk.
    """

    written_at: int = 0
    used_at: int = 0
    checksum: int = 0
    key: ChunkKey = b""


class FileTier(StorageTier):
    """A tier with payloads in one file and a table in another.

    The event loop's thread reads and changes the table. Threads of the pool move payloads.

    Args:
        options: The tier's section of the configuration.
        context: Slot size, fingerprint and threads.
    """

    Options: ClassVar[type[TierConfig]] = FileTierConfig

    def __init__(self, options: FileTierConfig, context: TierContext) -> None:
        self.name = options.name
        self.slot_nbytes = context.slot_nbytes
        self.capacity_slots = options.capacity_bytes // context.slot_nbytes
        if self.capacity_slots == 0:
            raise ConfigError(f"tier {self.name}: capacity is less than one slot")
        self._pool = context.pool
        self._epoch = 0
        self._closed = False
        # Each fingerprint and slot size has a cache of its own.
        namespace = f"{context.fingerprint.namespace()}-{context.slot_nbytes}"
        directory = options.path / namespace
        options.path.mkdir(mode=0o700, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        self._lock = _open(directory / "lock", 0)
        try:
            self.lock(directory)
            self._payloads = _open(directory / "slots", options.capacity_bytes)
            table = _open(directory / "table", self.capacity_slots * _ROW.size)
        except BaseException:
            os.close(self._lock)
            raise
        self._table = mmap.mmap(table, self.capacity_slots * _ROW.size)
        os.close(table)
        self._clock = max(max(row.written_at, row.used_at) for row in self._rows())

    @classmethod
    def open(cls, options: TierConfig, context: TierContext) -> Self:
        """See :class:`StorageTier`."""
        if not isinstance(options, FileTierConfig):
            raise ConfigError(f"{cls.__name__} takes FileTierConfig, not {options!r}")
        return cls(options, context)

    def lock(self, directory: Path) -> None:
        """Lock out other engines until the lock file is closed or the process ends."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CacheLockedError(self.name, directory, "another engine") from error

    def recovered(self) -> Iterator[tuple[ChunkKey, int]]:
        """See :class:`StorageTier`."""
        newest: dict[ChunkKey, int] = {}
        rows = [(row, slot) for slot, row in enumerate(self._rows()) if row.written_at]
        for row, slot in sorted(rows):
            newest[row.key] = slot
        for row, slot in sorted(rows, key=lambda found: found[0].used_at):
            if newest[row.key] == slot:
                yield row.key, slot

    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        """See :class:`StorageTier`."""
        self._check(keys, slots, sources)
        self.forget(slots)
        epoch = self._epoch
        call = functools.partial(self.save, keys, slots, sources)
        checksums, error = await self._pool.run(call, priority=int(purpose))
        if epoch != self._epoch:
            return SlotOutcomes([Outcome.FAILED] * len(keys), "the tier was reset meanwhile")
        for key, slot, checksum in zip(keys, slots, checksums, strict=False):
            self._put(slot, _Row(self._tick(), self._tick(), checksum, key))
        done, failed = len(checksums), len(keys) - len(checksums)
        return SlotOutcomes([Outcome.DONE] * done + [Outcome.FAILED] * failed, error)

    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        """See :class:`StorageTier`."""
        self._check(keys, slots, into)
        rows = [self._row(slot) for slot in slots]
        call = functools.partial(self.load, keys, slots, into, rows)
        outcomes = await self._pool.run(call, priority=int(purpose))
        bad = [outcome.value for outcome in outcomes if outcome is not Outcome.DONE]
        return SlotOutcomes(outcomes, f"a slot is {bad[0]}" if bad else "")

    def forget(self, slots: Sequence[int]) -> None:
        """See :class:`StorageTier`."""
        for slot in slots:
            self._put(slot, _Row())

    def touch(self, slots: Sequence[int]) -> None:
        """See :class:`StorageTier`."""
        for slot in slots:
            row = self._row(slot)
            if row.written_at:
                self._put(slot, row._replace(used_at=self._tick()))

    async def reset(self) -> None:
        """See :class:`StorageTier`."""
        self._require_open()
        self._epoch += 1
        self.forget(range(self.capacity_slots))

    async def aclose(self) -> None:
        """See :class:`StorageTier`."""
        if not self._closed:
            self._closed = True
            await self._pool.run(self._release, priority=int(Purpose.DEMOTE))

    def save(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
    ) -> tuple[list[int], str]:
        """Write payloads until one fails. This call blocks.

        Returns:
            Checksums of the written payloads, and an error text. The text is empty if all
            payloads were written.
        """
        checksums: list[int] = []
        for key, slot, source in zip(keys, slots, sources, strict=True):
            try:
                written = os.pwrite(self._payloads, source, slot * self.slot_nbytes)
            except OSError as error:
                return checksums, f"not written: {error.strerror}"
            if written != self.slot_nbytes:
                return checksums, "not written: the disk is full"
            checksums.append(_checksum(key, source))
        return checksums, ""

    def load(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        rows: Sequence[_Row],
    ) -> list[Outcome]:
        """Read payloads and compare them with the checksums in ``rows``. This call blocks."""
        outcomes = []
        for key, slot, view, row in zip(keys, slots, into, rows, strict=True):
            outcome = Outcome.CORRUPT
            try:
                if row.written_at and row.key == key:
                    os.preadv(self._payloads, [view], slot * self.slot_nbytes)
                    if _checksum(key, view) == row.checksum:
                        outcome = Outcome.DONE
            except OSError:
                outcome = Outcome.FAILED
            outcomes.append(outcome)
        return outcomes

    def _rows(self) -> Iterator[_Row]:
        return (self._row(slot) for slot in range(self.capacity_slots))

    def _row(self, slot: int) -> _Row:
        return _Row(*_ROW.unpack_from(self._table, slot * _ROW.size))

    def _put(self, slot: int, row: _Row) -> None:
        _ROW.pack_into(self._table, slot * _ROW.size, *row)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _check(
        self, keys: Sequence[ChunkKey], slots: Sequence[int], views: Sequence[memoryview]
    ) -> None:
        self._require_open()
        check_batch(self, keys, slots, views)
        if not all(0 <= slot < self.capacity_slots for slot in slots):
            raise CapacityError(f"tier {self.name} has slots 0 to {self.capacity_slots - 1}")

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self.name} is closed")

    def _release(self) -> None:
        self._table.close()
        os.close(self._payloads)
        os.close(self._lock)


def _open(path: Path, nbytes: int) -> int:
    """Open the file at ``path`` and reserve ``nbytes``."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if nbytes:
        os.posix_fallocate(descriptor, 0, nbytes)
    return descriptor


def _checksum(key: ChunkKey, payload: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(key))
