"""S3-FIFO: a small queue for new chunks, a main queue, and a queue of evicted keys.

Most chunks are used once, and are soon evicted from the small queue. A chunk that is used twice
in the small queue moves to the main queue. The third queue keeps the keys of chunks evicted
from the small queue. If such a chunk returns while its key is kept, the chunk enters the main
queue. Each use of a chunk in the main queue postpones its eviction by one pass, for at most
three passes.
"""

from __future__ import annotations

from collections import OrderedDict

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.eviction._next_victim import CopyOrder, Ghosts, NextVictimEviction

__all__ = ["S3Fifo"]

_MOVE_ON = 2
_MOST_USES = 3


class S3Fifo(NextVictimEviction):
    """S3-FIFO with 10 % of the slots in the small queue and 90 % in the main queue.

    The policy keeps at most 0.9 evicted keys per slot.

    Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023, with two
    details of libCacheSim. Before the first eviction, new chunks enter the main queue if the
    small queue is full. A pass over the small queue ends with a victim or an empty queue.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_limit = int(0.1 * capacity)
        self._main_limit = capacity - self._small_limit
        self._small: CopyOrder = OrderedDict()
        self._main: CopyOrder = OrderedDict()
        self._left = Ghosts(int(0.9 * capacity))
        self._returning = Ghosts(capacity)
        self._warm = False

    @override
    def on_miss(self, key: ChunkKey, ctx: PolicyContext) -> None:
        if self._left.take(key):
            self._returning.add(key)

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        copy.queued = 0
        returning = self._returning.take(copy.key)
        filling = not self._warm and len(self._small) >= self._small_limit
        order = self._main if returning or filling else self._small
        order[copy] = None

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        copy.queued += 1

    @override
    def _orders(self) -> tuple[CopyOrder, ...]:
        return (self._small, self._main)

    @override
    def _take(self) -> ChunkCopy | None:
        self._warm = True
        if self._small and (self._backoff or len(self._main) <= self._main_limit):
            victim = self._take_small()
            if victim is not None:
                return victim
        return self._take_main() or self._take_small()

    @override
    def _spare(self, copy: ChunkCopy) -> None:
        copy.queued = 0
        self._main[copy] = None

    @override
    def _record_evicted(self, copy: ChunkCopy) -> None:
        if copy.policy is not None:
            self._left.add(copy.key)
            copy.policy = None

    def _take_small(self) -> ChunkCopy | None:
        small, main = self._small, self._main
        while small:
            copy = small.popitem(last=False)[0]
            if copy.queued < _MOVE_ON:
                copy.policy = small
                return copy
            copy.queued = 0
            main[copy] = None
        return None

    def _take_main(self) -> ChunkCopy | None:
        main = self._main
        while main:
            copy = main.popitem(last=False)[0]
            if not copy.queued:
                copy.policy = None
                return copy
            copy.queued = min(copy.queued, _MOST_USES) - 1
            main[copy] = None
        return None
