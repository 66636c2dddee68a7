"""Policies that give every copy a score and evict the lowest, oldest use first among equals.

Scores stand in a binary heap. A use gives the copy a new entry and leaves the old one behind;
``copy.queued`` holds the stamp of the entry that counts, all others are skipped when they come
up, and the heap is rebuilt when they outnumber the members. So every method is O(log n)
amortised.

A copy that may not go keeps its score, for a score says nothing about pins. It must not be
asked for at every pick either: if the lowest thousand are pinned, each pick would ask them
all. What was asked in vain is therefore parked, and comes back after as many picks as there
are parked copies; then each pick pays for one of them. Nothing is lost by it: when the heap
has no victim, the parked are asked.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import deque

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext

__all__ = ["ScoredEviction"]

_SLACK = 64
_NOWHERE = 0

_Entry = tuple[float, int, ChunkCopy]


class ScoredEviction(Eviction):
    """Evicts the copy with the lowest score."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._heap: list[_Entry] = []
        self._parked: deque[_Entry] = deque()
        self._wait = 0
        self._stamp = _NOWHERE
        self._members = 0

    @abstractmethod
    def _score_new(self, copy: ChunkCopy, ctx: PolicyContext) -> float:
        """Return the score of a ``copy`` that came in."""

    @abstractmethod
    def _score_used(self, copy: ChunkCopy, ctx: PolicyContext) -> float:
        """Return the score of a ``copy`` that was used."""

    def _settle(self, score: float) -> None:
        """Note that a copy with ``score`` was evicted."""

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._members += 1
        self._enter(copy, self._score_new(copy, ctx))

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._enter(copy, self._score_used(copy, ctx))

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        copy.queued = _NOWHERE
        self._members -= 1
        self._bound()

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        heap, parked = self._heap, self._parked
        if parked:
            self._return_parked()
        waiting = len(parked)
        while heap:
            entry = heapq.heappop(heap)
            copy = entry[2]
            if copy.queued != entry[1]:
                continue
            if evictable(copy):
                return self._evict(entry)
            parked.append(entry)
            self._wait = len(parked)
        for _ in range(waiting):
            entry = parked.popleft()
            copy = entry[2]
            if copy.queued != entry[1]:
                continue
            if evictable(copy):
                return self._evict(entry)
            parked.append(entry)
        return None

    def _evict(self, entry: _Entry) -> ChunkCopy:
        score, _, copy = entry
        copy.queued = _NOWHERE
        self._members -= 1
        self._settle(score)
        return copy

    def _enter(self, copy: ChunkCopy, score: float) -> None:
        self._stamp += 1
        copy.queued = self._stamp
        heapq.heappush(self._heap, (score, self._stamp, copy))
        self._bound()

    def _return_parked(self) -> None:
        self._wait -= 1
        if self._wait < 0:
            for entry in self._parked:
                heapq.heappush(self._heap, entry)
            self._parked.clear()

    def _bound(self) -> None:
        if len(self._heap) + len(self._parked) <= 2 * self._members + _SLACK:
            return
        self._heap = [entry for entry in self._heap if entry[2].queued == entry[1]]
        heapq.heapify(self._heap)
        self._parked = deque(entry for entry in self._parked if entry[2].queued == entry[1])
