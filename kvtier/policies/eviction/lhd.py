"""Least hit density: evicts the chunk that earns least, and LRU's victim where that pays.

LRU keeps every chunk for the same time. This policy sorts chunks into classes, learns how many
hits a slot earns with each class at each age, and evicts from the class that earns least. In a
class the order is LRU.

**Classes.** A chunk used twice is used again more often than a chunk used once; the number of
uses survives an eviction while the key is remembered (ARC: Megiddo and Modha, FAST 2003). New
chunks are classed by the length of their prompt, in powers of four. A prompt's last chunk is
hardly ever used again, because the next turn continues in the middle of it, so last chunks are
a class of their own. A prefix is used whenever its continuation is used, so its class never
earns less. Among equals the deepest chunk is evicted first.

**Density.** An age is the number of uses of all chunks since a chunk's last use; an octave is a
range of ages from one power of two to the next. The uses in an octave, divided by the chunks
that reached it and its length, are the hazard. The *hit density* is the largest mean hazard of
a range of octaves from the present one on: the hits per slot and time until the best moment
(LHD: Beckmann, Chen and Cidon, NSDI 2018, takes the mean of all later ages). A prior of 1/age,
like LRU, decides until there is data, first for all classes together, then for each.

**The rival.** Where chunks are alike or the traffic changes, what was learned misleads. So
:class:`Rivalry` counts the policy's leading hits and those of LRU. While the policy is behind
by more than an allowance, it evicts the chunk used longest ago (choosing the better expert:
LeCaR, Vietri et al., HotStorage 2018). Both order the same copies, so a switch moves nothing
(Gramacy et al., NIPS 2002). LRU would hold the chunks used last, as many as there are slots, so
counts by time of last use tell what LRU holds, and no ghost cache is needed.

**Runs.** A prompt's chunks are inserted, used and evicted together. So copies are kept in runs,
and statistics are updated once per batch of moves. A copy that moves to another run leaves a
stale entry behind. If many copies are pinned, a scan of a class at every pick would be slow:
after a pick that rejected n copies, which are now the youngest, the next n go by age alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext, is_idle
from kvtier.policies.eviction._hit_density import AFTER, KINDS, NEW_KINDS, TAIL, HitDensity

__all__ = ["Lhd", "Rivalry"]

_SPANS: Final = 64
"""Least number of runs per turn. A turn is as many uses as the tier has slots."""
_MAX_SPAN: Final = 128
_SHARE: Final = 0.0005
"""Share of the uses that may be lost against LRU."""
_PROMPTS: Final = 4.0
"""Number of prompts of mean length that may be lost, too."""
_SLOTS: Final = 0.04
"""Share of the tier's slots that may be lost, too."""
_MOST_TIERS: Final = 2.0
"""Tiers that a prompt of mean length may fill; above, the policy stays with LRU."""
_KEEP: Final = 0.9986
"""Share of the lead that survives a renewal of the densities: half after 250 turns."""
_DEEP: Final = 1 << 62
_SLACK: Final = 8
"""Number of stale entries that a run may always have."""
_MOST_OPEN: Final = 1024
"""Requests that may come in parts, about as many as an engine runs at a time."""
# How a request found a chunk that it uses.
_PRESENT: Final = 0
_ROBBED: Final = 1
"""The request evicted the chunk itself, after it began and before it used the chunk."""
_MISSED: Final = 2


class Run:
    """Copies of one class, used one after the other.

    Attributes:
        kind: The class of the copies.
        since: Number of the use that began the run.
        copies: The copies, oldest use first. An entry is stale unless the copy's ``policy`` is
            this run.
        first: Index of the first entry that may be live.
        live: Number of live entries.
        robbed_by: The last request for which a copy of the run was evicted.
    """

    __slots__ = ("copies", "first", "kind", "live", "robbed_by", "since")

    def __init__(self, kind: int, since: int) -> None:
        self.kind = kind
        self.since = since
        self.copies: list[ChunkCopy] = []
        self.first = 0
        self.live = 0
        self.robbed_by: str | None = None


class _Request:
    """The chunks that one request used so far.

    Attributes:
        reach: LRU held the chunks used since this number of uses when the request began.
        end: Number of chunks up to the deepest one that was used.
        missed: Least depth of the chunks that were absent when the request began.
        lru_missed: Least depth of the chunks that LRU did not hold then.
        won: Leading hits minus those of LRU, as they were last counted.
    """

    __slots__ = ("end", "lru_missed", "missed", "reach", "won")

    def __init__(self, reach: int) -> None:
        self.reach = reach
        self.end = self.won = 0
        self.missed = self.lru_missed = _DEEP


class Rivalry:
    """Compares the policy's leading hits with LRU's, request by request.

    Only chunks before a request's first miss are useful. Their number is the least depth of the
    missed chunks, in whatever order the chunks come. Requests may come in parts by turns.

    Attributes:
        follows_lru: Whether the policy must evict what LRU would evict.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lead = self._uses = self._requests = 0.0
        self._open: dict[str, _Request] = {}  # the last ones, by id
        self._now = _Request(0)
        self.follows_lru = False

    @property
    def reach(self) -> int:
        """LRU held the chunks used since this number of uses when the request began."""
        return self._now.reach

    def record(
        self, first: int, last: int, *, count: int = 1, missed: bool, lru_missed: bool
    ) -> None:
        """Record ``count`` uses of the request's chunks between two depths."""
        now = self._now
        if not now.end:
            self._requests += 1.0
        self._uses += count
        if first > last:
            first, last = last, first
        if last >= now.end:
            now.end = last + 1
        if missed and first < now.missed:
            now.missed = first
        if lru_missed and first < now.lru_missed:
            now.lru_missed = first

    def go_on(self, request: str, reach: int) -> None:
        """Add the hits of the present request to the lead, and go on with ``request``."""
        now = self._now
        again = self._open.pop(request, None)
        self._now = _Request(reach) if again is None else again
        if request:
            self._open[request] = self._now
            if len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
        if not now.end:
            return
        won = min(now.missed, now.end) - min(now.lru_missed, now.end)
        length = self._uses / self._requests
        allowance = _PROMPTS * length + _SLOTS * self._capacity
        # Old wins must not pay for long losses.
        self._lead = min(self._lead + won - now.won, allowance)
        now.won = won
        budget = _SHARE * self._uses + self._lead
        if not self.follows_lru:
            budget += allowance
        self.follows_lru = budget < 0.0 or length > _MOST_TIERS * self._capacity

    def renew(self) -> None:
        """Reduce the weight of past counts."""
        self._lead *= _KEEP
        self._uses *= _KEEP
        self._requests *= _KEEP


class Lhd(Eviction):
    """Evicts by least hit density (LHD), or like LRU while LRU does better.

    The keys of evicted copies are remembered, at most two per slot.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._density = HitDensity(capacity)
        self._rivalry = Rivalry(capacity)
        self._span = min(max(capacity // _SPANS, 1), _MAX_SPAN)
        self._clock = 0
        self._queues: list[OrderedDict[Run, None]] = [OrderedDict() for _ in range(KINDS)]
        self._ghosts: dict[ChunkKey, Run] = {}
        self._ghosts_before: dict[ChunkKey, Run] = {}
        self._outside = Run(TAIL, -1)  # stands for the last run of new chunks
        self._backoff = 0
        self._victims: Run | None = None
        # The batch: moves from one run, from the entry ``_counted`` of the newest run on.
        self._source, self._how = self._outside, _MISSED
        self._counted = self._depth = 0
        # The request.
        self._request = ""
        self._length = 0
        self._new_depth = -1
        self._newest = self._outside
        self._open(TAIL)

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if ctx.request != self._request:
            self._begin(ctx)
        key, depth = copy.key, copy.depth
        source = self._ghosts.pop(key, None) or self._ghosts_before.pop(key, None)
        if source is None:
            self._move(self._outside, self._kind_of_new(depth), depth, _MISSED)
        else:
            how = _ROBBED if source.robbed_by == self._request else _MISSED
            self._move(source, AFTER[source.kind], depth, how)
        self._append((copy,))

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        if ctx.request != self._request:
            self._begin(ctx)
        if copies and copies[0].depth < copies[-1].depth:
            copies = copies[::-1]
        keys = [copy.key for copy in copies]
        is_chain = copies and copies[0].depth - copies[-1].depth == len(copies) - 1
        ghosts, before = self._ghosts.keys(), self._ghosts_before.keys()
        if not is_chain or not ghosts.isdisjoint(keys) or not before.isdisjoint(keys):
            for copy in copies:
                self.on_insert(copy, ctx)
            return
        at = 0
        while at < len(copies):  # new chunks of a prompt, leaf to root
            depth = copies[at].depth
            kind = self._kind_of_new(depth)
            self._move(self._outside, kind, depth, _MISSED)
            room = 1 if kind == TAIL else self._span - len(self._newest.copies)
            part = copies[at : at + room]
            self._append(part)
            self._new_depth = part[-1].depth
            at += room

    @override
    def on_stay(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        for ghosts in (self._ghosts, self._ghosts_before):
            ghosts.pop(copy.key, None)
        self._requeue(copy)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.on_hit_many((copy,), ctx)

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        if ctx.request != self._request:
            self._begin(ctx)
        source: Run | None = None
        newest, span = self._newest, self._span
        for copy in copies:
            if copy.policy is not source or len(newest.copies) >= span:
                source = copy.policy
                self._move(source, AFTER[source.kind], copy.depth, _PRESENT)
                newest = self._newest
            copy.policy = newest
            newest.copies.append(copy)

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        self._flush()
        run: Run = copy.policy
        self._density.remove(run.kind, run.since, 1)
        copy.policy = None
        self._leave(run, 1)

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        if ctx.request != self._request:
            self._begin(ctx)
        going = self._peek(1)
        self._backoff = max(self._backoff - 1, 0)
        spared: list[ChunkCopy] = []
        while going and not evictable(going[0]):
            self._drop(going, evicted=False)
            spared += going
            going = self._peek(1, by_age=True)
        if going:
            self._drop(going, evicted=True)
        for copy in spared:
            self._requeue(copy)
        self._backoff += len(spared)
        return going[0] if going else None

    @override
    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        if ctx.request != self._request:
            self._begin(ctx)
        picked: list[ChunkCopy] = []
        while (left := count - len(picked)) > 0 and (going := self._peek(left)):
            if evictable is is_idle and not any(copy.pins or copy.dirty for copy in going):
                self._drop(going, evicted=True)
                picked += going
            else:
                for _ in going:
                    victim = self.pick(evictable, ctx)
                    if victim is None:
                        return picked
                    picked.append(victim)
        return picked

    def _peek(self, count: int, *, by_age: bool = False) -> list[ChunkCopy]:
        """Return up to ``count`` copies of one run, the next victim first."""
        by_age = by_age or self._backoff > 0
        run = self._victims
        if by_age or run is None or not run.live or run is self._newest:
            run = self._choose(by_age=by_age)
        self._victims = None if by_age else run
        if run is None:
            return []
        while run.copies[run.first].policy is not run:
            run.first += 1
        going: list[ChunkCopy] = run.copies[run.first : run.first + (1 if by_age else count)]
        if run.live == len(run.copies) - run.first:
            return going
        return [copy for copy in going if copy.policy is run]

    def _drop(self, copies: Sequence[ChunkCopy], *, evicted: bool) -> None:
        """Remove ``copies`` of one run, the oldest; remember the keys of evicted copies."""
        run: Run = copies[0].policy
        run.first = run.copies.index(copies[-1], run.first) + 1
        self._leave(run, len(copies))
        if evicted:
            run.robbed_by = self._request
            if len(self._ghosts) + len(copies) > self.capacity:
                self._ghosts, self._ghosts_before = {}, self._ghosts
            for copy in copies:
                self._ghosts[copy.key] = run

    def _begin(self, ctx: PolicyContext) -> None:
        """Begin the request of ``ctx``."""
        self._flush()
        self._request = ctx.request
        self._new_depth = -1
        self._victims = None
        self._rivalry.go_on(ctx.request, self._density.reach)

    def _kind_of_new(self, depth: int) -> int:
        """Return the class of a new chunk; a prompt's new chunks come leaf to root."""
        if depth > self._new_depth:
            self._length = depth + 1
        self._new_depth = depth
        return TAIL if depth + 1 == self._length else NEW_KINDS[self._length.bit_length()]

    def _move(self, source: Run, kind: int, depth: int, how: int) -> None:
        """Begin a batch of moves from ``source`` to class ``kind``, unless it goes on.

        ``depth`` is that of the first copy.
        """
        newest = self._newest
        fits = newest.kind == kind and len(newest.copies) < self._span and newest is not source
        goes_on = fits and source is self._source and how == self._how
        if goes_on and self._counted < len(newest.copies):
            return
        self._flush()
        if source is self._victims:
            self._victims = None
        if not fits:
            self._open(kind)
        self._source, self._how, self._depth = source, how, depth
        self._counted = len(self._newest.copies)

    def _append(self, copies: Sequence[ChunkCopy]) -> None:
        """Append ``copies`` to the newest run; the next flush counts them."""
        newest = self._newest
        for copy in copies:
            copy.policy = newest
        newest.copies += copies

    def _flush(self) -> None:
        """Count the copies that moved since the last call."""
        newest = self._newest
        count = len(newest.copies) - self._counted
        if not count:
            return
        self._counted += count
        newest.live += count
        source, how, density = self._source, self._how, self._density
        lru_missed = source.since < self._rivalry.reach
        last = newest.copies[-1].depth
        self._rivalry.record(
            self._depth, last, count=count, missed=how == _MISSED, lru_missed=lru_missed
        )
        if source is not self._outside:
            density.record_uses(source.kind, source.since, self._clock, count)
            if how == _PRESENT:
                self._leave(source, count)
        density.add(newest.kind, newest.since, count)
        self._clock += count

    def _open(self, kind: int) -> None:
        """Begin a new run, which becomes the newest."""
        if self._clock >= self._density.due:
            self._density.renew(self._clock)
            self._rivalry.renew()
        before, run = self._newest, Run(kind, self._clock)
        self._newest = run
        self._leave(before, 0)
        self._queues[kind][run] = None
        self._counted = 0

    def _leave(self, run: Run, count: int) -> None:
        """Record that ``count`` copies left ``run``."""
        run.live -= count
        if run is self._newest:
            return
        if not run.live:
            run.copies, run.first = [], 0
            self._queues[run.kind].pop(run, None)
        elif len(run.copies) > 2 * run.live + _SLACK:
            run.copies = [copy for copy in run.copies[run.first :] if copy.policy is run]
            run.first = 0

    def _requeue(self, copy: ChunkCopy) -> None:
        """Make ``copy``, which has left its run, the youngest, without counting a use."""
        self._flush()
        before: Run = copy.policy
        if self._newest.kind != before.kind or len(self._newest.copies) >= self._span:
            self._open(before.kind)
        run = self._newest
        self._density.remove(before.kind, before.since, 1)
        self._density.add(run.kind, run.since, 1)
        self._append((copy,))
        run.live += 1
        self._counted = len(run.copies)

    def _choose(self, *, by_age: bool) -> Run | None:
        """Return the run with the next victim; None if there are no copies."""
        self._flush()
        chosen: Run | None = None
        oldest, least = inf, inf
        by_age = by_age or self._rivalry.follows_lru
        clock, table = self._clock, self._density.table
        for kind, queue in enumerate(self._queues):
            run = next(iter(queue), None)
            if run is None or not run.live:
                continue
            earns = 0.0 if by_age else table[kind][(clock - run.since).bit_length()]
            if earns < least or (earns == least and run.since < oldest):
                chosen, least, oldest = run, earns, run.since
        return chosen
