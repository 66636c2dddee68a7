"""What :mod:`.hedged_lhd` remembers: its runs, LRU's reach, evicted keys and the regret budget.

Everything is recorded for many copies at once: they are of one run and move together. One use
of ``count`` copies changes ages and classes (:class:`.HitDensity`), the order of uses and LRU's
reach in it (:class:`Timeline`), and what was won and lost against LRU (:class:`RegretBudget`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy
from kvtier.policies.eviction._hit_density import BELOW, KINDS, NOWHERE, TAIL, HitDensity

__all__ = ["History", "RegretBudget", "Run", "Timeline"]

_SPANS: Final = 64
"""Least number of runs in a turn of the tier. A turn is as many uses as the tier has slots."""
_MIN_SPAN: Final = 4
_MAX_SPAN: Final = 128
_RENEWALS_PER_TURN: Final = 2
_MIN_INTERVAL: Final = 64
"""Least number of uses between two renewals of the density table."""
_DENSITY_HALF_LIFE: Final = 16
"""Turns after which a count of uses by class weighs half."""
_BUDGET_HALF_LIFE: Final = 256
"""Turns after which a count of wins and losses weighs half."""
_SHARE: Final = 0.002
"""Share of the uses that may be lost against LRU."""
_ODDS: Final = 4.0
"""Early evictions allowed for each hit that is ahead of LRU."""
_MIN_PROMPT_SHARE: Final = 0.5
"""Least budget, as a share of a prompt."""
_MIN_PROMPTS: Final = 16
"""Least number of prompts that the tier must hold."""
_EMPTY: Final[list[ChunkCopy | None]] = []
"""The list of every run without copies; most runs only count evicted keys."""


class Run:
    """Copies of one class, used one after the other.

    A prompt's chunks are used together, so their ages hardly differ. A use moves a copy to the
    newest run, and work by age or class is done once for a whole run.

    Attributes:
        kind: Their class.
        since: Number of the use that began it.
        copies: The copies, oldest use first; None where one left. A copy's ``policy`` is its
            run, and its ``queued`` is its index in this list.
        first: Index of the first entry that may be a copy.
        live: Number of copies.
        away: Remembered keys that were evicted from it.
        away_before: Those of them that are forgotten next.
        beyond: Whether LRU would have evicted all of it.
    """

    __slots__ = ("away", "away_before", "beyond", "copies", "first", "kind", "live", "since")

    def __init__(self, kind: int, since: int) -> None:
        self.kind = kind
        self.since = since
        self.copies: list[ChunkCopy | None] = []
        self.first = 0
        self.live = 0
        self.away = 0
        self.away_before = 0
        self.beyond = False

    def clear(self) -> None:
        """Free the list, which holds no copies and will get none."""
        self.copies = _EMPTY
        self.first = 0

    def take(self, count: int) -> list[ChunkCopy]:
        """Remove and return up to ``count`` of the oldest copies, the oldest last.

        They keep their ``queued`` and still count as live.
        """
        copies, first = self.copies, self.first
        taken = list(islice(filter(None, islice(copies, first, None)), count))
        self.first = end = taken[-1].queued + 1
        copies[first:end] = [None] * (end - first)
        taken.reverse()
        return taken


class Timeline:
    """All runs, oldest first, and LRU's reach in them.

    A run also counts its remembered evicted keys. The newest runs that count as many keys as
    the tier has slots are what LRU would hold, so no list of LRU's keys is needed. LRU's
    *reach* is a place in the timeline, which advances as keys come in from beyond it. Of the
    run at that place LRU holds the newer keys.

    Args:
        capacity: Slots of the tier.

    Attributes:
        runs: The runs; those without keys are dropped now and then.
        early_evicted: Evicted keys of the runs that LRU's reach touches.
    """

    __slots__ = ("_capacity", "_edge", "_held", "_oldest", "early_evicted", "runs")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.runs: list[Run] = []
        self.early_evicted = 0
        self._held = 0
        self._edge = 0
        self._oldest = 0

    def open(self, kind: int, now: int) -> Run:
        """Begin a run and return it."""
        run = Run(kind, now)
        self.runs.append(run)
        return run

    def enter(self, count: int) -> None:
        """Record ``count`` keys in the newest runs that LRU did not hold."""
        runs, edge = self.runs, self._edge
        held = self._held + count
        run = runs[edge]
        while (left := held - run.live - run.away) >= self._capacity:
            held = left
            run.beyond = True
            self.early_evicted -= run.away
            edge += 1
            run = runs[edge]
        self._held = held
        self._edge = edge

    def past_reach(self, run: Run) -> int:
        """Return how many of the oldest keys of ``run`` LRU has evicted, if it holds others."""
        if run is not self.runs[self._edge]:
            return 0
        return max(self._held - self._capacity, 0)

    @property
    def early_evictions(self) -> int:
        """Evicted keys that LRU would hold."""
        away = self.runs[self._edge].away
        return self.early_evicted - min(max(self._held - self._capacity, 0), away)

    def forget(self, run: Run, count: int) -> None:
        """Forget ``count`` evicted keys of ``run``."""
        run.away -= count
        if not run.beyond:
            self._held -= count
            self.early_evicted -= count

    def remove(self, run: Run) -> None:
        """Record that a copy of ``run`` was removed; LRU's tier would lose it too."""
        if not run.beyond:
            self._held -= 1

    def oldest(self) -> Run:
        """Return the oldest run with a copy; there must be one."""
        runs, place = self.runs, self._oldest
        while not runs[place].live:
            place += 1
        self._oldest = place
        return runs[place]

    def by_age(self) -> Iterator[ChunkCopy]:
        """Yield all copies, at least one, oldest use first."""
        self.oldest()
        for place in range(self._oldest, len(self.runs)):
            run = self.runs[place]
            yield from filter(None, islice(run.copies, run.first, None))

    def tidy(self) -> None:
        """Drop the runs without keys."""
        kept = [run for run in self.runs if run.live or run.away]
        self._edge = sum(run.beyond for run in kept)
        self._oldest = 0
        self.runs = kept


class RegretBudget:
    """The number of chunks that may be evicted although LRU would still hold them.

    A policy that learns does well until the traffic changes, and then it loses. Switching to
    LRU by who did better lately is too late: the hits are lost by then. So a budget bounds the
    *early evictions*, the evicted chunks that LRU would still hold. Each can cost one hit, so
    their number bounds the loss, whatever comes.

    The budget is a small share of the uses, plus the *lead*: hits on chunks that LRU would have
    evicted, less misses on chunks that LRU would have held. While nothing was won, what was
    lost and what can still be lost stay within that share. Wins are risked at odds, because
    early evictions of many prompts are not all lost at once. So a policy that wins departs
    further, and one that loses comes back while there is little to lose. The budget turns the
    regret of LeCaR (Vietri et al., HotStorage 2018) from a weight into a bound; for risking
    wins see Kelly, Bell System Technical Journal 1956.

    A prompt that misses one chunk is lost from there on, half of it on average, so a smaller
    budget counts as none. In a tier of a few prompts losses do not average out, and a prompt
    evicts its own beginning: such a tier stays with LRU.

    Args:
        capacity: Slots of the tier.
        keep: Share of a count that survives a renewal.

    Attributes:
        uses: Uses of any chunk.
        depths: Lengths of the prompts at those uses, summed up.
        lead: Hits on chunks that LRU would not have held, less misses on chunks that it would.
    """

    __slots__ = ("_capacity", "_keep", "depths", "lead", "uses")

    def __init__(self, capacity: int, keep: float) -> None:
        self._capacity = capacity
        self._keep = keep
        self.uses = 0.0
        self.depths = 0.0
        self.lead = 0.0

    @property
    def limit(self) -> float:
        """Most early evictions at a time."""
        uses, lead, depths = self.uses, self.lead, self.depths
        regret_budget = _SHARE * uses
        if (regret_budget + lead) * uses <= _MIN_PROMPT_SHARE * depths:
            return 0.0
        if _MIN_PROMPTS * depths > uses * self._capacity:
            return 0.0
        return regret_budget + (_ODDS * lead if lead > 0.0 else lead)

    def renew(self) -> None:
        """Reduce the weight of past counts."""
        keep = self._keep
        self.uses *= keep
        self.depths *= keep
        self.lead *= keep


class History:
    """Members, evicted keys, and what came of both.

    Evicted keys are remembered with their run, up to twice as many as there are slots. When the
    younger half is full the older half is forgotten at once.

    Args:
        capacity: Slots of the tier.

    Attributes:
        density: Hits that a slot earns, by class and age.
        regret_budget: Wins and losses against LRU.
        timeline: All runs.
        queues: The runs of each class, oldest first; some may have no copies.
        newest: The run that used copies move to.
        outside: Stands for the source of new chunks.
        span: Most copies of a run.
        ghosts: Evicted keys and their runs, the younger half.
        ghosts_before: The older half.
        members: Number of members.
        clock: Uses so far.
    """

    __slots__ = (
        "_capacity",
        "_interval",
        "_renew_at",
        "_renewals",
        "clock",
        "density",
        "ghosts",
        "ghosts_before",
        "members",
        "newest",
        "outside",
        "queues",
        "regret_budget",
        "span",
        "timeline",
    )

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        keep, keep_long = (
            0.5 ** (1 / (_RENEWALS_PER_TURN * turns))
            for turns in (_DENSITY_HALF_LIFE, _BUDGET_HALF_LIFE)
        )
        self._interval = max(capacity // _RENEWALS_PER_TURN, _MIN_INTERVAL)
        self._renew_at = 0
        self._renewals = 0
        self.clock = 0
        self.members = 0
        self.density = HitDensity(capacity, BELOW, keep, self._interval)
        self.regret_budget = RegretBudget(capacity, keep_long)
        self.timeline = Timeline(capacity)
        self.queues: list[deque[Run]] = [deque() for _ in range(KINDS)]
        self.ghosts: dict[ChunkKey, Run] = {}
        self.ghosts_before: dict[ChunkKey, Run] = {}
        self.span = min(max(capacity // _SPANS, _MIN_SPAN), _MAX_SPAN)
        self.outside = Run(NOWHERE, 0)
        self.outside.beyond = True
        self.newest = self.timeline.open(TAIL, 0)
        self.queues[TAIL].append(self.newest)

    def open(self, kind: int) -> Run:
        """Begin a new run, the newest."""
        if self.clock >= self._renew_at:
            self._renew()
        run = self.newest = self.timeline.open(kind, self.clock)
        self.queues[kind].append(run)
        return run

    def record_uses(self, count: int, depths: int) -> None:
        """Record ``count`` uses that moved copies to the newest run.

        Args:
            count: Number of uses.
            depths: The lengths of their prompts, summed up.
        """
        newest = self.newest
        newest.live += count
        self.density.add(newest.kind, newest.since, count)
        self.clock += count
        self.regret_budget.uses += count
        self.regret_budget.depths += depths

    def record_hits(self, source: Run, count: int) -> None:
        """Record that the last ``count`` uses moved members of ``source``, or new chunks."""
        if source is self.outside:
            self.members += count
            self.timeline.enter(count)
            return
        self.density.record_uses(source.kind, source.since, self.clock - source.since, count)
        self.drop(source, count)
        if source.beyond:
            self.regret_budget.lead += count
            self.timeline.enter(count)

    def record_returns(self, source: Run, count: int) -> None:
        """Record that the last ``count`` uses were of keys evicted from ``source``."""
        timeline = self.timeline
        self.density.record_uses(source.kind, source.since, self.clock - source.since, count)
        timeline.enter(0)  # the run at the end of LRU's reach may be empty by now
        self.members += count
        source.away -= count
        if source.beyond:
            timeline.enter(count)
        else:
            self.regret_budget.lead -= count - min(timeline.past_reach(source), count)
            timeline.early_evicted -= count

    def record_evicted(self, run: Run, count: int) -> None:
        """Record that ``count`` copies of ``run`` were evicted."""
        self.members -= count
        run.live -= count
        run.away += count
        if not run.live and run is not self.newest:
            run.clear()
        if not run.beyond:
            self.timeline.early_evicted += count

    def record_stayed(self, copy: ChunkCopy) -> None:
        """Make ``copy``, whose eviction was recorded, a member again, as if just used."""
        run: Run = copy.policy
        self.members += 1
        if self.pop_ghost(copy.key) is None:
            # It was evicted so long ago that it counts as new.
            self.requeue(copy, self.outside)
            return
        run.away -= 1
        if not run.beyond:
            self.timeline.early_evicted -= 1
        self.density.remove(run.kind, run.since, 1)
        self.requeue(copy, run)

    def record_removed(self, copy: ChunkCopy) -> None:
        """Record that ``copy`` was removed without being picked."""
        self.members -= 1
        self.timeline.remove(copy.policy)
        self._leave(copy)

    def record_spared(self, copy: ChunkCopy) -> None:
        """Move ``copy``, which must stay, to where a used copy goes."""
        source: Run = copy.policy
        self._leave(copy)
        self.requeue(copy, source)

    def requeue(self, copy: ChunkCopy, source: Run) -> None:
        """Append ``copy``, which is in no run, to the newest run without a use.

        Args:
            copy: Its ``policy`` still names its last run.
            source: The run in which LRU has it.
        """
        kind = copy.policy.kind
        run = self.newest
        if run.kind != kind or len(run.copies) >= self.span:
            run = self.open(kind)
        copy.policy = run
        copy.queued = len(run.copies)
        run.copies.append(copy)
        run.live += 1
        self.density.add(run.kind, run.since, 1)
        if source.beyond:
            self.timeline.enter(1)

    def drop(self, run: Run, count: int) -> None:
        """Remove ``count`` copies from the live ones of ``run``."""
        run.live -= count
        if not run.live and run is not self.newest:
            run.clear()

    def pop_ghost(self, key: ChunkKey) -> Run | None:
        """Forget the evicted ``key`` and return its run, or None if it is not remembered."""
        run = self.ghosts.pop(key, None)
        if run is None:
            run = self.ghosts_before.pop(key, None)
            if run is not None:
                run.away_before -= 1
        return run

    def has_ghost(self, keys: list[ChunkKey]) -> bool:
        """Return whether one of ``keys`` is a remembered evicted key."""
        return not (
            self.ghosts.keys().isdisjoint(keys) and self.ghosts_before.keys().isdisjoint(keys)
        )

    def drop_older_ghosts(self) -> None:
        """Forget the older half of the evicted keys if the younger half is full."""
        if len(self.ghosts) < self._capacity:
            return
        for run in self.timeline.runs:
            if count := run.away_before:
                self.timeline.forget(run, count)
                self.density.remove(run.kind, run.since, count)
            run.away_before = run.away
        self.ghosts_before = self.ghosts
        self.ghosts = {}

    def _leave(self, copy: ChunkCopy) -> None:
        """Remove ``copy`` from its run."""
        run: Run = copy.policy
        run.copies[copy.queued] = None
        self.drop(run, 1)
        self.density.remove(run.kind, run.since, 1)

    def _renew(self) -> None:
        """Renew the density table and the budget; now and then drop empty runs."""
        self._renew_at = self.clock + self._interval
        self._renewals += 1
        self.density.advance(self.clock)
        self.density.renew()
        self.regret_budget.renew()
        timeline = self.timeline
        if not self._renewals % _RENEWALS_PER_TURN or len(timeline.runs) > self._capacity // 2:
            timeline.tidy()
            self.queues = [deque(run for run in queue if run.live) for queue in self.queues]
