"""Least recently used, as a queue that is tidied lazily.

The textbook structure, a doubly linked list, costs a dozen attribute writes per touch in
Python, and an ``OrderedDict`` hashes every key again and keeps a second table of them. Here a
touch appends the copy to a queue and leaves its older entries where they are; ``copy.queued``
counts them. An entry met at the old end is the copy's true place only if it is its last one,
otherwise it is skipped. Every entry is appended once and popped once, so the cost is O(1)
amortised. When stale entries outnumber live ones the queue is rebuilt, which bounds it by
twice the copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, CopyState, Evictable, Eviction, PolicyContext

__all__ = ["Lru"]

_GONE = CopyState.GONE
_SLACK = 64
"""Stale entries tolerated in a tiny tier, where rebuilding would be all it does."""


class Lru(Eviction):
    """Evicts the copy whose last use is longest ago."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue: deque[ChunkCopy] = deque()
        self._members = 0

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._members += 1
        copy.queued = 1
        self._queue.append(copy)

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        self._members += len(copies)
        for copy in copies:
            copy.queued = 1
        self._queue.extend(copies)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        copy.queued += 1
        queue = self._queue
        queue.append(copy)
        if len(queue) > 2 * self._members + _SLACK:
            self._tidy()

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        touched = list(copies)
        for copy in touched:
            copy.queued += 1
        self._queue.extend(touched)
        if len(self._queue) > 2 * self._members + _SLACK:
            self._tidy()

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        # Its entries stay; they are recognised by the copy's state and skipped.
        self._members -= 1
        if len(self._queue) > 2 * self._members + _SLACK:
            self._tidy()

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        victims = self.pick_many(1, evictable, ctx)
        return victims[0] if victims else None

    @override
    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        queue = self._queue
        victims: list[ChunkCopy] = []
        unasked = self._members  # whoever was rejected is not asked again
        oldest = queue.popleft
        while count and queue and unasked:
            copy = oldest()
            copy.queued -= 1
            if copy.queued or copy.state == _GONE:
                continue
            unasked -= 1
            if evictable(copy):
                count -= 1
                victims.append(copy)
                continue
            copy.queued = 1
            queue.append(copy)
        self._members -= len(victims)
        return victims

    def _tidy(self) -> None:
        """Drop every entry that is not its copy's last."""
        kept: deque[ChunkCopy] = deque()
        for copy in self._queue:
            copy.queued -= 1
            if not copy.queued and copy.state != _GONE:
                kept.append(copy)
        for copy in kept:
            copy.queued = 1
        self._queue = kept
