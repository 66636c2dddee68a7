"""Who goes next: how :mod:`.hedged_lhd` chooses, and what it keeps of a choice.

Room is taken from the class whose oldest chunk has the lowest hit density. Within a class the
order is LRU, so only the oldest of each need be compared. The policy departs from LRU only as
far as :mod:`._stake` allows, and where it allows nothing the victims are exactly LRU's. Where
the classes differ by little (:data:`_CLEARLY`) it does not depart either.

A choice is dear and a run that was chosen is finished before the next, so a choice takes as
many copies off the run as the budget allows, and each of them is *granted* to the next pick. A
use of the run, or anything else that could change the choice, puts back the rest.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from kvtier.policies.base import ChunkCopy
from kvtier.policies.eviction._books import Books
from kvtier.policies.eviction._classes import NOWHERE
from kvtier.policies.eviction._runs import Run

__all__ = ["Victims"]

_CLEARLY: Final = 0.7
"""Share of the oldest chunk's density below which another class is taken from."""


class Victims:
    """Chooses, and holds what is granted.

    Args:
        capacity: Slots of the tier.
        books: Who is here.

    Attributes:
        granted: Copies of one run that are the next victims, the next one last.
        run: That run.
    """

    __slots__ = ("_books", "_capacity", "_unsettled", "granted", "run")

    def __init__(self, capacity: int, books: Books) -> None:
        self._capacity = capacity
        self._books = books
        self.run = Run(NOWHERE, 0)
        self.granted: list[ChunkCopy] = []
        self._unsettled = 0

    def settle(self) -> None:
        """Book the granted copies that were picked."""
        picked = self._unsettled - len(self.granted)
        if picked:
            self._unsettled -= picked
            self._books.note_evicted(self.run, picked)

    def next(self, count: int) -> list[ChunkCopy]:
        """Take the next ``count`` granted copies, or all there are, the next one first."""
        granted = self.granted
        taken = granted[-count:]
        del granted[-count:]
        taken.reverse()
        return taken

    def give_back(self, taken: list[ChunkCopy], refused: ChunkCopy) -> list[ChunkCopy]:
        """Grant again what comes after ``refused`` in ``taken``; return what comes before."""
        place = taken.index(refused)
        self.granted += taken[:place:-1]
        return taken[:place]

    def recall(self) -> None:
        """Put the granted copies back that were not picked, and book the others."""
        self.settle()
        granted, run = self.granted, self.run
        if granted:
            run.first = granted[-1].queued
            for copy in granted:
                run.copies[copy.queued] = copy
            granted.clear()
        self._unsettled = 0

    def choose(self, *, by_age: bool) -> None:
        """Grant the next victims, of which there are none left; everything is settled.

        Args:
            by_age: Whether to grant but one, the oldest.
        """
        books = self._books
        if not books.members:
            return
        books.forget_older_half()
        timeline = books.timeline
        run = timeline.oldest()
        count = 1 if by_age else run.live
        if not by_age:
            budget = books.stake.limit - timeline.departures
            if budget > 0.0 or run.beyond:
                worst = self._worst(run)
                if worst is not run and (worst.beyond or budget > 0.0):
                    run, count = worst, worst.live
                    if not run.beyond:
                        count = min(count, ceil(budget))
        self.grant(run, min(count, self._capacity - len(books.ghosts)))

    def grant(self, run: Run, count: int) -> None:
        """Grant the ``count`` oldest copies of ``run``, or all there are."""
        self.run = run
        self.granted = run.take(count)
        self._unsettled = len(self.granted)

    def _worst(self, oldest: Run) -> Run:
        """Return the run whose slots are clearly worth least, or the oldest one."""
        books = self._books
        clock, newest = books.clock, books.newest
        table, lowest = books.density.table, books.density.lowest
        worst = oldest
        least = _CLEARLY * table[worst.kind][(clock - worst.since).bit_length()]
        for kind, queue in enumerate(books.queues):
            while queue and lowest[kind] < least:
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
