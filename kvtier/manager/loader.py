"""Pins what requests load, from the plan to the last worker's acknowledgement.

A load is remembered by its request and not by its chunks: a chunk may leave RAM, be stored
again and be loaded by another request while the first one's workers still read its former
slot, and each load must take back its own pins.

**Streamed loads.** A chunk that only a slower tier has may be a hit at once, if a RAM slot can
be reserved for it (:mod:`kvtier.manager.lookup`). The load that is planned next, in the same
step, allots the slots, plans the jobs that fill them, and tells the workers which slots and
which stamps to expect; a worker copies each chunk as soon as its slot bears its stamp. So a
chunk goes from the disk to the device within one job of the worker, without a scheduling step
in between, and its copy in RAM is a by-product that stays if the placement wants it.

**What counts as a hit.** Only when a load ends is it known what of it came, so hits are counted
then: the chunks before the first one that did not come, for the engine computes from there on.
Where the chunks are of several KV cache groups it computes everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from kvtier.keys import ChunkKey, of_one_group
from kvtier.manager.demoter import Demoter
from kvtier.manager.grants import Grants
from kvtier.manager.ladder import Ladder
from kvtier.manager.lookup import HitLookup
from kvtier.manager.plans import NO_GENERATION, NO_SLOT, LoadPlan
from kvtier.manager.promoter import Promoter
from kvtier.manager.promotion_jobs import PromotionJobs
from kvtier.manager.requests import RequestState
from kvtier.policies import ChunkCopy, CopyState

__all__ = ["Loader"]

_RESIDENT = CopyState.RESIDENT


@dataclass(slots=True)
class _Load:
    """A load in flight.

    Attributes:
        keys: What was asked for.
        copies: What it pins: the copies of ``keys``, less those that have none.
        slots: Where each is.
        generations: Stamp of each.
        origins: Index of the tier each copy's bytes come from.
        lead: Keys before the first that has no copy.
        streamed: Slots it made others give up.
        awaited: Copies whose bytes were on their way when it was planned, or came too late for
            another that was under way with it.
    """

    keys: Sequence[ChunkKey]
    copies: Sequence[ChunkCopy]
    slots: Sequence[int]
    generations: Sequence[int]
    origins: Sequence[int]
    lead: int
    streamed: int = 0
    awaited: Collection[ChunkCopy] = ()


class Loader:
    """Plans loads and ends them."""

    def __init__(
        self,
        ladder: Ladder,
        *,
        grants: Grants,
        lookup: HitLookup,
        promotions: PromotionJobs,
        promoter: Promoter,
        demoter: Demoter,
    ) -> None:
        self._ladder = ladder
        self._ram = ladder.ram
        self._grants = grants
        self._lookup = lookup
        self._promotions = promotions
        self._promoter = promoter
        self._demoter = demoter
        self._loads: dict[str, list[_Load]] = {}

    def prepare(
        self, keys: Sequence[ChunkKey], req_id: str, request: RequestState | None
    ) -> LoadPlan:
        """Do :meth:`TieredOffloadingManager.prepare_load`."""
        copies = self._ram.whole(keys)
        if len(copies) < len(keys):
            return self._stream(keys, copies, req_id, request)
        handed_over = request is not None and self._grants.hand_over(request, copies)
        self._use(copies, pinned=handed_over)
        load = _load_of(keys, copies)
        self._begin(load, req_id, request)
        self._ladder.slot_status.issue(load.slots)
        return LoadPlan(load.slots, load.generations, load.origins)

    def complete(self, req_id: str, request: RequestState | None) -> None:
        """Do :meth:`TieredOffloadingManager.complete_load`."""
        loads = self._loads.get(req_id)
        if loads is None:
            return
        load = loads.pop(0)
        if not loads:
            del self._loads[req_id]
        copies = load.copies
        self._grants.streaming -= load.streamed
        loaded = self._ladder.slot_status.loaded(load.slots, load.generations)
        if not all(loaded):
            failed = [not ok for ok in loaded]
            self._count_failures(compress(copies, failed), compress(load.origins, failed))
            self._condemn(load, compress(copies, failed))
            if request is not None:
                self._promoter.give_up(request)
        if any(load.origins):
            for copy in copies:
                copy.origin = 0
        self._ram.unpin_many(copies)
        self._ladder.drop_passed(copies)
        self._count_hits(load, loaded)

    def in_flight(self) -> Iterator[ChunkCopy]:
        """Yield each copy once for each load that a worker may be carrying out."""
        for loads in self._loads.values():
            for load in loads:
                yield from load.copies

    def clear(self) -> None:
        """Forget every load; for a reset of the cache, after which no completion comes."""
        self._loads.clear()
        self._grants.streaming = 0
        self._lookup.end_step()

    def _use(self, copies: Sequence[ChunkCopy], *, pinned: bool = False) -> None:
        """Pin resident ``copies``, unless they are, and count them as used."""
        if not pinned:
            self._ram.pin_many(copies)
        for copy in copies:
            copy.hits += 1
        self._ram.touch(copies, self._ladder.ctx)
        self._demoter.used(copies)

    def _count_hits(self, load: _Load, loaded: Sequence[bool]) -> None:
        """Count the chunks of a load that its engine does not compute after all."""
        keys = load.keys
        hits = load.lead if all(loaded) else min(load.lead, loaded.index(False))
        if not hits or (hits < len(keys) and not of_one_group(keys)):
            return
        origins = load.origins[:hits]
        is_counted = self._ladder.is_counted
        counted: Sequence[int] = origins
        if not (of_one_group(keys) and is_counted(keys[0])):
            counted = list(compress(origins, map(is_counted, keys)))
        for tier in self._ladder.tiers:
            tier.counters.hits += origins.count(tier.index)
            tier.counters.prompt_hits += counted.count(tier.index)

    def _begin(self, load: _Load, req_id: str, request: RequestState | None) -> None:
        self._loads.setdefault(req_id, []).append(load)
        self._lookup.redeem(request)
        self._grants.streaming += load.streamed
        if request is not None:
            self._promoter.release(request)
            request.remember(load.copies)

    def _stream(
        self,
        keys: Sequence[ChunkKey],
        resident: Sequence[ChunkCopy],
        req_id: str,
        request: RequestState | None,
    ) -> LoadPlan:
        """Plan a load of chunks of which only ``resident`` are whole in RAM.

        Raises:
            KeyError: Chunks are not streamed here.
        """
        ladder = self._ladder
        if not ladder.limits.direct_loads:
            whole = {copy.key for copy in resident}
            raise KeyError(next(key for key in keys if key not in whole))
        self._use(resident)  # pinned, they cannot make room for the others
        streamed = self._bring_up(keys, None if request is None else request.terms.load_tiers)
        chosen = list(map(self._await, map(self._ram.copies.get, keys)))
        load = _load_of(keys, [copy for copy in chosen if copy is not None], streamed=streamed)
        load.awaited = {copy for copy in load.copies if copy.state != _RESIDENT}
        plan = LoadPlan(load.slots, load.generations, load.origins)
        if None in chosen:
            load.lead = chosen.index(None)
            plan = _plan_with_gaps(chosen)
        self._begin(load, req_id, request)
        ladder.slot_status.issue(load.slots)
        if load.lead < len(keys) and request is not None:
            self._promoter.give_up(request)
        return plan._replace(wait_s=ladder.limits.load_timeout_s)

    def _bring_up(self, keys: Sequence[ChunkKey], within: Collection[int] | None) -> int:
        """Plan the jobs that bring up what of ``keys`` is not in RAM; return for how many."""
        members = self._ram.copies
        absent = [key for key in keys if key not in members]
        sources, tiers = self._ladder.find_below(absent, within)
        jobs = self._promotions.plan(sources, tiers) if sources else None
        return len(sources) if jobs else 0

    def _await(self, copy: ChunkCopy | None) -> ChunkCopy | None:
        """Pin ``copy`` if it is on its way up; return None if it is of no use to a load."""
        if copy is None or copy.state == _RESIDENT:
            return copy
        # Not those that workers store: if that fails, nobody says so to who waits for them.
        if copy.state != CopyState.WRITING or not copy.origin:
            return None
        copy.pins += 1
        copy.hits += 1
        return copy

    def _count_failures(self, copies: Iterable[ChunkCopy], origins: Iterable[int]) -> None:
        """Count what failed between RAM and the workers: what is not here failed below."""
        self._ram.counters.load_failed += sum(
            not origin or copy.state == _RESIDENT
            for copy, origin in zip(copies, origins, strict=True)
        )

    def _condemn(self, load: _Load, failed: Iterable[ChunkCopy]) -> None:
        """Drop copies that a worker could not load: who asks next must not get them.

        One that ``load`` waited for is let arrive, and stays if it has: the tier proves its
        bytes when it does, and was late. Nor is the next load of it, which bears the same
        stamp, taken for one that failed.
        """
        late: list[ChunkCopy] = []
        for copy in failed:
            if copy in load.awaited:
                late.append(copy)
            elif copy.state == _RESIDENT:
                self._grants.take_from_all(copy)
                self._ladder.retention.forget(copy)
                self._ladder.drop(self._ram, copy)
        if late:
            shared = self._share_lateness(late)
            self._ladder.slot_status.forgive([copy.slot for copy in late if copy not in shared])

    def _share_lateness(self, late: Collection[ChunkCopy]) -> set[ChunkCopy]:
        """Return which of ``late`` other loads carry as well.

        Nothing tells who of them could not load a copy. So to all it was late, also to one that
        was planned when it had come, and the last to end has that forgotten.
        """
        shared: set[ChunkCopy] = set()
        for loads in self._loads.values():
            for load in loads:
                common = set(late).intersection(load.copies)
                load.awaited = {*load.awaited, *common}
                shared |= common
        return shared


def _load_of(
    keys: Sequence[ChunkKey], copies: Sequence[ChunkCopy], *, streamed: int = 0
) -> _Load:
    """Return the load of ``copies``, all that there are of ``keys``."""
    return _Load(
        keys,
        copies,
        [copy.slot for copy in copies],
        [copy.generation for copy in copies],
        [copy.origin for copy in copies],
        lead=len(keys),
        streamed=streamed,
    )


def _plan_with_gaps(chosen: Sequence[ChunkCopy | None]) -> LoadPlan:
    """Return the plan of a load that fails where there is no copy."""
    return LoadPlan(
        [copy.slot if copy else NO_SLOT for copy in chosen],
        [copy.generation if copy else NO_GENERATION for copy in chosen],
        [copy.origin if copy else 0 for copy in chosen],
    )
