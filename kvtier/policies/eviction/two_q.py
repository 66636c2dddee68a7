"""2Q: keeps a chunk long if the chunk is requested again after it left a short queue.

Uses soon after a chunk's first use belong to the same burst. So new chunks enter a FIFO queue,
A1in, in which uses have no effect. The key of a chunk evicted from A1in enters a second queue,
A1out. A request for a key in A1out is a second, independent use: the chunk then enters Am, an
LRU list.
"""

from __future__ import annotations

from collections import OrderedDict

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.eviction._next_victim import CopyOrder, Ghosts, NextVictimEviction

__all__ = ["TwoQ"]


class TwoQ(NextVictimEviction):
    """The full version of 2Q. A1in has 25 % of the slots; A1out has 0.5 keys per slot.

    Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement
    Algorithm", VLDB 1994.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._in_limit = int(0.25 * capacity)
        self._newcomers: CopyOrder = OrderedDict()
        self._main: CopyOrder = OrderedDict()
        self._left = Ghosts(int(0.5 * capacity))
        self._returning = Ghosts(capacity)

    @override
    def on_miss(self, key: ChunkKey, ctx: PolicyContext) -> None:
        if self._left.take(key):
            self._returning.add(key)

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if self._returning.take(copy.key):
            self._main[copy] = None
        else:
            self._newcomers[copy] = None

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if copy in self._main:
            self._main.move_to_end(copy)

    @override
    def _orders(self) -> tuple[CopyOrder, ...]:
        return (self._newcomers, self._main)

    @override
    def _take(self) -> ChunkCopy | None:
        newcomers = self._newcomers
        if self._main and len(newcomers) <= (0 if self._backoff else self._in_limit):
            copy = self._main.popitem(last=False)[0]
            copy.policy = None
            return copy
        if not newcomers:
            return None
        copy = newcomers.popitem(last=False)[0]
        copy.policy = newcomers
        return copy

    @override
    def _spare(self, copy: ChunkCopy) -> None:
        self._main[copy] = None

    @override
    def _record_evicted(self, copy: ChunkCopy) -> None:
        if copy.policy is not None:
            self._left.add(copy.key)
