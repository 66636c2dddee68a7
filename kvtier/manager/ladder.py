"""The tiers and what the parts of the manager share."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtier.keys import ChunkKey
from kvtier.manager.events import EventLog
from kvtier.manager.ledger import JobLedger
from kvtier.manager.plans import ManagerLimits, SlotTruth
from kvtier.manager.requests import RequestState
from kvtier.manager.retention import Retention
from kvtier.manager.reuse import ReuseGaps
from kvtier.manager.tier import TierState
from kvtier.manager.worth import LoadWorth
from kvtier.policies import ChunkCopy, CopyState, Placement, PolicyContext

__all__ = ["Ladder"]


class Ladder:
    """Tiers, fastest first, with the placement policy and the jobs between them.

    Attributes:
        tiers: The tiers; index 0 is RAM.
        ram: The same as ``tiers[0]``.
        names: The tiers' names.
        placement: Decides what crosses tiers.
        limits: Bounds to keep to.
        truth: What the workers say about RAM slots.
        ledger: Jobs in flight.
        retention: RAM copies kept until a deadline.
        ctx: What policies may know.
        epoch: Counts resets.
        out_of_service: Slower tiers that nothing is to be read from for now, by index.
        corrupt: Slots whose content a restart must not bring back, as (tier index, slot).
        gaps: Per tier, how soon what it evicted was asked for again.
        worth: Says which loads are worth their time.
        events: What became resident where, until somebody takes it.
    """

    def __init__(
        self,
        tiers: Sequence[TierState],
        *,
        placement: Placement,
        limits: ManagerLimits,
        truth: SlotTruth,
        record_events: bool,
        worth: LoadWorth,
    ) -> None:
        self.tiers = tuple(tiers)
        self.ram = self.tiers[0]
        self._slower = [self.tiers[index + 1 :] for index in range(len(self.tiers))]
        self.names = tuple(tier.name for tier in tiers)
        self.placement = placement
        self.limits = limits
        self.truth = truth
        self.worth = worth
        self.ledger = JobLedger()
        self.retention = Retention(self.ram, limits.retained)
        self.ctx = PolicyContext()
        self.epoch = 0
        self.out_of_service: Collection[int] = ()
        self.corrupt: list[tuple[int, int]] = []
        self.gaps = [ReuseGaps(tier.slots.capacity) for tier in self.tiers]
        self._generation = 0
        self.events = EventLog(listened_to=record_events)

    def next_generation(self) -> int:
        """Return a stamp for RAM slots about to be written; never 0, never the same twice."""
        self._generation += 1
        return self._generation

    def slower_copy(
        self, key: ChunkKey, *, than: int = 0, within: Collection[int] | None = None
    ) -> tuple[TierState, ChunkCopy] | None:
        """Return the fastest resident copy of ``key`` in a tier slower than ``than``.

        Args:
            key: The chunk.
            than: Index of a tier.
            within: Tiers to look at; None for all.
        """
        for tier in self._slower[than]:
            if within is not None and tier.index not in within:
                continue
            copy = tier.copies.get(key)
            if copy is not None and copy.state == CopyState.RESIDENT:
                return tier, copy
        return None

    def reachable_copy(
        self, key: ChunkKey, *, within: Collection[int] | None = None
    ) -> tuple[TierState, ChunkCopy] | None:
        """Do :meth:`slower_copy`, passing over tiers that are out of service."""
        if self.out_of_service:
            every = range(1, len(self.tiers)) if within is None else within
            within = set(every).difference(self.out_of_service)
        return self.slower_copy(key, within=within)

    def held_within(self, key: ChunkKey, within: Collection[int]) -> bool:
        """Return whether one of the tiers ``within`` holds ``key`` or sent it up to RAM."""
        copy = self.ram.copies.get(key)
        if copy is not None and copy.origin in within:
            return True
        return self.slower_copy(key, within=within) is not None

    def serve(self, req_id: str, request: RequestState | None) -> None:
        """Tell policies whose chunks the next uses and insertions are."""
        self.ctx.request = req_id
        self.ctx.session = "" if request is None else request.terms.session

    def make_room(
        self, tier: TierState, newcomers: Sequence[ChunkKey]
    ) -> list[ChunkKey] | None:
        """Do :meth:`TierState.make_room` for ``newcomers`` and record who left.

        Returns:
            The keys of the victims; None, and nothing changed, when there is not enough to
            evict.
        """
        if len(newcomers) > tier.room:
            return None
        tier.expect(newcomers, self.ctx)
        victims = tier.make_room(len(newcomers), self.ctx)
        if victims is None:
            return None
        return self._left(tier, victims) if victims else []

    def evict(self, tier: TierState, victims: Sequence[ChunkCopy]) -> None:
        """Let go of leaving copies that nothing keeps any more, and record it."""
        if victims:
            tier.let_go(victims)
            self._left(tier, victims)

    def asked(self, key: ChunkKey) -> None:
        """Note that ``key`` is wanted, in every tier that is passed before it is found."""
        for tier, gaps in zip(self.tiers, self.gaps, strict=True):
            if key in tier.copies:
                return
            gaps.asked(key)

    def publish(self, tier: TierState, copies: Sequence[ChunkCopy]) -> None:
        """Make written ``copies`` hits and record that they arrived."""
        if not copies:
            return
        tier.publish(copies, self.ctx)
        self.events.add(tier.index, [copy.key for copy in copies], removed=False)

    def drop(self, tier: TierState, copy: ChunkCopy) -> None:
        """Make a resident ``copy`` a miss and record that it left."""
        if copy.state == CopyState.RESIDENT:
            self.events.add(tier.index, (copy.key,), removed=True)
        tier.drop(copy)

    def condemn(self, tier: TierState, copy: ChunkCopy) -> None:
        """Count a copy in a slower tier whose bytes are wrong, and forget it."""
        tier.counters.corrupt += 1
        if copy.state == CopyState.RESIDENT:
            self.corrupt.append((tier.index, copy.slot))
            self.drop(tier, copy)

    def _left(self, tier: TierState, victims: Sequence[ChunkCopy]) -> list[ChunkKey]:
        """Record that ``victims`` left to make room; return their keys."""
        keys = [victim.key for victim in victims]
        self.gaps[tier.index].evicted(keys)
        self.events.add(tier.index, keys, removed=True)
        return keys

    def take_corrupt(self) -> list[tuple[int, int]]:
        """Return the corrupt slots since the last call."""
        corrupt, self.corrupt = self.corrupt, []
        return corrupt
