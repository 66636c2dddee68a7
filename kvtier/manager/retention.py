"""Keeps chunks in a tier until a deadline, whatever the eviction policy decides.

A conversation that waits for a tool, or a system prompt of the next shift, will be used again.
Only the sender of the request knows that; to the cache, the chunks are just unused. A deadline
ends by itself, while a flag would need a second message (Mooncake's soft pins and Continuum's
pins, arXiv 2511.02230, also have deadlines).

A quota bounds the retained chunks. Beyond the quota, further chunks are refused; retained
chunks stay. Chunks are released early only for a store or a promotion that has waited as long
as allowed and would otherwise be cut. The chunks with the earliest deadlines are released
first.

Requests retain chunks in RAM. In a slower tier, a warm-up can retain chunks: it marks them in
the index, and the next start reads the marks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count

from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy, CopyState

__all__ = ["Retention"]


class Retention:
    """The retained copies of one tier, each with one pin and a deadline.

    Args:
        tier: The tier.
        quota: Largest number of copies to retain.
    """

    def __init__(self, tier: TierState, quota: int) -> None:
        self._tier = tier
        self._quota = quota
        self._deadlines: dict[ChunkCopy, float] = {}
        # Extending a deadline leaves an old entry in the heap, which is skipped later. The
        # number in an entry breaks ties between equal deadlines.
        self._heap: list[tuple[float, int, ChunkCopy]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, copy: ChunkCopy) -> bool:
        return copy in self._deadlines

    def retain(self, copies: Iterable[ChunkCopy], until: float) -> int:
        """Retain resident ``copies`` until a deadline; extend an earlier deadline.

        Args:
            copies: Root to leaf; beyond the quota, the last chunks are refused.
            until: Deadline, in seconds on the clock of :meth:`expire`.

        Returns:
            The number of ``copies`` retained at least until ``until``.
        """
        tier, deadlines = self._tier, self._deadlines
        retained = 0
        for copy in copies:
            if copy.state != CopyState.RESIDENT:
                continue
            old = deadlines.get(copy)
            if old is None:
                if len(deadlines) >= self._quota:
                    tier.counters.unretained += 1
                    continue
                tier.pin((copy,))
            if old is None or until > old:
                deadlines[copy] = until
                heapq.heappush(self._heap, (until, next(self._numbers), copy))
            retained += 1
        if len(self._heap) > 2 * len(deadlines) + self._quota:
            self._drop_old_entries()
        return retained

    def expire(self, now: float) -> None:
        """Release the copies with deadlines in the past."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            until, _, copy = heapq.heappop(heap)
            self._end(copy, until)

    def release_early(self, slots: int) -> None:
        """Release copies, earliest deadline first, until ``slots`` more copies can be evicted.

        Copies that are pinned or dirty for another reason are skipped.
        """
        tier, heap = self._tier, self._heap
        target = tier.idle + slots
        skipped: list[tuple[float, int, ChunkCopy]] = []
        while heap and tier.idle < target:
            entry = heapq.heappop(heap)
            until, _, copy = entry
            if copy.pins > 1 or copy.dirty:
                skipped.append(entry)
            elif self._end(copy, until):
                tier.counters.unretained += 1
        for entry in skipped:
            heapq.heappush(heap, entry)

    def release(self, copy: ChunkCopy) -> None:
        """Release a copy that is about to be dropped, if it is retained."""
        if self._deadlines.pop(copy, None) is not None:
            self._tier.unpin((copy,))
            self._tier.counters.unretained += 1

    def clear(self) -> None:
        """Release every copy, after a reset of the cache."""
        self._tier.unpin(self._deadlines)
        self._deadlines.clear()
        self._heap.clear()

    def _end(self, copy: ChunkCopy, until: float) -> bool:
        """Release ``copy`` if its deadline is ``until``; return whether it was released."""
        if self._deadlines.get(copy) != until:
            return False
        del self._deadlines[copy]
        self._tier.unpin((copy,))
        return True

    def _drop_old_entries(self) -> None:
        self._heap = [
            entry for entry in self._heap if self._deadlines.get(entry[2]) == entry[0]
        ]
        heapq.heapify(self._heap)
