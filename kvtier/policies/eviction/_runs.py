"""Chunks that were used together, in the order of their last uses, and what LRU would hold.

A prompt's chunks are used together, so their ages differ by nothing that matters. They stand
in *runs*: chunks of one class, used one after the other. A use moves the copy to the newest
run, and whatever is done by age or class is done once for many chunks.

A run also counts the keys whose last use is in it but that were evicted since, as far as they
are remembered. Then the newest runs that count as many keys as the tier has slots are what LRU
would hold, and no list of LRU's keys is needed: the *reach* of LRU is a place in the timeline,
which moves on as keys come in from beyond it. Of the run at that place LRU would hold a part;
it counts as within reach as a whole, so runs are kept short.
"""

from __future__ import annotations

from kvtier.policies.base import ChunkCopy

__all__ = ["Run", "Timeline"]


class Run:
    """Copies of one class whose last use was at about the same time.

    Attributes:
        kind: Their class.
        since: Number of the use that began it.
        copies: The copies, oldest use first; each names this run as its ``policy``.
        away: Keys that were evicted from it and are remembered.
        beyond: Whether LRU would have let all of it go.
        octave: Octave of its age when it was last looked at.
    """

    __slots__ = ("away", "beyond", "copies", "kind", "octave", "since")

    def __init__(self, kind: int, since: int) -> None:
        self.kind = kind
        self.since = since
        self.copies: dict[ChunkCopy, None] = {}
        self.away = 0
        self.beyond = False
        self.octave = 0

    @property
    def keys(self) -> int:
        """Keys that it counts."""
        return len(self.copies) + self.away


class Timeline:
    """All runs, oldest first.

    Args:
        capacity: Slots of the tier.

    Attributes:
        runs: The runs; those without any key are dropped now and then.
        departed: Keys within LRU's reach that are not here.
    """

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
        self._held += count
        runs = self.runs
        run = runs[self._edge]
        while self._held - run.keys >= self._capacity:
            run.beyond = True
            self._held -= run.keys
            self.departed -= run.away
            self._edge += 1
            run = runs[self._edge]

    def forget(self, run: Run) -> None:
        """Note that a key of ``run`` that was away is forgotten."""
        run.away -= 1
        if not run.beyond:
            self._held -= 1
            self.departed -= 1

    def remove(self, run: Run) -> None:
        """Note that a copy of ``run`` left, and would have left LRU's tier as well."""
        if not run.beyond:
            self._held -= 1

    def oldest(self) -> Run:
        """Return the oldest run with a copy here; there must be one."""
        runs, place = self.runs, self._oldest
        while not runs[place].copies:
            place += 1
        self._oldest = place
        return runs[place]

    def tidy(self) -> None:
        """Drop the runs that count no key."""
        kept = [run for run in self.runs if run.copies or run.away]
        self._edge = sum(run.beyond for run in kept)
        self._oldest = 0
        self.runs = kept
