"""LIRS: ranks chunks by the time between their last two uses.

This time is the *inter-reference recency*: the number of other chunks used in between. Copies
with a low recency (LIR) fill almost all of the tier. The other copies (HIR) are in a FIFO queue
Q with 1 % of the slots, and are evicted soon. A stack S has keys in order of last use. If a HIR
chunk is used while its key is in S, it was used twice since the last use of the bottom LIR
copy. So the HIR chunk becomes LIR, and the bottom LIR copy becomes HIR. S is pruned until a
LIR copy is at the bottom, because a chunk below all LIR copies cannot become LIR.

S also keeps keys of evicted HIR chunks. The paper sets no limit. In this class S has at most
two entries per slot of the tier, and the keys that were evicted first are dropped first.
"""

from __future__ import annotations

from collections import OrderedDict

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.eviction._next_victim import CopyOrder, NextVictimEviction

__all__ = ["Lirs"]

_LOW, _HIGH = True, False


class Lirs(NextVictimEviction):
    """Low Inter-reference Recency Set (LIRS), with 1 % of the slots for HIR copies.

    Jiang and Zhang, "LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy to
    Improve Buffer Cache Performance", SIGMETRICS 2002.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._low_limit = capacity - max(1, int(0.01 * capacity))
        self._low = 0
        self._stack: OrderedDict[ChunkKey, ChunkCopy | None] = OrderedDict()
        self._queue: CopyOrder = OrderedDict()
        self._left: OrderedDict[ChunkKey, None] = OrderedDict()

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        key = copy.key
        returned = key in self._left
        if returned:
            del self._left[key]
        if returned or self._low < self._low_limit:
            self._raise(copy)
        else:
            copy.policy = _HIGH
            self._use(copy)
            self._queue[copy] = None
        self._bound()

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if copy.policy is _LOW:
            self._stack.move_to_end(copy.key)
            self._prune()
        elif copy.key in self._stack:
            del self._queue[copy]
            self._raise(copy)
        else:
            self._stack[copy.key] = copy
            self._queue.move_to_end(copy)
        self._bound()

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        self._stack.pop(copy.key, None)
        if copy.policy is _LOW:
            self._low -= 1
            self._prune()
        else:
            super().on_remove(copy)

    @override
    def _orders(self) -> tuple[CopyOrder, ...]:
        return (self._queue,)

    @override
    def _take(self) -> ChunkCopy | None:
        if not self._queue:
            if not self._low:
                return None
            self._lower_bottom()
        return self._queue.popitem(last=False)[0]

    @override
    def _spare(self, copy: ChunkCopy) -> None:
        self._raise(copy)

    @override
    def _record_evicted(self, copy: ChunkCopy) -> None:
        if copy.key in self._stack:
            self._stack[copy.key] = None
            self._left[copy.key] = None
            self._bound()

    def _use(self, copy: ChunkCopy) -> None:
        """Move ``copy`` to the top of the stack."""
        self._stack[copy.key] = copy
        self._stack.move_to_end(copy.key)

    def _raise(self, copy: ChunkCopy) -> None:
        """Make ``copy`` a LIR copy; if there are too many, make the bottom LIR copy HIR."""
        copy.policy = _LOW
        self._low += 1
        self._use(copy)
        if self._low > self._low_limit:
            self._lower_bottom()

    def _lower_bottom(self) -> None:
        """Make the bottom LIR copy a HIR copy, and append it to the queue."""
        self._prune()
        _, copy = self._stack.popitem(last=False)
        if copy is None:
            raise ValueError("the pruned stack has a key without a copy at its bottom")
        copy.policy = _HIGH
        self._low -= 1
        self._queue[copy] = None
        self._prune()

    def _prune(self) -> None:
        """Remove the stack's entries below the lowest LIR copy."""
        stack = self._stack
        while stack:
            key = next(iter(stack))
            copy = stack[key]
            if copy is None:
                del self._left[key]
            elif copy.policy is _LOW:
                return
            del stack[key]

    def _bound(self) -> None:
        while len(self._stack) > 2 * self.capacity and self._left:
            key, _ = self._left.popitem(last=False)
            del self._stack[key]
