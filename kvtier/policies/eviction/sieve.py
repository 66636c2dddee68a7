"""SIEVE: a FIFO queue with a hand that passes over used copies.

The paper keeps one list, newest at the head, and a hand that moves from the tail to the head
and starts over. The hand stops at the first copy that was not used since the hand's last pass,
and clears the used marks on the way. The hand divides the list into two parts, which are two
queues here: the copies that the hand has *passed*, and the copies *ahead*, up to the head. When
the hand passes a copy, that copy moves from the front of *ahead* to the back of *passed*. A new
chunk enters at the back of *ahead*. When the hand starts over, the queues are swapped.
"""

from __future__ import annotations

from collections import OrderedDict

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.eviction._next_victim import CopyOrder, NextVictimEviction

__all__ = ["Sieve"]


class Sieve(NextVictimEviction):
    """Moves a hand over the copies; evicts the first copy unused since the hand last passed.

    If new chunks are not used before the hand reaches them, the hand follows the head for ever
    and all older chunks stay: on agent traffic the cache freezes.

    Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web
    Caches", NSDI 2024.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._passed: CopyOrder = OrderedDict()
        self._ahead: CopyOrder = OrderedDict()

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        copy.queued = 0
        self._ahead[copy] = None

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        copy.queued = 1

    @override
    def _orders(self) -> tuple[CopyOrder, ...]:
        return (self._ahead, self._passed)

    @override
    def _take(self) -> ChunkCopy | None:
        while self._ahead or self._passed:
            if not self._ahead:
                self._start_over()
            copy = self._ahead.popitem(last=False)[0]
            if not copy.queued:
                # Not at the next pick: a new chunk belongs behind the passed copies.
                if not self._ahead:
                    self._start_over()
                return copy
            copy.queued = 0
            self._passed[copy] = None
        return None

    @override
    def _spare(self, copy: ChunkCopy) -> None:
        self._passed[copy] = None

    def _start_over(self) -> None:
        self._ahead, self._passed = self._passed, self._ahead
