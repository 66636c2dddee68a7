"""W-TinyLFU: keeps a new chunk only if the chunk is more popular than the next victim.

New chunks enter a small LRU window. A chunk that leaves the window is a candidate for the main
area, a segmented LRU. If the main area is full, the candidate is compared with the main area's
next victim, the *resident*. The chunk with more recent requests (hits and misses) stays. In a
tie the resident stays, so a scan cannot empty the main area.

The comparison happens when a slot is needed, before the new chunk is inserted. The loser is the
victim. If the resident lost, the insertion moves the candidate from the window to the main
area.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, Literal

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.eviction._next_victim import CopyOrder, NextVictimEviction
from kvtier.policies.frequency import SketchFrequency

__all__ = ["WTinyLfu"]


class WTinyLfu(NextVictimEviction):
    """W-TinyLFU with 1 % of the slots in the window and 99 % in the main area.

    At most 80 % of the main area is protected. A sketch counts the uses of each key.

    Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM
    Transactions on Storage 13(4), 2017.
    """

    touch_order: ClassVar[Literal["reverse", "forward"]] = "forward"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        main = int(0.99 * capacity)
        self._window_limit = capacity - main
        self._protected_limit = int(0.8 * main)
        self._window: CopyOrder = OrderedDict()
        self._probation: CopyOrder = OrderedDict()
        self._protected: CopyOrder = OrderedDict()
        self._frequency = SketchFrequency(capacity)

    @override
    def on_miss(self, key: ChunkKey, ctx: PolicyContext) -> None:
        self._frequency.count(key)

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        window = self._window
        window[copy] = None
        if len(window) > self._window_limit:
            self._probation[window.popitem(last=False)[0]] = None

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._frequency.count(copy.key)
        if copy in self._window:
            self._window.move_to_end(copy)
        elif copy in self._protected:
            self._protected.move_to_end(copy)
        else:
            del self._probation[copy]
            self._spare(copy)

    @override
    def _orders(self) -> tuple[CopyOrder, ...]:
        return (self._window, self._probation, self._protected)

    @override
    def _take(self) -> ChunkCopy | None:
        window, main = self._window, self._probation or self._protected
        if main and not self._candidate_loses(main):
            window = main
        return window.popitem(last=False)[0] if window else None

    @override
    def _spare(self, copy: ChunkCopy) -> None:
        protected = self._protected
        protected[copy] = None
        if len(protected) > self._protected_limit:
            self._probation[protected.popitem(last=False)[0]] = None

    def _candidate_loses(self, main: CopyOrder) -> bool:
        if self._backoff:
            return bool(self._window)
        if len(self._window) < self._window_limit:
            return False
        candidate, resident = next(iter(self._window)), next(iter(main))
        frequency = self._frequency
        return frequency.of(candidate.key) <= frequency.of(resident.key)
