"""The tiers and what the parts of the manager share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvtier.keys import ChunkKey, group_filter
from kvtier.manager.events import EventLog
from kvtier.manager.ledger import JobLedger
from kvtier.manager.plans import ManagerLimits, SlotTruth
from kvtier.manager.requests import RequestState
from kvtier.manager.retention import Retention
from kvtier.manager.reuse import SAMPLING_BYTE, ReuseGaps
from kvtier.manager.run import Run
from kvtier.manager.tier import TierState
from kvtier.manager.worth import LoadWorth
from kvtier.policies import ChunkCopy, CopyState, Placement, PolicyContext

__all__ = ["Ladder", "first_whole"]

_RESIDENT = CopyState.RESIDENT


def first_whole(
    tiers: Iterable[TierState], key: ChunkKey
) -> tuple[TierState, ChunkCopy] | None:
    """Return the first of ``tiers`` that has ``key`` whole, and its copy."""
    for tier in tiers:
        copy = tier.copies.get(key)
        if copy is not None and copy.state == _RESIDENT:
            return tier, copy
    return None


class Ladder:
    """Tiers, fastest first, with the placement policy and the jobs between them.

    Attributes:
        tiers: The tiers; index 0 is RAM.
        ram: The same as ``tiers[0]``.
        slower: The others.
        names: The tiers' names.
        placement: Decides what crosses tiers.
        limits: Bounds to keep to.
        truth: What the workers say about RAM slots.
        ledger: Jobs in flight.
        retention: RAM copies kept until a deadline.
        ctx: What policies may know.
        epoch: Counts resets.
        step: Counts scheduling steps.
        out_of_service: Slower tiers that nothing is to be read from for now, by index.
        corrupt: Slots whose content a restart must not bring back, as (tier index, slot).
        gaps: Per tier, how soon what it evicted was asked for again.
        follows_reuse: Whether anybody wants to know that; if not, ``gaps`` stay empty.
        restricts_stores: Whether a request ever said which tiers its chunks may be in.
        worth: Says which loads are worth their time.
        is_counted: Says of a key whether its KV cache group is the one that stands for tokens.
        events: What became resident where, until somebody takes it.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each part
        self,
        tiers: Sequence[TierState],
        *,
        placement: Placement,
        limits: ManagerLimits,
        truth: SlotTruth,
        record_events: bool,
        follow_reuse: bool,
        worth: LoadWorth,
        counting_group: int,
    ) -> None:
        self.tiers = tuple(tiers)
        self.ram = self.tiers[0]
        self.slower = self.tiers[1:]
        self.names = tuple(tier.name for tier in tiers)
        self.placement = placement
        self.limits = limits
        self.truth = truth
        self.worth = worth
        self.is_counted = group_filter(counting_group)
        self.ledger = JobLedger()
        self.retention = Retention(self.ram, limits.retained)
        self.ctx = PolicyContext()
        self.epoch = 0
        self.step = 0
        self.out_of_service: Collection[int] = ()
        self.corrupt: list[tuple[int, int]] = []
        self.follows_reuse = follow_reuse
        self.restricts_stores = False
        self.gaps = [ReuseGaps(tier.slots.capacity) for tier in self.tiers]
        self._passed = [
            (tier.copies, gaps) for tier, gaps in zip(self.tiers, self.gaps, strict=True)
        ]
        self._sampling = min(gaps.mask for gaps in self.gaps)
        self._generation = 0
        self.events = EventLog(listened_to=record_events)

    def next_generation(self) -> int:
        """Return a stamp for RAM slots about to be written; never 0, never the same twice."""
        self._generation += 1
        return self._generation

    def holds_any(self, keys: Collection[ChunkKey], *, slower_than: int = -1) -> bool:
        """Return whether a tier slower than ``slower_than`` has any of ``keys``."""
        for tier in self.tiers[slower_than + 1 :]:
            if not tier.copies.keys().isdisjoint(keys):
                return True
        return False

    def readable(self, within: Collection[int] | None) -> Sequence[TierState]:
        """Return the slower tiers that are in service, fastest first.

        Args:
            within: Tiers to choose from; None for all.
        """
        if within is None and not self.out_of_service:
            return self.slower
        return [
            tier
            for tier in self.slower
            if tier.index not in self.out_of_service
            and (within is None or tier.index in within)
        ]

    def held_within(self, key: ChunkKey, within: Collection[int]) -> bool:
        """Return whether one of the tiers ``within`` holds ``key`` or sent it up to RAM."""
        copy = self.ram.copies.get(key)
        if copy is not None and copy.origin in within:
            return True
        allowed = (tier for tier in self.slower if tier.index in within)
        return first_whole(allowed, key) is not None

    def serve(self, req_id: str, request: RequestState | None) -> None:
        """Tell policies whose chunks the next uses and insertions are."""
        self.ctx.request = req_id
        self.ctx.session = "" if request is None else request.terms.session

    def make_room(
        self, tier: TierState, newcomers: Sequence[ChunkKey]
    ) -> tuple[list[int], list[ChunkKey]] | None:
        """Do :meth:`TierState.take_slots` for ``newcomers`` and record who left.

        Returns:
            A slot for each newcomer and the keys of the victims; None, and nothing changed,
            when there is not enough to evict.
        """
        count = len(newcomers)
        if count > tier.slots.free + tier.idle:
            return None
        if tier.eviction.tracks_misses:
            for key in newcomers:
                tier.eviction.on_miss(key, self.ctx)
        taken = tier.take_slots(count, self.ctx)
        if taken is not None and taken[1]:
            self._left(tier, taken[1])
        return taken

    def evict(self, tier: TierState, run: Run) -> None:
        """Let go of leaving copies that nothing keeps any more, and record it."""
        tier.let_go(run)
        self._left(tier, run.keys)

    def find_below(
        self, keys: Sequence[ChunkKey], within: Collection[int] | None
    ) -> tuple[list[ChunkCopy], list[int]]:
        """Find those of ``keys`` that a slower tier in service has whole.

        Args:
            keys: Chunks.
            within: Tiers to look in; None for all.

        Returns:
            A copy of each that was found, and the tier it is in.
        """
        readable = self.readable(within)
        if len(readable) == 1:
            (tier,) = readable
            copies = tier.whole(keys)
            return copies, [tier.index] * len(copies)
        found = [at for key in keys if (at := first_whole(readable, key)) is not None]
        return [copy for _, copy in found], [tier.index for tier, _ in found]

    def asked(self, keys: Iterable[ChunkKey]) -> None:
        """Note that ``keys`` are wanted, in every tier that is passed before each is found."""
        if not self.follows_reuse:
            return
        mask = self._sampling
        for key in keys:
            if key[SAMPLING_BYTE] & mask:
                continue
            for copies, gaps in self._passed:
                if key in copies:
                    break
                gaps.asked(key)

    def publish(
        self, tier: TierState, copies: Sequence[ChunkCopy], *, is_ordered: bool = False
    ) -> None:
        """Do :meth:`TierState.publish` and record that ``copies`` arrived."""
        if not copies:
            return
        tier.publish(copies, self.ctx, is_ordered=is_ordered)
        if self.events.listened_to:
            self.events.add(tier.index, [copy.key for copy in copies], removed=False)

    def drop(self, tier: TierState, copy: ChunkCopy) -> None:
        """Make a resident ``copy`` a miss and record that it left."""
        if copy.state == CopyState.RESIDENT:
            self.events.add(tier.index, (copy.key,), removed=True)
        tier.drop(copy)

    def drop_passed(self, copies: Sequence[ChunkCopy]) -> None:
        """Drop those of ``copies`` in RAM that were to pass through it and nothing holds."""
        if self.ram.passing:
            for copy in copies:
                if copy.transient and not copy.pins and copy.state == _RESIDENT:
                    self.drop(self.ram, copy)

    def condemn(self, tier: TierState, copy: ChunkCopy) -> None:
        """Count a copy in a slower tier whose bytes are wrong, and forget it."""
        tier.counters.corrupt += 1
        if copy.state == CopyState.RESIDENT:
            self.corrupt.append((tier.index, copy.slot))
            self.drop(tier, copy)

    def _left(self, tier: TierState, keys: Sequence[ChunkKey]) -> None:
        """Record that ``keys`` left to make room."""
        if self.follows_reuse:
            tier.counters.followed += self.gaps[tier.index].evicted(keys)
        if self.events.listened_to:
            self.events.add(tier.index, keys, removed=True)

    def take_corrupt(self) -> list[tuple[int, int]]:
        """Return the corrupt slots since the last call."""
        corrupt, self.corrupt = self.corrupt, []
        return corrupt
