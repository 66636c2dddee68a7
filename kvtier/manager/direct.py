"""Direct loads, which begin before their chunks are in RAM.

A request loads directly if RAM slots can be reserved for the missing chunks at its lookup. In
the same step, the plan of the load allocates the slots and plans the jobs that fill them. Other
requests wait for staged promotions (:mod:`kvtier.manager.promote`).

The plan tells the workers the slot of each chunk and the generation that the slot will have. A
worker copies each chunk as soon as the slot has that generation. So a chunk moves from the disk
to the device within one job of the worker, without a scheduling step in between. A copy of the
chunk stays in RAM.

With GDS, workers can read some chunks from their tier. These chunks need neither a slot nor a
job; their copies in the tier are pinned until the load ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from kvtier.keys import ChunkKey
from kvtier.manager.grants import Grants, RequestState
from kvtier.manager.load import NO_SLOT, Loader, LoadPlan, PendingLoad, load_of
from kvtier.manager.promote import Hit, Promoter
from kvtier.manager.tier_stack import NO_GENERATION, TierStack, first_resident
from kvtier.policies import ChunkCopy, CopyState

__all__ = ["DirectLoads"]

_RESIDENT = CopyState.RESIDENT
_WRITING = CopyState.WRITING


class DirectLoads:
    """Reserves RAM slots for loads of this step, and plans direct loads."""

    def __init__(
        self, stack: TierStack, grants: Grants, promoter: Promoter, loader: Loader
    ) -> None:
        self._stack = stack
        self._ram = stack.ram
        self._grants = grants
        self._promoter = promoter
        self._loader = loader

    def reserve(self, request: RequestState, keys: Sequence[ChunkKey]) -> bool:
        """Reserve the RAM slots of a load of ``keys`` until the step ends.

        Args:
            request: The request.
            keys: The chunks of the request's hit, in the order of the load.

        Returns:
            Whether the request can load now. If not, there is no reservation.
        """
        stack, ram = self._stack, self._ram
        copies = ram.leading(keys)
        if len(copies) == len(keys):
            ram.restore(copies, stack.ctx)
            self._grants.reserve_reads(request, copies)
            return True
        hit = Hit(*stack.find_leading(keys, self._promoter.readable(request)))
        stack.record_wanted([copy.key for copy in compress(*hit)])
        in_ram = hit.in_ram()
        ram.restore(in_ram, stack.ctx)
        fills = len(hit.copies) - len(in_ram) - sum(self._gds_readable(*hit))
        return self._is_direct(hit, in_ram) and self._grants.reserve(request, fills, in_ram)

    def prepare(
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
        stack, ram = self._stack, self._ram
        if not stack.limits.direct_loads:
            whole = {copy.key for copy in resident}
            raise KeyError(next(key for key in keys if key not in whole))
        ram.pin(resident)  # so that they are not evicted for the missing chunks
        self._loader.use(resident)
        fills, reads = self._begin(keys, request)
        in_ram = list(map(_loadable, map(ram.copies.get, keys)))
        load = load_of(keys, list(filter(None, in_ram)), request)
        load.fills, load.reads = fills, reads
        load.coming = {copy for copy in load.copies if copy.state != _RESIDENT}
        ram.pin(load.coming)
        ram.count_hits(load.coming)
        used = [copy or reads.get(at) for at, copy in enumerate(in_ram)]
        if None in used:
            load.lead = used.index(None)
        load_id = self._loader.begin(load, req_id, list(filter(None, used)))
        if load.lead < len(keys) and request is not None:
            self._grants.fail(request)
        plan = self._plan_of(load, in_ram)
        return plan._replace(wait_s=stack.limits.load_timeout_s, load_id=load_id)

    def _is_direct(self, hit: Hit, in_ram: Sequence[ChunkCopy]) -> bool:
        """Return whether ``hit`` may be loaded before its chunks are in RAM.

        Args:
            hit: A hit with chunks in slower tiers or on their way to RAM.
            in_ram: The copies of ``hit`` in RAM.
        """
        if not self._stack.limits.direct_loads:
            return False
        if any(copy.state != _RESIDENT for copy in in_ram):
            return False
        return self._promoter.worthwhile(hit)[1] is None

    def _begin(
        self, keys: Sequence[ChunkKey], request: RequestState | None
    ) -> tuple[int, dict[int, ChunkCopy]]:
        """Provide the chunks of a load that RAM lacks.

        Chunks that workers can read from their tier are pinned there. For the other chunks,
        promotion jobs are planned if RAM has available slots for all of them.

        Returns:
            The number of RAM slots to fill, and the copies that workers read, by the position
            of their key.
        """
        ram, gds = self._ram, self._stack.gds
        sources, tiers = self._find_slower(keys, request)
        reads: dict[int, ChunkCopy] = {}
        by_gds = self._gds_readable(sources, tiers)
        if gds is not None and True in by_gds:
            by_key = {copy.key: copy for copy in compress(sources, by_gds)}
            reads = {at: by_key[key] for at, key in enumerate(keys) if key in by_key}
            tier = self._stack.tiers[gds.tier]
            tier.pin(reads.values())
            tier.count_hits(reads.values())
            ram.counters.misses += len(reads)
            others = [not is_read for is_read in by_gds]
            sources, tiers = list(compress(sources, others)), list(compress(tiers, others))
        fills = len(sources) if len(sources) <= ram.available else 0
        if fills:
            self._promoter.plan(sources, tiers)
        return fills, reads

    def _find_slower(
        self, keys: Sequence[ChunkKey], request: RequestState | None
    ) -> tuple[Sequence[ChunkCopy], Sequence[int]]:
        """Find the chunks of ``keys`` that RAM lacks in the slower tiers.

        Returns:
            A copy of each chunk that was found, and the tier index of each copy.
        """
        absent = [key for key in keys if key not in self._ram.copies]
        readable = self._promoter.readable(request)
        if len(readable) == 1:
            copies = readable[0].resident(absent)
            return copies, [readable[0].index] * len(copies)
        found = [at for key in absent if (at := first_resident(readable, key)) is not None]
        return [copy for _, copy in found], [tier.index for tier, _ in found]

    def _gds_readable(
        self, copies: Sequence[ChunkCopy], tiers: Sequence[int]
    ) -> Sequence[bool]:
        """Return, for each copy, whether workers can read the copy from its tier.

        The result is empty if no copy is in the tier of GDS reads.

        Args:
            copies: Resident copies.
            tiers: Index of the tier of each copy.
        """
        gds = self._stack.gds
        if gds is None or gds.tier not in tiers:
            return ()
        positions = [at for at, tier in enumerate(tiers) if tier == gds.tier]
        answers = [False] * len(copies)
        readable = gds.readable([copies[at].slot for at in positions])
        for at, answer in zip(positions, readable, strict=True):
            answers[at] = answer
        return answers

    def _plan_of(self, load: PendingLoad, in_ram: Sequence[ChunkCopy | None]) -> LoadPlan:
        """Return the plan of ``load``; a chunk without a slot and without a read will fail.

        Args:
            load: The load.
            in_ram: The RAM copy of each chunk, resident or on its way; None if there is none.
        """
        if None not in in_ram:
            return LoadPlan(load.slots, load.generations, load.origins)
        slots = [copy.slot if copy else NO_SLOT for copy in in_ram]
        generations = [copy.generation if copy else NO_GENERATION for copy in in_ram]
        origins = [copy.origin if copy else 0 for copy in in_ram]
        gds, reads = self._stack.gds, load.reads
        if gds is None or not reads:
            return LoadPlan(slots, generations, origins)
        for at in reads:
            origins[at] = gds.tier
        read_slots = [copy.slot for copy in reads.values()]
        planned = gds.plan_reads(list(reads), read_slots)
        return LoadPlan(slots, generations, origins, gds=planned)


def _loadable(copy: ChunkCopy | None) -> ChunkCopy | None:
    """Return ``copy`` if it is resident or being promoted, else None.

    A direct load cannot use a copy that a worker is storing, because a failed store is not
    reported to waiting workers.
    """
    if copy is None or copy.state == _RESIDENT:
        return copy
    return copy if copy.state == _WRITING and copy.origin else None
