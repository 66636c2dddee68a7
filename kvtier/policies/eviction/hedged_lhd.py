"""Least hit density, hedged with LRU: what earns its slot least goes, as far as that pays.

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

Recency is hard to beat where sessions go on, and classes mislead where the past does. So the
policy departs from LRU only as far as :mod:`._stake` allows, and where it allows nothing the
victims are exactly LRU's. Where the classes differ by little (:data:`_CLEARLY`) it does not
depart either.

No rule about parents and children is needed. A prefix is used whenever its continuation is,
hence it was used as recently and as often; its class is never worth less (see
:data:`_BELOW`), and among equals the deepest chunk of a prompt stands first. So a prefix
outlives what continues it.

Copies stand in runs (see :mod:`._runs`). A run that was chosen is finished before the next
choice, which makes the choice rare. A prompt's chunks come leaf to root, and the first of them
tells its length; a batch that comes root to leaf is turned round.

A copy that may not go is put where one goes that was just used. Were all of a class pinned,
each pick would go round all of it, so for as many picks as copies were refused victims are
chosen by age alone, and each of those picks moves on. Keys that left are remembered with their
run, as many as there are slots.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext
from kvtier.policies.eviction._hit_density import HitDensity
from kvtier.policies.eviction._runs import Run, Timeline
from kvtier.policies.eviction._stake import Stake

__all__ = ["HedgedLhd"]

_TAIL: Final = 0
_NEW: Final = 1
_LENGTHS: Final = 5
_USED: Final = _NEW + _LENGTHS
_MOST_USES: Final = 4
_KINDS: Final = _USED + _MOST_USES
_NOWHERE: Final = -1

_AFTER: Final = [max(_USED, min(kind + 1, _KINDS - 1)) for kind in range(_KINDS)]
"""The class that a use makes of each."""
_BELOW: Final = [
    [],
    *([_TAIL] for _ in range(_NEW, _USED)),
    list(range(_USED)),
    *([kind - 1] for kind in range(_USED + 1, _KINDS)),
]
"""What a continuation of a chunk of each class can be, unless a class between says so."""

_CLEARLY: Final = 0.7
"""Share of the oldest chunk's density below which another class is taken from."""
_SPANS: Final = 64
"""Parts of a turn of the tier that are told apart by age, at least."""
_SPAN_LEAST: Final = 4
_SPAN_MOST: Final = 128
_LEARN_EVERY: Final = 4
"""Times the table is renewed while as many chunks are used as the tier holds."""
_LEARN_LEAST: Final = 64
_MEMORY: Final = 16
"""Turns of the tier after which what was seen counts half."""


class HedgedLhd(Eviction):
    """Evicts what is expected to earn the fewest hits, LRU's victim where that is a risk.

    ``copy.policy`` is the run that holds the copy.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        keep = 0.5 ** (1 / (_LEARN_EVERY * _MEMORY))
        self._density = HitDensity(capacity, _BELOW, keep)
        self._stake = Stake(capacity, keep)
        self._timeline = Timeline(capacity)
        self._queues: list[deque[Run]] = [deque() for _ in range(_KINDS)]
        self._left: OrderedDict[ChunkKey, Run] = OrderedDict()
        self._span = min(max(capacity // _SPANS, _SPAN_LEAST), _SPAN_MOST)
        self._clock = 0
        self._learn_at = 0
        self._members = 0
        self._shy = 0
        self._victims = Run(_NOWHERE, 0)
        self._newest = self._open(_TAIL)
        # The parent of the last new chunk, and the class it has if it is new as well.
        self._next_new: ChunkKey | None = None
        self._prompt = _NEW
        # A stretch of copies is moving from one run, or from outside, to the newest run, which
        # had been offered so much room and has so much left.
        self._outside = Run(_NOWHERE, 0)
        self._outside.beyond = True
        self._source: Run | None = None
        self._offered = 0
        self._room = 0
        self._depth = 0

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._members += 1
        source = self._left.pop(copy.key, None)
        if source is not None:
            self._come_back(copy, source)
            return
        if copy.key != self._next_new:
            self._begin(copy, self._outside, _TAIL)
            self._prompt = _NEW + min((copy.depth + 1).bit_length() // 2, _LENGTHS - 1)
        elif self._newest.kind != self._prompt or not self._room or self._source is None:
            self._begin(copy, self._outside, self._prompt)
        self._next_new = copy.parent
        run = copy.policy = self._newest
        run.copies[copy] = None
        self._room -= 1

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        downwards = bool(copies) and copies[0].depth < copies[-1].depth
        for copy in reversed(copies) if downwards else copies:
            self.on_insert(copy, ctx)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        source: Run = copy.policy
        if source is not self._source or not self._room:
            self._begin(copy, source, _AFTER[source.kind])
        del source.copies[copy]
        run = copy.policy = self._newest
        run.copies[copy] = None
        self._room -= 1

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        self._settle()
        self._members -= 1
        del copy.policy.copies[copy]
        self._timeline.remove(copy.policy)
        copy.policy = None

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        if self._shy:
            self._shy -= 1
        timeline, stake = self._timeline, self._stake
        for _ in range(self._members):
            run = self._victims
            if not run.copies:
                run = self._victims = self._worst()
            if self._shy or not (run.beyond or timeline.departed < stake.limit):
                run = timeline.oldest()
            copy = next(iter(run.copies))
            if evictable(copy):
                self._evict(copy, run)
                return copy
            self._spare(copy, run)
        return None

    # -- uses -------------------------------------------------------------------------------

    def _begin(self, copy: ChunkCopy, source: Run, kind: int) -> None:
        """Make ready for copies that go, like ``copy``, from ``source`` to class ``kind``."""
        self._settle()
        run = self._newest_of(kind)
        self._source = source
        self._room = self._offered = self._span - len(run.copies)
        self._depth = copy.depth

    def _settle(self) -> None:
        """Account for the copies that moved since :meth:`_begin`."""
        source = self._source
        if source is None:
            return
        self._source = None
        count = self._offered - self._room
        if source is self._outside:
            self._clock += count
            self._stake.used(count, self._depth)
        else:
            self._count(source, count, self._depth)
            if source.beyond:
                self._stake.won += count
        if source.beyond:
            self._timeline.enter(count)

    def _come_back(self, copy: ChunkCopy, source: Run) -> None:
        """Let in ``copy``, which left from ``source``."""
        self._settle()
        self._count(source, 1, copy.depth)
        self._add(copy, _AFTER[source.kind])
        source.away -= 1
        if source.beyond:
            self._timeline.enter(1)
        else:
            self._stake.lost += 1
            self._timeline.departed -= 1

    def _count(self, source: Run, count: int, depth: int) -> None:
        """Count uses of chunks whose last use was in ``source``."""
        self._clock += count
        self._stake.used(count, depth)
        self._density.used(source.kind, self._clock - source.since, count)

    def _add(self, copy: ChunkCopy, kind: int) -> None:
        run = copy.policy = self._newest_of(kind)
        run.copies[copy] = None

    def _newest_of(self, kind: int) -> Run:
        """Return the newest run, which has room for a copy of class ``kind``."""
        run = self._newest
        if run.kind != kind or len(run.copies) >= self._span:
            run = self._newest = self._open(kind)
        return run

    def _open(self, kind: int) -> Run:
        if self._clock >= self._learn_at:
            self._learn()
        run = self._timeline.open(kind, self._clock)
        self._queues[kind].append(run)
        return run

    def _learn(self) -> None:
        """Look at all runs: how old they grew unused, and which are empty."""
        self._learn_at = self._clock + max(self.capacity // _LEARN_EVERY, _LEARN_LEAST)
        self._timeline.tidy()
        self._density.grow_older(self._timeline.runs, self._clock)
        self._density.learn()
        self._stake.renew()
        self._queues = [deque(run for run in queue if run.copies) for queue in self._queues]

    # -- victims ----------------------------------------------------------------------------

    def _worst(self) -> Run:
        """Return the run whose slots are clearly worth least, or the oldest one."""
        self._settle()
        density, clock = self._density.of, self._clock
        worst = self._timeline.oldest()
        least = _CLEARLY * density(worst.kind, clock - worst.since)
        for kind, queue in enumerate(self._queues):
            while queue and not queue[0].copies and queue[0] is not self._newest:
                queue.popleft()
            if queue and queue[0].copies:
                run = queue[0]
                worth = density(kind, clock - run.since)
                if worth < least:
                    worst, least = run, worth
        return worst

    def _evict(self, copy: ChunkCopy, run: Run) -> None:
        del run.copies[copy]
        copy.policy = None
        self._members -= 1
        run.away += 1
        if not run.beyond:
            self._timeline.departed += 1
            self._stake.departures += 1
        left = self._left
        left[copy.key] = run
        if len(left) > self.capacity:
            self._timeline.forget(left.popitem(last=False)[1])

    def _spare(self, copy: ChunkCopy, run: Run) -> None:
        """Put ``copy``, which may not go, where it is asked for last."""
        self._settle()
        self._shy += 1
        del run.copies[copy]
        self._add(copy, run.kind)
        if run.beyond:
            self._timeline.enter(1)
