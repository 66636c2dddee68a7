"""Least recently used, as a queue that is tidied lazily.

The textbook structure, a doubly linked list, costs a dozen attribute writes per touch in
Python, and an ``OrderedDict`` hashes every key again and keeps a second table of them. Here a
touch appends the copy to a queue and leaves its older entries where they are; ``copy.queued``
counts these stale ones. An entry met at the old end is the copy's true place only if none is
left, otherwise it is skipped. Every entry is appended once and popped once, so the cost is O(1)
amortised. When stale entries outnumber live ones the queue is rebuilt, which bounds it by
twice the copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, Evictable, PolicyContext
from kvtier.policies.eviction._lazy_queue import GONE, SLACK, LazyQueue

__all__ = ["Lru"]


class Lru(LazyQueue):
    """Evicts the copy whose last use is longest ago."""

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        copy.queued += 1
        queue = self._queue
        queue.append(copy)
        if len(queue) > 2 * self._members + SLACK:
            self._tidy()

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        touched = list(copies)
        for copy in touched:
            copy.queued += 1
        self._queue.extend(touched)
        if len(self._queue) > 2 * self._members + SLACK:
            self._tidy()

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        # Its entries stay; they are recognised by the copy's state and skipped.
        self._members -= 1
        if len(self._queue) > 2 * self._members + SLACK:
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
        rejected: list[ChunkCopy] = []
        oldest = queue.popleft
        while count and queue:
            copy = oldest()
            if copy.queued:
                copy.queued -= 1
            elif copy.state == GONE:
                continue
            elif evictable(copy):
                count -= 1
                victims.append(copy)
            else:
                rejected.append(copy)
        queue.extend(rejected)
        self._members -= len(victims)
        return victims
