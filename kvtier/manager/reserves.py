"""Keeps slots of every tier free ahead of need, by sending its best victims down.

This is write-on-evict. A chunk is owed to a slower tier only by being new, and nothing is sent
while there is room. When the reserve of free slots runs low, the best victims are taken out of
the order and leave, at once if a slower tier has them, else when they have been copied. So an
eviction never waits for a disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.manager.demotion_jobs import DemotionJobs
from kvtier.manager.ladder import Ladder, first_whole
from kvtier.manager.placing import admitted, targets_of
from kvtier.manager.run import Run, without
from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy

__all__ = ["Reserves"]


class Reserves:
    """The free slots that tiers with somewhere to demote to keep.

    Attributes:
        tiers: Those tiers.
    """

    def __init__(self, ladder: Ladder, jobs: DemotionJobs) -> None:
        self._ladder = ladder
        self._jobs = jobs
        self._targets = {
            tier: ladder.placement.demotion_targets(tier.index, len(ladder.tiers))
            for tier in ladder.tiers
        }
        self.tiers = [tier for tier, targets in self._targets.items() if targets]
        self._slots = [
            int(ladder.limits.reserve * tier.slots.capacity) for tier in ladder.tiers
        ]
        self._shortest = ladder.placement.min_chunks

    def adopt(self, tier: TierState, copies: Sequence[ChunkCopy]) -> None:
        """Mark dirty those of ``copies``, new in ``tier`` alone, that must not vanish."""
        if tier not in self.tiers or not copies:
            return
        for target, group in targets_of(self._ladder, copies, tier.index).items():
            if target is not None:
                tier.mark_dirty_many(group)

    def adopt_recovered(self, tier: TierState, copies: Sequence[ChunkCopy]) -> None:
        """Do :meth:`adopt` for what an earlier run left; a slower tier may have it, too."""
        if tier not in self.tiers:
            return
        below = self._ladder.tiers[tier.index + 1 :]
        self.adopt(tier, [copy for copy in copies if first_whole(below, copy.key) is None])

    @property
    def are_low(self) -> bool:
        """Whether :meth:`refill` may have something to do.

        It may have at once after it was called: what one tier lets go may be what another
        waits for.
        """
        return any(map(self._is_low, self.tiers))

    def refill(self) -> None:
        """Send victims away wherever the reserve is low, or a wish for room was not met."""
        for tier in self.tiers:
            if self._is_low(tier):
                self._reclaim(tier)

    def _is_low(self, tier: TierState) -> bool:
        free = tier.slots.free + len(tier.leaving)
        return bool(tier.wanted) or free < self._slots[tier.index]

    def _reclaim(self, tier: TierState) -> None:
        """Send victims of ``tier`` away until its reserve is free or on its way to be.

        The reserve is free slots. Were clean copies counted too, they would be evicted for it
        first, and those that just came up from below, the hot ones, are the clean ones.
        """
        ladder = self._ladder
        # What passes through will be free in a moment; an unmet wish does not wait for it.
        wanted = max(self._slots[tier.index] - tier.passing, tier.wanted)
        tier.wanted = 0
        short = wanted - tier.slots.free - len(tier.leaving)
        if short <= 0:
            return
        takes = {index: self._takes(ladder.tiers[index]) for index in self._targets[tier]}
        # Whatever becomes of a victim it frees one slot, so no more are picked than all of the
        # tiers below could take: one that was put back would count as just used.
        while short > 0 and (most := min(short, *takes.values())) > 0:
            victims = tier.run_of(tier.pick_leaving(most, ladder.ctx))
            if not victims.copies:
                return
            short -= len(victims.copies)
            for index, batch in self._sort_out(tier, victims).items():
                sent = self._jobs.send(tier, victims.part(batch), index, is_eviction=True)
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
            # They were used up here, which the slower tier did not hear of.
            below.use(below.whole([victim.key for victim in alone]), ladder.ctx)
            # Some may be on their way there still, from where they were before they came here;
            # whoever sent them counts them as lost if they do not arrive.
            alone = [victim for victim in alone if victim.key not in below.copies]
        gone = list(without(victims.copies, alone))
        batches: dict[int, Sequence[ChunkCopy]] = {}
        targets = targets_of(ladder, alone, tier.index, shortest=self._shortest)
        for target, group in targets.items():
            entering: Sequence[ChunkCopy] = ()
            if target is not None:
                entering = batches[target] = admitted(ladder, group, target)
                tier.counters.lost += len(group) - len(entering)
                tier.mark_dirty_many([copy for copy in entering if not copy.dirty])
            gone += without(group, entering)
        if gone:
            ladder.evict(tier, victims.part(gone))
        return {target: batch for target, batch in batches.items() if batch}

    def _takes(self, target: TierState) -> int:
        """Return how many chunks may be sent to ``target`` now.

        A tier whose slots are all in use for the moment takes none, and its victims-to-be wait;
        so do they for the slots of chunks on their way up, rather than evict another. A tier
        without slots takes any number: they are lost, for waiting would not help.
        """
        queue = self._ladder.limits.queue - self._jobs.in_flight[target.index]
        if not target.slots.capacity:
            return queue
        moving = self._ladder.ledger.moving_out(target.index)
        return min(queue, target.slots.free if moving else target.room)
