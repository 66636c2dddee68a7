"""The base of policies that select victims one by one.

A paper's policy names *the* victim; a live tier needs the next one that may leave. So a policy
names its next candidate (:meth:`~NextVictimEviction._take`), takes back a candidate that must
stay (:meth:`~NextVictimEviction._spare`), and records one that left
(:meth:`~NextVictimEviction._record_evicted`). Candidates that must stay are held aside until a
victim is found, so no candidate is asked for twice in one pick. They are then put where the
policy puts a chunk that was just used.

With one order this keeps scans O(1) amortised. A policy with two orders, new chunks and reused
chunks, may select victims from reused chunks that are all pinned, and would scan all of them at
every pick. So after a pick that spared n candidates, the next n victims come from the new
chunks: ``_backoff`` counts these picks down.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext

__all__ = ["CopyOrder", "Ghosts", "NextVictimEviction"]

CopyOrder = OrderedDict[ChunkCopy, None]
"""Copies in an order, the next candidate first."""


class NextVictimEviction(Eviction):
    """An eviction policy that selects victims one by one."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._backoff = 0

    @abstractmethod
    def _orders(self) -> tuple[CopyOrder, ...]:
        """Return the orders that hold the members, such as two LRU lists."""

    @abstractmethod
    def _take(self) -> ChunkCopy | None:
        """Remove the next candidate and return it; None if there is none."""

    @abstractmethod
    def _spare(self, copy: ChunkCopy) -> None:
        """Make the candidate ``copy`` a member again, as if just used."""

    def _record_evicted(self, copy: ChunkCopy) -> None:
        """Record that the candidate ``copy`` left."""

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
    """Keys of chunks that left the tier; the key that was added first is dropped first.

    Args:
        limit: Most keys to hold.
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
        """Remove ``key`` and return whether it was held."""
        if key in self._keys:
            del self._keys[key]
            return True
        return False
