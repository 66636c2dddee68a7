"""Copies chunks to slower tiers: at once (write-through) or before eviction (write-on-evict).

A chunk that a slower tier must still receive is dirty and cannot be evicted. With write-through
the chunk is dirty from the end of its store until the slower tier has it. With write-on-evict
the chunk also becomes dirty at the end of its store, but is copied only when free slots are low
(:class:`_Reclaimer`). In both modes an eviction never waits for a disk, and a chunk whose copy
failed counts as lost.

When a slower tier cannot keep up with new chunks, its backlog grows. Beyond a bound the newest
chunks are not queued: they stay hits in RAM, but are lost when evicted. So the queue keeps the
first chunks of prefixes, which all later chunks need, and RAM keeps room for chunks in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress

from kvtier.manager.copies import CopyList, without
from kvtier.manager.storage_jobs import JobRecord, StorageJobs
from kvtier.manager.tier import TierState
from kvtier.manager.tier_stack import TierStack, first_resident
from kvtier.policies import ChunkCopy, CopyState
from kvtier.types import TransferResult

__all__ = ["Demoter"]

_RESIDENT = CopyState.RESIDENT


class Demoter:
    """Queues RAM copies for slower tiers, and plans demotion jobs within the queue limits."""

    def __init__(self, stack: TierStack, jobs: StorageJobs) -> None:
        self._stack = stack
        self._ram = stack.ram
        self._targets = _Targets(stack)
        self._jobs = _DemotionJobs(stack, jobs)
        self._reclaimer = _Reclaimer(stack, self._targets, self._jobs)
        self._queues: list[deque[CopyList]] = [deque() for _ in stack.tiers]
        self._queued = [0] * len(stack.tiers)

    @property
    def queued(self) -> int:
        """Number of copies that wait for a demotion job."""
        return sum(self._queued)

    @property
    def is_reclaiming(self) -> bool:
        """Whether the next :meth:`end_step` may demote copies to free slots."""
        return self._reclaimer.is_needed

    def publish(self, listed: CopyList) -> None:
        """Make ``listed`` resident in RAM; queue the copies that slower tiers must receive."""
        copies = listed.copies
        self._stack.publish(self._ram, copies)
        if len(self._stack.tiers) == 1 or not copies:
            return
        self._place_listed(listed)

    def record_use(self, copies: Sequence[ChunkCopy]) -> None:
        """Apply the placement policy to chunks that were loaded from RAM."""
        if self._stack.placement.places_used and len(self._stack.tiers) > 1:
            self._place(copies)

    def add_sole_copies(self, tier: TierState, copies: Sequence[ChunkCopy]) -> None:
        """Mark as dirty each of ``copies`` that a slower tier must receive.

        Args:
            tier: The tier of the copies.
            copies: Copies of chunks that no slower tier has.
        """
        if tier not in self._reclaimer.tiers or not copies:
            return
        for target, group in self._targets.of_victims(copies, tier.index).items():
            if target is not None:
                tier.mark_dirty(group)

    def add_recovered(self, tier: TierState, copies: Sequence[ChunkCopy]) -> None:
        """Mark as dirty each recovered copy that a slower tier must still receive."""
        if tier not in self._reclaimer.tiers:
            return
        slower = self._stack.tiers[tier.index + 1 :]
        sole = [copy for copy in copies if first_resident(slower, copy.key) is None]
        self.add_sole_copies(tier, sole)

    def end_step(self) -> None:
        """Plan jobs for queued copies and for victims, within the queue limits."""
        if self._reclaimer.tiers:
            self._reclaimer.end_step()
        if any(self._queues):
            for index, queue in enumerate(self._queues):
                if queue:
                    self._drain(index)

    def flush_all(self) -> None:
        """Plan demotion jobs for every dirty copy in RAM, before an orderly shutdown.

        Retained copies, and copies with a load in progress, are demoted too.
        """
        coming = chain(self.waiting(), self._jobs.sources(self._ram))
        on_their_way = set(map(id, coming))
        dirty = [
            copy
            for copy in self._ram.copies.values()
            if copy.dirty and copy.state == _RESIDENT and id(copy) not in on_their_way
        ]
        for target, group in self._targets.of_victims(dirty, self._ram.index).items():
            if target is not None:
                self._ram.pin(group)
                self._enqueue(target, self._ram.list_of(group))
        self.end_step()

    def waiting(self) -> Iterator[ChunkCopy]:
        """Yield the copies that wait for a demotion job, even if RAM has dropped them since."""
        return chain.from_iterable(listed.copies for queue in self._queues for listed in queue)

    def apply(self, record: JobRecord, result: TransferResult) -> None:
        """Apply the result of a demotion job."""
        arrived = self._jobs.apply(record, result)
        self.add_sole_copies(self._stack.tiers[record.destination], arrived)

    def clear(self) -> None:
        """Unpin and forget all queued copies, and clear the in-flight counts, after a reset."""
        self._ram.unpin(self.waiting())
        for queue in self._queues:
            queue.clear()
        self._queued = [0] * len(self._queued)
        self._jobs.clear()

    def _place(self, copies: Iterable[ChunkCopy]) -> None:
        """Call :meth:`_place_listed` with the clean copies among ``copies``."""
        clean = [copy for copy in copies if not copy.dirty]
        if clean:
            self._place_listed(self._ram.list_of(clean))

    def _place_listed(self, listed: CopyList) -> None:
        """Queue the copies that are due for demotion now, and mark those due later as dirty."""
        queued, others = self._targets.of_new(listed)
        for target, part in queued:
            fitting = self._cut_to_backlog(part, target)
            if fitting is not None:
                self._ram.begin_demotion(fitting.copies)
                self._enqueue(target, fitting)
        self.add_sole_copies(self._ram, others)

    def _cut_to_backlog(self, listed: CopyList, target: int) -> CopyList | None:
        """Return the first copies of ``listed`` that fit in the backlog of tier ``target``.

        The other copies count as dropped and lost. The result is None if no copy fits.
        """
        stack, chunks = self._stack, len(listed.copies)
        backlog = self._queued[target] + self._jobs.in_flight[target]
        fits = max(stack.limits.backlog - backlog, 0)
        if fits >= chunks:
            return listed if chunks else None
        stack.tiers[target].counters.dropped += chunks - fits
        self._ram.counters.lost += chunks - fits
        return listed.head(fits) if fits else None

    def _enqueue(self, target: int, listed: CopyList) -> None:
        """Queue dirty, pinned copies for tier ``target``."""
        self._queues[target].append(listed)
        self._queued[target] += len(listed.copies)

    def _drain(self, index: int) -> None:
        """Plan jobs for the queue of tier ``index``, within the limit of chunks in flight."""
        queue, limits = self._queues[index], self._stack.limits
        while queue:
            chunks = limits.queue - self._jobs.in_flight[index]
            if not self._can_free_at_once(index):
                chunks = min(chunks, limits.batch)
            listed = self._dequeue(index, chunks)
            if listed is None:
                break
            # The job takes over the pins of the copies that it moves.
            sent = self._jobs.plan(self._ram, listed, index)
            if sent < len(listed.copies):
                self._ram.unpin(listed.copies[sent:])
                break

    def _can_free_at_once(self, index: int) -> bool:
        """Return whether tier ``index`` may evict for its whole queue at once.

        If not, the tier evicts for one job at a time, so that only one job's chunks are lost if
        slots run out. A policy that tracks misses always needs one job at a time, because its
        decisions depend on the order of evictions and insertions.
        """
        target = self._stack.tiers[index]
        return not target.eviction.tracks_misses and self._queued[index] <= target.available

    def _dequeue(self, index: int, chunks: int) -> CopyList | None:
        """Dequeue the oldest copies; return up to ``chunks`` that tier ``index`` still lacks.

        Returns:
            The copies, perhaps none; None if the queue is empty or ``chunks`` is not positive.
        """
        queue = self._queues[index]
        taken: list[CopyList] = []
        while queue and chunks > 0:
            listed = queue.popleft()
            if len(listed.copies) > chunks:
                listed, later = listed.cut(chunks)
                queue.appendleft(later)
            self._queued[index] -= len(listed.copies)
            listed = self._still_needed(listed, index)
            chunks -= len(listed.copies)
            taken.append(listed)
        return CopyList.join(taken) if taken else None

    def _still_needed(self, listed: CopyList, index: int) -> CopyList:
        """Return the copies of chunks that tier ``index`` lacks; release the other copies."""
        members = self._stack.tiers[index].copies
        if listed.drops == self._ram.drops and members.keys().isdisjoint(listed.keys):
            return listed
        needed = [
            copy
            for copy in listed.copies
            if copy.state == _RESIDENT and copy.key not in members
        ]
        others = without(listed.copies, needed)
        self._ram.unpin(others)
        self._jobs.release(self._ram, others)
        return self._ram.list_of(needed)


class _Targets:
    """Asks the placement policy which slower tiers must receive copies.

    Each method asks about many copies in one call, because the policy nearly always gives the
    same answer for all of them.
    """

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack

    def of_new(
        self, listed: CopyList
    ) -> tuple[list[tuple[int, CopyList]], Sequence[ChunkCopy]]:
        """Decide which of the clean RAM copies each slower tier must receive soon.

        Returns:
            Two sequences. The first has a pair for each tier that must receive copies soon: the
            index of the tier, and the copies. The second has the remaining copies of chunks
            that no slower tier has.
        """
        stack, new = self._stack, listed.copies
        if stack.has_any(listed.keys, slower_than=0):
            new = [copy for copy in new if first_resident(stack.slower, copy.key) is None]
        others = new
        parts: list[tuple[int, CopyList]] = []
        for target, group in self._place(new).items():
            allowed = group
            if stack.restricts_stores:
                allowed = [copy for copy in group if copy.terms.may_store_in(target)]
            admitted = self.admitted(allowed, target)
            if len(admitted) == len(new):
                others = ()
            else:
                excluded = set(admitted)
                others = [copy for copy in others if copy not in excluded]
            is_whole = len(admitted) == len(listed.copies)
            parts.append((target, listed if is_whole else stack.ram.list_of(admitted)))
        return parts, others

    def of_victims(
        self, copies: Sequence[ChunkCopy], source: int
    ) -> dict[int | None, Sequence[ChunkCopy]]:
        """Group ``copies`` by the slower tier that must receive each copy.

        Args:
            copies: Copies, in one tier, of chunks that no slower tier has.
            source: Index of that tier.

        Returns:
            Copies by the index of the receiving tier. The key None has the copies that no
            slower tier receives.
        """
        if not copies:
            return {}
        targets = self._stack.placement.demote_many(copies, source, self._stack.ctx)
        if not self._stack.restricts_stores and targets.count(targets[0]) == len(copies):
            return {targets[0]: copies}
        groups: dict[int | None, list[ChunkCopy]] = {}
        for copy, target in zip(copies, targets, strict=True):
            place = target if copy.terms.may_store_in(target) else None
            groups.setdefault(place, []).append(copy)
        return dict(groups)

    def admitted(self, copies: Sequence[ChunkCopy], target: int) -> Sequence[ChunkCopy]:
        """Return the ``copies`` that may enter tier ``target``.

        Each condition sees only the copies that the earlier conditions admitted.
        """
        stack = self._stack
        for condition in stack.conditions:
            if not copies:
                break
            answers = condition.admits_many(copies, target, stack.ctx)
            if not all(answers):
                copies = list(compress(copies, answers))
        return copies

    def _place(self, copies: Sequence[ChunkCopy]) -> dict[int, Sequence[ChunkCopy]]:
        """Return the ``copies`` to send soon to each slower tier, by the tier's index."""
        places = self._stack.placement.place_many(copies, self._stack.ctx)
        if places and places.count(places[0]) == len(places):
            return dict.fromkeys(places[0], copies)
        groups: dict[int, list[ChunkCopy]] = {}
        for copy, targets in zip(copies, places, strict=True):
            for target in targets:
                groups.setdefault(target, []).append(copy)
        return dict(groups)


class _DemotionJobs:
    """Plans demotion jobs and applies their results.

    Attributes:
        in_flight: Number of chunks on their way to each tier, by the tier's index; chunks of
            late jobs are excluded.
    """

    def __init__(self, stack: TierStack, jobs: StorageJobs) -> None:
        self._stack = stack
        self._jobs = jobs
        self.in_flight = [0] * len(stack.tiers)

    def plan(
        self, source: TierState, listed: CopyList, index: int, *, is_eviction: bool = False
    ) -> int:
        """Plan jobs that copy ``listed`` to tier ``index``, while the tier has available slots.

        Args:
            source: Tier of the copies.
            listed: The copies to demote.
            index: Index of the receiving tier.
            is_eviction: Whether the copies are victims of ``source``, in eviction order.

        Returns:
            The number of leading copies for which a job was planned. At its end, the job
            removes one pin of each of them. Pin the copies before this call, but victims after
            it, because the call evicts victims only while they have no pin.
        """
        target = self._stack.tiers[index]
        chunks = len(listed.copies)
        fits = min(chunks, target.available)
        if fits < chunks:
            listed, rest = listed.cut(fits)
            target.request_slots(chunks)
            target.counters.refused += chunks - fits
            source.counters.lost += chunks - fits
            self.release(source, rest.copies)
        if fits:
            self._jobs.plan(source, target, listed, is_eviction=is_eviction)
            self.in_flight[index] += fits
        return fits

    def room(self, index: int) -> int:
        """Return how many chunks tier ``index`` can receive now.

        If all slots of the tier are pinned, the victims wait. While moves from the tier to RAM
        are in flight, only free slots count, and the victims wait for the slots of the moved
        chunks. If the tier has no slots at all, chunks are sent and lost, because waiting would
        not help.
        """
        target = self._stack.tiers[index]
        queue = self._stack.limits.queue - self.in_flight[index]
        if not target.slots.capacity:
            return queue
        is_moving = self._jobs.is_moving_from(index)
        return min(queue, target.slots.free if is_moving else target.available)

    def apply(self, record: JobRecord, result: TransferResult) -> Sequence[ChunkCopy]:
        """Apply the result of a demotion job; return the copies that arrived."""
        stack = self._stack
        source_tier = stack.tiers[record.source]
        target = stack.tiers[record.destination]
        chunks = len(record.destinations)
        if not record.is_late:
            self.in_flight[record.destination] -= chunks
        if not result.settled:  # the slots stay taken, but later jobs need not wait
            record.is_late = True
            target.counters.expired += chunks
            return ()
        arrived, failures = self._jobs.settle(record, result.outcomes)
        source_tier.counters.lost += len(failures)
        if not record.is_late:  # else the job was counted at its deadline
            for _, _, outcome in failures:
                target.counters.record_failure(outcome, reading=False)
        if source_tier.leaving:
            self._evict_leaving(source_tier, record.sources)
        source_tier.counters.demoted += len(arrived)
        stack.publish(target, arrived, is_ordered=record.is_eviction)
        return arrived

    def release(self, tier: TierState, copies: Sequence[ChunkCopy]) -> None:
        """Decrement the dirty count of ``copies``, and evict clean ones in ``tier.leaving``.

        Call this method for copies that need no demotion job.
        """
        tier.mark_clean(copies)
        if tier.leaving and copies:
            self._evict_leaving(tier, tier.list_of(copies))

    def sources(self, tier: TierState) -> Iterator[ChunkCopy]:
        """Yield the copies in ``tier`` that demotion jobs in flight read."""
        for record in self._jobs.records():
            if not record.is_promotion and record.source == tier.index:
                yield from record.sources.copies

    def clear(self) -> None:
        """Set the in-flight counts to 0, after a reset of the cache."""
        self.in_flight = [0] * len(self.in_flight)

    def _evict_leaving(self, tier: TierState, listed: CopyList) -> None:
        """Evict the clean, unpinned copies of ``listed`` that are in ``tier.leaving``.

        Clean but pinned copies return to the eviction order; dirty copies stay in ``leaving``.
        """
        are_needed = [copy.pins or copy.dirty for copy in listed.copies]
        if not any(are_needed) and tier.leaving.issuperset(listed.copies):
            self._stack.evict_leaving(tier, listed)
            return
        clean = [copy for copy in listed.copies if not copy.dirty and copy in tier.leaving]
        tier.restore([copy for copy in clean if copy.pins], self._stack.ctx)
        evicted = [copy for copy in clean if not copy.pins]
        if evicted:
            self._stack.evict_leaving(tier, tier.list_of(evicted))


class _Reclaimer:
    """Implements write-on-evict: keeps some slots of every tier free by demoting victims.

    A new chunk is dirty if a slower tier must receive it, but is not copied while enough slots
    are free. When free slots are low, the best victims leave the eviction order. A victim is
    evicted at once if a slower tier has the chunk, else after a copy of the chunk.

    Attributes:
        tiers: The tiers whose victims are demoted.
    """

    def __init__(self, stack: TierStack, targets: _Targets, jobs: _DemotionJobs) -> None:
        self._stack = stack
        self._targets = targets
        self._jobs = jobs
        self._target_tiers = {
            tier: stack.placement.demotion_targets(tier.index) for tier in stack.tiers
        }
        self.tiers = [tier for tier, targets in self._target_tiers.items() if targets]
        self._reserve = [
            int(stack.limits.reserve * tier.slots.capacity) for tier in stack.tiers
        ]

    @property
    def is_needed(self) -> bool:
        """Whether a tier lacks free slots."""
        return any(map(self._lacks_slots, self.tiers))

    def end_step(self) -> None:
        """Demote victims of every tier that lacks free slots."""
        for tier in self.tiers:
            if self._lacks_slots(tier):
                self._reclaim(tier)

    def _lacks_slots(self, tier: TierState) -> bool:
        free = tier.slots.free + len(tier.leaving)
        return bool(tier.requested_slots) or free < self._reserve[tier.index]

    def _reclaim(self, tier: TierState) -> None:
        """Demote victims of ``tier`` until enough slots are free or about to be free.

        Slots with idle copies do not count as free. Otherwise all idle copies would be evicted
        first, including the most recently promoted chunks.
        """
        stack = self._stack
        wanted = max(self._reserve[tier.index], tier.requested_slots)
        tier.requested_slots = 0
        shortage = wanted - tier.slots.free - len(tier.leaving)
        if shortage <= 0:
            return
        room = {index: self._jobs.room(index) for index in self._target_tiers[tier]}
        # Every victim frees a slot. At most as many victims are picked as all targets can
        # receive, because a victim that is put back would count as just used.
        while shortage > 0 and (most := min(shortage, *room.values())) > 0:
            victims = tier.list_of(tier.pick_leaving(most, stack.ctx))
            if not victims.copies:
                return
            shortage -= len(victims.copies)
            for index, batch in self._evict_copied(tier, victims).items():
                sent = self._jobs.plan(tier, victims.part(batch), index, is_eviction=True)
                tier.pin(batch[:sent])
                room[index] -= len(batch)
        if shortage > 0:
            for index, left in room.items():
                if left <= 0:
                    stack.tiers[index].request_slots(wanted)

    def _evict_copied(
        self, tier: TierState, victims: CopyList
    ) -> dict[int, Sequence[ChunkCopy]]:
        """Evict the victims that no slower tier will receive; return the other victims.

        Returns:
            The other victims, by the index of the receiving tier.
        """
        stack, sole = self._stack, victims.copies
        for slower in stack.tiers[tier.index + 1 :]:
            if slower.copies.keys().isdisjoint(victims.keys):
                continue
            # The slower tier has no record of their uses in ``tier``.
            slower.touch_each(slower.resident([victim.key for victim in sole]), stack.ctx)
            # Some chunks may be on their way there; their job counts them if they are lost.
            sole = [victim for victim in sole if victim.key not in slower.copies]
        evicted = list(without(victims.copies, sole))
        batches: dict[int, Sequence[ChunkCopy]] = {}
        groups = self._targets.of_victims(sole, tier.index)
        for target, group in groups.items():
            admitted: Sequence[ChunkCopy] = ()
            if target is not None:
                admitted = batches[target] = self._targets.admitted(group, target)
                tier.counters.lost += len(group) - len(admitted)
                tier.mark_dirty([copy for copy in admitted if not copy.dirty])
            evicted += without(group, admitted)
        if evicted:
            stack.evict_leaving(tier, victims.part(evicted))
        return {target: batch for target, batch in batches.items() if batch}
