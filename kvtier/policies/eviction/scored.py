"""Policies that evict the copy with the lowest score, and among equals the longest unused.

Scores are in a binary heap. If a use can only raise a score, the use does not change the heap:
the copy's entry is then too low, and is corrected when it reaches the top. If a use can lower a
score, the old entry would reach the top too late. So the copy gets a new entry, and the old
entry is skipped. Either way ``copy.queued`` is the stamp of the last use, and an entry with
another stamp is stale. Every method is O(log n) amortised.

A copy that must stay keeps its score. If the lowest thousand copies are pinned, each pick would
test all of them. So rejected entries are parked, and n parked entries return after n picks: the
cost per pick is one entry. When the heap has no victim, the parked entries are tested.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import deque
from typing import ClassVar

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext

__all__ = ["Lfu", "ScoredEviction"]

_SLACK = 64
_NOWHERE = 0

_Entry = tuple[float, int, ChunkCopy]


class ScoredEviction(Eviction):
    """Evicts the copy with the lowest score.

    ``copy.policy`` is a pair: the number of uses, the insertion included, and the score.
    """

    falling: ClassVar[bool] = False
    """Whether a use can lower a score; if False, a use never lowers it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._heap: list[_Entry] = []
        self._parked: deque[_Entry] = deque()
        self._wait = 0
        self._stamp = _NOWHERE
        self._members = 0

    @abstractmethod
    def _score(self, uses: int, ctx: PolicyContext) -> float:
        """Return the score of a copy after its ``uses``-th use, which is now."""

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._members += 1
        self._use(copy, 1, self._score(1, ctx))
        self._enter(copy)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        uses = copy.policy[0] + 1
        self._use(copy, uses, self._score(uses, ctx))
        if self.falling:
            self._enter(copy)

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
            _, stamp, copy = entry = heap[0]
            if copy.queued != stamp:
                self._correct_top(copy)
                continue
            heapq.heappop(heap)
            if evictable(copy):
                return self._evict(copy)
            parked.append(entry)
            self._wait = len(parked)
        for _ in range(waiting):
            entry = parked.popleft()
            copy = entry[2]
            if not self._is_current(entry):
                continue
            if evictable(copy):
                return self._evict(copy)
            parked.append(entry)
        return None

    def _use(self, copy: ChunkCopy, uses: int, score: float) -> None:
        self._stamp += 1
        copy.queued = self._stamp
        copy.policy = (uses, score)

    def _enter(self, copy: ChunkCopy) -> None:
        heapq.heappush(self._heap, (copy.policy[1], copy.queued, copy))
        if self.falling:
            self._bound()

    def _correct_top(self, copy: ChunkCopy) -> None:
        """Remove the stale entry at the top, or replace it by the copy's current entry."""
        if self.falling or copy.queued == _NOWHERE:
            heapq.heappop(self._heap)
        else:
            heapq.heapreplace(self._heap, (copy.policy[1], copy.queued, copy))

    def _evict(self, copy: ChunkCopy) -> ChunkCopy:
        copy.queued = _NOWHERE
        self._members -= 1
        return copy

    def _return_parked(self) -> None:
        self._wait -= 1
        if self._wait < 0:
            for entry in self._parked:
                heapq.heappush(self._heap, entry)
            self._parked.clear()

    def _is_current(self, entry: _Entry) -> bool:
        """Return whether ``entry`` is the latest entry of its copy."""
        _, stamp, copy = entry
        return copy.queued == stamp if self.falling else copy.queued != _NOWHERE

    def _bound(self) -> None:
        """Drop stale entries when there are too many."""
        if len(self._heap) + len(self._parked) <= 2 * self._members + _SLACK:
            return
        self._heap = [entry for entry in self._heap if self._is_current(entry)]
        heapq.heapify(self._heap)
        self._parked = deque(entry for entry in self._parked if self._is_current(entry))


class Lfu(ScoredEviction):
    """Evicts the copy used least often since its insertion; in a tie, the longest unused copy.

    Counts do not age, so chunks that were popular once stay, and on agent traffic the cache
    freezes. Use ``lfu`` for comparison only.
    """

    @override
    def _score(self, uses: int, ctx: PolicyContext) -> float:
        return uses
