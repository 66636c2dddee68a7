"""Segmented LRU: what was used again is kept apart from what was not."""

from __future__ import annotations

from collections import OrderedDict

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.eviction._taking import TakingEviction

__all__ = ["Slru"]


class Slru(TakingEviction):
    """A probationary and a protected LRU list, the latter at most 80 % of the tier.

    A newcomer is on probation. A use protects it; the least recently used protected copy then
    goes back on probation if there are too many. Victims come from probation.

    Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance", IEEE
    Computer 27(3), 1994.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._protected_limit = int(0.8 * capacity)
        self._probation: OrderedDict[ChunkCopy, None] = OrderedDict()
        self._protected: OrderedDict[ChunkCopy, None] = OrderedDict()

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._probation[copy] = None

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if copy in self._protected:
            self._protected.move_to_end(copy)
        else:
            del self._probation[copy]
            self._spare(copy)

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        order = self._protected if copy in self._protected else self._probation
        del order[copy]

    @override
    def _take(self) -> ChunkCopy | None:
        order = self._probation or self._protected
        return order.popitem(last=False)[0] if order else None

    @override
    def _spare(self, copy: ChunkCopy) -> None:
        protected = self._protected
        protected[copy] = None
        if len(protected) > self._protected_limit:
            self._probation[protected.popitem(last=False)[0]] = None
