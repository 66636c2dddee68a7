"""The books of :mod:`.hedged_lhd`: who is here, who left, and what came of it.

Everything is booked for many copies at once: they are of one run, and go one way. One use of
``count`` copies changes the ages and the classes (:mod:`._hit_density`), the order of uses and
LRU's reach in it (:mod:`._runs`), and what was won and lost against LRU (:mod:`._stake`).

Keys that left are remembered with their run: as many as there are slots, and as many again
until the older half is forgotten at once, which is cheaper than one by one.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy
from kvtier.policies.eviction._classes import BELOW, KINDS, NOWHERE, TAIL
from kvtier.policies.eviction._hit_density import HitDensity
from kvtier.policies.eviction._runs import Run, Timeline
from kvtier.policies.eviction._stake import Stake

__all__ = ["Books"]

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


class Books:
    """Who is here and who left.

    Args:
        capacity: Slots of the tier.

    Attributes:
        density: What a slot earns, by class and age.
        stake: What was won and lost against LRU.
        timeline: All runs.
        queues: The runs of each class, oldest first; some of them may have no copy.
        newest: The run that copies go to now.
        outside: Where new chunks come from.
        span: Most places of a run.
        ghosts: Runs of the keys that left, the younger half.
        ghosts_before: The older half.
        members: Copies that are here.
        clock: Uses so far.
    """

    __slots__ = (
        "_capacity",
        "_interval",
        "_learn_at",
        "_lessons",
        "clock",
        "density",
        "ghosts",
        "ghosts_before",
        "members",
        "newest",
        "outside",
        "queues",
        "span",
        "stake",
        "timeline",
    )

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        keep, keep_long = (
            0.5 ** (1 / (_LEARN_EVERY * turns)) for turns in (_MEMORY, _LONG_MEMORY)
        )
        self._interval = max(capacity // _LEARN_EVERY, _LEARN_LEAST)
        self._learn_at = 0
        self._lessons = 0
        self.clock = 0
        self.members = 0
        self.density = HitDensity(capacity, BELOW, keep, self._interval)
        self.stake = Stake(capacity, keep_long)
        self.timeline = Timeline(capacity)
        self.queues: list[deque[Run]] = [deque() for _ in range(KINDS)]
        self.ghosts: dict[ChunkKey, Run] = {}
        self.ghosts_before: dict[ChunkKey, Run] = {}
        self.span = min(max(capacity // _SPANS, _SPAN_LEAST), _SPAN_MOST)
        self.outside = Run(NOWHERE, 0)
        self.outside.beyond = True
        self.newest = self.timeline.open(TAIL, 0)
        self.queues[TAIL].append(self.newest)

    def open(self, kind: int) -> Run:
        """Begin a new run, the newest."""
        if self.clock >= self._learn_at:
            self._learn()
        run = self.newest = self.timeline.open(kind, self.clock)
        self.queues[kind].append(run)
        return run

    def note_uses(self, count: int, depths: int) -> None:
        """Note ``count`` uses that brought copies to the newest run.

        Args:
            count: How many.
            depths: The lengths of their prompts, summed up.
        """
        newest = self.newest
        newest.live += count
        self.density.came(newest.kind, newest.since, count)
        self.clock += count
        self.stake.uses += count
        self.stake.depths += depths

    def note_hits(self, source: Run, count: int) -> None:
        """Note that the last ``count`` uses were of copies of ``source``, or of new chunks."""
        if source is self.outside:
            self.members += count
            self.timeline.enter(count)
            return
        self.density.used(source.kind, source.since, self.clock - source.since, count)
        self.lose(source, count)
        if source.beyond:
            self.stake.lead += count
            self.timeline.enter(count)

    def note_returns(self, source: Run, count: int) -> None:
        """Note that the last ``count`` uses were of chunks that had left from ``source``."""
        timeline = self.timeline
        self.density.used(source.kind, source.since, self.clock - source.since, count)
        timeline.enter(0)  # nothing; but the run at the end of LRU's reach may be empty by now
        self.members += count
        source.away -= count
        if source.beyond:
            timeline.enter(count)
        else:
            self.stake.lead -= count - min(timeline.past_reach(source), count)
            timeline.departed -= count

    def note_evicted(self, run: Run, count: int) -> None:
        """Note that ``count`` copies of ``run`` were evicted."""
        self.members -= count
        run.live -= count
        run.away += count
        if not run.live and run is not self.newest:
            run.clear()
        if not run.beyond:
            self.timeline.departed += count

    def note_stayed(self, copy: ChunkCopy) -> None:
        """Note that ``copy``, whose eviction was booked, is here after all, as if just used."""
        run: Run = copy.policy
        self.members += 1
        if self.forget(copy.key) is None:
            # Evicted so long ago that it is like a new one.
            self.respite(copy, self.outside)
            return
        run.away -= 1
        if not run.beyond:
            self.timeline.departed -= 1
        self.density.went(run.kind, run.since, 1)
        self.respite(copy, run)

    def note_removed(self, copy: ChunkCopy) -> None:
        """Note that ``copy`` left for another reason than to make room."""
        self.members -= 1
        self.timeline.remove(copy.policy)
        self._leave(copy)

    def note_spared(self, copy: ChunkCopy) -> None:
        """Put ``copy``, which may not go, where one goes that was just used."""
        source: Run = copy.policy
        self._leave(copy)
        self.respite(copy, source)

    def respite(self, copy: ChunkCopy, source: Run) -> None:
        """Let ``copy``, which is in no run, stand last without having been used.

        Args:
            copy: Its ``policy`` still names its last run.
            source: Where LRU has it.
        """
        kind = copy.policy.kind
        run = self.newest
        if run.kind != kind or len(run.copies) >= self.span:
            run = self.open(kind)
        copy.policy = run
        copy.queued = len(run.copies)
        run.copies.append(copy)
        run.live += 1
        self.density.came(run.kind, run.since, 1)
        if source.beyond:
            self.timeline.enter(1)

    def lose(self, run: Run, count: int) -> None:
        """Note that ``count`` copies of ``run`` are there no more."""
        run.live -= count
        if not run.live and run is not self.newest:
            run.clear()

    def forget(self, key: ChunkKey) -> Run | None:
        """Return the run that ``key`` left from, if that is remembered, and forget it."""
        run = self.ghosts.pop(key, None)
        if run is None:
            run = self.ghosts_before.pop(key, None)
            if run is not None:
                run.away_before -= 1
        return run

    def remembers_any(self, keys: list[ChunkKey]) -> bool:
        """Return whether one of ``keys`` left and is remembered."""
        return not (
            self.ghosts.keys().isdisjoint(keys) and self.ghosts_before.keys().isdisjoint(keys)
        )

    def forget_older_half(self) -> None:
        """Forget the older of the keys that left, if there are as many younger as slots."""
        if len(self.ghosts) < self._capacity:
            return
        for run in self.timeline.runs:
            if count := run.away_before:
                self.timeline.forget(run, count)
                self.density.went(run.kind, run.since, count)
            run.away_before = run.away
        self.ghosts_before = self.ghosts
        self.ghosts = {}

    def _leave(self, copy: ChunkCopy) -> None:
        """Take ``copy`` out of its run."""
        run: Run = copy.policy
        run.copies[copy.queued] = None
        self.lose(run, 1)
        self.density.went(run.kind, run.since, 1)

    def _learn(self) -> None:
        """Look at the runs: how old they grew unused and, now and then, which are empty."""
        self._learn_at = self.clock + self._interval
        self._lessons += 1
        self.density.grow_older(self.clock)
        self.density.learn()
        self.stake.renew()
        timeline = self.timeline
        if not self._lessons % _LEARN_EVERY or len(timeline.runs) > self._capacity // 2:
            timeline.tidy()
            self.queues = [deque(run for run in queue if run.live) for queue in self.queues]
