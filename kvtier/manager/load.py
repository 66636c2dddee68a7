"""Plans loads, and pins their copies until every worker has acknowledged the load.

Loads are recorded per request, not per chunk. A chunk may be dropped, stored again and loaded
for another request, while workers still read its former slot for the first request. So each
load must release exactly its own pins.

Chunks that RAM lacks are loaded directly: :mod:`kvtier.manager.direct` plans such a load.

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
from kvtier.manager.tier_stack import TierStack
from kvtier.policies import ChunkCopy, CopyState
from kvtier.types import GdsReads, Outcome

__all__ = ["NO_LOAD", "NO_SLOT", "LoadPlan", "Loader", "PendingLoad", "load_of"]

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
class PendingLoad:
    """A load in flight.

    Attributes:
        keys: The requested chunks.
        copies: The pinned copies, in the order of ``keys``; a key may have no copy.
        slots: Slot of each copy.
        generations: Generation of each copy.
        origins: Index of the tier that each copy's bytes come from.
        lead: Number of keys that precede the first key without a copy.
        request: The request; None if ``begin_request`` was not called for it.
        fills: Number of RAM slots that the load fills from slower tiers.
        coming: Copies that were still being written when the load was planned, or were too late
            for another load in flight.
        reads: Copies that workers read from their tier, by the position of their key.
    """

    keys: Sequence[ChunkKey]
    copies: Sequence[ChunkCopy]
    slots: Sequence[int]
    generations: Sequence[int]
    origins: Sequence[int]
    lead: int
    request: RequestState | None
    fills: int = 0
    coming: Collection[ChunkCopy] = ()
    reads: Mapping[int, ChunkCopy] = field(default_factory=dict)


class Loader:
    """Plans loads of resident chunks, and completes all loads."""

    def __init__(self, stack: TierStack, grants: Grants, demoter: Demoter) -> None:
        self._stack = stack
        self._ram = stack.ram
        self._grants = grants
        self._demoter = demoter
        self._loads: dict[str, dict[int, PendingLoad]] = {}
        self._begun = 0

    def __bool__(self) -> bool:
        return bool(self._loads)

    def prepare(
        self,
        keys: Sequence[ChunkKey],
        copies: Sequence[ChunkCopy],
        req_id: str,
        request: RequestState | None,
    ) -> LoadPlan:
        """Plan a load of ``keys`` and pin ``copies``, their resident copies in RAM."""
        if request is None or not self._grants.transfer(request, copies):
            self._ram.pin(copies)
        self.use(copies)
        load = load_of(keys, copies, request)
        load_id = self.begin(load, req_id, copies)
        return LoadPlan(load.slots, load.generations, load.origins, load_id=load_id)

    def use(self, copies: Sequence[ChunkCopy]) -> None:
        """Count a use of resident ``copies``."""
        self._ram.count_hits(copies)
        self._ram.touch(copies, self._stack.ctx)
        self._demoter.record_use(copies)

    def begin(self, load: PendingLoad, req_id: str, copies: Sequence[ChunkCopy]) -> int:
        """Record a planned load and return its id.

        Args:
            load: The load; its copies are pinned.
            req_id: The request.
            copies: The copies that the load uses, in the order of the keys.
        """
        load_id = self._begun
        self._begun += 1
        self._loads.setdefault(req_id, {})[load_id] = load
        self._grants.begin_load(load.request, load.fills)
        if load.request is not None:
            load.request.extend(copies)
        self._stack.slot_status.issue(load.slots)
        return load_id

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
        self._grants.end_load(load.fills)
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
        self, load: PendingLoad, loaded: Sequence[bool], failed: Container[int]
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

    def _end_reads(self, load: PendingLoad, failed: Mapping[int, Outcome]) -> None:
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

    def _drop_failed(self, load: PendingLoad, failed: Iterable[ChunkCopy]) -> None:
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


def load_of(
    keys: Sequence[ChunkKey], copies: Sequence[ChunkCopy], request: RequestState | None
) -> PendingLoad:
    """Return a load of ``keys`` that uses the RAM ``copies``."""
    return PendingLoad(
        keys,
        copies,
        [copy.slot for copy in copies],
        [copy.generation for copy in copies],
        [copy.origin for copy in copies],
        lead=len(keys),
        request=request,
    )
