"""Keeps chunks in RAM until a deadline, whatever the eviction policy thinks of them.

An agent that waits for a tool, or a system prompt that the next shift will need, is known to
come back by whoever sent the request and by nobody here: its chunks look as cold as any. A
deadline is better than a flag, for nobody has to remember to take it back (Mooncake's soft
pins and Continuum's, arXiv 2511.02230, are of this kind).

A quota bounds what may be kept. Beyond it, wishes are refused and not traded for older ones:
what was promised to one is not taken away because another asks. Only a store or a promotion
that waited its time and would be cut short takes kept chunks, those that end soonest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count

from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy, CopyState

__all__ = ["Retention"]


class Retention:
    """The RAM copies that are kept, each by one pin, and until when.

    Args:
        ram: The tier.
        quota: Most copies to keep.
    """

    def __init__(self, ram: TierState, quota: int) -> None:
        self._ram = ram
        self._quota = quota
        self._until: dict[ChunkCopy, float] = {}
        # A deadline that was put off leaves its entry behind, which is skipped when its time
        # has come; the number keeps equal deadlines apart.
        self._heap: list[tuple[float, int, ChunkCopy]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._until)

    def keep(self, copies: Iterable[ChunkCopy], until: float) -> int:
        """Keep resident ``copies`` until then; a deadline is put off, never brought forward.

        A copy that was only to pass through RAM stays from now on.

        Args:
            copies: Root to leaf; when the quota ends it is the tail that is refused.
            until: Seconds on the clock of :meth:`expire`.

        Returns:
            How many of them are kept at least until then.
        """
        ram, deadlines = self._ram, self._until
        kept = 0
        for copy in copies:
            if copy.state != CopyState.RESIDENT:
                continue
            old = deadlines.get(copy)
            if old is None:
                if len(deadlines) >= self._quota:
                    ram.counters.unretained += 1
                    continue
                ram.pin(copy)
                ram.stop_passing(copy)
            if old is None or until > old:
                deadlines[copy] = until
                heapq.heappush(self._heap, (until, next(self._numbers), copy))
            kept += 1
        if len(self._heap) > 2 * len(deadlines) + self._quota:
            self._tidy()
        return kept

    def expire(self, now: float) -> None:
        """Let go of the copies whose deadline has passed."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            until, _, copy = heapq.heappop(heap)
            self._end(copy, until)

    def give_way(self, slots: int) -> None:
        """Let go of copies, the earliest deadline first, until ``slots`` more could be evicted.

        A copy that something else holds as well is no help, so it is left alone.
        """
        ram, heap = self._ram, self._heap
        wanted = ram.idle + slots
        held: list[tuple[float, int, ChunkCopy]] = []
        while heap and ram.idle < wanted:
            entry = heapq.heappop(heap)
            until, _, copy = entry
            if copy.pins > 1 or copy.dirty:
                held.append(entry)
            elif self._end(copy, until):
                ram.counters.unretained += 1
        for entry in held:
            heapq.heappush(heap, entry)

    def forget(self, copy: ChunkCopy) -> None:
        """Let go of a copy that must leave, if it is kept."""
        if self._until.pop(copy, None) is not None:
            self._ram.unpin(copy)
            self._ram.counters.unretained += 1

    def clear(self) -> None:
        """Let go of everything; for a reset of the cache."""
        for copy in self._until:
            self._ram.unpin(copy)
        self._until.clear()
        self._heap.clear()

    def _end(self, copy: ChunkCopy, until: float) -> bool:
        """Let go of ``copy`` if ``until`` is still its deadline."""
        if self._until.get(copy) != until:
            return False
        del self._until[copy]
        self._ram.unpin(copy)
        return True

    def _tidy(self) -> None:
        """Drop the entries whose deadline was put off."""
        self._heap = [entry for entry in self._heap if self._until.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)
