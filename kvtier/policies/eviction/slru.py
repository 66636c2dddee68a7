"""Segmented LRU: keeps reused chunks and new chunks in separate lists."""

from __future__ import annotations

from collections import OrderedDict

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.eviction._next_victim import CopyOrder, NextVictimEviction

__all__ = ["Slru"]


class Slru(NextVictimEviction):
    """Keeps a probationary LRU list, and a protected LRU list of at most 80 % of the slots.

    A new chunk enters the probationary list, and its next use moves it to the protected list.
    If the protected list is too long, its least recently used copy returns to the probationary
    list. Victims come from the probationary list.

    Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance", IEEE
    Computer 27(3), 1994.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._protected_limit = int(0.8 * capacity)
        self._probation: CopyOrder = OrderedDict()
        self._protected: CopyOrder = OrderedDict()

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
    def _orders(self) -> tuple[CopyOrder, ...]:
        return (self._probation, self._protected)

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
