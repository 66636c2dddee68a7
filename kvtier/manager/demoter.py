"""Copies chunks down, ahead of need.

A chunk that must still reach a slower tier is *dirty* and is no victim. With write-through it
is dirty from the moment it is stored until it arrived below; with write-on-evict it becomes
so only by being new, and is sent down when the tier's reserve of free slots runs low: the
best victims are taken out of the order, copied, and dropped when they arrived. Either way an
eviction never waits for a disk, and a chunk that could not be copied is counted as lost,
never silently forgotten.

When a slower tier takes chunks more slowly than they are stored, its backlog grows. Beyond a
bound the newest chunks are not queued at all: they are hits in RAM like any other, but will not
outlive it. Dropping the newest keeps the heads of prefixes, without which their tails are of no
use, and costs a future miss where a longer backlog would take RAM from what is hot now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from kvtier.manager.ladder import Ladder
from kvtier.manager.ledger import BATCH_CHUNKS, JobRecord
from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy, CopyState
from kvtier.types import Outcome, TransferResult, Why

__all__ = ["Demoter"]


class Demoter:
    """Plans the jobs that copy chunks to slower tiers."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._queues: list[deque[ChunkCopy]] = [deque() for _ in ladder.tiers]
        self._in_flight = [0] * len(ladder.tiers)
        self._adopted = False

    @property
    def queued(self) -> int:
        """Copies that wait to be sent down."""
        return sum(len(queue) for queue in self._queues)

    def stored(self, copies: Sequence[ChunkCopy]) -> None:
        """Decide where chunks that just became resident in RAM must go."""
        ladder = self._ladder
        if len(ladder.tiers) == 1:
            return
        shortest = ladder.placement.min_chunks
        for copy in copies:
            length = copy.depth + 1
            if length == shortest > 1:
                # Now they are worth it; without them this one would be stranded below.
                for earlier in self._before(copy):
                    self._send_down(earlier)
            if length >= shortest:
                self._send_down(copy)

    def used(self, copies: Sequence[ChunkCopy]) -> None:
        """Decide again where chunks that were loaded from RAM must go."""
        if self._ladder.placement.places_used:
            self.stored(copies)

    def adopt(self, tier: TierState, copy: ChunkCopy) -> None:
        """Mark ``copy``, new in ``tier`` and in no slower one, dirty if it must not vanish."""
        if self._ladder.placement.demote(copy, tier.index, self._ladder.ctx) is not None:
            tier.mark_dirty(copy)
            self._adopted = True

    def flush(self) -> None:
        """Plan jobs for what is queued and what should leave, within the queue limits."""
        if self._adopted:
            for tier in self._ladder.tiers[:-1]:
                self._reclaim(tier)
        for index, queue in enumerate(self._queues):
            while queue:
                room = self._ladder.limits.queue - self._in_flight[index]
                batch = self._take(index, min(room, BATCH_CHUNKS))
                sent = bool(batch) and self._send(self._ladder.ram, batch, index)
                for copy in batch:
                    self._ladder.ram.unpin(copy)  # the job holds its own pin now
                if not sent:
                    break

    def apply(self, record: JobRecord, result: TransferResult) -> None:
        """Take a demotion job's outcome into account."""
        if not result.settled:
            # Its slots stay taken, but it must not keep later jobs from being sent, and
            # refused.
            record.late = True
            self._in_flight[record.destination] -= len(record.sources)
            return
        ladder = self._ladder
        source_tier = ladder.tiers[record.source]
        target = ladder.tiers[record.destination]
        if not record.late:
            self._in_flight[record.destination] -= len(record.sources)
        arrived: list[ChunkCopy] = []
        for source, copy, outcome in zip(
            record.sources, record.destinations, result.outcomes, strict=True
        ):
            source_tier.unpin(source)
            if outcome is Outcome.DONE:
                arrived.append(copy)
            else:
                target.abort(copy)
                target.counters.failed += outcome is not Outcome.CANCELLED
                source_tier.counters.lost += 1
                if outcome is Outcome.CORRUPT and record.source:
                    ladder.condemn(source_tier, source)
            self._settle_source(source_tier, source)
        ladder.publish(target, arrived)
        for copy in arrived:
            self.adopt(target, copy)

    def flush_all(self) -> None:
        """Queue every dirty copy of RAM, whatever the reserve; for an orderly shutdown."""
        ladder = self._ladder
        queued = {id(copy) for queue in self._queues for copy in queue}
        for copy in list(ladder.ram.copies.values()):
            if copy.dirty and copy.state == CopyState.RESIDENT and id(copy) not in queued:
                target = ladder.placement.demote(copy, 0, ladder.ctx)
                if target is not None and not copy.pins:
                    ladder.ram.pin(copy)
                    self._queues[target].append(copy)
        self.flush()

    def clear(self) -> None:
        """Forget what is queued; for a reset of the cache."""
        for queue in self._queues:
            queue.clear()
        self._in_flight = [0] * len(self._in_flight)
        self._adopted = False

    def _before(self, copy: ChunkCopy) -> list[ChunkCopy]:
        """Return the chunks before ``copy`` that RAM holds without a gap, root to leaf."""
        members = self._ladder.ram.copies
        chain: list[ChunkCopy] = []
        while copy.depth and copy.parent is not None:
            parent = members.get(copy.parent)
            if parent is None or parent.state != CopyState.RESIDENT:
                break
            chain.append(parent)
            copy = parent
        chain.reverse()
        return chain

    def _send_down(self, copy: ChunkCopy) -> None:
        """Queue ``copy`` for the tiers that must have it soon, or see that it is not lost."""
        ladder = self._ladder
        if copy.dirty or ladder.slower_copy(copy.key) is not None:
            return
        targets = self._place(copy)
        for target in targets:
            if self._backlog(target) >= ladder.limits.backlog:
                ladder.tiers[target].counters.dropped += 1
                ladder.ram.counters.lost += 1
                continue
            # The pin keeps a queued copy out of every victim scan until it is sent.
            ladder.ram.mark_dirty(copy)
            ladder.ram.pin(copy)
            self._queues[target].append(copy)
        if not targets:
            self.adopt(ladder.ram, copy)

    def _backlog(self, target: int) -> int:
        """Return how many chunks are queued for ``target`` or on their way there."""
        return len(self._queues[target]) + self._in_flight[target]

    def _place(self, copy: ChunkCopy) -> list[int]:
        ladder = self._ladder
        return [
            target
            for target in ladder.placement.place(copy, ladder.ctx)
            if ladder.placement.admit(copy, target, Why.DEMOTE, ladder.ctx)
        ]

    def _take(self, index: int, room: int) -> list[ChunkCopy]:
        """Take the oldest queued copies that still need to go to tier ``index``."""
        queue, target = self._queues[index], self._ladder.tiers[index]
        batch: list[ChunkCopy] = []
        while queue and len(batch) < room:
            copy = queue.popleft()
            if copy.state == CopyState.RESIDENT and copy.key not in target.copies:
                batch.append(copy)
                continue
            self._ladder.ram.unpin(copy)
            self._settle_source(self._ladder.ram, copy)
        return batch

    def _send(self, source: TierState, batch: Sequence[ChunkCopy], index: int) -> bool:
        """Plan one job; what finds no room below is counted as lost.

        Returns:
            Whether the whole batch is on its way.
        """
        ladder = self._ladder
        target = ladder.tiers[index]
        fits = min(len(batch), target.room)
        if ladder.make_room(target, [copy.key for copy in batch[:fits]]) is None:
            fits = target.slots.free
        if fits < len(batch):
            target.want(len(batch))
        for copy in batch[fits:]:
            target.counters.refused += 1
            source.counters.lost += 1
            self._settle_source(source, copy)
        if not fits:
            return False
        sources = batch[:fits]
        copies = []
        for copy, slot in zip(sources, target.slots.allocate(fits), strict=True):
            source.pin(copy)
            copies.append(ChunkCopy(copy.key, slot, copy.parent, copy.depth))
        target.add_writing(copies)
        self._in_flight[index] += fits
        record = JobRecord(Why.DEMOTE, source.index, index, sources, copies, ladder.epoch)
        ladder.ledger.open(record, names=ladder.names, timeout_s=ladder.limits.store_timeout_s)
        return fits == len(batch)

    def _settle_source(self, tier: TierState, copy: ChunkCopy) -> None:
        """Note that ``copy`` need not be sent down; let it go if it was leaving."""
        if copy.state != CopyState.RESIDENT:
            return
        if copy.dirty:
            tier.mark_clean(copy)
        if copy.dirty or copy not in tier.leaving:
            return
        if copy.pins:
            tier.stay(copy, self._ladder.ctx)
        else:
            self._ladder.evict(tier, copy)

    def _reclaim(self, tier: TierState) -> None:
        """Send victims of ``tier`` down until its reserve is free or on its way to be."""
        reserve = int(self._ladder.limits.reserve * tier.slots.capacity)
        wanted = max(reserve, tier.wanted)
        tier.wanted = 0
        if tier.room + len(tier.leaving) >= wanted:
            return
        slower = self._ladder.tiers[tier.index + 1 :]
        takes = {target.index: self._takes(target) for target in slower}
        for index, batch in self._choose(tier, wanted, takes).items():
            if len(batch) >= takes[index]:
                self._ladder.tiers[index].want(wanted)
            if batch:
                self._send(tier, batch, index)

    def _choose(
        self, tier: TierState, wanted: int, takes: Mapping[int, int]
    ) -> dict[int, list[ChunkCopy]]:
        """Take victims of ``tier`` out of the order until ``wanted`` slots are free or will be.

        Args:
            tier: The tier that lacks room.
            wanted: Slots to be free when everything that is leaving has left.
            takes: How many chunks each slower tier takes now.

        Returns:
            The victims that must be copied, by the tier they go to.
        """
        batches: dict[int, list[ChunkCopy]] = {index: [] for index in takes}
        while tier.slots.free + len(tier.leaving) < wanted:
            # Asked before the victim is picked, for a victim put back would count as just used.
            if all(len(batch) >= takes[index] for index, batch in batches.items()):
                break
            leaver = self._leave(tier)
            if leaver is None:
                break
            index, copy = leaver
            if index < 0:
                continue
            if len(batches[index]) >= takes[index]:
                tier.stay(copy, self._ladder.ctx)
                break
            batches[index].append(copy)
        return batches

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

    def _leave(self, tier: TierState) -> tuple[int, ChunkCopy] | None:
        """Take one victim out of the order.

        Returns:
            The tier it must reach first and the victim; -1 when it left at once; None when
            there is no victim.
        """
        ladder = self._ladder
        victim = tier.pick_leaving(ladder.ctx)
        if victim is None:
            return None
        target = None
        if victim.dirty and ladder.slower_copy(victim.key, than=tier.index) is None:
            target = ladder.placement.demote(victim, tier.index, ladder.ctx)
            if target is not None and not ladder.placement.admit(
                victim, target, Why.DEMOTE, ladder.ctx
            ):
                target = None
                tier.counters.lost += 1
        if target is None:
            ladder.evict(tier, victim)
            return -1, victim
        return target, victim
