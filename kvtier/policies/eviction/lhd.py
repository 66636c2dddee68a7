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

A prompt's chunks are inserted, used and evicted together. So copies are kept in *runs*, and
statistics are updated once per batch of moves. If many copies are pinned, scanning a class at
every pick would be slow: after a pick that rejected n copies, which are now the youngest, the
next n victims are chosen by age alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from operator import eq
from typing import Final

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext
from kvtier.policies.eviction._hit_density import AFTER, KINDS, TAIL, HitDensity, kind_of_new

__all__ = ["Lhd", "Rivalry"]

_SPANS: Final = 64
"""Least number of runs per turn. A turn is as many uses as the tier has slots."""
_MAX_SPAN: Final = 128
_CLEARLY: Final = 0.9
"""Victims come from another class if its density is below this share of the oldest chunk's."""
_SHARE: Final = 0.001
"""Share of the uses that may be lost against LRU."""
_PROMPTS: Final = 4.0
"""Number of prompts of mean length that may be lost, too."""
_SLOTS: Final = 0.05
"""Share of the tier's slots that may be lost, too."""
_MOST_TIERS: Final = 2.0
"""Tiers that a prompt of mean length may fill; above, the policy stays with LRU."""
_KEEP: Final = 0.9986
"""Share of the lead that survives a renewal of the densities: half after 250 turns."""
_DEEP: Final = 1 << 62
_EMPTY: Final[list[ChunkCopy | None]] = []
"""The list of every run without copies; most runs only tell when evicted keys were used."""


class Run:
    """Copies of one class, used one after the other.

    Attributes:
        kind: The class of the copies.
        since: Number of the use that began the run.
        copies: The copies, oldest use first; None where a copy left. A copy's ``policy`` is its
            run, and its ``queued`` is its index in this list.
        first: Index of the first entry that may be a copy.
        live: Number of copies.
    """

    __slots__ = ("copies", "first", "kind", "live", "since")

    def __init__(self, kind: int, since: int) -> None:
        self.kind = kind
        self.since = since
        self.copies: list[ChunkCopy | None] = []
        self.first = 0
        self.live = 0


class Rivalry:
    """Compares the policy's leading hits with LRU's, request by request.

    Only chunks before a request's first miss are useful. Their number is the least depth of the
    missed chunks, in whatever order the chunks come.

    Attributes:
        follows_lru: Whether the policy must evict what LRU would evict.
        reach: LRU held the chunks used since this number of uses when the request began.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lead = self._uses = self._requests = 0.0
        self._end = 0
        self._missed = self._lru_missed = _DEEP
        self.follows_lru = False
        self.reach = 0

    def record(self, first: int, last: int, *, missed: bool, lru_missed: bool) -> None:
        """Record uses of the request's chunks between the depths ``first`` and ``last``."""
        self._end = max(self._end, first + 1, last + 1)
        if missed:
            self._missed = min(self._missed, first, last)
        if lru_missed:
            self._lru_missed = min(self._lru_missed, first, last)

    def end_request(self, reach: int) -> None:
        """Add the request's hits to the lead, and choose whom to follow."""
        self.reach = reach
        if not self._end:
            return
        self._lead += min(self._missed, self._end) - min(self._lru_missed, self._end)
        self._uses += self._end
        self._requests += 1.0
        self._end, self._missed, self._lru_missed = 0, _DEEP, _DEEP
        length = self._uses / self._requests
        budget = _SHARE * self._uses + self._lead
        if not self.follows_lru:
            budget += _PROMPTS * length + _SLOTS * self._capacity
        self.follows_lru = budget < 0.0 or length > _MOST_TIERS * self._capacity

    def renew(self) -> None:
        """Reduce the weight of past counts."""
        self._lead *= _KEEP
        self._uses *= _KEEP
        self._requests *= _KEEP


class Lhd(Eviction):
    """Evicts by least hit density (LHD), or like LRU while LRU does better.

    Evicted keys are remembered with their run, at most two per slot. When the younger half is
    full, the older half is forgotten at once.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._density = HitDensity(capacity)
        self._rivalry = Rivalry(capacity)
        self._span = min(max(capacity // _SPANS, 1), _MAX_SPAN)
        self._clock = 0
        self._queues: list[deque[Run]] = [deque() for _ in range(KINDS)]
        self._ghosts: dict[ChunkKey, Run] = {}
        self._ghosts_before: dict[ChunkKey, Run] = {}
        self._outside = Run(TAIL, -1)  # counts as the last run of new chunks
        self._counted = self._opened = 0
        self._newest = self._open(TAIL)
        self._victims: Run | None = None
        self._backoff = 0
        # The batch: copies that came from one run, and are not counted yet.
        self._batch = (self._outside, False, True)
        self._depth = 0
        # The prompt of the new chunks.
        self._request = ""
        self._taken: set[ChunkKey] = set()  # keys that the request found and evicted
        self._began = 0
        self._length = 0
        self._new_depth = -1

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if ctx.request != self._request:
            self._begin_request(ctx.request)
        key = copy.key
        source = self._ghosts.pop(key, None) or self._ghosts_before.pop(key, None)
        if source is None:
            kind = self._kind_of_new(copy.depth)
            self._extend(self._outside, kind, copy.depth, missed=True)
        else:
            missed = key not in self._taken
            self._extend(source, AFTER[source.kind], copy.depth, returns=True, missed=missed)
        newest = self._newest
        copy.policy = newest
        copy.queued = len(newest.copies)
        newest.copies.append(copy)

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        keys = [copy.key for copy in copies]
        parents = [copy.parent for copy in copies]
        if sum(map(eq, keys, parents[1:])) > sum(map(eq, keys[1:], parents)):  # root to leaf
            copies, keys, parents = copies[::-1], keys[::-1], parents[::-1]
        is_chain = keys[1:] == parents[:-1]
        ghosts = (self._ghosts, self._ghosts_before)
        if copies and is_chain and all(known.keys().isdisjoint(keys) for known in ghosts):
            self._insert_prompt(copies, ctx)
        else:
            for copy in copies:
                self.on_insert(copy, ctx)

    @override
    def on_stay(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._flush()
        for ghosts in (self._ghosts, self._ghosts_before):
            ghosts.pop(copy.key, None)
        self._requeue(copy)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.on_hit_many((copy,), ctx)

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        if ctx.request != self._request:
            self._begin_request(ctx.request)
        source: Run | None = None
        order, span = self._newest.copies, self._span
        for copy in copies:
            if copy.policy is not source or len(order) >= span:
                source = copy.policy
                self._extend(source, AFTER[source.kind], copy.depth)
                order = self._newest.copies
            source.copies[copy.queued] = None
            copy.policy = self._newest
            copy.queued = len(order)
            order.append(copy)

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        self._flush()
        run: Run = copy.policy
        self._density.lose(run.kind, run.since)
        self._detach(copy)
        copy.policy = None

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        run = self._victims
        if run is not None and ctx.request == self._request and not self._backoff:
            for copy in islice(run.copies, run.first, None):
                if copy is not None:
                    if evictable(copy):
                        self._evict((copy,))
                        return copy
                    return self._search(copy, evictable)
        victims = self.pick_many(1, evictable, ctx)
        return victims[0] if victims else None

    @override
    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        if ctx.request != self._request:
            self._begin_request(ctx.request)
        picked: list[ChunkCopy] = []
        while (left := count - len(picked)) > 0:
            going = self._next(left)
            refused = next((copy for copy in going if not evictable(copy)), None)
            if refused is not None:
                going = going[: going.index(refused)]
            if going:
                self._evict(going)
                picked += going
            if refused is not None:
                victim = self._search(refused, evictable)
                going = [] if victim is None else [victim]
                picked += going
            if not going:
                break
        return picked

    # -- requests and batches

    def _begin_request(self, request: str) -> None:
        self._flush()
        self._request = request
        self._taken.clear()
        self._began = self._clock
        self._new_depth = -1
        self._victims = None
        self._rivalry.end_request(self._density.reach)

    def _kind_of_new(self, depth: int) -> int:
        """Return the class of a new chunk; a prompt's new chunks come leaf to root."""
        if depth > self._new_depth:
            self._length = depth + 1
        self._new_depth = depth
        return TAIL if depth + 1 == self._length else kind_of_new(self._length)

    def _insert_prompt(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Insert new chunks of one prompt, leaf to root."""
        at = 0
        while at < len(copies):
            self.on_insert(copies[at], ctx)
            at += 1
            newest = self._newest
            if at > 1 or self._length > copies[0].depth + 1:
                part = copies[at : at + self._span - len(newest.copies)]
                for place, copy in enumerate(part, len(newest.copies)):
                    copy.policy = newest
                    copy.queued = place
                newest.copies += part
                at += len(part)
        self._new_depth = copies[-1].depth

    def _extend(
        self,
        source: Run,
        kind: int,
        depth: int,
        *,
        returns: bool = False,
        missed: bool = False,
    ) -> None:
        """Begin a batch of moves from ``source`` to class ``kind``, unless it goes on.

        Args:
            source: The copies' last run, or the run that stands for new chunks.
            kind: The copies' new class.
            depth: The depth of the first copy.
            returns: Whether the copies were evicted in between.
            missed: Whether the copies were absent when the request began.
        """
        newest, batch = self._newest, (source, returns, missed)
        fits = newest.kind == kind and len(newest.copies) < self._span
        if fits and batch == self._batch and self._counted < len(newest.copies):
            return
        self._flush()
        if source is self._victims:
            self._victims = None
        if not fits:
            newest = self._open(kind)
        self._batch = batch
        self._counted = len(newest.copies)
        self._depth = depth

    def _flush(self) -> None:
        """Count the copies that moved since the last call."""
        newest = self._newest
        count = len(newest.copies) - self._counted
        if not count:
            return
        self._counted += count
        newest.live += count
        (source, returns, missed), density = self._batch, self._density
        last = newest.copies[-1]
        self._rivalry.record(
            self._depth,
            self._depth + 1 - count if last is None else last.depth,
            missed=missed,
            lru_missed=source.since < self._rivalry.reach,
        )
        to_lru = source.since < density.reach
        if source is not self._outside:
            density.record_uses(source.kind, source.since, self._clock, count)
            if not returns:
                self._leave(source, count)
        density.add(newest.kind, newest.since, count, to_lru=to_lru)
        self._clock += count

    def _open(self, kind: int) -> Run:
        """Begin a new run, which becomes the newest."""
        if self._clock >= self._density.due:
            self._density.renew(self._clock)
            self._rivalry.renew()
        self._opened += 1
        if self._opened > self.capacity // 2:
            self._opened = 0
            self._queues = [deque(run for run in queue if run.live) for queue in self._queues]
        run = self._newest = Run(kind, self._clock)
        self._queues[kind].append(run)
        self._counted = 0
        return run

    # -- copies that leave

    def _next(self, count: int) -> list[ChunkCopy]:
        """Return up to ``count`` copies of one run, the next victim first."""
        by_age = self._backoff > 0
        if by_age:
            self._backoff -= 1
            self._victims, count = None, 1
        while True:
            run = self._victims or self._choose(by_age=by_age)
            if run is None:
                return []
            while run.first < len(run.copies):
                going = [copy for copy in run.copies[run.first : run.first + count] if copy]
                if going:
                    self._victims = None if by_age else run
                    return going
                run.first += count
            self._victims = None

    def _evict(self, copies: Sequence[ChunkCopy]) -> None:
        """Remove ``copies`` of one run, the oldest, and remember their keys."""
        run: Run = copies[0].policy
        run.first = copies[-1].queued + 1
        if len(self._ghosts) + len(copies) > self.capacity:
            self._ghosts, self._ghosts_before = {}, self._ghosts
        for copy in copies:
            run.copies[copy.queued] = None
            self._ghosts[copy.key] = run
        if run.since < self._began:
            self._taken.update([copy.key for copy in copies])
        self._leave(run, len(copies))

    def _detach(self, copy: ChunkCopy) -> None:
        """Remove ``copy`` from its run."""
        run: Run = copy.policy
        run.copies[copy.queued] = None
        self._leave(run, 1)

    def _leave(self, run: Run, count: int) -> None:
        """Record that ``count`` copies left ``run``."""
        run.live -= count
        if not run.live and run is not self._newest:
            run.copies = _EMPTY

    def _search(self, refused: ChunkCopy, evictable: Evictable) -> ChunkCopy | None:
        """Evict the oldest evictable copy instead of ``refused``; return the victim or None."""
        spared, victim = [refused], None
        self._detach(refused)
        while victim is None and (run := self._choose(by_age=True)) is not None:
            copy = next(filter(None, islice(run.copies, run.first, None)))
            if evictable(copy):
                victim = copy
                self._evict((copy,))
            else:
                spared.append(copy)
                self._detach(copy)
        for copy in spared:
            self._requeue(copy)
        self._backoff += len(spared)
        self._victims = None
        return victim

    def _requeue(self, copy: ChunkCopy) -> None:
        """Make ``copy``, which is in no run, the youngest, without counting a use."""
        self._flush()
        before: Run = copy.policy
        run, density = self._newest, self._density
        if run.kind != before.kind or len(run.copies) >= self._span:
            run = self._open(before.kind)
        density.remove(before.kind, before.since, 1)
        density.add(run.kind, run.since, 1, to_lru=before.since < density.reach)
        run.live += 1
        copy.policy = run
        copy.queued = len(run.copies)
        run.copies.append(copy)
        self._counted = len(run.copies)

    def _choose(self, *, by_age: bool = False) -> Run | None:
        """Return the run with the next victims; None if there are no copies."""
        self._flush()
        oldest: Run | None = None
        worst, least, bound = oldest, inf, inf
        clock, table = self._clock, self._density.table
        for kind, queue in enumerate(self._queues):
            while queue and not queue[0].live and queue[0] is not self._newest:
                queue.popleft()
            if not queue or not queue[0].live:
                continue
            run = queue[0]
            worth = table[kind][(clock - run.since).bit_length()]
            if oldest is None or run.since < oldest.since:
                oldest, bound = run, _CLEARLY * worth
            if worth < least:
                worst, least = run, worth
        if oldest is None or by_age or self._rivalry.follows_lru or least >= bound:
            return oldest
        return worst
