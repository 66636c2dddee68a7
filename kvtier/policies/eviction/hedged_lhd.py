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
chosen by age alone, and each of those picks moves on.

Keys that left are remembered with their run: as many as there are slots, and as many again
until the older half is forgotten at once, which is cheaper than one by one.

Copies that stand in their run as they are used, and victims of one run, move as a block. A
choice takes as many copies off a run as the budget allows, and each of them is granted to the
next pick; a use of the run or anything else that could change the choice puts back the rest.

Accounts are kept by the stretch. Copies that go the same way one after the other, from one run
to the newest, are a stretch, and so are victims out of one run. Each of them costs a few
attribute writes; counts, ages and LRU's reach are put right when the stretch ends or somebody
wants to know.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import repeat, takewhile
from math import ceil
from operator import is_not
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
_ENDED: Final[list[ChunkCopy | None]] = [None]

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
_LEARN_EVERY: Final = 2
"""Times the table is renewed while as many chunks are used as the tier holds."""
_LEARN_LEAST: Final = 64
_MEMORY: Final = 16
"""Turns of the tier after which what was seen of the classes counts half."""
_LONG_MEMORY: Final = 256
"""Turns after which what was won and lost counts half."""


class HedgedLhd(Eviction):
    """Evicts what is expected to earn the fewest hits, LRU's victim where that is a risk.

    ``copy.policy`` is the run that holds the copy.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        keep, keep_long = (
            0.5 ** (1 / (_LEARN_EVERY * turns)) for turns in (_MEMORY, _LONG_MEMORY)
        )
        self._interval = max(capacity // _LEARN_EVERY, _LEARN_LEAST)
        self._density = HitDensity(capacity, _BELOW, keep, self._interval)
        self._stake = Stake(capacity, keep_long)
        self._timeline = Timeline(capacity)
        self._queues: list[deque[Run]] = [deque() for _ in range(_KINDS)]
        self._ghosts: dict[ChunkKey, Run] = {}
        self._ghosts_before: dict[ChunkKey, Run] = {}
        self._span = min(max(capacity // _SPANS, _SPAN_LEAST), _SPAN_MOST)
        self._clock = 0
        self._learn_at = 0
        self._lessons = 0
        self._members = 0
        self._shy = 0
        # Victims of one run, the next one last, out of so many that the budget allowed.
        self._victims = Run(_NOWHERE, 0)
        self._granted: list[ChunkCopy] = []
        self._grant = 0
        # A stretch of copies moves to the newest run, until that is so long: from the run where
        # they are, or from one that remembers them, or from outside.
        self._outside = Run(_NOWHERE, 0)
        self._outside.beyond = True
        self._newest = self._timeline.open(_TAIL, 0)
        self._queues[_TAIL].append(self._newest)
        self._source: Run | None = None
        self._returning: Run | None = None
        self._settled = 0
        self._depth = 0
        self._deeper = 0
        # The parent of the last new chunk, and the depth of the last that began a prompt.
        self._next_new: ChunkKey | None = None
        self._goes_on = False
        self._tail = 0

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        key = copy.key
        came_from = self._ghosts.pop(key, None) or self._ghosts_before.pop(key, None)
        order = self._newest.copies
        if came_from is not None:
            if came_from is not self._returning or len(order) >= self._span:
                order = self._begin(copy, came_from, _AFTER[came_from.kind], returns=True)
        elif key == self._next_new and self._goes_on and len(order) < self._span:
            self._next_new = copy.parent
        else:
            order = self._begin_new(copy)
        copy.policy = self._newest
        copy.queued = len(order)
        order.append(copy)

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        if copies and copies[0].depth < copies[-1].depth:
            copies = copies[::-1]
        keys = [copy.key for copy in copies]
        parents = [copy.parent for copy in copies]
        if (
            keys[1:] != parents[:-1]
            or not self._ghosts.keys().isdisjoint(keys)
            or not self._ghosts_before.keys().isdisjoint(keys)
        ):
            for copy in copies:
                self.on_insert(copy, ctx)
            return
        at = 0
        while at < len(copies):
            room = self._span - len(self._newest.copies)
            if keys[at] != self._next_new or not self._goes_on or not room:
                room = self._span - len(self._begin_new(copies[at]))
            part = copies[at : at + (room if self._goes_on else 1)]
            self._append(part)
            at += len(part)
            self._next_new = parents[at - 1]

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        source: Run = copy.policy
        order = self._newest.copies
        if source is not self._source or len(order) >= self._span:
            order = self._begin(copy, source, _AFTER[source.kind], returns=False)
        source.copies[copy.queued] = None
        copy.policy = self._newest
        copy.queued = len(order)
        order.append(copy)

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        used = list(copies)
        at = 0
        while at < len(used):
            copy = used[at]
            source: Run = copy.policy
            if source is not self._source or len(self._newest.copies) >= self._span:
                self._begin(copy, source, _AFTER[source.kind], returns=False)
            # Those that stand in the source as they are used move as one.
            place = copy.queued
            part = used[at : at + self._span - len(self._newest.copies)]
            there = source.copies[place : place + len(part)]
            if there != part:
                part = part[: list(map(is_not, there + _ENDED, part)).index(True)]
            source.copies[place : place + len(part)] = repeat(None, len(part))
            self._append(part)
            at += len(part)

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        self._stop()
        self._members -= 1
        self._timeline.remove(copy.policy)
        self._leave(copy)
        copy.policy = None

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        granted = self._granted
        if not granted:
            if self._shy:
                self._shy -= 1
                self._stop()
            self._choose()
            granted = self._granted
            if not granted:
                return None
        copy = granted.pop()
        if evictable(copy):
            self._ghosts[copy.key] = self._victims
            return copy
        return self._search(copy, evictable)

    @override
    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        victims: list[ChunkCopy] = []
        while len(victims) < count:
            granted = self._granted
            if not granted:
                victim = self.pick(evictable, ctx)
                if victim is None:
                    break
                victims.append(victim)
                continue
            part = granted[: -1 - count + len(victims) : -1]
            good = list(takewhile(evictable, part))
            del granted[len(granted) - len(good) :]
            self._ghosts.update(zip([copy.key for copy in good], repeat(self._victims)))
            victims += good
            if len(good) < len(part):
                victim = self._search(granted.pop(), evictable)
                if victim is None:
                    break
                victims.append(victim)
        return victims

    # -- uses -------------------------------------------------------------------------------

    def _append(self, copies: Sequence[ChunkCopy]) -> None:
        """Let ``copies`` stand last in the newest run, which has room for them."""
        run = self._newest
        for place, copy in enumerate(copies, len(run.copies)):
            copy.policy = run
            copy.queued = place
        run.copies += copies

    def _begin_new(self, copy: ChunkCopy) -> list[ChunkCopy | None]:
        """Make ready for ``copy``, which is new, and what goes its way; return their order."""
        continues = copy.key == self._next_new
        self._next_new = copy.parent
        if continues:
            length = min((self._tail + 1).bit_length() // 2, _LENGTHS - 1)
            order = self._begin(copy, self._outside, _NEW + length, returns=False)
            self._goes_on = True
            return order
        self._tail = depth = copy.depth
        newest = self._newest
        if (
            newest.kind == _TAIL
            and self._source is self._outside
            and len(newest.copies) < self._span
        ):
            # One more prompt's last chunk: the stretch goes on, only of another length.
            self._deeper += depth - self._depth
            return newest.copies
        return self._begin(copy, self._outside, _TAIL, returns=False)

    def _begin(
        self, copy: ChunkCopy, source: Run, kind: int, *, returns: bool
    ) -> list[ChunkCopy | None]:
        """Make ready for copies that go, like ``copy``, from ``source`` to class ``kind``.

        Returns:
            Where they are to be appended.
        """
        self._settle()
        if source is self._victims and not returns:
            self._recall()
        run = self._newest
        if run.kind != kind or len(run.copies) >= self._span:
            run = self._open(kind)
        if returns:
            self._source, self._returning = None, source
        else:
            self._source, self._returning = source, None
        self._goes_on = False
        order = run.copies
        self._settled = len(order)
        self._depth = copy.depth
        return order

    def _open(self, kind: int) -> Run:
        """Begin a new run, the newest."""
        if self._clock >= self._learn_at:
            self._learn()
        run = self._newest = self._timeline.open(kind, self._clock)
        self._queues[kind].append(run)
        return run

    def _settle(self) -> None:
        """Account for the copies that left or moved since the last time."""
        if len(self._granted) < self._grant:
            self._settle_victims()
        newest = self._newest
        count = len(newest.copies) - self._settled
        if not count:
            return
        source = self._source
        if source is None and self._returning is None:
            return
        self._settled += count
        newest.live += count
        self._density.came(newest.kind, newest.since, count)
        self._clock += count
        stake = self._stake
        stake.uses += count
        stake.depths += count * (self._depth + 1) + self._deeper
        self._deeper = 0
        if source is self._outside:
            self._members += count
            self._timeline.enter(count)
        elif source is not None:
            self._density.used(source.kind, source.since, self._clock - source.since, count)
            self._lose(source, count)
            if source.beyond:
                stake.lead += count
                self._timeline.enter(count)
        elif self._returning is not None:
            self._settle_returns(self._returning, count)

    def _stop(self) -> None:
        """Let neither what leaves nor what moves go on as it does."""
        self._settle()
        self._source = self._returning = None
        self._goes_on = False
        self._recall()

    def _recall(self) -> None:
        """Put the granted victims back that were not picked."""
        granted, run = self._granted, self._victims
        if granted:
            run.first = granted[-1].queued
            for copy in granted:
                run.copies[copy.queued] = copy
            granted.clear()
        self._grant = 0

    def _settle_returns(self, source: Run, count: int) -> None:
        """Account for ``count`` chunks that came back and had left from ``source``."""
        timeline = self._timeline
        self._density.used(source.kind, source.since, self._clock - source.since, count)
        timeline.enter(0)  # nothing; but the run at the end of LRU's reach may be empty by now
        self._members += count
        source.away -= count
        if source.beyond:
            timeline.enter(count)
        else:
            self._stake.lead -= count - min(timeline.past_reach(source), count)
            timeline.departed -= count

    def _settle_victims(self) -> None:
        """Account for the copies that were evicted since :meth:`_choose`."""
        count, run = self._grant - len(self._granted), self._victims
        self._grant -= count
        self._members -= count
        self._lose(run, count)
        run.away += count
        if not run.beyond:
            self._timeline.departed += count

    def _lose(self, run: Run, count: int) -> None:
        """Note that ``count`` copies of ``run`` are there no more."""
        run.live -= count
        if not run.live and run is not self._newest:
            run.clear()

    def _learn(self) -> None:
        """Look at the runs: how old they grew unused and, now and then, which are empty."""
        self._learn_at = self._clock + self._interval
        self._lessons += 1
        self._density.grow_older(self._clock)
        self._density.learn()
        self._stake.renew()
        timeline = self._timeline
        if not self._lessons % _LEARN_EVERY or len(timeline.runs) > self.capacity // 2:
            timeline.tidy()
            self._queues = [deque(run for run in queue if run.live) for queue in self._queues]

    # -- victims ----------------------------------------------------------------------------

    def _choose(self) -> None:
        """Choose the run to evict from next, and so many of it as the budget allows."""
        self._settle()
        if not self._members:
            return
        if len(self._ghosts) >= self.capacity:
            self._forget()
        timeline = self._timeline
        run = timeline.oldest()
        grant = 1 if self._shy else run.live
        budget = self._stake.limit - timeline.departures
        if not self._shy and (budget > 0.0 or run.beyond):
            worst = self._worst(run)
            if worst is not run and (worst.beyond or budget > 0.0):
                run, grant = worst, worst.live
                if not run.beyond:
                    grant = min(grant, ceil(budget))
        if run is self._source or run is self._returning:
            self._source = self._returning = None
            self._goes_on = False
        self._victims = run
        self._granted = run.take(min(grant, self.capacity - len(self._ghosts)))
        self._grant = len(self._granted)

    def _search(self, copy: ChunkCopy, evictable: Evictable) -> ChunkCopy | None:
        """Return a victim other than ``copy``, which was granted but may not go."""
        refused = 0
        while True:
            refused += 1
            self._spare(copy)
            self._choose()
            if refused >= self._members:
                self._recall()
                return None
            copy = self._granted.pop()
            if evictable(copy):
                self._ghosts[copy.key] = self._victims
                return copy

    def _worst(self, oldest: Run) -> Run:
        """Return the run whose slots are clearly worth least, or the oldest one."""
        clock, queues, newest = self._clock, self._queues, self._newest
        table = self._density.table
        worst = oldest
        least = _CLEARLY * table[worst.kind][(clock - worst.since).bit_length()]
        for kind, lowest in enumerate(self._density.lowest):
            if lowest >= least:
                continue
            queue = queues[kind]
            while queue:
                run = queue[0]
                if run.live:
                    worth = table[kind][(clock - run.since).bit_length()]
                    if worth < least:
                        worst, least = run, worth
                    break
                if run is newest:
                    break
                queue.popleft()
        return worst

    def _forget(self) -> None:
        """Forget the older of the keys that left; as many as there are slots are kept."""
        for run, count in Counter(self._ghosts_before.values()).items():
            self._timeline.forget(run, count)
            self._density.went(run.kind, run.since, count)
        self._ghosts_before = self._ghosts
        self._ghosts = {}

    def _spare(self, copy: ChunkCopy) -> None:
        """Put ``copy``, a granted victim that may not go, where it is asked for last."""
        self._granted.append(copy)
        self._stop()
        self._shy += 1
        source: Run = copy.policy
        self._leave(copy)
        run = self._newest
        if run.kind != source.kind or len(run.copies) >= self._span:
            self._open(source.kind)
            run = self._newest
        copy.policy = run
        copy.queued = len(run.copies)
        run.copies.append(copy)
        run.live += 1
        self._density.came(run.kind, run.since, 1)
        if source.beyond:
            self._timeline.enter(1)

    def _leave(self, copy: ChunkCopy) -> None:
        """Take ``copy`` out of its run."""
        run: Run = copy.policy
        run.copies[copy.queued] = None
        self._lose(run, 1)
        self._density.went(run.kind, run.since, 1)
