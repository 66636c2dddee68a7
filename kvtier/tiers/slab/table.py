"""What each slot holds, as far as a read needs to know: 25 bytes per slot, no objects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.slab.trail import KeyMarks

__all__ = ["SlotTable"]


class SlotTable:
    """Key hash, key mark and checksum of every slot whose content is known to be whole.

    The hash tells keys apart. The mark is for the trail when a key leaves, for by then nobody
    here has the key any more.

    Single numpy operations keep the interpreter lock, so ``drop`` and ``matches`` may be
    called from different threads.

    Args:
        capacity_slots: How many slots there are.
    """

    def __init__(self, capacity_slots: int) -> None:
        self._known = np.zeros(capacity_slots, dtype=np.bool_)
        self._key_hashes = np.zeros(capacity_slots, dtype=np.uint64)
        self._key_marks = np.zeros(capacity_slots, dtype=np.uint64)
        self._checksums = np.zeros(capacity_slots, dtype=np.uint64)

    def put(
        self,
        slots: npt.NDArray[np.int64],
        key_hashes: npt.NDArray[np.uint64],
        key_marks: KeyMarks,
        checksums: npt.NDArray[np.uint64],
    ) -> None:
        """Note that ``slots`` hold these keys with these checksums."""
        self._key_hashes[slots] = key_hashes
        self._key_marks[slots] = key_marks
        self._checksums[slots] = checksums
        self._known[slots] = True

    def drop(self, slots: npt.NDArray[np.int64]) -> None:
        """Note that nothing is known about ``slots``."""
        self._known[slots] = False

    def clear(self) -> None:
        """Note that nothing is known about any slot."""
        self._known[:] = False

    def key_marks(self) -> KeyMarks:
        """Return the mark of every key that is known."""
        known: KeyMarks = self._key_marks[self._known]
        return known

    def displaced(
        self, slots: npt.NDArray[np.int64], key_hashes: npt.NDArray[np.uint64]
    ) -> KeyMarks:
        """Return the marks of the keys that leave when ``slots`` get other ones."""
        others = self._known[slots] & (self._key_hashes[slots] != key_hashes)
        leaving: KeyMarks = self._key_marks[slots][others]
        return leaving

    def held(self, slots: npt.NDArray[np.int64]) -> KeyMarks:
        """Return the marks of the keys in those of ``slots`` that hold one."""
        found: KeyMarks = self._key_marks[slots[self._known[slots]]]
        return found

    def matches(
        self, slots: npt.NDArray[np.int64], key_hashes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """Return the positions in ``slots`` that hold the key of the same position."""
        found = self._known[slots] & (self._key_hashes[slots] == key_hashes)
        return np.flatnonzero(found)

    def checksums(self, slots: Sequence[int] | npt.NDArray[np.int64]) -> list[int]:
        """Return the checksums of ``slots``, which must be known."""
        listed: list[int] = self._checksums[slots].tolist()
        return listed
