"""Copies chunks down as soon as they must be below, and sees to those that must later.

A chunk that must still reach a slower tier is *dirty* and is no victim. With write-through it
is dirty from the moment it is stored until it arrived below; with write-on-evict it becomes
so only by being new, and is sent down when the tier's :mod:`~kvtier.manager.reserves` run low.
Either way an eviction never waits for a disk, and a chunk that could not be copied is counted
as lost, never silently forgotten.

When a slower tier takes chunks more slowly than they are stored, its backlog grows. Beyond a
bound the newest chunks are not queued at all: they are hits in RAM like any other, but will not
outlive it. Dropping the newest keeps the heads of prefixes, without which their tails are of no
use, and costs a future miss where a longer backlog would take RAM from what is hot now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from kvtier.manager.demotion_jobs import DemotionJobs
from kvtier.manager.ladder import Ladder
from kvtier.manager.placing import long_enough, places_of, targets_of
from kvtier.manager.reserves import Reserves
from kvtier.manager.run import Run, without
from kvtier.policies import ChunkCopy, CopyState

__all__ = ["Demoter"]

_RESIDENT = CopyState.RESIDENT


class Demoter:
    """Queues what must go down from RAM, and hands it out within the queue limits."""

    def __init__(self, ladder: Ladder, jobs: DemotionJobs, reserves: Reserves) -> None:
        self._ladder = ladder
        self._jobs = jobs
        self._reserves = reserves
        self._queues: list[deque[Run]] = [deque() for _ in ladder.tiers]
        self._queued = [0] * len(ladder.tiers)
        self._shortest = ladder.placement.min_chunks

    @property
    def queued(self) -> int:
        """Copies that wait to be sent down."""
        return sum(self._queued)

    def publish(self, run: Run) -> None:
        """Make chunks that were stored hits in RAM, and see that they get where they must."""
        ladder, copies = self._ladder, run.copies
        ladder.publish(ladder.ram, copies)
        if len(ladder.tiers) == 1 or not copies:
            return
        if self._shortest > 1:
            self._send_down(copies)
        else:
            self._place(run)

    def used(self, copies: Sequence[ChunkCopy]) -> None:
        """Decide again where chunks that were loaded from RAM must go."""
        if self._ladder.placement.places_used and len(self._ladder.tiers) > 1:
            self._send_down(copies)

    def flush(self) -> None:
        """Plan jobs for what is queued and what should leave, within the queue limits."""
        if self._reserves.tiers:
            self._reserves.refill()
        if any(self._queues):
            for index, queue in enumerate(self._queues):
                if queue:
                    self._drain(index)

    def flush_all(self) -> None:
        """Queue every dirty copy of RAM, whatever the reserve; for an orderly shutdown.

        What is kept in RAM, or is being loaded, goes down like the rest: its pins say nothing
        of whether it is on its way.
        """
        ladder = self._ladder
        going = {id(copy) for copy in chain(self.waiting(), self._jobs.sources(ladder.ram))}
        owed = [
            copy
            for copy in ladder.ram.copies.values()
            if copy.dirty and copy.state == _RESIDENT and id(copy) not in going
        ]
        for target, group in targets_of(ladder, owed, ladder.ram.index).items():
            if target is not None:
                ladder.ram.pin_many(group)
                self._enqueue(target, ladder.ram.run_of(group))
        self.flush()

    def waiting(self) -> Iterator[ChunkCopy]:
        """Yield the copies that wait to be sent down; some may be gone from RAM."""
        return chain.from_iterable(run.copies for queue in self._queues for run in queue)

    def clear(self) -> None:
        """Forget what is queued; for a reset of the cache."""
        for queue in self._queues:
            queue.clear()
        self._queued = [0] * len(self._queued)
        self._jobs.clear()

    def _send_down(self, copies: Iterable[ChunkCopy]) -> None:
        """Do :meth:`_place` for those of ``copies`` that owe nothing, and what comes before."""
        if self._shortest > 1:
            copies = dict.fromkeys(long_enough(self._ladder, copies, self._shortest))
        new = [copy for copy in copies if not copy.dirty]
        if new:
            self._place(self._ladder.ram.run_of(new))

    def _place(self, run: Run) -> None:
        """See that copies in RAM that owe nothing yet get where they must."""
        ram = self._ladder.ram
        going, staying = places_of(self._ladder, run)
        for target, part in going:
            fitting = self._cut_to_backlog(part, target)
            if fitting is not None:
                ram.owe_many(fitting.copies)
                self._enqueue(target, fitting)
        self._reserves.adopt(ram, staying)

    def _cut_to_backlog(self, run: Run, target: int) -> Run | None:
        """Return what of ``run`` does not leave tier ``target`` too far behind, if any."""
        ladder, chunks = self._ladder, len(run.copies)
        behind = self._queued[target] + self._jobs.in_flight[target]
        fits = max(ladder.limits.backlog - behind, 0)
        if fits >= chunks:
            return run if chunks else None
        ladder.tiers[target].counters.dropped += chunks - fits
        ladder.ram.counters.lost += chunks - fits
        return run.head(fits) if fits else None

    def _enqueue(self, target: int, run: Run) -> None:
        """Queue copies that owe themselves to tier ``target`` and are pinned for it."""
        self._queues[target].append(run)
        self._queued[target] += len(run.copies)

    def _drain(self, index: int) -> None:
        """Plan jobs for what is queued for tier ``index``, within its queue limit."""
        queue, ram, limits = self._queues[index], self._ladder.ram, self._ladder.limits
        while queue:
            room = limits.queue - self._jobs.in_flight[index]
            if not self._is_roomy(index):
                room = min(room, limits.batch)
            run = self._take(index, room)
            if run is None:
                break
            sent = self._jobs.send(ram, run, index)
            # The pins of those in the queue are the job's from now on.
            if sent < len(run.copies):
                ram.unpin_many(run.copies[sent:])
                break

    def _is_roomy(self, index: int) -> bool:
        """Return whether room may be made at once for all that is queued for tier ``index``.

        Otherwise it is made job by job: what finds none is lost, and what was not tried yet is
        not. A policy that hears of misses, or picks leaves only, may answer otherwise then.
        """
        target = self._ladder.tiers[index]
        policy = target.eviction
        simple = not policy.tracks_misses and not policy.leaf_only
        return simple and self._queued[index] <= target.room

    def _take(self, index: int, room: int) -> Run | None:
        """Take the oldest queued copies that still need to go to tier ``index``."""
        queue = self._queues[index]
        taken: list[Run] = []
        while queue and room > 0:
            run = queue.popleft()
            if len(run.copies) > room:
                run, later = run.cut(room)
                queue.appendleft(later)
            self._queued[index] -= len(run.copies)
            run = self._still_going(run, index)
            room -= len(run.copies)
            taken.append(run)
        return Run.join(taken) if taken else None

    def _still_going(self, run: Run, index: int) -> Run:
        """Return what of ``run`` must still go to tier ``index``; let go of the rest."""
        ram, there = self._ladder.ram, self._ladder.tiers[index].copies
        if run.departed == ram.departed and there.keys().isdisjoint(run.keys):
            return run
        going = [
            copy for copy in run.copies if copy.state == _RESIDENT and copy.key not in there
        ]
        others = without(run.copies, going)
        ram.unpin_many(others)
        self._jobs.settle_sources(ram, others)
        return ram.run_of(going)
