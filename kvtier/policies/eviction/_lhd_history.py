"""The history that :mod:`.hedged_lhd` keeps: cohorts, evicted keys and the regret budget.

Each call records many copies of one cohort, which move together. A use of ``count`` copies
changes three things:

* ages and classes (:class:`.HitDensity`)
* the order of uses, and the part of this order that LRU would hold (:class:`Timeline`)
* the hits won and lost against LRU (:class:`RegretBudget`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy
from kvtier.policies.eviction._hit_density import BELOW, KINDS, NOWHERE, TAIL, HitDensity

__all__ = ["Cohort", "History", "RegretBudget", "Timeline"]

_SPANS: Final = 64
"""Least number of cohorts per turn. A turn is as many uses as the tier has slots."""
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
"""Number of early evictions that each hit of the lead over LRU allows."""
_MIN_PROMPT_SHARE: Final = 0.5
"""Smallest budget that counts, as a share of the mean prompt length."""
_MIN_PROMPTS: Final = 16
"""Number of mean-length prompts that a tier must hold; smaller tiers stay with LRU."""
_EMPTY: Final[list[ChunkCopy | None]] = []
"""The list of every cohort without copies; most cohorts only count evicted keys."""


class Cohort:
    """Copies of one class, used one after the other.

    A prompt's chunks are used together, so their ages hardly differ. A use moves a copy to the
    newest cohort, and work by age or class is done once for a whole cohort.

    Attributes:
        kind: The class of the copies.
        since: Number of the use that began the cohort.
        copies: The copies, oldest use first; None where a copy left. A copy's ``policy`` is its
            cohort, and its ``queued`` is its index in this list.
        first: Index of the first entry that may be a copy.
        live: Number of copies.
        away: Number of remembered keys that were evicted from the cohort.
        away_before: Number of those keys that are in :attr:`History.ghosts_before`, which is
            forgotten first.
        beyond: Whether LRU would have evicted all copies of the cohort.
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
        """Free the memory of the list of copies, which is empty for good."""
        self.copies = _EMPTY
        self.first = 0

    def take(self, count: int) -> list[ChunkCopy]:
        """Remove and return up to ``count`` of the oldest copies; the oldest copy comes last.

        The returned copies keep their ``queued`` and still count as live.
        """
        copies, first = self.copies, self.first
        taken = list(islice(filter(None, islice(copies, first, None)), count))
        self.first = end = taken[-1].queued + 1
        copies[first:end] = [None] * (end - first)
        taken.reverse()
        return taken


class Timeline:
    """All cohorts, oldest first, and the cohort with the oldest key that LRU would hold.

    A cohort also counts its remembered evicted keys. LRU would hold the newest keys, as many as
    the tier has slots, so no list of LRU's keys is needed. LRU's *reach* is the cohort with the
    oldest key that LRU would hold: the reach advances when a use adds a key that LRU does not
    hold. In the cohort at the reach, LRU may hold only the newer keys.

    Args:
        capacity: Slots of the tier.

    Attributes:
        cohorts: The cohorts; those without keys are dropped now and then.
        early_evicted: Number of evicted keys in the cohort at LRU's reach and in newer cohorts.
    """

    __slots__ = ("_capacity", "_edge", "_held", "_oldest", "cohorts", "early_evicted")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.cohorts: list[Cohort] = []
        self.early_evicted = 0
        self._held = 0
        self._edge = 0
        self._oldest = 0

    def open(self, kind: int, now: int) -> Cohort:
        """Begin a new cohort and return the cohort."""
        cohort = Cohort(kind, now)
        self.cohorts.append(cohort)
        return cohort

    def enter(self, count: int) -> None:
        """Record ``count`` new keys that LRU did not hold, and advance LRU's reach."""
        cohorts, edge = self.cohorts, self._edge
        held = self._held + count
        cohort = cohorts[edge]
        while (left := held - cohort.live - cohort.away) >= self._capacity:
            held = left
            cohort.beyond = True
            self.early_evicted -= cohort.away
            edge += 1
            cohort = cohorts[edge]
        self._held = held
        self._edge = edge

    def past_reach(self, cohort: Cohort) -> int:
        """Return the number of keys of ``cohort`` that LRU would have evicted by now.

        The number is zero unless ``cohort`` is at LRU's reach.
        """
        if cohort is not self.cohorts[self._edge]:
            return 0
        return max(self._held - self._capacity, 0)

    @property
    def early_evictions(self) -> int:
        """Number of evicted keys that LRU would still hold."""
        away = self.cohorts[self._edge].away
        return self.early_evicted - min(max(self._held - self._capacity, 0), away)

    def forget(self, cohort: Cohort, count: int) -> None:
        """Forget ``count`` evicted keys of ``cohort``."""
        cohort.away -= count
        if not cohort.beyond:
            self._held -= count
            self.early_evicted -= count

    def remove(self, cohort: Cohort) -> None:
        """Record that a copy in ``cohort`` was removed; LRU would have lost it too."""
        if not cohort.beyond:
            self._held -= 1

    def oldest(self) -> Cohort:
        """Return the oldest cohort that is not empty. The tier must hold a copy."""
        cohorts, place = self.cohorts, self._oldest
        while not cohorts[place].live:
            place += 1
        self._oldest = place
        return cohorts[place]

    def by_age(self) -> Iterator[ChunkCopy]:
        """Yield all copies, oldest use first. The tier must hold a copy."""
        self.oldest()
        for place in range(self._oldest, len(self.cohorts)):
            cohort = self.cohorts[place]
            yield from filter(None, islice(cohort.copies, cohort.first, None))

    def tidy(self) -> None:
        """Drop the cohorts that have neither copies nor remembered keys."""
        kept = [cohort for cohort in self.cohorts if cohort.live or cohort.away]
        self._edge = sum(cohort.beyond for cohort in kept)
        self._oldest = 0
        self.cohorts = kept


class RegretBudget:
    """The number of chunks that may be evicted although LRU would still hold them.

    A learning policy loses hits when the traffic changes. Switching to LRU after LRU did better
    is too late, because the hits are lost by then. So a budget bounds the *early evictions*,
    the evicted chunks that LRU would still hold. Each early eviction can cost one hit, so their
    number bounds the loss for any traffic.

    The budget is a small share of the uses, plus the *lead*: hits on chunks that LRU would have
    evicted, less misses on chunks that LRU would have held. Before the first win, past and
    possible losses together stay within that small share. Each win allows several early
    evictions, because chunks of many prompts are rarely all missed at once. So a winning policy
    departs further from LRU, and a losing policy soon returns to LRU. The budget turns the
    regret of LeCaR (Vietri et al., HotStorage 2018) from a weight into a bound. On how much of
    its wins to risk, see Kelly, Bell System Technical Journal 1956.

    A missing chunk makes the rest of its prompt useless, half of the prompt on average. So a
    budget below half a prompt counts as zero. In a tier of a few prompts losses do not average
    out, and a prompt evicts its own beginning: such a tier stays with LRU.

    Args:
        capacity: Slots of the tier.
        keep: Share of a count that survives a renewal.

    Attributes:
        uses: Uses of any chunk.
        depths: Sum of the prompt lengths over those uses.
        lead: Hits on chunks that LRU would have evicted, less misses on chunks that LRU would
            have held.
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
        """Most early evictions allowed at a time."""
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
    """The members, the evicted keys, and the statistics of both.

    Evicted keys are remembered with their cohort, at most two per slot. When the younger half
    is full, the older half is forgotten at once.

    Args:
        capacity: Slots of the tier.

    Attributes:
        density: Hits that a slot earns, by class and age.
        regret_budget: Wins and losses against LRU.
        timeline: All cohorts.
        queues: The cohorts of each class, oldest first; some may have no copies.
        newest: The cohort to which used copies move.
        outside: A cohort without copies, which counts as the source of new chunks.
        span: Most copies of a cohort.
        ghosts: Evicted keys and their cohorts, the younger half.
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
        self.queues: list[deque[Cohort]] = [deque() for _ in range(KINDS)]
        self.ghosts: dict[ChunkKey, Cohort] = {}
        self.ghosts_before: dict[ChunkKey, Cohort] = {}
        self.span = min(max(capacity // _SPANS, _MIN_SPAN), _MAX_SPAN)
        self.outside = Cohort(NOWHERE, 0)
        self.outside.beyond = True
        self.newest = self.timeline.open(TAIL, 0)
        self.queues[TAIL].append(self.newest)

    def open(self, kind: int) -> Cohort:
        """Begin a new cohort, which becomes the newest."""
        if self.clock >= self._renew_at:
            self._renew()
        cohort = self.newest = self.timeline.open(kind, self.clock)
        self.queues[kind].append(cohort)
        return cohort

    def record_uses(self, count: int, depths: int) -> None:
        """Record ``count`` uses, each of which moved one copy to the newest cohort.

        Args:
            count: Number of uses.
            depths: Sum of the prompt lengths over these uses.
        """
        newest = self.newest
        newest.live += count
        self.density.add(newest.kind, newest.since, count)
        self.clock += count
        self.regret_budget.uses += count
        self.regret_budget.depths += depths

    def record_hits(self, source: Cohort, count: int) -> None:
        """Record ``count`` hits, the most recent uses, on copies of the cohort ``source``.

        For new chunks ``source`` is :attr:`outside`.
        """
        if source is self.outside:
            self.members += count
            self.timeline.enter(count)
            return
        self.density.record_uses(source.kind, source.since, self.clock - source.since, count)
        self.drop(source, count)
        if source.beyond:
            self.regret_budget.lead += count
            self.timeline.enter(count)

    def record_returns(self, source: Cohort, count: int) -> None:
        """Record that the last ``count`` uses brought back keys evicted from ``source``."""
        timeline = self.timeline
        self.density.record_uses(source.kind, source.since, self.clock - source.since, count)
        timeline.enter(0)  # the cohort at LRU's reach may be empty by now
        self.members += count
        source.away -= count
        if source.beyond:
            timeline.enter(count)
        else:
            self.regret_budget.lead -= count - min(timeline.past_reach(source), count)
            timeline.early_evicted -= count

    def record_evicted(self, cohort: Cohort, count: int) -> None:
        """Record that ``count`` copies of ``cohort`` were evicted."""
        self.members -= count
        cohort.live -= count
        cohort.away += count
        if not cohort.live and cohort is not self.newest:
            cohort.clear()
        if not cohort.beyond:
            self.timeline.early_evicted += count

    def record_stayed(self, copy: ChunkCopy) -> None:
        """Undo the recorded eviction of ``copy``; ``copy`` then counts as just used."""
        cohort: Cohort = copy.policy
        self.members += 1
        if self.pop_ghost(copy.key) is None:
            # Its key is forgotten, so it counts as new.
            self.requeue(copy, self.outside)
            return
        cohort.away -= 1
        if not cohort.beyond:
            self.timeline.early_evicted -= 1
        self.density.remove(cohort.kind, cohort.since, 1)
        self.requeue(copy, cohort)

    def record_removed(self, copy: ChunkCopy) -> None:
        """Record that ``copy`` was removed without being picked."""
        self.members -= 1
        self.timeline.remove(copy.policy)
        self._leave(copy)

    def record_spared(self, copy: ChunkCopy) -> None:
        """Move ``copy``, which must stay in the tier, to the newest cohort as if just used."""
        source: Cohort = copy.policy
        self._leave(copy)
        self.requeue(copy, source)

    def requeue(self, copy: ChunkCopy, source: Cohort) -> None:
        """Append ``copy``, which is in no cohort, to the newest cohort without recording a use.

        Args:
            copy: The copy; its ``policy`` still names its last cohort.
            source: The copy's last cohort; :attr:`outside` if the key was forgotten.
        """
        kind = copy.policy.kind
        cohort = self.newest
        if cohort.kind != kind or len(cohort.copies) >= self.span:
            cohort = self.open(kind)
        copy.policy = cohort
        copy.queued = len(cohort.copies)
        cohort.copies.append(copy)
        cohort.live += 1
        self.density.add(cohort.kind, cohort.since, 1)
        if source.beyond:
            self.timeline.enter(1)

    def drop(self, cohort: Cohort, count: int) -> None:
        """Reduce the number of live copies of ``cohort`` by ``count``."""
        cohort.live -= count
        if not cohort.live and cohort is not self.newest:
            cohort.clear()

    def pop_ghost(self, key: ChunkKey) -> Cohort | None:
        """Forget the evicted ``key`` and return the key's cohort; None for an unknown key."""
        cohort = self.ghosts.pop(key, None)
        if cohort is None:
            cohort = self.ghosts_before.pop(key, None)
            if cohort is not None:
                cohort.away_before -= 1
        return cohort

    def has_ghost(self, keys: list[ChunkKey]) -> bool:
        """Return whether one of ``keys`` is a remembered evicted key."""
        return not (
            self.ghosts.keys().isdisjoint(keys) and self.ghosts_before.keys().isdisjoint(keys)
        )

    def drop_older_ghosts(self) -> None:
        """Forget the older half of the evicted keys if the younger half is full."""
        if len(self.ghosts) < self._capacity:
            return
        for cohort in self.timeline.cohorts:
            if count := cohort.away_before:
                self.timeline.forget(cohort, count)
                self.density.remove(cohort.kind, cohort.since, count)
            cohort.away_before = cohort.away
        self.ghosts_before = self.ghosts
        self.ghosts = {}

    def _leave(self, copy: ChunkCopy) -> None:
        """Remove ``copy`` from its cohort."""
        cohort: Cohort = copy.policy
        cohort.copies[copy.queued] = None
        self.drop(cohort, 1)
        self.density.remove(cohort.kind, cohort.since, 1)

    def _renew(self) -> None:
        """Renew the density table and the budget; now and then drop empty cohorts."""
        self._renew_at = self.clock + self._interval
        self._renewals += 1
        self.density.advance(self.clock)
        self.density.renew()
        self.regret_budget.renew()
        timeline = self.timeline
        if (
            not self._renewals % _RENEWALS_PER_TURN
            or len(timeline.cohorts) > self._capacity // 2
        ):
            timeline.tidy()
            self.queues = [
                deque(cohort for cohort in queue if cohort.live) for queue in self.queues
            ]
