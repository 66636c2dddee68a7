"""Least hit density: evicts the chunk that earns least, and LRU's victim where that pays.

LRU keeps every chunk for the same time. But some chunks are likelier to be used again than
others, and the difference depends on the traffic. This policy sorts chunks into classes. It
learns how many hits a slot earns with each class at each age (:mod:`._hit_density`), and evicts
from the class that earns least. In a class the order is LRU.

Where all chunks are alike, or the traffic changes, what was learned misleads. So the policy
counts its own leading hits and those that LRU would have had (:class:`Rivalry`). While it is
behind by more than a small allowance, it evicts the chunk used longest ago. Choosing the expert
that did better is due to LeCaR (Vietri et al., "Driving Cache Replacement with ML-based LeCaR",
HotStorage 2018); that a ghost of LRU needs no list of keys is due to the counts by time of last
use. Both experts order the same copies, so a switch moves nothing (Gramacy et al., "Adaptive
Caching by Refetching", NIPS 2002).

The chunks of a prompt are inserted, used and evicted together. So copies are kept in *runs*,
and what was learned is updated once per batch of moves. A single chunk costs a few attribute
writes.

A copy that must stay moves to the newest run, like a copy just used. If a whole class were
pinned, each pick would scan the class. So after a pick that rejected n copies, the next n
victims are chosen by age alone, and the rejected copies are now the youngest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import attrgetter
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
_HALF_LIFE: Final = 0.998
"""Share of the lead that survives a renewal of the densities: half after 170 turns."""
_DEEP: Final = 1 << 62
_SINCE: Final = attrgetter("since")
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
        request: Number of the request that last evicted from the run.
    """

    __slots__ = ("copies", "first", "kind", "live", "request", "since")

    def __init__(self, kind: int, since: int) -> None:
        self.kind = kind
        self.since = since
        self.copies: list[ChunkCopy | None] = []
        self.first = 0
        self.live = 0
        self.request = -1


class Rivalry:
    """Compares the policy's leading hits with LRU's, request by request.

    A missing chunk makes the rest of its prompt useless, so only the chunks before the first
    miss count. Their number is the least depth of the missed chunks, in whatever order the
    chunks of a request come.

    Args:
        capacity: Slots of the tier.

    Attributes:
        follows_lru: Whether the policy must evict what LRU would evict.
        since: Number of the use from which on LRU held all used chunks at the request's begin.
    """

    __slots__ = (
        "_capacity",
        "_end",
        "_lead",
        "_lru_missed",
        "_missed",
        "_requests",
        "_uses",
        "follows_lru",
        "since",
    )

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lead = self._uses = self._requests = 0.0
        self._end = 0
        self._missed = self._lru_missed = _DEEP
        self.follows_lru = False
        self.since = 0

    def record(self, depths: tuple[int, int], *, missed: bool, lru_missed: bool) -> None:
        """Record uses of the request's chunks from the first to the second of ``depths``."""
        self._end = max(self._end, *(depth + 1 for depth in depths))
        if missed:
            self._missed = min(self._missed, *depths)
        if lru_missed:
            self._lru_missed = min(self._lru_missed, *depths)

    def end_request(self, reach: int) -> None:
        """Add the request's hits to the lead, and choose whom to follow.

        Args:
            reach: Number of the use from which on LRU holds all used chunks.
        """
        self.since = reach
        end = self._end
        if not end:
            return
        self._lead += min(self._missed, end) - min(self._lru_missed, end)
        self._uses += end
        self._requests += 1.0
        self._end = 0
        self._missed = self._lru_missed = _DEEP
        length = self._uses / self._requests
        budget = _SHARE * self._uses + self._lead
        if not self.follows_lru:
            budget += _PROMPTS * length + _SLOTS * self._capacity
        self.follows_lru = budget < 0.0 or length > _MOST_TIERS * self._capacity

    def renew(self) -> None:
        """Reduce the weight of past counts."""
        self._lead *= _HALF_LIFE
        self._uses *= _HALF_LIFE
        self._requests *= _HALF_LIFE


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
        self._counted = 0
        self._newest = self._open(TAIL)
        self._victims: Run | None = None
        self._backoff = 0
        # The batch: copies that came from one run, and are not counted yet.
        self._batch = (self._outside, True)
        self._depth = 0
        # The prompt of the new chunks.
        self._request = ""
        self._number = 0
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
            self._extend(self._outside, kind, copy.depth, returns=True)
        else:
            self._extend(source, AFTER[source.kind], copy.depth, returns=True)
        newest = self._newest
        copy.policy = newest
        copy.queued = len(newest.copies)
        newest.copies.append(copy)

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        if len(copies) > 1 and copies[1].parent == copies[0].key:
            copies = copies[::-1]
        keys = [copy.key for copy in copies]
        is_chain = keys[1:] == [copy.parent for copy in copies[:-1]]
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
        self._detach([copy])
        copy.policy = None

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
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
        self._number += 1
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

    def _extend(self, source: Run, kind: int, depth: int, *, returns: bool = False) -> None:
        """Begin a batch of copies that move from ``source`` to class ``kind``, unless it goes on.

        Args:
            source: The copies' last run, or the run that stands for new chunks.
            kind: The copies' new class.
            depth: The depth of the first copy.
            returns: Whether the copies were evicted in between.
        """
        newest, batch = self._newest, (source, returns)
        fits = newest.kind == kind and len(newest.copies) < self._span
        if fits and batch == self._batch:
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
        (source, returns), density = self._batch, self._density
        last = newest.copies[-1]
        self._rivalry.record(
            (self._depth, self._depth + 1 - count if last is None else last.depth),
            missed=returns and source.request != self._number,
            lru_missed=source.since < self._rivalry.since,
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
            self._queues = [deque(run for run in queue if run.live) for queue in self._queues]
        run = self._newest = Run(kind, self._clock)
        queue = self._queues[kind]
        while queue and not queue[-1].live:
            queue.pop()
        queue.append(run)
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
        """Remove ``copies`` of one run, and remember their keys."""
        if not copies:
            return
        run = self._detach(copies)
        keys = [copy.key for copy in copies]
        if len(self._ghosts) + len(keys) > self.capacity:
            self._ghosts, self._ghosts_before = {}, self._ghosts
        self._ghosts.update(dict.fromkeys(keys, run))
        run.request = self._number

    def _detach(self, copies: Sequence[ChunkCopy]) -> Run:
        """Remove ``copies`` from their run, and return the run."""
        run: Run = copies[0].policy
        for copy in copies:
            run.copies[copy.queued] = None
        self._leave(run, len(copies))
        return run

    def _leave(self, run: Run, count: int) -> None:
        """Record that ``count`` copies left ``run``."""
        run.live -= count
        if not run.live and run is not self._newest:
            run.copies = _EMPTY

    def _search(self, refused: ChunkCopy, evictable: Evictable) -> ChunkCopy | None:
        """Evict the oldest evictable copy instead of ``refused``; return the victim or None."""
        spared, victim = [refused], None
        self._detach(spared)
        while victim is None and (run := self._choose(by_age=True)) is not None:
            copy = next(filter(None, islice(run.copies, run.first, None)))
            if evictable(copy):
                victim = copy
                self._evict([copy])
            else:
                spared.append(copy)
                self._detach([copy])
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
        heads: list[Run] = []
        for queue in self._queues:
            while queue and not queue[0].live and queue[0] is not self._newest:
                queue.popleft()
            if queue and queue[0].live:
                heads.append(queue[0])
        if not heads:
            return None
        oldest = min(heads, key=_SINCE)
        if not by_age and not self._rivalry.follows_lru:
            worst = min(heads, key=self._worth)
            if self._worth(worst) < _CLEARLY * self._worth(oldest):
                oldest = worst
        return oldest

    def _worth(self, run: Run) -> float:
        density = self._density
        return density.table[run.kind][density.octave_of(self._clock - run.since)]
