"""Admission policies, which decide whether a chunk is written to a slower tier.

A refused chunk stays in its tier until it is evicted, and is then lost. So an admission policy
reduces both the wear of the drive and the number of hits. On chat traffic, ``second-touch``
makes 1/5 of the writes of ``all`` and loses 1/4 of the hits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from math import floor

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, PolicyContext

__all__ = ["Admission", "AdmitAll", "SecondTouch", "WriteBudget"]

_DAY_S = 86_400.0
_BURSTS_PER_DAY = 25


class Admission(ABC):
    """A condition that a chunk must meet to enter a slower tier.

    One object serves all tiers of a cache and decides for each tier separately. A condition may
    read copies, but must not change or keep them.

    Args:
        capacity: Number of slots of RAM and the largest tier together. A condition keeps at
            most ``capacity`` keys for each tier.

    Attributes:
        capacity: Number of slots of RAM and the largest tier together.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        """Return whether ``copy`` may enter ``tier``.

        The manager calls this method right before ``copy`` is written, after the earlier
        conditions have admitted ``copy``. The manager may call again for the same chunk: after
        a refusal, if no slot was free, or if ``tier`` evicted the chunk. Each write of a chunk
        to RAM has its own ``copy.generation``; a copy in a slower tier has 0. A refused victim
        is still evicted.

        Args:
            copy: The source, in RAM or in a slower tier.
            tier: Index of the target tier, 1 or more.
            ctx: The context.
        """

    def admits_many(
        self, copies: Sequence[ChunkCopy], tier: int, ctx: PolicyContext
    ) -> Sequence[bool]:
        """Return the answer of :meth:`admits` for each of ``copies``, in order."""
        return [self.admits(copy, tier, ctx) for copy in copies]


class AdmitAll(Admission):
    """Admits every chunk."""

    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        return True

    @override
    def admits_many(
        self, copies: Sequence[ChunkCopy], tier: int, ctx: PolicyContext
    ) -> Sequence[bool]:
        return [True] * len(copies)


class SecondTouch(Admission):
    """Admits a chunk at its second use.

    A load of the copy is a second use. A new copy is a second use too, if this policy has
    decided about an earlier copy of the chunk. A copy in a slower tier is always admitted,
    because its chunk was admitted before. This policy is CacheLib's reject-first policy with
    whole keys.

    Args:
        capacity: Largest number of keys to keep per tier. The oldest keys are dropped first.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._asked: dict[int, OrderedDict[ChunkKey, tuple[int, bool]]] = {}

    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        if not copy.generation:
            return True
        asked = self._asked.setdefault(tier, OrderedDict())
        last = asked.pop(copy.key, None)
        # If the tier has no room, the manager asks again for the same copy: no second use.
        again = last is not None and (last[0] != copy.generation or last[1])
        asked[copy.key] = (copy.generation, again)
        if len(asked) > self.capacity:
            asked.popitem(last=False)
        return again or copy.hits > 0


class WriteBudget(Admission):
    """Refuses writes above a daily budget of bytes.

    Each tier has a token bucket for 1/25 of the daily budget. The other 24/25 refill the bucket
    evenly over a day, so the writes of any 24 hours stay within the budget. When the bucket is
    full, unused budget is lost. The bucket has room for at least one chunk. So a budget of less
    than one chunk a day admits a chunk every few days. The bucket is full at the start, so each
    restart can exceed the budget by 1/25.

    Args:
        bytes_per_day: Number of bytes that may be written to each slower tier in a day.
        chunk_nbytes: Number of bytes written for one chunk.
    """

    def __init__(self, *, bytes_per_day: int, chunk_nbytes: int) -> None:
        super().__init__(capacity=0)  # remembers no keys
        per_day = bytes_per_day / chunk_nbytes
        self._most = max(per_day / _BURSTS_PER_DAY, 1.0)
        refill = per_day - self._most
        if per_day <= _BURSTS_PER_DAY:
            # The bucket holds the day's first chunk, saved up on the day before.
            refill = floor(per_day) or per_day
        self._chunks_per_s = refill / _DAY_S
        self._filled: dict[int, tuple[float, float]] = {}

    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        chunks, since = self._filled.get(tier, (self._most, ctx.now))
        chunks = min(chunks + (ctx.now - since) * self._chunks_per_s, self._most)
        admitted = chunks >= 1.0
        self._filled[tier] = (chunks - admitted, ctx.now)
        return admitted
