"""Allocates slots in extents, so that the slots of one request lie next to each other.

The throughput of a slow medium depends on the bytes per system call. A plain list of free slots
would scatter a request's chunks within minutes. So free slots are kept as *extents*: the
longest possible ranges of consecutive free slots. Extents are grouped in bins by length, one
bin for each power of two. An allocation tries a few extents of the smallest suitable bin, then
takes an extent of a larger bin. If no extent is long enough, it uses several of the longest
extents. Freed slots merge with their free neighbours at once, so an evicted request leaves one
extent. An allocation or a release takes O(1) time per extent, and never scans all slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from kvtier.slot_ranges import consecutive_ranges

__all__ = ["SlotAllocator"]

_TRIED = 8
"""Number of extents of the smallest suitable bin that an allocation tries."""


class SlotAllocator:
    """Allocates and frees the slots of one tier.

    Args:
        capacity: Number of slots. They are numbered from 0, and all are free at first.

    Attributes:
        free: Number of free slots.
    """

    __slots__ = ("_bins", "_end_of", "_filled", "_start_of", "capacity", "free")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # A dict is an insertion-ordered set with O(1) removal: extents of a bin, oldest first.
        self._bins: list[dict[int, None]] = [{} for _ in range(capacity.bit_length() + 1)]
        self._filled = 0  # bit b is set if bin b holds anything
        if capacity:
            self._add(0, capacity)
            self.free = capacity

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` slots in few extents; return them ascending.

        Raises:
            ValueError: Fewer than ``count`` slots are free. No slot was allocated.
        """
        if count > self.free:
            raise ValueError(f"{count} slots requested, {self.free} free")
        taken: list[int] = []
        wanted = count
        while wanted:
            start = self._best(wanted)
            end = self._remove(start)
            cut = min(end, start + wanted)
            taken.extend(range(start, cut))
            wanted -= cut - start
            if cut < end:
                self._add(cut, end)
        self.free -= count
        # Chunks of a prefix get ascending slots, so that neighbours share an I/O call.
        taken.sort()
        return taken

    def exchange(self, slots: Sequence[int], count: int) -> list[int]:
        """Free ``slots``, then allocate ``count`` slots; return them ascending."""
        if not self.free and len(slots) == count:
            return sorted(slots)  # a full tier reuses exactly what was released
        self.release(slots)
        return self.allocate(count)

    def take(self, slots: Iterable[int]) -> None:
        """Allocate exactly ``slots``, for recovered chunks.

        Raises:
            ValueError: A slot is not free.
        """
        for start, end in _extents(slots):
            found = self._extent_around(start)
            if found is None or self._end_of[found] < end:
                raise ValueError(f"slots {start}..{end - 1} are not all free")
            stop = self._remove(found)
            if found < start:
                self._add(found, start)
            if end < stop:
                self._add(end, stop)
            self.free -= end - start

    def release(self, slots: Iterable[int]) -> None:
        """Free ``slots``."""
        start_of, end_of = self._start_of, self._end_of
        for start, end in _extents(slots):
            self.free += end - start
            first, last = start, end
            if start in start_of:
                first = start_of[start]
                self._remove(first)
            if end in end_of:
                last = self._remove(end)
            self._add(first, last)

    def extents(self) -> list[tuple[int, int]]:
        """Return the free extents as ``(first, last + 1)``, ascending."""
        return sorted(self._end_of.items())

    def _best(self, wanted: int) -> int:
        """Return the start of a free extent with ``wanted`` slots, else of a long extent."""
        # Extents in bin b have 2**(b-1) to 2**b - 1 slots. In the bin of ``wanted`` some may
        # be long enough, so the oldest few are tried; in the bins above all are.
        exact = wanted.bit_length()
        filled = self._filled
        if filled >> exact & 1:
            ends = self._end_of
            for start in islice(self._bins[exact], _TRIED):
                if ends[start] - start >= wanted:
                    return start
        longer = filled >> exact + 1
        shortest = exact + (longer & -longer).bit_length()
        number = shortest if longer else filled.bit_length() - 1
        return next(iter(self._bins[number]))

    def _extent_around(self, slot: int) -> int | None:
        """Return the start of the free extent around ``slot``; None if the slot is in use."""
        if slot in self._end_of:
            return slot
        # Recovery takes slots in ascending order, so the extent is nearly always the last one
        # added; the fallback keeps this correct for any order.
        for start, end in reversed(self._end_of.items()):
            if start <= slot < end:
                return start
        return None

    def _add(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        number = (end - start).bit_length()
        self._bins[number][start] = None
        self._filled |= 1 << number

    def _remove(self, start: int) -> int:
        end = self._end_of.pop(start)
        del self._start_of[end]
        number = (end - start).bit_length()
        extents = self._bins[number]
        del extents[start]
        if not extents:
            self._filled ^= 1 << number
        return end


def _extents(slots: Iterable[int]) -> list[tuple[int, int]]:
    """Group ``slots`` into maximal extents ``(first, last + 1)``, ascending.

    >>> _extents([3, 1, 2, 7])
    [(1, 4), (7, 8)]
    """
    ordered = sorted(slots)
    if ordered and ordered[-1] - ordered[0] == len(ordered) - 1:
        return [(ordered[0], ordered[-1] + 1)]  # usual for a prefix
    parts = consecutive_ranges(ordered)
    return [(ordered[part.start], ordered[part.stop - 1] + 1) for part in parts]
