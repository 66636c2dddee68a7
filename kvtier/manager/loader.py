"""Pins what requests load, from the plan to the last worker's acknowledgement.

A load is remembered by its request and not by its chunks: a chunk may leave RAM, be stored
again and be loaded by another request while the first one's workers still read its former
slot, and each load must take back its own pins.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from kvtier.keys import ChunkKey
from kvtier.manager.demoter import Demoter
from kvtier.manager.ladder import Ladder
from kvtier.manager.plans import LoadPlan
from kvtier.manager.promoter import Promoter
from kvtier.manager.requests import RequestState
from kvtier.policies import ChunkCopy, CopyState

__all__ = ["Loader"]

_RESIDENT = CopyState.RESIDENT


class Loader:
    """Plans loads and ends them."""

    def __init__(self, ladder: Ladder, promoter: Promoter, demoter: Demoter) -> None:
        self._ladder = ladder
        self._ram = ladder.ram
        self._promoter = promoter
        self._demoter = demoter
        self._loads: dict[str, deque[list[ChunkCopy]]] = {}

    def prepare(
        self, keys: Sequence[ChunkKey], req_id: str, request: RequestState | None
    ) -> LoadPlan:
        """Do :meth:`TieredOffloadingManager.prepare_load`."""
        ladder, ram = self._ladder, self._ram
        members = ram.copies
        copies = [members[key] for key in keys]
        for copy in copies:
            if copy.state != _RESIDENT:
                raise KeyError(copy.key)
        ram.pin_many(copies)
        for copy in copies:
            copy.hits += 1
        origins = [copy.origin for copy in copies]
        for tier, hits in Counter(origins).items():
            ladder.tiers[tier].counters.hits += hits
        ram.touch(copies, ladder.ctx)
        self._demoter.used(copies)
        if request is not None:
            self._promoter.release(request)
            request.remember(keys)
        self._loads.setdefault(req_id, deque()).append(copies)
        slots = [copy.slot for copy in copies]
        ladder.truth.issue(slots)
        return LoadPlan(slots, [copy.generation for copy in copies], origins)

    def complete(self, req_id: str, request: RequestState | None) -> None:
        """Do :meth:`TieredOffloadingManager.complete_load`."""
        loads = self._loads.get(req_id)
        if loads is None:
            return
        copies = loads.popleft()
        if not loads:
            del self._loads[req_id]
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
            for copies in loads:
                yield from copies

    def clear(self) -> None:
        """Forget every load; for a reset of the cache, after which no completion comes."""
        self._loads.clear()

    def _condemn(self, copies: Sequence[ChunkCopy]) -> None:
        """Drop copies that a worker could not load: who asks next must not get them."""
        self._ram.counters.load_failed += len(copies)
        for copy in copies:
            if copy.state == _RESIDENT:
                self._promoter.take_from_all(copy)
                self._ladder.retention.forget(copy)
                self._ladder.drop(self._ram, copy)
