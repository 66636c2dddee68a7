"""Pins what requests load, from the plan to the last worker's acknowledgement.

A load is remembered by its request and not by its chunks: a chunk may leave RAM, be stored
again and be loaded by another request while the first one's workers still read its former
slot, and each load must take back its own pins.

**Streamed loads.** A chunk that only a slower tier has may be a hit at once, if a RAM slot can
be *promised* for it. The load that is planned next, in the same step, allots the slots, plans
the jobs that fill them, and tells the workers which slots and which stamps to expect; a
worker copies each chunk as soon as its slot bears its stamp. So a chunk goes from the disk to
the device within one job of the worker, without a scheduling step in between, and its copy in
RAM is a by-product that stays if the placement wants it.

A promise is a number, not a slot: nothing is evicted for a request that may not be scheduled.
What a request was told is a hit in this step, in RAM or below, is counted against what could be
evicted, and promises and streams in flight against ``pin_budget``; so its load finds room, and
one that would not waits its turn with the :class:`~kvtier.manager.promoter.Promoter`. An engine
that looks up many requests before it loads for the first can still break that. Then a chunk has
no slot, which the plan says, and its load fails by itself.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.keys import ChunkKey
from kvtier.manager.demoter import Demoter
from kvtier.manager.ladder import Ladder
from kvtier.manager.plans import NO_GENERATION, NO_SLOT, LoadPlan
from kvtier.manager.promoter import Promoter
from kvtier.manager.requests import RequestState
from kvtier.manager.rising import Wanted, plan_rise
from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy, CopyState

__all__ = ["Loader"]

_RESIDENT = CopyState.RESIDENT


@dataclass(slots=True)
class _Load:
    """A load in flight: the copies it pins, and how many slots it made others give up."""

    copies: Sequence[ChunkCopy]
    streamed: int = 0


class Loader:
    """Plans loads and ends them."""

    def __init__(self, ladder: Ladder, promoter: Promoter, demoter: Demoter) -> None:
        self._ladder = ladder
        self._ram = ladder.ram
        self._promoter = promoter
        self._demoter = demoter
        self._loads: dict[str, deque[_Load]] = {}
        self._promises: Counter[RequestState] = Counter()
        self._promised_to: RequestState | None = None
        self._left = 0
        self._fits = 0
        self._doubtful: set[int] = set()

    # -- promises ---------------------------------------------------------------------------

    def promise(self, request: RequestState, key: ChunkKey, tier: TierState) -> bool:
        """Promise a RAM slot for a chunk of ``tier`` until the step ends, if one is sure."""
        ladder = self._ladder
        if not ladder.limits.streams or request.wanting:
            return False
        if key in request.asked:
            return True
        if request is not self._promised_to:
            # An engine asks for one request after the other, so this is not done for every key.
            self._turn_to(request)
        if self._left <= 0 or len(request.asked) >= self._fits or tier.index in self._doubtful:
            return False
        self._left -= 1
        self._promises[request] += 1
        return True

    def _turn_to(self, request: RequestState) -> None:
        """Work out what can be promised to ``request``."""
        ladder, promoter = self._ladder, self._promoter
        held = promoter.granted + promoter.streaming + self._promises.total()
        others = (other for other in promoter.asked_for() if other is not request)
        self._promised_to = request
        self._left = ladder.limits.pin_budget - held
        self._fits = self._ram.room - sum(len(other.asked) for other in others)
        self._doubtful = {
            tier.index for tier in ladder.tiers[1:] if not ladder.worth.plainly(tier.index)
        }

    def end_step(self) -> None:
        """Take back what was promised in this step and not used."""
        self._promises.clear()
        self._promised_to = None

    # -- loads ------------------------------------------------------------------------------

    def prepare(
        self, keys: Sequence[ChunkKey], req_id: str, request: RequestState | None
    ) -> LoadPlan:
        """Do :meth:`TieredOffloadingManager.prepare_load`."""
        members = self._ram.copies
        copies: list[ChunkCopy] = []
        for key in keys:
            copy = members.get(key)
            if copy is None or copy.state != _RESIDENT:
                return self._stream(keys, req_id, request)
            copies.append(copy)
        origins = self._use(copies)
        self._begin(_Load(copies), keys, req_id, request)
        slots = [copy.slot for copy in copies]
        self._ladder.truth.issue(slots)
        return LoadPlan(slots, [copy.generation for copy in copies], origins)

    def complete(self, req_id: str, request: RequestState | None) -> None:
        """Do :meth:`TieredOffloadingManager.complete_load`."""
        loads = self._loads.get(req_id)
        if loads is None:
            return
        load = loads.popleft()
        if not loads:
            del self._loads[req_id]
        copies = load.copies
        self._promoter.streaming -= load.streamed
        loaded = self._ladder.truth.loaded(
            [copy.slot for copy in copies], [copy.generation for copy in copies]
        )
        if not all(loaded):
            self._condemn([copy for copy, ok in zip(copies, loaded, strict=True) if not ok])
            if request is not None:
                self._promoter.give_up(request)
        ram = self._ram
        for copy in copies:
            copy.origin = 0
            ram.unpin(copy)
            if copy.transient and not copy.pins and copy.state == _RESIDENT:
                self._ladder.drop(ram, copy)

    def in_flight(self) -> Iterator[ChunkCopy]:
        """Yield each copy once for each load that a worker may be carrying out."""
        for loads in self._loads.values():
            for load in loads:
                yield from load.copies

    def clear(self) -> None:
        """Forget every load; for a reset of the cache, after which no completion comes."""
        self._loads.clear()
        self._promoter.streaming = 0
        self.end_step()

    # -- internals --------------------------------------------------------------------------

    def _use(self, copies: Sequence[ChunkCopy]) -> list[int]:
        """Pin resident ``copies``, count them as used, and return whence their bytes came."""
        self._ram.pin_many(copies)
        for copy in copies:
            copy.hits += 1
        origins = [copy.origin for copy in copies]
        if any(origins):
            for tier, hits in Counter(origins).items():
                self._ladder.tiers[tier].counters.hits += hits
        else:
            self._ram.counters.hits += len(copies)
        self._ram.touch(copies, self._ladder.ctx)
        self._demoter.used(copies)
        return origins

    def _begin(
        self, load: _Load, keys: Sequence[ChunkKey], req_id: str, request: RequestState | None
    ) -> None:
        self._loads.setdefault(req_id, deque()).append(load)
        self._promised_to = None
        self._promoter.streaming += load.streamed
        if request is not None:
            self._promises.pop(request, None)
            self._promoter.release(request)
            request.remember(keys)

    def _stream(
        self, keys: Sequence[ChunkKey], req_id: str, request: RequestState | None
    ) -> LoadPlan:
        """Plan a load of chunks not all of which are whole in RAM.

        Raises:
            KeyError: Chunks are not streamed here.
        """
        ladder, ram = self._ladder, self._ram
        members = ram.copies
        there = [copy for key in keys if (copy := members.get(key)) is not None]
        resident = [copy for copy in there if copy.state == _RESIDENT]
        if not ladder.limits.streams:
            whole = {copy.key for copy in resident}
            raise KeyError(next(key for key in keys if key not in whole))
        self._use(resident)  # pinned, they cannot make room for the others
        within = None if request is None else request.terms.load_tiers
        wanted = [
            Wanted(key, *found)
            for key in keys
            if key not in members
            and (found := ladder.reachable_copy(key, within=within)) is not None
        ]
        rises = plan_rise(ladder, wanted) if wanted else []
        chunks = [members.get(key) for key in keys]
        coming = [copy for copy in chunks if copy and copy.state == CopyState.WRITING]
        for copy in coming:
            ram.pin(copy)
            copy.hits += 1
            ladder.tiers[copy.origin].counters.hits += 1
        load = _Load([*resident, *coming], len(wanted) if rises else 0)
        self._begin(load, keys, req_id, request)
        ladder.truth.issue([copy.slot for copy in load.copies])
        usable = set(load.copies)
        chosen = [copy if copy in usable else None for copy in chunks]
        if None in chosen and request is not None:
            self._promoter.give_up(request)
        return LoadPlan(
            [copy.slot if copy else NO_SLOT for copy in chosen],
            [copy.generation if copy else NO_GENERATION for copy in chosen],
            [copy.origin if copy else 0 for copy in chosen],
            wait_s=ladder.limits.load_timeout_s,
        )

    def _condemn(self, copies: Sequence[ChunkCopy]) -> None:
        """Drop copies that a worker could not load: who asks next must not get them.

        One that was still on its way is let arrive: the tier proves its bytes when it does.
        """
        self._ram.counters.load_failed += len(copies)
        for copy in copies:
            if copy.state == _RESIDENT:
                self._promoter.take_from_all(copy)
                self._ladder.retention.forget(copy)
                self._ladder.drop(self._ram, copy)
