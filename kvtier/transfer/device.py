"""Worker-side routes, which copy between the device's KV blocks and RAM slots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kvtier.memory import ControlBlock
from kvtier.os.iopool import IoPool
from kvtier.tiers.base import SlotOutcomes
from kvtier.transfer.routes import Route
from kvtier.types import GdsReads, Job, JobId, Outcome

if TYPE_CHECKING:
    from kvtier.memory.copy import Copier
    from kvtier.memory.copy_plan import BlockCopyPlan
    from kvtier.memory.part_hashes import Hashes, StoreHasher
    from kvtier.memory.streams import Fence

__all__ = [
    "BlockStore",
    "DeviceLoadRoute",
    "DeviceStoreRoute",
    "LoadPayload",
    "StorePayload",
]

_SHORTEST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.002
_PAUSE_SHARE: Final = 1 / 8
"""Pause between two checks of slots, divided by the time waited so far.

A disk read takes 0.1 ms or more; a check holds the interpreter lock for a few microseconds."""
_CHECKED_AT_ONCE: Final = 256
_COPIED_AT_ONCE: Final = 1024
"""Chunks of a load that are checked and copied before another load gets its turn."""
_UNBLAMED: Final = (Outcome.DONE, Outcome.CANCELLED)
_OVERWRITTEN: Final = "a slot was reused while it was read"


@dataclass(frozen=True, slots=True)
class LoadPayload:
    """Payload of a load job, which copies RAM slots or an NVMe tier's slots to KV blocks.

    Attributes:
        plan: The block copies.
        after: Point in the compute stream after which the copies start; None on a CPU.
        generations: Required generation per slot; 0 if a chunk has no slot. The load of such a
            chunk fails.
        wait_s: Longest time in seconds to wait for the generations of slots and for GDS reads.
        gds: The chunks to read from an NVMe tier. For each of these chunks, the plan has a
            negative number instead of a slot. None if all chunks are in RAM slots.
    """

    plan: BlockCopyPlan
    after: Fence | None
    generations: Sequence[int]
    wait_s: float = 0.0
    gds: GdsReads | None = None


class _DeviceRoute(Route):
    """Base class of the routes between the device and RAM, in both directions."""

    def __init__(
        self, copier: Copier, control: ControlBlock, *, rank: int, pool: IoPool
    ) -> None:
        self._copier = copier
        self._control = control
        self._rank = rank
        self._pool = pool

    @override
    def abandon(self, job: Job) -> None:
        """Do nothing, because no other worker waits for this rank's copies."""


@dataclass(frozen=True, slots=True)
class BlockStore:
    """One store of a store job.

    Attributes:
        job_id: The submitter's id for the store.
        plan: The block copies.
        generations: Generation to give each slot; all are equal.
    """

    job_id: JobId
    plan: BlockCopyPlan
    generations: Sequence[int]


@dataclass(frozen=True, slots=True)
class StorePayload:
    """Payload of a store job, which copies KV blocks to RAM slots.

    Attributes:
        stores: The stores, for example of all prompts of a step.
        after: Point in the compute stream after which the copies start; None on a CPU.
    """

    stores: Sequence[BlockStore]
    after: Fence | None


class DeviceStoreRoute(_DeviceRoute):
    """Copies KV blocks to RAM slots, and sets the slots' generation before the job settles.

    A single call of the copier copies the blocks of all stores of a job, because each call
    takes interpreter time that the model needs. If this call fails, all stores fail.

    The slot of a chunk that lacks blocks gets no generation, because a later hit would load old
    bytes of the slot. An engine may offer such a chunk if a sliding window is shorter than a
    chunk. If only the first blocks of the group's first chunk are missing, the other chunks are
    stored. Otherwise no slot of the group gets a generation, because the engine does not report
    which blocks are missing.

    Args:
        hasher: Hashes the stored chunks for GDS reads; None if GDS reads are not used.
    """

    def __init__(
        self,
        copier: Copier,
        control: ControlBlock,
        *,
        rank: int,
        pool: IoPool,
        hasher: StoreHasher | None = None,
    ) -> None:
        super().__init__(copier, control, rank=rank, pool=pool)
        self._hasher = hasher

    @override
    async def run(self, job: Job) -> SlotOutcomes:
        payload: StorePayload = job.payload
        stores = payload.stores

        def copy() -> Hashes | None:
            first, *others = (store.plan for store in stores)
            plan = first.joined_with(others)
            self._copier.store(plan, after=payload.after)
            return None if self._hasher is None else self._hasher.hash(plan)

        try:
            hashes = await self._pool.run(copy, priority=int(job.purpose))
            if hashes is not None:
                self._record(stores, hashes)
            ended = [self._finish(store) for store in stores]
        finally:
            self._control.acknowledge(self._rank, job.source_slots)
        outcomes = [outcome for each in ended for outcome in each.outcomes]
        return SlotOutcomes(outcomes, next((each.error for each in ended if each.error), ""))

    def _record(self, stores: Sequence[BlockStore], hashes: Hashes) -> None:
        """Record the hashes of all stored chunks in the control block."""
        at = 0
        for store in stores:
            slots = store.plan.slots
            if slots:
                own = hashes[at : at + len(slots)]
                self._control.set_hashes(self._rank, slots, own, store.generations[0])
            at += len(slots)

    def _finish(self, store: BlockStore) -> SlotOutcomes:
        """Set the generation of the slots that a store filled; return the outcomes."""
        slots = store.plan.slots
        filled = store.plan.slots_filled(self._copier.blocks_per_chunk)
        generation = store.generations[0] if slots else 0
        self._control.set_generation(self._rank, filled, generation)
        if filled is slots:
            return SlotOutcomes([Outcome.DONE] * len(slots))
        whole = set(filled)
        return SlotOutcomes(
            [Outcome.DONE if slot in whole else Outcome.REFUSED for slot in slots],
            "some blocks of a chunk are missing: a window is shorter than a chunk",
        )


class DeviceLoadRoute(_DeviceRoute):
    """Copies each RAM slot to its KV blocks as soon as the slot's bytes have arrived.

    A load may wait for slots that a slower tier is still filling. The load polls the slots'
    generations on the engine's loop, until they are those that the load requires. Other loads
    are not delayed.

    A chunk is useless without the chunks before it. So after the loss of a chunk, the load does
    not wait for later chunks. The load still copies earlier chunks, because the engine may keep
    them.
    """

    def __init__(
        self, copier: Copier, control: ControlBlock, *, rank: int, pool: IoPool
    ) -> None:
        super().__init__(copier, control, rank=rank, pool=pool)
        self._waits = True

    def wait_no_more(self) -> None:
        """Fail all chunks that have not arrived yet, in running and later loads."""
        self._waits = False

    @override
    async def run(self, job: Job) -> SlotOutcomes:
        payload: LoadPayload = job.payload
        slots = payload.plan.slots
        outcomes = [Outcome.CANCELLED] * len(slots)
        try:
            error = await self._load(payload, outcomes, priority=int(job.purpose))
        finally:
            self._record(payload, outcomes)
        return SlotOutcomes(outcomes, error)

    async def _load(
        self, payload: LoadPayload, outcomes: list[Outcome], *, priority: int
    ) -> str:
        """Copy chunks as they arrive; return the first error, or an empty string."""
        arrived_s = time.monotonic()
        deadline = arrived_s + payload.wait_s
        waiting = list(range(len(outcomes)))
        error = ""
        while waiting:
            ready, lost = self._check_arrivals(payload, waiting)
            may_wait = self._waits and time.monotonic() < deadline
            if not (may_wait or ready or lost):
                lost = waiting
            if lost:
                error = error or _reason(payload, lost[0])
                _mark(outcomes, lost, Outcome.FAILED)
                waiting = [at for at in waiting if at < lost[0]]
                ready = [at for at in ready if at < lost[0]]
            if ready:
                if not await self._copy(payload, ready, outcomes, priority=priority):
                    return error or _OVERWRITTEN
                done = set(ready)
                waiting = [at for at in waiting if at not in done]
                arrived_s = time.monotonic()
            elif waiting:
                await asyncio.sleep(_pause_s(time.monotonic() - arrived_s))
        return error

    def _check_arrivals(
        self, payload: LoadPayload, waiting: Sequence[int]
    ) -> tuple[list[int], Sequence[int]]:
        """Check the first chunks of ``waiting``; return the arrived and the lost chunks."""
        # Chunks arrive roughly in order, and checking thousands takes the engine's time.
        ready: list[int] = []
        lost: Sequence[int] = ()
        for start in range(0, min(len(waiting), _COPIED_AT_ONCE), _CHECKED_AT_ONCE):
            arrived, lost = self._check_next(payload, waiting[start:])
            ready += arrived
            if len(arrived) < min(len(waiting) - start, _CHECKED_AT_ONCE):
                break
        return ready, lost

    def _check_next(
        self, payload: LoadPayload, waiting: Sequence[int]
    ) -> tuple[list[int], Sequence[int]]:
        """Check the next few chunks of ``waiting``; return the arrived and the lost chunks."""
        near = waiting[:_CHECKED_AT_ONCE]
        generations = [payload.generations[at] for at in near]
        if 0 in generations:  # a chunk without a slot
            first = generations.index(0)
            near, generations = near[:first], generations[:first]
            without = [at for at in waiting[first:] if not payload.generations[at]]
        else:
            without = []
        slots = [payload.plan.slots[at] for at in near]
        whole, lost = self._control.arrivals(self._rank, slots, generations)
        ready = [yes and not no for yes, no in zip(whole, lost, strict=True)]
        return list(compress(near, ready)), [*compress(near, lost), *without]

    async def _copy(
        self,
        payload: LoadPayload,
        ready: Sequence[int],
        outcomes: list[Outcome],
        *,
        priority: int,
    ) -> bool:
        """Copy the chunks at ``ready``; return False if a slot was reused during the copy."""
        plan = payload.plan
        slots = [plan.slots[at] for at in ready]
        generations = [payload.generations[at] for at in ready]

        def copy() -> bool:
            part = plan.restricted_to(slots) if len(slots) < len(plan.slots) else plan
            self._copier.load(part, after=payload.after)
            return self._control.has_generations(self._rank, slots, generations)

        _mark(outcomes, ready, Outcome.FAILED)
        whole = await self._pool.run(copy, priority=priority)
        _mark(outcomes, ready, Outcome.DONE if whole else Outcome.OVERWRITTEN)
        return whole

    def _record(self, payload: LoadPayload, outcomes: Sequence[Outcome]) -> None:
        """Record the failed chunks in the control block, and acknowledge the job's slots."""
        slots, generations = payload.plan.slots, payload.generations
        held = [bool(generation) for generation in generations]
        if outcomes.count(Outcome.DONE) < len(outcomes):
            lost = [
                yes and outcome not in _UNBLAMED
                for yes, outcome in zip(held, outcomes, strict=True)
            ]
            self._control.record_failed_loads(
                self._rank, list(compress(slots, lost)), list(compress(generations, lost))
            )
        self._control.acknowledge(self._rank, list(compress(slots, held)))


def _mark(outcomes: list[Outcome], positions: Sequence[int], outcome: Outcome) -> None:
    for at in positions:
        outcomes[at] = outcome


def _reason(payload: LoadPayload, lost: int) -> str:
    if not payload.generations[lost]:
        return "no RAM slot was free for a chunk"
    if not payload.wait_s:
        return "a slot has another generation than expected"
    return "a chunk was not promoted from a slower tier"


def _pause_s(waited_s: float) -> float:
    """Return the seconds until the next poll, after ``waited_s`` without a new chunk."""
    return min(max(_SHORTEST_PAUSE_S, _PAUSE_SHARE * waited_s), _LONGEST_PAUSE_S)
