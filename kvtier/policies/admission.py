"""Which chunks are worth writing to a slower tier.

Conditions, each with one reason to refuse, asked one after the other until one refuses. A
refused chunk stays where it is and is gone when its room is needed, so every condition trades
hits for wear: on chat traffic second-touch writes a fifth and loses a quarter of the hits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from math import floor

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, PolicyContext
from kvtier.policies.frequency import SketchFrequency

__all__ = ["Admission", "AdmitAll", "SecondTouch", "TinyLfu", "WriteBudget"]

_DAY_S = 86_400.0
_BURSTS_PER_DAY = 25
_SAMPLE_PER_SLOT = 2


class Admission(ABC):
    """One condition for entering a slower tier.

    One object serves all tiers of a cache, and judges each by itself: what it was asked for
    one says nothing about another. It reads the copies, writes to none and keeps none.

    Args:
        capacity: Chunks of RAM and of the largest tier together, for what is remembered to be
            in proportion to: at most one key for each, and that for each tier.

    Attributes:
        capacity: That number.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        """Return whether ``copy`` may enter ``tier``.

        Asked when the copy is about to be written, once the placement and the conditions
        before this one agreed. It is asked again about a chunk that was refused, when that is
        to be written again; and about one that was admitted and found no room, or was evicted
        there since. Nobody says which of these it is: ``copy.generation`` differs for another
        copy of the chunk in RAM, and is 0 for one in a slower tier.

        Args:
            copy: The copy it is written from, in RAM or in a slower tier.
            tier: Index of the tier that it would enter, 1 or more.
            ctx: What else may be known.
        """

    def admits_many(
        self, copies: Sequence[ChunkCopy], tier: int, ctx: PolicyContext
    ) -> Sequence[bool]:
        """Do :meth:`admits` for ``copies``, in this order."""
        return [self.admits(copy, tier, ctx) for copy in copies]


class AdmitAll(Admission):
    """Refuses nothing."""

    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        return True


class SecondTouch(Admission):
    """Refuses a chunk that was used only once as far as anybody remembers.

    It was used again if its copy was loaded, or if an earlier copy of it was asked for. This is
    CacheLib's reject-first with the keys themselves. What comes from a slower tier than RAM was
    admitted there before, so it is not asked again.

    Args:
        capacity: Most keys to remember for each tier, the latest ones.
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
        # One copy is asked for several times if the tier has no room: that is not another use.
        again = last is not None and (last[0] != copy.generation or last[1])
        asked[copy.key] = (copy.generation, again)
        if len(asked) > self.capacity:
            asked.popitem(last=False)
        return again or copy.hits > 0


class TinyLfu(Admission):
    """Refuses a chunk that was wanted less than twice lately, by a sketch that fades.

    Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM
    Transactions on Storage 13(4), 2017. A store's traffic has no single victim to compare with,
    hence a threshold. Unlike :class:`SecondTouch` it keeps no keys and forgets old uses.

    Args:
        capacity: Chunks of the tiers together; twice as many uses are looked back on.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._sketches: dict[int, SketchFrequency] = {}

    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        sketch = self._sketches.get(tier)
        if sketch is None:
            sketch = SketchFrequency(self.capacity, sample_per_slot=_SAMPLE_PER_SLOT)
            self._sketches[tier] = sketch
        sketch.count(copy.key)
        return sketch.of(copy.key) + copy.hits >= 2


class WriteBudget(Admission):
    """Refuses what would wear the medium faster than it may.

    A token bucket for each tier that holds a 25th of the day's budget and is filled by the rest
    within a day, so no 24 hours, whenever they begin, see more written than the budget, and a
    quiet night does not pay for a burst. It holds one chunk at least: a budget of less than 25
    is spent in whole chunks, evenly, and one of less than a chunk a day is a chunk every few
    days. What was written is not remembered across restarts, and the bucket is full at a start:
    each start can cost a 25th of the budget more.

    Args:
        bytes_per_day: Bytes that may be written to each slower tier in a day.
        chunk_nbytes: Bytes written for one chunk.
    """

    def __init__(self, *, bytes_per_day: int, chunk_nbytes: int) -> None:
        super().__init__(capacity=0)  # of chunks it remembers nothing
        per_day = bytes_per_day / chunk_nbytes
        self._most = max(per_day / _BURSTS_PER_DAY, 1.0)
        refill = per_day - self._most
        if per_day <= _BURSTS_PER_DAY:
            # The chunk that a day begins with was saved up on the day before.
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
