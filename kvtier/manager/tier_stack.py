"""All tiers, and the state that the modules of the manager share."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from kvtier.keys import ChunkKey, group_filter
from kvtier.manager.copies import CopyList
from kvtier.manager.cost_model import CostModel
from kvtier.manager.reports import SAMPLING_BYTE, EventLog, ReuseGaps
from kvtier.manager.retention import Retention
from kvtier.manager.tier import TierState
from kvtier.policies import Admission, ChunkCopy, CopyState, Placement, PolicyContext
from kvtier.policies.base import RequestTerms
from kvtier.types import GdsReads, Outcome

__all__ = [
    "NO_GENERATION",
    "GdsSource",
    "ManagerLimits",
    "SlotStatus",
    "TierStack",
    "first_resident",
]

NO_GENERATION: Final = 0
"""A generation that is never given to a write."""
_RESIDENT = CopyState.RESIDENT
_LATE = CopyState.LATE


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Limits of the manager.

    Attributes:
        pin_budget: Largest number of RAM slots held for waiting requests.
        reserve: Fraction of a tier's slots that write-on-evict keeps free.
        queue: Largest number of chunks on their way to one slower tier.
        batch: Largest number of chunks in one job.
        retained: Largest number of RAM slots retained until a deadline.
        backlog: Largest number of chunks queued for one slower tier or on their way there.
            Further chunks stay in RAM only.
        load_timeout_s: Timeout of a promotion.
        store_timeout_s: Timeout of a demotion.
        max_queue_steps: Limit, in steps, of a request's wait for its promotions to start.
        max_queue_s: Limit of that wait in seconds; the wait ends once both limits have passed.
        max_arrival_steps: Largest number of steps for which a request waits for chunks on their
            way.
        max_idle_grant_steps: Number of steps without a lookup after which a request's grants
            end.
        max_store_refusals: Number of refusals after which a store is cut to the chunks that
            fit.
        direct_loads: Whether chunks in slower tiers may be loaded directly; else all loads are
            staged.
        lookup_timeout_s: Timeout of a question to the shared tier.
    """

    pin_budget: int
    reserve: float
    queue: int
    batch: int = 256
    retained: int = 0
    backlog: int = sys.maxsize
    load_timeout_s: float = 10.0
    store_timeout_s: float = 60.0
    max_queue_steps: int = 256
    max_queue_s: float = 0.0
    max_arrival_steps: int = 20_000
    max_idle_grant_steps: int = 256
    max_store_refusals: int = 16
    direct_loads: bool = False
    lookup_timeout_s: float = 0.05


class SlotStatus(Protocol):
    """The workers' reports about RAM slots, read from shared memory.

    An acknowledgement reports that a job ended in every rank, but not which chunks are whole.
    The workers write this status, slot by slot, into memory that they share with the scheduler.
    Both entry points use this interface.
    """

    def issue(self, slots: Sequence[int]) -> None:
        """Record that each worker gets one more job for each of ``slots``."""

    def clear_generations(self, slots: Sequence[int]) -> None:
        """Clear the generations of ``slots`` before the bytes in the slots change."""

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> Sequence[bool]:
        """Return, for each slot, whether all ranks stored all bytes of its generation."""

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> Sequence[bool]:
        """Return, for each slot, whether all loads of its generation succeeded on every rank.

        The value is True for a slot without such loads.
        """

    def clear_failed_loads(self, slots: Sequence[int]) -> None:
        """Forget the failed loads of ``slots``. No rank may be loading from these slots."""

    def all_acknowledged(self, slots: Sequence[int]) -> Sequence[bool]:
        """Return, for each slot, whether all ranks acknowledged every job issued for it."""


class GdsSource(Protocol):
    """Reports which slots of one tier the workers can read, and plans their GDS reads.

    A GDS read of a chunk needs no RAM slot and no job between tiers. The chunk's copy in the
    tier is pinned from the plan of the load until all workers have acknowledged the load. The
    methods return at once.
    """

    @property
    def tier(self) -> int:
        """Index of the tier."""

    def readable(self, slots: Sequence[int]) -> Sequence[bool]:
        """Return, for each of ``slots``, whether all workers can read and verify it now."""

    def plan_reads(self, positions: Sequence[int], slots: Sequence[int]) -> GdsReads:
        """Return the GDS reads of ``slots``, for the chunks at ``positions`` in a load."""

    def begin_overwriting(self, slots: Sequence[int]) -> None:
        """Forget the part hashes of ``slots``, because other chunks will be written there."""

    def touch(self, slots: Sequence[int]) -> None:
        """Record that ``slots`` were read."""


def first_resident(
    tiers: Iterable[TierState], key: ChunkKey
) -> tuple[TierState, ChunkCopy] | None:
    """Return the first tier with a resident copy of ``key``, and this copy; else None."""
    for tier in tiers:
        copy = tier.copies.get(key)
        if copy is not None and copy.state == _RESIDENT:
            return tier, copy
    return None


class TierStack:
    """All tiers, fastest first, and the state that the modules of the manager share.

    Attributes:
        tiers: The tiers; index 0 is RAM.
        ram: The first tier.
        slower: The other tiers.
        shared: The shared tier, which is the last tier; None without one.
        placement: Decides what moves between tiers.
        conditions: The conditions on writes to slower tiers, in order.
        limits: Bounds to keep.
        slot_status: The workers' reports about RAM slots.
        cost_model: Decides whether to load chunks or compute them.
        is_counted: Returns whether a key belongs to the counting group.
        retentions: The copies of each tier that are retained until a deadline.
        ctx: The information that policies may use.
        epoch: Number of resets.
        step: Number of scheduling steps.
        out_of_service: Indices of the slower tiers that cannot be read now.
        corrupt: Slots with wrong bytes, as (tier index, slot); a restart must not recover them.
        gaps: Per tier, the times from a chunk's eviction to its next lookup.
        tracks_reuse: Whether ``gaps`` are recorded.
        restricts_stores: Whether a request has limited the tiers that may store its chunks.
        events: Residency events that wait for :meth:`EventLog.take`.
        gds: Reports which slots of one tier the workers can read; None without GDS reads.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each part
        self,
        tiers: Sequence[TierState],
        *,
        placement: Placement,
        conditions: Sequence[Admission],
        limits: ManagerLimits,
        slot_status: SlotStatus,
        record_events: bool,
        track_reuse: bool,
        cost_model: CostModel,
        counting_group: int,
        gds: GdsSource | None = None,
    ) -> None:
        self.gds = gds
        self.tiers = tuple(tiers)
        self.ram = self.tiers[0]
        self.slower = self.tiers[1:]
        self.shared = self.tiers[-1] if self.tiers[-1].is_shared else None
        self._local = self.slower if self.shared is None else self.slower[:-1]
        self.placement = placement
        self.conditions = tuple(conditions)
        self.limits = limits
        self.slot_status = slot_status
        self.cost_model = cost_model
        self.is_counted = group_filter(counting_group)
        quotas = [limits.retained, *(tier.slots.capacity for tier in self.slower)]
        self.retentions = [
            Retention(tier, quota) for tier, quota in zip(self.tiers, quotas, strict=True)
        ]
        self.ctx = PolicyContext()
        self.epoch = 0
        self.step = 0
        self.out_of_service: Collection[int] = ()
        self.corrupt: list[tuple[int, int]] = []
        self.tracks_reuse = track_reuse
        self.restricts_stores = False
        self.gaps = [ReuseGaps(tier.slots.capacity) for tier in self.tiers]
        self._tracked = list(zip(self.tiers, self.gaps, strict=True))
        self._sampling = min(gaps.mask for gaps in self.gaps)
        self._generation = 0
        self.events = EventLog(has_listener=record_events)

    def next_generation(self) -> int:
        """Return a new generation, never 0, for RAM slots about to be written."""
        self._generation += 1
        return self._generation

    @contextmanager
    def naming_request(self, req_id: str, terms: RequestTerms) -> Iterator[None]:
        """Set the request that policies see during a ``with`` block."""
        ctx = self.ctx
        ctx.request, ctx.session = req_id, terms.session
        try:
            yield
        finally:
            ctx.request = ctx.session = ""

    def end_reuse_step(self) -> None:
        """End the current step in the :class:`ReuseGaps` of every tier."""
        for gaps in self.gaps:
            if gaps.is_changed:
                gaps.end_step(self.ctx.now)

    # -- finding chunks ---------------------------------------------------------------------

    def has_any(self, keys: Collection[ChunkKey], *, slower_than: int = -1) -> bool:
        """Return whether a tier with an index above ``slower_than`` has any of ``keys``."""
        for tier in self.tiers[slower_than + 1 :]:
            if not tier.copies.keys().isdisjoint(keys):
                return True
        return False

    def readable(
        self, allowed: Collection[int] | None, *, with_shared: bool
    ) -> Sequence[TierState]:
        """Return the slower tiers in service, fastest first.

        Args:
            allowed: Indices of the tiers to choose from; None for all.
            with_shared: Whether the shared tier, if any, may be read.
        """
        if allowed is None and not self.out_of_service:
            return self.slower if with_shared else self._local
        return [
            tier
            for tier in self.slower
            if tier.index not in self.out_of_service
            and (with_shared or tier in self._local)
            and (allowed is None or tier.index in allowed)
        ]

    def find_leading(
        self, keys: Sequence[ChunkKey], readable: Sequence[TierState]
    ) -> tuple[list[ChunkCopy], list[int]]:
        """Find ``keys`` in RAM or else in ``readable``, up to the first missing key.

        Returns:
            A copy of each key, which may be on its way to RAM, and the tier index of each copy.
        """
        ram = self.ram
        copies = ram.leading(keys)
        tiers = [0] * len(copies)
        rest = keys[len(copies) :] if copies else keys
        if (
            readable
            and rest
            and rest[0] in readable[0].copies
            and ram.copies.keys().isdisjoint(rest)
        ):
            copies += readable[0].leading(rest)
            tiers += [readable[0].index] * (len(copies) - len(tiers))
        for key in islice(keys, len(copies), None):
            copy = ram.copies.get(key)
            if copy is None:
                found = first_resident(readable, key)
                if found is None:
                    break
                tier, copy = found
                tiers.append(tier.index)
            elif copy.state == _LATE:
                break
            else:
                tiers.append(0)
            copies.append(copy)
        return copies, tiers

    def is_from(self, key: ChunkKey, allowed: Collection[int]) -> bool:
        """Return whether ``key`` is in, or was promoted from, a tier in ``allowed``."""
        copy = self.ram.copies.get(key)
        if copy is not None and copy.origin in allowed:
            return True
        tiers = (tier for tier in self.slower if tier.index in allowed)
        return first_resident(tiers, key) is not None

    def record_wanted(self, keys: Iterable[ChunkKey]) -> None:
        """Record a lookup of each key in the tiers that are faster than the key's fastest."""
        if not self.tracks_reuse:
            return
        mask = self._sampling
        for key in keys:
            if key[SAMPLING_BYTE] & mask:
                continue
            for tier, gaps in self._tracked:
                if key in tier.copies:
                    break
                gaps.record_wanted(key)

    # -- adding and removing copies ---------------------------------------------------------

    def take_slots(
        self, tier: TierState, keys: Sequence[ChunkKey]
    ) -> tuple[list[int], list[ChunkKey]]:
        """Allocate a slot of ``tier`` for each of ``keys``, evicting idle copies if needed.

        Args:
            tier: The tier.
            keys: At most :attr:`TierState.available` keys.

        Returns:
            A slot for each key, and the keys of the victims.
        """
        if tier.eviction.tracks_misses:
            for key in keys:
                tier.eviction.on_miss(key, self.ctx)
        slots, evicted = tier.take_slots(len(keys), self.ctx)
        if evicted:
            self._record_evicted(tier, evicted)
        return slots, evicted

    def evict_leaving(self, tier: TierState, listed: CopyList) -> None:
        """Evict the copies in ``listed`` and record the evictions.

        Args:
            tier: The tier.
            listed: Unpinned copies in :attr:`TierState.leaving`, clean or dirty.
        """
        tier.evict_leaving(listed)
        self._record_evicted(tier, listed.keys)

    def publish(
        self, tier: TierState, copies: Sequence[ChunkCopy], *, is_ordered: bool = False
    ) -> None:
        """Make written copies resident and record the residency events."""
        if not copies:
            return
        tier.publish(copies, self.ctx, is_ordered=is_ordered)
        if self.events.has_listener:
            self.events.add(tier.index, [copy.key for copy in copies], removed=False)

    @property
    def retention(self) -> Retention:
        """The copies retained in RAM until a deadline."""
        return self.retentions[0]

    def drop(self, tier: TierState, copy: ChunkCopy) -> None:
        """Make ``copy`` a miss and record the residency event."""
        if copy.state == _RESIDENT:
            self.events.add(tier.index, (copy.key,), removed=True)
            self.retentions[tier.index].release(copy)
        tier.drop(copy)

    def drop_unreadable(self, tier: TierState, copy: ChunkCopy, outcome: Outcome) -> None:
        """Drop a copy in a slower tier if a job found it corrupt or missing.

        After other outcomes the copy stays, because a later read may succeed.
        """
        if outcome is Outcome.CORRUPT:
            tier.counters.corrupt += 1
            if copy.state == _RESIDENT:
                self.record_corrupt(tier.index, (copy,))
        elif outcome is not Outcome.MISSING:
            return
        if copy.state == _RESIDENT:
            self.drop(tier, copy)

    def record_corrupt(self, tier: int, copies: Iterable[ChunkCopy]) -> None:
        """Record the slots of ``copies`` as corrupt; a restart must not recover them."""
        self.corrupt += [(tier, copy.slot) for copy in copies]

    def take_corrupt(self) -> list[tuple[int, int]]:
        """Return the slots found corrupt since the last call."""
        corrupt, self.corrupt = self.corrupt, []
        return corrupt

    def _record_evicted(self, tier: TierState, keys: Sequence[ChunkKey]) -> None:
        if self.tracks_reuse:
            tier.counters.followed += self.gaps[tier.index].record_evicted(keys)
        if self.events.has_listener:
            self.events.add(tier.index, keys, removed=True)
