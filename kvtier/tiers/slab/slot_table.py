"""The slot table: the contents of all slots of an open slab, in arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.slab.removals import PackedMarks
from kvtier.tiers.slab.stored_rows import KeyMarks

__all__ = ["SlotTable"]


class SlotTable:
    """The key hash, key mark and checksum of every slot whose chunk is known.

    The table uses 25 bytes per slot and has no Python objects. Instead of keys, it has hashes
    of keys for comparisons, and marks of keys for the removal log.

    ``drop`` and ``matches`` may be called from different threads, because each numpy operation
    keeps the interpreter lock.
    """

    def __init__(self, capacity_slots: int) -> None:
        self._known = np.zeros(capacity_slots, dtype=np.bool_)
        self._key_hashes = np.zeros(capacity_slots, dtype=np.uint64)
        self._key_marks = np.zeros(capacity_slots, dtype="<u8")
        self._checksums = np.zeros(capacity_slots, dtype=np.uint64)

    def put(
        self,
        slots: npt.NDArray[np.int64],
        key_hashes: npt.NDArray[np.uint64],
        key_marks: KeyMarks,
        checksums: npt.NDArray[np.uint64],
    ) -> None:
        """Record the key hash, key mark and checksum of the chunk in each of ``slots``."""
        self._key_hashes[slots] = key_hashes
        self._key_marks[slots] = key_marks
        self._checksums[slots] = checksums
        self._known[slots] = True

    def drop(self, slots: npt.NDArray[np.int64]) -> None:
        """Record that the content of ``slots`` is unknown."""
        self._known[slots] = False

    def clear(self) -> None:
        """Record that the content of all slots is unknown."""
        self._known[:] = False

    def key_marks(self) -> PackedMarks:
        """Return the marks of all known keys."""
        return self._key_marks[self._known].tobytes()

    def displaced(
        self, slots: npt.NDArray[np.int64], key_hashes: npt.NDArray[np.uint64]
    ) -> PackedMarks:
        """Return the marks of the known keys in ``slots`` that differ from the new keys."""
        others = self._known[slots] & (self._key_hashes[slots] != key_hashes)
        removed: PackedMarks = self._key_marks[slots][others].tobytes()
        return removed

    def held(self, slots: npt.NDArray[np.int64]) -> PackedMarks:
        """Return the marks of the known keys in ``slots``."""
        return self._key_marks[slots[self._known[slots]]].tobytes()

    def matches(
        self, slots: npt.NDArray[np.int64], key_hashes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """Return each ``i`` where slot ``slots[i]`` holds a key with hash ``key_hashes[i]``."""
        found = self._known[slots] & (self._key_hashes[slots] == key_hashes)
        return np.flatnonzero(found)

    def checksums(self, slots: Sequence[int] | npt.NDArray[np.int64]) -> list[int]:
        """Return the checksums of ``slots``; the table must know the chunks there."""
        listed: list[int] = self._checksums[slots].tolist()
        return listed
