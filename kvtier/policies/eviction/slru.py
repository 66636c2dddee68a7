"""Segmented LRU: reused chunks and new chunks are in separate lists."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.eviction._next_victim import CopyOrder, NextVictimEviction

__all__ = ["Slru", "Slru4"]

_SEGMENTS = 4


class Slru(NextVictimEviction):
    """Keeps a probationary LRU list, and a protected LRU list of at most 80 % of the slots.

    A new chunk enters the probationary list, and its next use moves it to the protected list.
    If that list is too long, its least recently used copy returns to the probationary list.
    Victims come from the probationary list.

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


class Slru4(NextVictimEviction):
    """Four LRU lists of a quarter of the tier each.

    A new chunk enters the lowest list that has room, or the lowest list if all are full. A use
    moves a copy one list up. If a list is then too long, its least recently used copy moves
    down. The victim is the least recently used copy of the lowest list that is not empty.

    Huang et al., "An Analysis of Facebook Photo Caching", SOSP 2013 (S4LRU), with two details
    of libCacheSim. The rule for new chunks matters while the tier is not full. Shedding matters
    if the capacity is no multiple of four: the lowest list may overflow, and another copy is
    then evicted.
    """

    sheds: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._limit = capacity // _SEGMENTS
        self._lists: list[CopyOrder] = [OrderedDict() for _ in range(_SEGMENTS)]

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        level = 0
        for number, order in enumerate(self._lists):
            if len(order) < self._limit:
                level = number
                break
        copy.policy = level
        self._lists[level][copy] = None

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.surplus = 0
        level = copy.policy
        if level == _SEGMENTS - 1:
            self._lists[level].move_to_end(copy)
        else:
            del self._lists[level][copy]
            self._put(copy, level + 1)

    @override
    def _orders(self) -> tuple[CopyOrder, ...]:
        return tuple(self._lists)

    @override
    def _take(self) -> ChunkCopy | None:
        self.surplus = max(self.surplus - 1, 0)
        for order in self._lists:
            if order:
                return order.popitem(last=False)[0]
        return None

    @override
    def _spare(self, copy: ChunkCopy) -> None:
        self._put(copy, _SEGMENTS - 1)

    def _put(self, copy: ChunkCopy, level: int) -> None:
        """Make ``copy`` the newest of ``level``, and move any excess down."""
        copy.policy = level
        order = self._lists[level]
        order[copy] = None
        while level and len(order) > self._limit:
            level -= 1
            lowered = order.popitem(last=False)[0]
            lowered.policy = level
            order = self._lists[level]
            order[lowered] = None
            if not level:
                self.surplus = max(len(order) - self._limit, 0)
