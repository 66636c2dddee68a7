"""ARC: keeps a recency list and a frequency list, and adapts the length of each list.

T1 and T2 are LRU lists: T1 has chunks that were used once since their insertion, and T2 has
chunks that were used again. B1 has the keys of chunks evicted from T1, and B2 has the keys of
chunks evicted from T2. A miss on a key in B1 shows that T1 was too short, so the target length
``p`` of T1 grows. A miss on a key in B2 reduces ``p``. In both cases the chunk enters T2.

The paper shortens B1 and B2 before a slot is freed. This class shortens B1 and B2 at the
insertion. The victims are the same as in the paper, because no key is looked up in between.
B1 and B2 stay bounded even if the tier loses copies without evictions.
"""

from __future__ import annotations

from collections import OrderedDict

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.eviction._next_victim import CopyOrder, Ghosts, NextVictimEviction

__all__ = ["Arc"]


class Arc(NextVictimEviction):
    """Adaptive Replacement Cache (ARC): evicts from a recency list or from a frequency list.

    The target length ``p`` of the recency list, a float, decides which list loses a chunk.

    Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, fig. 4.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: CopyOrder = OrderedDict()
        self._again: CopyOrder = OrderedDict()
        self._left_once: OrderedDict[ChunkKey, None] = OrderedDict()
        self._left_again: OrderedDict[ChunkKey, None] = OrderedDict()
        self._returning = Ghosts(capacity)
        self._target = 0.0
        self._missed_again = False

    @override
    def on_miss(self, key: ChunkKey, ctx: PolicyContext) -> None:
        once, again = self._left_once, self._left_again
        self._missed_again = False
        if key in once:
            self._target = min(self.capacity, self._target + max(len(again) / len(once), 1))
            del once[key]
            self._returning.add(key)
        elif key in again:
            self._target = max(0.0, self._target - max(len(once) / len(again), 1))
            self._missed_again = True
            del again[key]
            self._returning.add(key)

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if self._returning.take(copy.key):
            self._again[copy] = None
            return
        left_once, left_again, capacity = self._left_once, self._left_again, self.capacity
        self._once[copy] = None
        once = len(self._once) + len(left_once)
        if once > capacity and left_once:
            left_once.popitem(last=False)
            once -= 1
        if left_again and once + len(self._again) + len(left_again) > 2 * capacity:
            left_again.popitem(last=False)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if copy in self._again:
            self._again.move_to_end(copy)
        else:
            del self._once[copy]
            self._again[copy] = None

    @override
    def _orders(self) -> tuple[CopyOrder, ...]:
        return (self._once, self._again)

    @override
    def _take(self) -> ChunkCopy | None:
        once, target = len(self._once), self._target
        take_once = once > target or (once == target and self._missed_again) or self._backoff
        order = self._once if once and (take_once or not self._again) else self._again
        if not order:
            return None
        copy = order.popitem(last=False)[0]
        copy.policy = order
        return copy

    @override
    def _spare(self, copy: ChunkCopy) -> None:
        self._again[copy] = None

    @override
    def _record_evicted(self, copy: ChunkCopy) -> None:
        ghosts = self._left_once if copy.policy is self._once else self._left_again
        ghosts[copy.key] = None
        copy.policy = None
