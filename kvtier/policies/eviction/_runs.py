"""Chunks that were used together, in the order of their last uses, and what LRU would hold.

A prompt's chunks are used together, so their ages differ by nothing that matters. They stand
in *runs*: chunks of one class, used one after the other. A use moves the copy to the newest
run, and whatever is done by age or class is done once for many chunks.

A run also counts the keys whose last use is in it but that were evicted since, as far as they
are remembered. Then the newest runs that count as many keys as the tier has slots are what LRU
would hold, and no list of LRU's keys is needed: the *reach* of LRU is a place in the timeline,
which moves on as keys come in from beyond it. Of the run at that place LRU would hold a part;
its oldest keys are those that LRU let go of.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from kvtier.policies.base import ChunkCopy

__all__ = ["Run", "Timeline"]

_EMPTY: Final[list[ChunkCopy | None]] = []
"""Of every run that will have no copy again; most runs only count what left."""


class Run:
    """Copies of one class whose last use was at about the same time.

    Attributes:
        kind: Their class.
        since: Number of the use that began it.
        copies: The copies, oldest use first, and None where one was. Each names this run as its
            ``policy``, and its place in the list as its ``queued``.
        first: Place before which there is none any more.
        live: How many there are.
        away: Keys that were evicted from it and are remembered.
        away_before: Those of them that are forgotten next.
        beyond: Whether LRU would have let all of it go.
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
        """Let go of what is left of a list without a copy; there will be none again."""
        self.copies = _EMPTY
        self.first = 0

    def take(self, count: int) -> list[ChunkCopy]:
        """Take the ``count`` oldest copies off, or all there are; the oldest comes last.

        They keep their ``queued``, and count as live until somebody says otherwise.
        """
        copies, first = self.copies, self.first
        taken = list(islice(filter(None, islice(copies, first, None)), count))
        self.first = end = taken[-1].queued + 1
        copies[first:end] = [None] * (end - first)
        taken.reverse()
        return taken


class Timeline:
    """All runs, oldest first.

    Args:
        capacity: Slots of the tier.

    Attributes:
        runs: The runs; those without any key are dropped now and then.
        departed: Keys that are not here, of runs that are within LRU's reach or partly so.
    """

    __slots__ = ("_capacity", "_edge", "_held", "_oldest", "departed", "runs")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.runs: list[Run] = []
        self.departed = 0
        self._held = 0
        self._edge = 0
        self._oldest = 0

    def open(self, kind: int, now: int) -> Run:
        """Begin a run and return it."""
        run = Run(kind, now)
        self.runs.append(run)
        return run

    def enter(self, count: int) -> None:
        """Note that the newest runs got ``count`` keys that LRU did not hold."""
        runs, edge = self.runs, self._edge
        held = self._held + count
        run = runs[edge]
        while (left := held - run.live - run.away) >= self._capacity:
            held = left
            run.beyond = True
            self.departed -= run.away
            edge += 1
            run = runs[edge]
        self._held = held
        self._edge = edge

    def past_reach(self, run: Run) -> int:
        """Return how many keys of ``run``, its oldest, LRU has let go of if it holds others."""
        if run is not self.runs[self._edge]:
            return 0
        return max(self._held - self._capacity, 0)

    @property
    def departures(self) -> int:
        """Keys that LRU holds and that are not here."""
        away = self.runs[self._edge].away
        return self.departed - min(max(self._held - self._capacity, 0), away)

    def forget(self, run: Run, count: int) -> None:
        """Note that ``count`` keys of ``run`` that were away are forgotten."""
        run.away -= count
        if not run.beyond:
            self._held -= count
            self.departed -= count

    def remove(self, run: Run) -> None:
        """Note that a copy of ``run`` left, and would have left LRU's tier as well."""
        if not run.beyond:
            self._held -= 1

    def oldest(self) -> Run:
        """Return the oldest run with a copy here; there must be one."""
        runs, place = self.runs, self._oldest
        while not runs[place].live:
            place += 1
        self._oldest = place
        return runs[place]

    def by_age(self) -> Iterator[ChunkCopy]:
        """Yield the copies that are here, of which there must be one, oldest use first."""
        self.oldest()
        for place in range(self._oldest, len(self.runs)):
            run = self.runs[place]
            yield from filter(None, islice(run.copies, run.first, None))

    def tidy(self) -> None:
        """Drop the runs that count no key."""
        kept = [run for run in self.runs if run.live or run.away]
        self._edge = sum(run.beyond for run in kept)
        self._oldest = 0
        self.runs = kept
