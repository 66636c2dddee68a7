"""Copies chunks down, ahead of need.

A chunk that must still reach a slower tier is *dirty* and is no victim. With write-through it
is dirty from the moment it is stored until it arrived below; with write-on-evict it becomes
so only by being new, and is sent down when the tier's reserve of free slots runs low: the
best victims are taken out of the order and leave, at once if a slower tier has them, else
when they have been copied. Either way an eviction never waits for a disk, and a chunk that
could not be copied is counted as lost, never silently forgotten.

When a slower tier takes chunks more slowly than they are stored, its backlog grows. Beyond a
bound the newest chunks are not queued at all: they are hits in RAM like any other, but will not
outlive it. Dropping the newest keeps the heads of prefixes, without which their tails are of no
use, and costs a future miss where a longer backlog would take RAM from what is hot now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress

from kvtier.manager.ladder import Ladder, first_whole
from kvtier.manager.ledger import JobRecord
from kvtier.manager.run import Run
from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy, CopyState
from kvtier.types import Outcome, TransferResult, Why

__all__ = ["Demoter"]

_RESIDENT = CopyState.RESIDENT
_DONE = Outcome.DONE
_DEMOTE = Why.DEMOTE


class Demoter:
    """Plans the jobs that copy chunks to slower tiers."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._queues: list[deque[Run]] = [deque() for _ in ladder.tiers]
        self._queued = [0] * len(ladder.tiers)
        self._in_flight = [0] * len(ladder.tiers)
        self._reserves = [
            int(ladder.limits.reserve * tier.slots.capacity) for tier in ladder.tiers
        ]
        self._evicting = [
            tier
            for tier in ladder.tiers
            if ladder.placement.demotion_targets(tier.index, len(ladder.tiers))
        ]
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

    def adopt(self, tier: TierState, copies: Sequence[ChunkCopy]) -> None:
        """Mark dirty those of ``copies``, new in ``tier`` alone, that must not vanish."""
        if tier not in self._evicting or not copies:
            return
        targets = self._ladder.placement.demote_many(copies, tier.index, self._ladder.ctx)
        groups = _by_target(copies, targets, restricted=self._ladder.restricts_stores)
        for target, group in groups.items():
            if target is not None:
                tier.mark_dirty_many(group)

    def flush(self) -> None:
        """Plan jobs for what is queued and what should leave, within the queue limits."""
        for tier in self._evicting:
            if tier.wanted or tier.slots.free + len(tier.leaving) < self._reserves[tier.index]:
                self._reclaim(tier)
        if any(self._queues):
            for index, queue in enumerate(self._queues):
                if queue:
                    self._drain(index)

    def _drain(self, index: int) -> None:
        """Plan jobs for what is queued for tier ``index``, within its queue limit."""
        queue, ram, limits = self._queues[index], self._ladder.ram, self._ladder.limits
        while queue:
            room = limits.queue - self._in_flight[index]
            if not self._is_roomy(index):
                room = min(room, limits.batch)
            run = self._take(index, room)
            if run is None:
                break
            sent = self._send(ram, run, index, batch=limits.batch)
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
        simple = not policy.hears_misses and not policy.leaf_only
        return simple and self._queued[index] <= target.room

    def apply(self, record: JobRecord, result: TransferResult) -> None:
        """Take a demotion job's outcome into account."""
        if not result.settled:
            # Its slots stay taken, but it must not keep later jobs from being sent, and
            # refused.
            record.late = True
            self._in_flight[record.destination] -= len(record.sources)
            self._ladder.tiers[record.destination].counters.expired += len(record.sources)
            return
        ladder = self._ladder
        source_tier = ladder.tiers[record.source]
        target = ladder.tiers[record.destination]
        if not record.late:
            self._in_flight[record.destination] -= len(record.sources)
        arrived = record.destinations
        if result.outcomes.count(_DONE) < len(arrived):
            arrived = self._arrived(record, result)
        source_tier.sent(record.sources)
        if source_tier.leaving:
            self._let_go(
                source_tier,
                Run(record.sources, record.keys, record.source_slots, source_tier.departed),
            )
        source_tier.counters.demoted += len(arrived)
        ladder.publish(target, arrived)
        self.adopt(target, arrived)

    def flush_all(self) -> None:
        """Queue every dirty copy of RAM, whatever the reserve; for an orderly shutdown."""
        ladder = self._ladder
        queued = {id(copy) for copy in self.waiting()}
        owed = [
            copy
            for copy in ladder.ram.copies.values()
            if copy.dirty
            and not copy.pins
            and copy.state == _RESIDENT
            and id(copy) not in queued
        ]
        targets = ladder.placement.demote_many(owed, 0, ladder.ctx)
        groups = _by_target(owed, targets, restricted=ladder.restricts_stores)
        for target, group in groups.items():
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
        self._in_flight = [0] * len(self._in_flight)

    def _arrived(self, record: JobRecord, result: TransferResult) -> list[ChunkCopy]:
        """Give up the chunks of a job that did not arrive and return the others."""
        source_tier = self._ladder.tiers[record.source]
        target = self._ladder.tiers[record.destination]
        arrived: list[ChunkCopy] = []
        for source, copy, outcome in zip(
            record.sources, record.destinations, result.outcomes, strict=True
        ):
            if outcome is Outcome.DONE:
                arrived.append(copy)
                continue
            target.abort(copy)
            if not record.late:  # else it was counted when its deadline passed
                target.counters.note_failure(outcome, reading=False)
            source_tier.counters.lost += 1
            if outcome is Outcome.CORRUPT and record.source:
                self._ladder.condemn(source_tier, source)
        return arrived

    def _long_enough(self, copies: Iterable[ChunkCopy]) -> Iterator[ChunkCopy]:
        """Yield those of ``copies`` whose prefix is worth copying down."""
        shortest = self._shortest
        for copy in copies:
            length = copy.depth + 1
            if length == shortest:
                # Now they are worth it; without them this one would be stranded below.
                yield from self._before(copy)
            if length >= shortest:
                yield copy

    def _before(self, copy: ChunkCopy) -> list[ChunkCopy]:
        """Return the chunks before ``copy`` that RAM holds without a gap, root to leaf."""
        members = self._ladder.ram.copies
        before: list[ChunkCopy] = []
        while copy.depth and copy.parent is not None:
            parent = members.get(copy.parent)
            if parent is None or parent.state != _RESIDENT:
                break
            # It may have been stored anew since, behind another chunk.
            if parent.depth != copy.depth - 1:
                break
            before.append(parent)
            copy = parent
        before.reverse()
        return before

    def _send_down(self, copies: Iterable[ChunkCopy]) -> None:
        """Do :meth:`_place` for those of ``copies`` that owe nothing, and what comes before."""
        if self._shortest > 1:
            copies = dict.fromkeys(self._long_enough(copies))
        new = [copy for copy in copies if not copy.dirty]
        if new:
            self._place(self._ladder.ram.run_of(new))

    def _place(self, run: Run) -> None:
        """See that copies in RAM that owe nothing yet get where they must."""
        going, staying = self._decide(run)
        for target, part in going:
            self._ladder.ram.owe_many(part.copies)
            self._enqueue(target, part)
        self.adopt(self._ladder.ram, staying)

    def _decide(self, run: Run) -> tuple[list[tuple[int, Run]], Sequence[ChunkCopy]]:
        """Say where copies must go soon that owe nothing yet.

        Returns:
            What goes to which tier, all of ``run`` being ``run`` itself, and what goes to none.
        """
        ladder = self._ladder
        new = run.copies
        if ladder.holds_any(run.keys, slower_than=0):
            new = [copy for copy in new if first_whole(ladder.slower, copy.key) is None]
        staying = new
        going: list[tuple[int, Run]] = []
        for target, group in self._placed(new).items():
            allowed = group
            if ladder.restricts_stores:
                allowed = [copy for copy in group if copy.terms.may_store_in(target)]
            answers = ladder.placement.admit_many(allowed, target, _DEMOTE, ladder.ctx)
            admitted = allowed if all(answers) else list(compress(allowed, answers))
            if len(admitted) == len(new):
                staying = ()
            else:
                taken = set(admitted)
                staying = [copy for copy in staying if copy not in taken]
            part = run if len(admitted) == len(run.copies) else ladder.ram.run_of(admitted)
            fitting = self._cut_to_backlog(part, target)
            if fitting is not None:
                going.append((target, fitting))
        return going, staying

    def _placed(self, copies: Sequence[ChunkCopy]) -> dict[int, Sequence[ChunkCopy]]:
        """Return the slower tiers that must have some of ``copies`` soon, and which."""
        places = self._ladder.placement.place_many(copies, self._ladder.ctx)
        if places and places.count(places[0]) == len(places):
            return dict.fromkeys(places[0], copies)
        groups: dict[int, list[ChunkCopy]] = {}
        for copy, targets in zip(copies, places, strict=True):
            for target in targets:
                groups.setdefault(target, []).append(copy)
        return dict(groups)

    def _cut_to_backlog(self, run: Run, target: int) -> Run | None:
        """Return what of ``run`` does not leave tier ``target`` too far behind, if any."""
        ladder, chunks = self._ladder, len(run.copies)
        behind = self._queued[target] + self._in_flight[target]
        fits = max(ladder.limits.backlog - behind, 0)
        if fits >= chunks:
            return run if chunks else None
        ladder.tiers[target].counters.dropped += chunks - fits
        ladder.ram.counters.lost += chunks - fits
        return run.cut(fits)[0] if fits else None

    def _enqueue(self, target: int, run: Run) -> None:
        """Queue copies that owe themselves to tier ``target`` and are pinned for it."""
        self._queues[target].append(run)
        self._queued[target] += len(run.copies)

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
        others = _without(run.copies, going)
        ram.unpin_many(others)
        self._settle_sources(ram, others)
        return ram.run_of(going)

    def _send(self, source: TierState, run: Run, index: int, *, batch: int) -> int:
        """Plan jobs; what finds no room below is counted as lost.

        Args:
            source: Tier of the run.
            run: What to copy down.
            index: Of the tier that it goes to.
            batch: Most chunks of one job.

        Returns:
            How many of the run are on their way; its job needs a pin on each of them.
        """
        ladder = self._ladder
        target = ladder.tiers[index]
        chunks = len(run.copies)
        fits = min(chunks, target.room)
        room = ladder.make_room(target, run.keys[:fits])
        if room is None:
            fits = target.slots.free
        slots = target.slots.allocate(fits) if room is None else room[0]
        if fits < chunks:
            run, left = run.cut(fits)
            target.want(chunks)
            target.counters.refused += chunks - fits
            source.counters.lost += chunks - fits
            self._settle_sources(source, left.copies)
        if not fits:
            return 0
        copies = target.begin_copying(run.keys, slots, run.copies)
        self._in_flight[index] += fits
        for at in range(0, fits, batch):
            part = slice(at, at + batch)
            record = JobRecord(
                _DEMOTE,
                source.index,
                index,
                run.copies[part],
                run.keys[part],
                run.slots[part],
                copies[part],
                ladder.epoch,
            )
            timeout_s = ladder.limits.store_timeout_s
            ladder.ledger.open(
                record, slots=slots[part], names=ladder.names, timeout_s=timeout_s
            )
        return fits

    def _settle_sources(self, tier: TierState, copies: Sequence[ChunkCopy]) -> None:
        """Note that ``copies`` need not be sent down; let go of those that were leaving."""
        for copy in copies:
            if copy.dirty:
                tier.mark_clean(copy)
        if tier.leaving and copies:
            self._let_go(tier, tier.run_of(copies))

    def _let_go(self, tier: TierState, run: Run) -> None:
        """Let those of ``run`` leave that were leaving and have nothing to wait for."""
        waiting = [copy.pins or copy.dirty for copy in run.copies]
        if not any(waiting) and tier.leaving.issuperset(run.copies):
            self._ladder.evict(tier, run)
            return
        gone: list[ChunkCopy] = []
        for copy in run.copies:
            if copy.dirty or copy not in tier.leaving:
                continue
            if copy.pins:
                tier.stay(copy, self._ladder.ctx)
            else:
                gone.append(copy)
        if gone:
            self._ladder.evict(tier, tier.run_of(gone))

    def _reclaim(self, tier: TierState) -> None:
        """Send victims of ``tier`` away until its reserve is free or on its way to be.

        The reserve is free slots. Were clean copies counted too, they would be evicted for it
        first, and those that just came up from below, the hot ones, are the clean ones.
        """
        ladder = self._ladder
        # What passes through will be free in a moment; an unmet wish does not wait for it.
        wanted = max(self._reserves[tier.index] - tier.passing, tier.wanted)
        tier.wanted = 0
        short = wanted - tier.slots.free - len(tier.leaving)
        if short <= 0:
            return
        targets = ladder.placement.demotion_targets(tier.index, len(ladder.tiers))
        takes = {index: self._takes(ladder.tiers[index]) for index in targets}
        # Whatever becomes of a victim it frees one slot, so no more are picked than all of the
        # tiers below could take: one that was put back would count as just used.
        while short > 0 and (most := min(short, *takes.values())) > 0:
            victims = tier.run_of(tier.pick_leaving(most, ladder.ctx))
            if not victims.copies:
                return
            short -= len(victims.copies)
            for index, batch in self._sort_out(tier, victims).items():
                run = victims.part(batch)
                sent = self._send(tier, run, index, batch=ladder.limits.batch)
                tier.pin_dirty(batch[:sent])
                takes[index] -= len(batch)
        if short > 0:
            for index, room in takes.items():
                if room <= 0:
                    ladder.tiers[index].want(wanted)

    def _sort_out(self, tier: TierState, victims: Run) -> dict[int, Sequence[ChunkCopy]]:
        """Let go of the victims that need not be copied.

        Returns:
            The others, by the tier they go to.
        """
        ladder = self._ladder
        alone = victims.copies
        for below in ladder.tiers[tier.index + 1 :]:
            if below.copies.keys().isdisjoint(victims.keys):
                continue
            used = below.whole([victim.key for victim in alone])
            # They were used up here, which the slower tier did not hear of.
            below.use(used, ladder.ctx)
            there = {copy.key for copy in used}
            alone = [victim for victim in alone if victim.key not in there]
        gone = list(_without(victims.copies, alone))
        batches: dict[int, Sequence[ChunkCopy]] = {}
        for target, group in self._targets(tier, alone).items():
            admitted: Sequence[ChunkCopy] = ()
            if target is not None:
                answers = ladder.placement.admit_many(group, target, _DEMOTE, ladder.ctx)
                admitted = group if all(answers) else list(compress(group, answers))
                batches[target] = admitted
                tier.counters.lost += len(group) - len(admitted)
                tier.mark_dirty_many([copy for copy in admitted if not copy.dirty])
            gone += _without(group, admitted)
        if gone:
            ladder.evict(tier, victims.part(gone))
        return {target: batch for target, batch in batches.items() if batch}

    def _targets(
        self, tier: TierState, victims: Sequence[ChunkCopy]
    ) -> dict[int | None, Sequence[ChunkCopy]]:
        """Return ``victims``, which are in no slower tier, by the one each must reach."""
        ladder = self._ladder
        shortest = self._shortest
        targets = ladder.placement.demote_many(victims, tier.index, ladder.ctx)
        if shortest > 1:
            # One of too short a prefix never was to go down, or it would be dirty.
            targets = [
                target if victim.dirty or victim.depth + 1 >= shortest else None
                for victim, target in zip(victims, targets, strict=True)
            ]
        return _by_target(victims, targets, restricted=ladder.restricts_stores)

    def _takes(self, target: TierState) -> int:
        """Return how many chunks may be sent to ``target`` now.

        A tier whose slots are all in use for the moment takes none, and its victims-to-be wait;
        so do they for the slots of chunks on their way up, rather than evict another. A tier
        without slots takes any number: they are lost, for waiting would not help.
        """
        queue = self._ladder.limits.queue - self._in_flight[target.index]
        if not target.slots.capacity:
            return queue
        moving = self._ladder.ledger.moving_out(target.index)
        return min(queue, target.slots.free if moving else target.room)


def _without(copies: Sequence[ChunkCopy], some: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
    """Return those of ``copies`` that are not among ``some``, a part of them."""
    if len(some) == len(copies):
        return ()
    if not some:
        return copies
    taken = set(some)
    return [copy for copy in copies if copy not in taken]


def _by_target(
    copies: Sequence[ChunkCopy], targets: Sequence[int | None], *, restricted: bool
) -> dict[int | None, Sequence[ChunkCopy]]:
    """Group ``copies`` by the tier each goes to; None where that is none it may enter.

    ``restricted`` says whether there may be one that a copy may not enter.
    """
    if not copies:
        return {}
    if not restricted and targets.count(targets[0]) == len(copies):
        return {targets[0]: copies}
    groups: dict[int | None, list[ChunkCopy]] = {}
    for copy, target in zip(copies, targets, strict=True):
        place = target if copy.terms.may_store_in(target) else None
        groups.setdefault(place, []).append(copy)
    return dict(groups)
