"""Least recently used, leaf first: no chunk goes before those that continue it.

A chunk is of use only with its whole prefix, so a child whose parent went is *stranded*: it
takes room and serves nobody. The victim is therefore the least recently used copy *without
children*; its parent becomes a candidate when the last child has gone. This is the order of
SGLang's radix cache (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", NeurIPS 2024), which keeps the leaves in a heap.

No heap is needed. The copies stand in one lazily tidied queue, as in :mod:`.lru`. One that
comes to the old end while it has children is set aside, out of the queue: it is older than
everything left there. When a child of it goes, it is put back at the old end, where it belongs
by its age, and is looked at next; if it has other children it is set aside again. A departure
brings back one copy at most, so the cost is O(1) amortised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Final

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, Evictable, PolicyContext
from kvtier.policies.eviction._lazy_queue import GONE, SLACK, LazyQueue

__all__ = ["PrefixLru"]

_ASIDE: Final = -1
"""The ``queued`` of a copy without an entry; a touch makes it 0: one, and it is not stale."""


class PrefixLru(LazyQueue):
    """Evicts, of the copies without children, the one whose last use is longest ago."""

    leaf_only: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._aside: dict[ChunkKey, ChunkCopy] = {}

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if copy.queued == _ASIDE:
            del self._aside[copy.key]
        copy.queued += 1
        queue = self._queue
        queue.append(copy)
        if len(queue) > 2 * self._members + SLACK:
            self._tidy()

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        touched = list(copies)
        for copy in touched:
            if copy.queued == _ASIDE:
                del self._aside[copy.key]
            copy.queued += 1
        self._queue.extend(touched)
        if len(self._queue) > 2 * self._members + SLACK:
            self._tidy()

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        self._members -= 1
        if copy.queued == _ASIDE:
            del self._aside[copy.key]
        self._bring_back(copy.parent)
        if len(self._queue) > 2 * self._members + SLACK:
            self._tidy()

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        queue, aside = self._queue, self._aside
        rejected = 0
        while queue and rejected < self._members - len(aside):
            copy = queue.popleft()
            if copy.queued:
                copy.queued -= 1
                continue
            if copy.state == GONE:
                continue
            if copy.child_count > 0:
                copy.queued = _ASIDE
                aside[copy.key] = copy
            elif evictable(copy):
                self._members -= 1
                if copy.parent in aside:
                    self._bring_back(copy.parent)
                return copy
            else:
                rejected += 1
                queue.append(copy)
        return None

    def _bring_back(self, key: ChunkKey | None) -> None:
        if key is not None and (copy := self._aside.pop(key, None)) is not None:
            copy.queued = 0
            self._queue.appendleft(copy)
