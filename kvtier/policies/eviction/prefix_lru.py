"""Least recently used, leaf first: no chunk is evicted before its children.

A chunk is useful only with its whole prefix, so a child without its parent is *stranded*: it
takes room and serves no request. The victim is therefore the least recently used copy *without
children*; a parent becomes a candidate when its last child is evicted. This is the order of
SGLang's radix cache (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", NeurIPS 2024), which keeps the leaves in a heap.

Here the copies are in one lazily cleaned queue, as in :mod:`.lru`. A copy that reaches the old
end while it has children is set aside, out of the queue. When one of its children leaves, the
copy returns to the old end and is checked again; that copy is older than all entries in the
queue. An eviction brings back one copy at most, so the cost is O(1) amortised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, CopyState, Evictable, Eviction, PolicyContext

__all__ = ["PrefixLru"]

_GONE: Final = CopyState.GONE
_SLACK: Final = 64
"""Stale entries that even a tiny tier tolerates, so that it seldom rebuilds its queue."""
_ASIDE: Final = -1
"""The ``queued`` of a copy without an entry; a use adds an entry and makes ``queued`` 0."""


class PrefixLru(Eviction):
    """Evicts the least recently used of the copies without children."""

    leaf_only: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue: deque[ChunkCopy] = deque()
        self._members = 0
        self._aside: dict[ChunkKey, ChunkCopy] = {}

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._members += 1
        copy.queued = 0
        self._queue.append(copy)

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        # ``queued`` is 0: an inserted copy is new, or was picked.
        self._members += len(copies)
        self._queue.extend(copies)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if copy.queued == _ASIDE:
            del self._aside[copy.key]
        copy.queued += 1
        queue = self._queue
        queue.append(copy)
        self._bound()

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        touched = list(copies)
        for copy in touched:
            if copy.queued == _ASIDE:
                del self._aside[copy.key]
            copy.queued += 1
        self._queue.extend(touched)
        self._bound()

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        self._members -= 1
        if copy.queued == _ASIDE:
            del self._aside[copy.key]
        self._bring_back(copy.parent)
        self._bound()

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        queue, aside = self._queue, self._aside
        rejected = 0
        while queue and rejected < self._members - len(aside):
            copy = queue.popleft()
            if copy.queued:
                copy.queued -= 1
                continue
            if copy.state == _GONE:
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

    def _bound(self) -> None:
        """Drop stale entries when there are too many."""
        if len(self._queue) <= 2 * self._members + _SLACK:
            return
        kept: deque[ChunkCopy] = deque()
        for copy in self._queue:
            if copy.queued:
                copy.queued -= 1
            elif copy.state != _GONE:
                kept.append(copy)
        self._queue = kept
