"""The queue that :mod:`.lru` explains, for the policies that stand in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, CopyState, Eviction, PolicyContext

__all__ = ["GONE", "SLACK", "LazyQueue"]

GONE: Final = CopyState.GONE
SLACK: Final = 64
"""Stale entries tolerated in a tiny tier, where rebuilding would be all it does."""


class LazyQueue(Eviction):
    """Copies in the order of their last use, with stale entries between them."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue: deque[ChunkCopy] = deque()
        self._members = 0

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._members += 1
        copy.queued = 0
        self._queue.append(copy)

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        # Nobody wrote to ``queued`` before: what is inserted is new, or was picked.
        self._members += len(copies)
        self._queue.extend(copies)

    def _tidy(self) -> None:
        """Drop every entry that is not its copy's last."""
        kept: deque[ChunkCopy] = deque()
        for copy in self._queue:
            if copy.queued:
                copy.queued -= 1
            elif copy.state != GONE:
                kept.append(copy)
        self._queue = kept
