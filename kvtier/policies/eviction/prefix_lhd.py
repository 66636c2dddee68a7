"""Least hit density, leaf first: what earns its slot least goes, no parent before its child.

LRU lets everything grow equally old. But chunks differ: one that was used twice comes back more
often than one that was used once, the tail of a prompt hardly ever, a short prompt more often
than a long one; and by how much depends on the traffic. This policy puts chunks into classes by
what a cache can see of them, learns how likely each class is to be used at each age, and takes
room from the class whose oldest chunk has the lowest *hit density* (see :mod:`._hit_density`).
Within a class the order is LRU, so only the oldest of each need be compared.

The classes are

- by number of uses, for chunks that were used before. The count survives an eviction while the
  key is remembered, as in ARC (Megiddo and Modha, FAST 2003), or a chunk that comes back late
  would start anew each time;
- by length of the prompt, in steps of four, for chunks that are new;
- the last new chunk of a prompt, for itself: the next turn continues in the middle of it.

Two things keep it from losing to LRU where the past misleads. A class other than that of the
least recently used chunk is only taken from when its density is clearly lower
(:data:`_CLEARLY`): where the classes do not differ, or nothing was learned yet, this is
leaf-first LRU. And a *twin* keeps all the keys that LRU would hold and counts the hits it would
have had; while it leads by more than a few hits in ten thousand, victims are chosen by recency
alone. That is the expert and the regret of LeCaR (Vietri et al., HotStorage 2018), with the
regret measured instead of estimated.

Copies of one class that were used at about the same time form a *segment*, and segments are
queued, not copies. A prompt's chunks stand in it deepest first: half a prefix still serves,
half a tail does not. A segment that was chosen is finished before the next choice, which makes
the choice rare. A copy that comes up while it has children is set aside and comes back when one
of them goes, as in :mod:`.prefix_lru`; without that rule one class's noise strands the chunks
of another. New chunks wait unclassified until something else happens, for only then the length
of their prompt is known.

What could not go is parked for as many picks as there are parked copies, as in :mod:`._scored`.
Keys that left are remembered with their uses, as many as there are slots; the twin remembers
none besides those, and the sample of :mod:`._hit_density` as many again at most.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, Final

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext
from kvtier.policies.eviction._hit_density import HitDensity, octave_of
from kvtier.policies.eviction._lru_twin import LruTwin

__all__ = ["PrefixLhd"]

_TAIL: Final = 0
_NEW: Final = 1
_LENGTHS: Final = 5
_USED: Final = _NEW + _LENGTHS
_MOST_USES: Final = 4
_KINDS: Final = _USED + _MOST_USES
_NOWHERE: Final = -1

_CLEARLY: Final = 0.7
"""Share of the oldest chunk's density below which another class is taken from."""
_SEGMENTS: Final = 64
"""Parts of a turn of the tier that are told apart by age."""
_SPAN_LEAST: Final = 8
_LEARN_EVERY: Final = 4
"""Times the table is renewed while as many chunks are used as the tier holds."""
_LEARN_LEAST: Final = 256


class _Segment:
    """Copies of one class that were used at about the same time, oldest use first.

    Attributes:
        kind: Their class.
        since: Number of the use that began it.
        copies: Those that may be looked at; the last use of each is in this segment.
    """

    __slots__ = ("copies", "kind", "since")

    def __init__(self, kind: int, since: int) -> None:
        self.kind = kind
        self.since = since
        self.copies: OrderedDict[ChunkCopy, None] = OrderedDict()

    def add(self, copy: ChunkCopy) -> None:
        """Append ``copy``."""
        self.copies[copy] = None
        copy.policy = self

    def take(self) -> ChunkCopy:
        """Remove the copy whose turn it is and return it."""
        return self.copies.popitem(last=False)[0]


class PrefixLhd(Eviction):
    """Evicts the leaf whose slot is expected to earn the fewest hits.

    ``copy.queued`` is the number of uses before this stay and in it, ``copy.policy`` the
    segment.
    """

    leaf_only: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._clock = 0
        self._density = HitDensity(capacity, _KINDS)
        self._learn_at = 0
        self._queues: list[OrderedDict[_Segment, None]] = [OrderedDict() for _ in range(_KINDS)]
        self._aside: dict[ChunkKey, ChunkCopy] = {}
        self._left: OrderedDict[ChunkKey, int] = OrderedDict()
        self._parked = _Segment(_NOWHERE, 0)
        self._wait = 0
        self._twin = LruTwin(capacity)
        self._fresh = _Segment(_NOWHERE, 0)
        self._newest: list[_Segment | None] = [None] * _KINDS
        self._span = max(capacity // _SEGMENTS, _SPAN_LEAST)
        self._fresh_end: ChunkKey | None = None
        self._victims = _Segment(_NOWHERE, 0)

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._twin.use(copy.key, hits=0)
        uses = self._left.pop(copy.key, 0)
        copy.queued = uses + 1
        if uses:
            self._use(copy)
            return
        self._clock += 1
        if self._fresh.copies and self._fresh_end != copy.parent:
            self._classify()
        self._fresh_end = copy.key
        self._fresh.add(copy)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._twin.use(copy.key, hits=1)
        self._forget(copy)
        copy.queued += 1
        self._use(copy)

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        self._forget(copy)
        self._twin.forget(copy.key)
        copy.policy = None
        self._bring_back(copy.parent)

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        parked = self._parked
        if parked.copies:
            self._return_parked()
        waiting = len(parked.copies)
        while (segment := self._choose()) is not None:
            copy = segment.take()
            if not segment.copies:
                self._dequeue(segment)
            if copy.kids > 0:
                self._aside[copy.key] = copy
            elif evictable(copy):
                return self._evict(copy)
            else:
                parked.add(copy)
                self._wait = len(parked.copies)
        for _ in range(waiting):
            copy = parked.take()
            if copy.kids <= 0 and evictable(copy):
                return self._evict(copy)
            parked.add(copy)
        return None

    def _use(self, copy: ChunkCopy) -> None:
        """Put ``copy``, used now, where its number of uses says."""
        if self._fresh.copies:
            self._classify()
        if self._clock >= self._learn_at:
            self._learn()
        self._clock += 1
        kind = _kind_of(copy)
        self._density.note(copy.key, kind, self._clock)
        self._segment(kind).add(copy)

    def _classify(self) -> None:
        """Give the new chunks the class they turned out to have."""
        if self._clock >= self._learn_at:
            self._learn()
        fresh = self._fresh
        self._fresh = _Segment(_NOWHERE, self._clock)
        deepest = next(reversed(fresh.copies))
        prompt = _NEW + min((deepest.depth + 1).bit_length() // 2, _LENGTHS - 1)
        note = self._density.note
        kind = _TAIL
        for copy in reversed(fresh.copies):
            self._twin.renew(copy.key)
            note(copy.key, kind, self._clock)
            self._segment(kind).add(copy)
            kind = prompt

    def _learn(self) -> None:
        self._twin.fade()
        self._density.learn(self._clock)
        self._learn_at = self._clock + max(self.capacity // _LEARN_EVERY, _LEARN_LEAST)

    def _choose(self) -> _Segment | None:
        """Return the segment to take victims from, the same until it is empty."""
        if self._victims.copies:
            return self._victims
        heads = [next(iter(queue)) for queue in self._queues if queue]
        if not heads:
            if not self._fresh.copies:
                return None
            self._classify()
            return self._choose()
        oldest = min(heads, key=_since)
        if self._twin.ahead:
            self._victims = oldest
            return oldest
        worst = min(heads, key=self._worth)
        clearly = self._worth(worst) < _CLEARLY * self._worth(oldest)
        self._victims = worst if clearly else oldest
        return self._victims

    def _worth(self, segment: _Segment) -> float:
        row = self._density.table[segment.kind]
        return row[min(octave_of(self._clock - segment.since), len(row) - 1)]

    def _evict(self, copy: ChunkCopy) -> ChunkCopy:
        left = self._left
        left[copy.key] = copy.queued
        if len(left) > self.capacity:
            self._twin.forget(left.popitem(last=False)[0])
        copy.policy = None
        self._bring_back(copy.parent)
        return copy

    def _segment(self, kind: int) -> _Segment:
        """Return the segment for a copy of class ``kind`` that is used now."""
        segment = self._newest[kind]
        if segment is None or not segment.copies or self._clock - segment.since > self._span:
            segment = self._newest[kind] = _Segment(kind, self._clock)
            self._queues[kind][segment] = None
        return segment

    def _dequeue(self, segment: _Segment) -> None:
        if segment.kind != _NOWHERE:
            del self._queues[segment.kind][segment]

    def _forget(self, copy: ChunkCopy) -> None:
        """Take ``copy`` from wherever it is."""
        segment: _Segment = copy.policy
        if copy in segment.copies:
            del segment.copies[copy]
            if not segment.copies:
                self._dequeue(segment)
        else:
            del self._aside[copy.key]

    def _bring_back(self, key: ChunkKey | None) -> None:
        """Let a copy that was set aside be looked at again: a child of it went."""
        copy = self._aside.pop(key, None) if key is not None else None
        if copy is None:
            return
        segment: _Segment = copy.policy
        if not segment.copies:
            queue = self._queues[segment.kind]
            queue[segment] = None
            queue.move_to_end(segment, last=False)
        segment.copies[copy] = None
        segment.copies.move_to_end(copy, last=False)

    def _return_parked(self) -> None:
        self._wait -= 1
        if self._wait < 0:
            while self._parked.copies:
                copy = self._parked.take()
                self._segment(_kind_of(copy) if copy.queued > 1 else _NEW).add(copy)


def _kind_of(copy: ChunkCopy) -> int:
    """Return the class of a copy that was used more than once."""
    return _USED + min(copy.queued - 2, _MOST_USES - 1)


def _since(segment: _Segment) -> int:
    return segment.since
