"""Segmented LRU with four equal segments: a copy climbs one with every use."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.eviction._taking import TakingEviction

__all__ = ["Slru4"]

_SEGMENTS = 4


class Slru4(TakingEviction):
    """Four LRU lists of a quarter of the tier each.

    A newcomer goes to the lowest list with room, or the lowest. A use moves a copy to the list
    above; what that list has no room for cools down to the list below. The victim is the least
    recently used copy of the lowest list that is not empty.

    Huang et al., "An Analysis of Facebook Photo Caching", SOSP 2013 (S4LRU), with the details
    of libCacheSim: the rule for newcomers, which matters while the tier is not full, and one
    that sheds: if the capacity is no multiple of four the lowest list may be too long, and
    what cools down into it then pushes another copy out.
    """

    sheds: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._limit = capacity // _SEGMENTS
        self._lists: list[OrderedDict[ChunkCopy, None]] = [
            OrderedDict() for _ in range(_SEGMENTS)
        ]

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
    def on_remove(self, copy: ChunkCopy) -> None:
        del self._lists[copy.policy][copy]

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
        """Make ``copy`` the newest of ``level``, and let what is too much cool down."""
        copy.policy = level
        order = self._lists[level]
        order[copy] = None
        while level and len(order) > self._limit:
            level -= 1
            cooled = order.popitem(last=False)[0]
            cooled.policy = level
            order = self._lists[level]
            order[cooled] = None
            if not level:
                self.surplus = max(len(order) - self._limit, 0)
