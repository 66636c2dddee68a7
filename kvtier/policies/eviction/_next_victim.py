"""The base class of eviction policies that select victims one by one.

In papers, a policy selects exactly one victim. In a live tier, this victim may be pinned. Then
the policy must select another copy. So a derived class has three methods:

* :meth:`~NextVictimEviction._take` removes and returns the next candidate.
* :meth:`~NextVictimEviction._spare` inserts a candidate that must stay, as a just used copy.
* :meth:`~NextVictimEviction._record_evicted` records a candidate that is evicted.

Candidates that must stay are inserted again only after a victim was found. So one pick never
tests a candidate twice.

In a policy with one list of copies, a pick takes O(1) amortised time. A policy may have a list
of new chunks and a list of reused chunks, and select victims from the reused chunks. If all
reused chunks were pinned, every pick would scan the whole list. So after a pick that spared n
candidates, the next n victims are new chunks. ``_backoff`` counts these picks down.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext

__all__ = ["CopyOrder", "Ghosts", "NextVictimEviction"]

CopyOrder = OrderedDict[ChunkCopy, None]
"""Copies in order, next candidate first. In this type, any copy can be removed in O(1)."""


class NextVictimEviction(Eviction):
    """An eviction policy that selects victims one by one."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._backoff = 0

    @abstractmethod
    def _orders(self) -> tuple[CopyOrder, ...]:
        """Return the lists that :meth:`on_remove` searches, such as two LRU lists."""

    @abstractmethod
    def _take(self) -> ChunkCopy | None:
        """Remove and return the next candidate; return None if there is no candidate."""

    @abstractmethod
    def _spare(self, copy: ChunkCopy) -> None:
        """Insert the candidate ``copy``, which must stay, as a copy that was just used."""

    def _record_evicted(self, copy: ChunkCopy) -> None:
        """Record that the candidate ``copy`` is evicted."""

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        for order in self._orders():
            if copy in order:
                del order[copy]
                return

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        if self._backoff:
            self._backoff -= 1
        victim = self._take()
        if victim is None:
            return None
        if evictable(victim):
            self._record_evicted(victim)
            return victim
        spared = [victim]
        while (victim := self._take()) is not None:
            if evictable(victim):
                self._record_evicted(victim)
                break
            spared.append(victim)
        self._backoff = len(spared)
        for copy in spared:
            self._spare(copy)
        return victim


class Ghosts:
    """Remembers a limited number of keys. The oldest key is dropped first.

    Args:
        limit: Largest number of keys.
    """

    __slots__ = ("_keys", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: OrderedDict[ChunkKey, None] = OrderedDict()

    def add(self, key: ChunkKey) -> None:
        """Add ``key`` as the newest; drop the oldest key if there are too many."""
        keys = self._keys
        keys[key] = None
        if len(keys) > self._limit:
            keys.popitem(last=False)

    def take(self, key: ChunkKey) -> bool:
        """Remove ``key``; return whether it was present."""
        if key in self._keys:
            del self._keys[key]
            return True
        return False
