"""Plans loads, and pins their copies until every worker has acknowledged the load.

Loads are recorded per request, not per chunk. A chunk may be dropped, stored again and loaded
for another request, while workers still read its former slot for the first request. So each
load must release exactly its own pins.

**Direct loads** (:mod:`kvtier.manager.promote`). Before the RAM slots are filled, the plan
tells the workers the slot of each chunk and the generation that the slot will have. A worker
copies each chunk as soon as the slot has that generation. So a chunk moves from the disk to the
device within one job of the worker, without a scheduling step in between. A copy of the chunk
stays in RAM.

**Hits.** Hits are counted when a load ends, because the chunks that arrived are known only
then. The hits are the chunks before the first failed chunk, because the engine computes all
later tokens. With several KV cache groups, the engine computes all tokens after a failure.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final, NamedTuple

from kvtier.keys import ChunkKey, is_single_group
from kvtier.manager.demote import Demoter
from kvtier.manager.grants import Grants, RequestState
from kvtier.manager.promote import Promoter
from kvtier.manager.tier_stack import NO_GENERATION, TierStack
from kvtier.policies import ChunkCopy, CopyState
from kvtier.types import GdsReads, Outcome

__all__ = ["NO_LOAD", "NO_SLOT", "LoadPlan", "Loader"]

NO_SLOT: Final = -1
"""Slot number of a chunk that has no slot in a :class:`LoadPlan`; its load fails."""
NO_LOAD: Final = -1
"""The ``load_id`` of a :class:`LoadPlan` without a load."""
_RESIDENT = CopyState.RESIDENT


class LoadPlan(NamedTuple):
    """The source of each chunk of a load: a RAM slot or a GDS read.

    Attributes:
        slots: RAM slot of each chunk, in the order of the keys; :data:`NO_SLOT` for a chunk
            without a slot.
        generations: Required generation of each slot. A worker must not load a slot with
            another generation. :data:`NO_GENERATION` for a chunk without a slot.
        origins: Index of the tier that each chunk's bytes come from.
        wait_s: Longest time in seconds that a worker waits for the generations of slots and for
            its GDS reads; 0 for no wait.
        load_id: Identifies the load when it is completed; :data:`NO_LOAD` for an empty plan.
        gds: The chunks that workers read from their tier, without a RAM slot.
    """

    slots: Sequence[int]
    generations: Sequence[int]
    origins: Sequence[int]
    wait_s: float = 0.0
    load_id: int = NO_LOAD
    gds: GdsReads | None = None


@dataclass(slots=True)
class _PendingLoad:
    """A load in flight.

    Attributes:
        keys: The requested chunks.
        copies: The pinned copies, in the order of ``keys``; a key may have no copy.
        slots: Slot of each copy.
        generations: Generation of each copy.
        origins: Index of the tier that each copy's bytes come from.
        lead: Number of keys that precede the first key without a copy.
        direct: Number of RAM slots that the load fills from slower tiers.
        coming: Copies that were still being written when the load was planned, or were too late
            for another load in flight.
        request: The request; None if ``begin_request`` was not called for it.
        reads: Copies that workers read from their tier, by the position of their key.
    """

    keys: Sequence[ChunkKey]
    copies: Sequence[ChunkCopy]
    slots: Sequence[int]
    generations: Sequence[int]
    origins: Sequence[int]
    lead: int
    direct: int = 0
    coming: Collection[ChunkCopy] = ()
    request: RequestState | None = None
    reads: Mapping[int, ChunkCopy] = field(default_factory=dict)


class Loader:
    """Plans loads and completes them."""

    def __init__(
        self,
        stack: TierStack,
        *,
        grants: Grants,
        promoter: Promoter,
        demoter: Demoter,
    ) -> None:
        self._stack = stack
        self._ram = stack.ram
        self._grants = grants
        self._promoter = promoter
        self._demoter = demoter
        self._loads: dict[str, dict[int, _PendingLoad]] = {}
        self._begun = 0

    def __bool__(self) -> bool:
        return bool(self._loads)

    def prepare(
        self, keys: Sequence[ChunkKey], req_id: str, request: RequestState | None
    ) -> LoadPlan:
        """Plan a load and pin its copies; see :meth:`TieredOffloadingManager.prepare_load`."""
        copies = self._ram.resident(keys)
        if len(copies) < len(keys):
            return self._prepare_direct(keys, copies, req_id, request)
        if request is None or not self._grants.transfer(request, copies):
            self._ram.pin(copies)
        self._use(copies)
        load = _load_of(keys, copies)
        load_id = self._begin(load, req_id, request, copies)
        self._stack.slot_status.issue(load.slots)
        return LoadPlan(load.slots, load.generations, load.origins, load_id=load_id)

    def complete(
        self, req_id: str, load_id: int | None, failed_reads: Mapping[int, Outcome]
    ) -> None:
        """Complete a load; see :meth:`TieredOffloadingManager.complete_load`."""
        loads = self._loads.get(req_id, {})
        load = loads.pop(next(iter(loads), NO_LOAD) if load_id is None else load_id, None)
        if load is None:
            return
        if not loads:
            del self._loads[req_id]
        copies = load.copies
        self._grants.end_load(load.direct)
        loaded = self._stack.slot_status.loaded(load.slots, load.generations)
        if not all(loaded):
            failed = [not ok for ok in loaded]
            self._count_failures(compress(copies, failed), compress(load.origins, failed))
            self._drop_failed(load, compress(copies, failed))
        if load.reads:
            self._end_reads(load, failed_reads)
        if load.request is not None and (failed_reads or not all(loaded)):
            self._grants.fail(load.request)
        if any(load.origins):
            self._ram.clear_origins(copies)
        self._ram.unpin(copies)
        self._count_hits(*self._by_key(load, loaded, failed_reads))

    def in_flight(self) -> Iterator[ChunkCopy]:
        """Yield the RAM copies of every load in flight, once per load."""
        for loads in self._loads.values():
            for load in loads.values():
                yield from load.copies

    def reads(self) -> Iterator[ChunkCopy]:
        """Yield the copies that GDS reads of loads in flight use, once per load."""
        for loads in self._loads.values():
            for load in loads.values():
                yield from load.reads.values()

    def clear(self) -> list[ChunkCopy]:
        """Forget every load, because loads are not completed after a reset of the cache.

        GDS reads lose their pins, because a worker detects overwritten bytes.

        Returns:
            The copies in RAM that workers may be loading, each with one pin per load.
        """
        copies = list(self.in_flight())
        if self._stack.gds is not None:
            self._stack.tiers[self._stack.gds.tier].unpin(self.reads())
        self._loads.clear()
        return copies

    def _use(self, copies: Sequence[ChunkCopy]) -> None:
        """Count a use of resident ``copies``."""
        self._ram.count_hits(copies)
        self._ram.touch(copies, self._stack.ctx)
        self._demoter.record_use(copies)

    def _begin(
        self,
        load: _PendingLoad,
        req_id: str,
        request: RequestState | None,
        copies: Sequence[ChunkCopy],
    ) -> int:
        """Record a planned load and return its id; ``copies`` are in the order of the keys."""
        load_id = self._begun
        self._begun += 1
        load.request = request
        self._loads.setdefault(req_id, {})[load_id] = load
        self._grants.begin_load(request, load.direct)
        if request is not None:
            request.extend(copies)
        return load_id

    def _count_hits(
        self, keys: Sequence[ChunkKey], origins: Sequence[int], loaded: Sequence[bool]
    ) -> None:
        """Count as hits the chunks before the first chunk that failed to load.

        Args:
            keys: All chunks of a load.
            origins: Index of the tier of each chunk before the first chunk without a copy.
            loaded: Whether each of these chunks was loaded.
        """
        hits = loaded.index(False) if False in loaded else len(loaded)
        if not hits or (hits < len(keys) and not is_single_group(keys)):
            return
        origins = origins[:hits]
        is_counted = self._stack.is_counted
        counted: Sequence[int] = origins
        if not (is_single_group(keys) and is_counted(keys[0])):
            counted = list(compress(origins, map(is_counted, keys)))
        for tier in self._stack.tiers:
            tier.counters.hits += origins.count(tier.index)
            tier.counters.prompt_hits += counted.count(tier.index)

    def _by_key(
        self, load: _PendingLoad, loaded: Sequence[bool], failed: Container[int]
    ) -> tuple[Sequence[ChunkKey], Sequence[int], Sequence[bool]]:
        """Return the arguments of :meth:`_count_hits` for a completed load.

        Args:
            load: A completed load.
            loaded: Whether each copy in RAM was loaded.
            failed: Positions of the keys whose GDS read failed.

        Returns:
            Three lists: the keys of all chunks; and, for each chunk before the first chunk
            without a copy, the index of its tier, and whether the chunk was loaded.
        """
        if not load.reads:
            return load.keys, load.origins[: load.lead], loaded[: load.lead]
        gds = self._stack.gds
        assert gds is not None
        in_ram = zip(load.origins, loaded, strict=True)
        answers = [
            (gds.tier, at not in failed) if at in load.reads else next(in_ram)
            for at in range(load.lead)
        ]
        return load.keys, [origin for origin, _ in answers], [ok for _, ok in answers]

    # -- direct loads -----------------------------------------------------------------------

    def _prepare_direct(
        self,
        keys: Sequence[ChunkKey],
        resident: Sequence[ChunkCopy],
        req_id: str,
        request: RequestState | None,
    ) -> LoadPlan:
        """Plan a direct load of ``keys``; ``resident`` are the copies that RAM has already.

        Raises:
            KeyError: Loads are not direct.
        """
        stack = self._stack
        if not stack.limits.direct_loads:
            whole = {copy.key for copy in resident}
            raise KeyError(next(key for key in keys if key not in whole))
        self._ram.pin(resident)  # so that they are not evicted for the missing chunks
        self._use(resident)
        promoted, in_ram, reads = self._promoter.begin_direct_load(keys, request)
        copies = [copy for copy in in_ram if copy is not None]
        load = _load_of(keys, copies, direct=promoted)
        load.reads = {at: copy for at, copy in enumerate(reads) if copy is not None}
        load.coming = {copy for copy in copies if copy.state != _RESIDENT}
        self._ram.pin(load.coming)
        self._ram.count_hits(load.coming)
        plan = LoadPlan(load.slots, load.generations, load.origins)
        if None in in_ram:
            plan = self._plan_with_reads(_plan_with_gaps(in_ram), load.reads)
        chosen = [copy or read for copy, read in zip(in_ram, reads, strict=True)]
        if None in chosen:
            load.lead = chosen.index(None)
        present = [copy for copy in chosen if copy is not None]
        load_id = self._begin(load, req_id, request, present)
        stack.slot_status.issue(load.slots)
        if load.lead < len(keys) and request is not None:
            self._grants.fail(request)
        return plan._replace(wait_s=stack.limits.load_timeout_s, load_id=load_id)

    def _plan_with_reads(self, plan: LoadPlan, reads: Mapping[int, ChunkCopy]) -> LoadPlan:
        """Return ``plan`` with added GDS reads for chunks that have no RAM slot."""
        gds = self._stack.gds
        if gds is None or not reads:
            return plan
        origins = [
            gds.tier if at in reads else origin for at, origin in enumerate(plan.origins)
        ]
        slots = [copy.slot for copy in reads.values()]
        return plan._replace(origins=origins, gds=gds.plan_reads(list(reads), slots))

    def _end_reads(self, load: _PendingLoad, failed: Mapping[int, Outcome]) -> None:
        """Unpin the copies that a load's GDS reads used; record failures and uses."""
        gds = self._stack.gds
        assert gds is not None
        tier = self._stack.tiers[gds.tier]
        tier.unpin(load.reads.values())
        for at, outcome in failed.items():
            self._stack.drop_unreadable(tier, load.reads[at], outcome)
            tier.counters.record_failure(outcome, reading=True)
        read = [
            copy
            for at, copy in load.reads.items()
            if at not in failed and copy.state == _RESIDENT
        ]
        tier.touch(read, self._stack.ctx)
        gds.touch([copy.slot for copy in read])

    # -- failed loads -----------------------------------------------------------------------

    def _count_failures(self, copies: Iterable[ChunkCopy], origins: Iterable[int]) -> None:
        """Count failed ``copies``, except copies that never arrived from a slower tier."""
        self._ram.counters.load_failed += sum(
            not origin or copy.state == _RESIDENT
            for copy, origin in zip(copies, origins, strict=True)
        )

    def _drop_failed(self, load: _PendingLoad, failed: Iterable[ChunkCopy]) -> None:
        """Drop copies that a worker could not load, so that no other request gets them.

        A copy that was on its way when ``load`` was planned was only late. Such a copy may
        still arrive and is kept, because its source tier verifies the bytes. The copy's failure
        is cleared in the slot status, so that the next load of the same generation does not
        count as failed.
        """
        late: list[ChunkCopy] = []
        for copy in failed:
            if copy in load.coming:
                late.append(copy)
            elif copy.state == _RESIDENT:
                self._grants.withdraw_from_all(copy)
                self._stack.drop(self._ram, copy)
        if late:
            shared = self._share_lateness(late)
            slots = [copy.slot for copy in late if copy not in shared]
            self._stack.slot_status.clear_failed_loads(slots)

    def _share_lateness(self, late: Collection[ChunkCopy]) -> set[ChunkCopy]:
        """Mark ``late`` copies as late in all other loads; return the copies found there.

        The slot status does not show which load of a slot failed. So a copy in several loads
        counts as late in all of them. The last load to complete clears the failure in the slot
        status.
        """
        shared: set[ChunkCopy] = set()
        for loads in self._loads.values():
            for load in loads.values():
                common = set(late).intersection(load.copies)
                load.coming = {*load.coming, *common}
                shared |= common
        return shared


def _load_of(
    keys: Sequence[ChunkKey], copies: Sequence[ChunkCopy], *, direct: int = 0
) -> _PendingLoad:
    """Return a load of ``keys``; ``copies`` has one copy of each key, in the same order."""
    return _PendingLoad(
        keys,
        copies,
        [copy.slot for copy in copies],
        [copy.generation for copy in copies],
        [copy.origin for copy in copies],
        lead=len(keys),
        direct=direct,
    )


def _plan_with_gaps(chosen: Sequence[ChunkCopy | None]) -> LoadPlan:
    """Return a plan in which chunks without a copy have no slot and fail to load."""
    return LoadPlan(
        [copy.slot if copy else NO_SLOT for copy in chosen],
        [copy.generation if copy else NO_GENERATION for copy in chosen],
        [copy.origin if copy else 0 for copy in chosen],
    )
