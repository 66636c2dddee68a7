"""Routes between the device's KV blocks and RAM slots; they run in the worker."""

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
from kvtier.types import Job, JobId, Outcome

if TYPE_CHECKING:
    from kvtier.memory.copy import BlockCopier, BlockCopyPlan
    from kvtier.memory.streams import Fence

__all__ = ["DeviceLoad", "DeviceStore", "LoadRequest", "StoreRequest"]

_SHORTEST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.002
_PAUSE_SHARE: Final = 1 / 8
"""Between two looks at a slot's stamp, of the time waited so far: a disk takes a tenth of a
millisecond and more, and a look takes a few microseconds of an interpreter that others need."""
_LOOKED_AT: Final = 256
_UNBLAMED: Final = (Outcome.DONE, Outcome.CANCELLED)
_OVERWRITTEN: Final = "a slot was given away while it was read"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a load needs besides slots.

    Attributes:
        plan: The copies.
        after: Point in the compute stream that they must come after; None on a CPU.
        generations: Stamp per slot that it insists on; 0 for a chunk that has no slot, whose
            load fails.
        wait_s: How long the slots may take to bear their stamps.
    """

    plan: BlockCopyPlan
    after: Fence | None
    generations: Sequence[int]
    wait_s: float = 0.0


class _DeviceRoute(Route):
    """What both directions need: the copier, the workers' record and a thread."""

    def __init__(
        self, copier: BlockCopier, control: ControlBlock, *, rank: int, pool: IoPool
    ) -> None:
        self._copier = copier
        self._control = control
        self._rank = rank
        self._pool = pool


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """One of the stores that a job carries out.

    Attributes:
        job_id: What its submitter calls it.
        plan: The copies.
        after: Point in the compute stream that they must come after; None on a CPU.
        generations: The stamp that it leaves on each slot; the same on all.
    """

    job_id: JobId
    plan: BlockCopyPlan
    after: Fence | None
    generations: Sequence[int]


class DeviceStore(_DeviceRoute):
    """KV blocks to RAM slots; leaves the truth in the control block before the job settles.

    A job's payload is a sequence of :class:`StoreRequest`, such as those of all prompts of a
    step. They are copied in one call, since what a call costs beside its bytes is paid in the
    interpreter, which the model needs; and they fail together.

    A chunk some of whose blocks are gone is never whole. An engine may offer one where a
    sliding window is shorter than a chunk, and a hit that ends elsewhere would load what was in
    the slot before. Nor are the others of its group, unless it is only the first one's head
    that is gone: an engine leaves out what is gone, and does not say where.
    """

    def __init__(
        self, copier: BlockCopier, control: ControlBlock, *, rank: int, pool: IoPool
    ) -> None:
        super().__init__(copier, control, rank=rank, pool=pool)
        self._revoked: set[JobId] = set()

    def revoke(self, job_id: JobId) -> None:
        """Keep a store from counting as whole: its blocks may be overwritten from now on."""
        self._revoked.add(job_id)

    @override
    async def run(self, job: Job) -> SlotOutcomes:
        stores: Sequence[StoreRequest] = job.payload

        def copy() -> None:
            first, *others = (store.plan for store in stores)
            # Marks are made in the stores' order: what comes after the last comes after all.
            self._copier.store(first.joined_with(others), after=stores[-1].after)

        try:
            await self._pool.run(copy, priority=int(job.purpose))
            ended = [self._finish(store) for store in stores]
        finally:
            self._control.acknowledge(self._rank, job.source_slots)
        outcomes = [outcome for each in ended for outcome in each.outcomes]
        return SlotOutcomes(outcomes, next((each.error for each in ended if each.error), ""))

    def _finish(self, store: StoreRequest) -> SlotOutcomes:
        """Leave the stamps of a store whose bytes are there."""
        slots = store.plan.slots
        if store.job_id in self._revoked:
            self._revoked.discard(store.job_id)
            return SlotOutcomes([Outcome.EXPIRED] * len(slots), "revoked")
        filled = store.plan.slots_filled(self._copier.blocks_per_chunk)
        self._control.stamp(self._rank, filled, store.generations[0] if slots else 0)
        if filled is slots:
            return SlotOutcomes([Outcome.DONE] * len(slots))
        whole = set(filled)
        return SlotOutcomes(
            [Outcome.DONE if slot in whole else Outcome.REFUSED for slot in slots],
            "some blocks of a chunk are gone: a window is shorter than a chunk",
        )


class DeviceLoad(_DeviceRoute):
    """RAM slots to KV blocks; a slot without the stamp it was promised is never used.

    A load may be told to wait for slots that are still being filled. It looks at their stamps
    now and then, on its engine's loop, so that loads that wait keep none from being copied; and
    it copies what is there while the rest is on its way.

    Chunks follow on one another, so once one will not come those behind it are of no use, and
    are not waited for. Those before it are: an engine may keep the head of what it asked for.
    """

    def __init__(
        self, copier: BlockCopier, control: ControlBlock, *, rank: int, pool: IoPool
    ) -> None:
        super().__init__(copier, control, rank=rank, pool=pool)
        self._waits = True

    def wait_no_more(self) -> None:
        """Fail what is not there yet, now and from now on: nobody will read it."""
        self._waits = False

    @override
    async def run(self, job: Job) -> SlotOutcomes:
        payload: LoadRequest = job.payload
        slots = payload.plan.slots
        outcomes = [Outcome.CANCELLED] * len(slots)
        try:
            error = await self._load(payload, outcomes, priority=int(job.purpose))
        finally:
            self._record(payload, outcomes)
        return SlotOutcomes(outcomes, error)

    async def _load(
        self, payload: LoadRequest, outcomes: list[Outcome], *, priority: int
    ) -> str:
        """Copy chunk by chunk as they arrive; return what went wrong, if anything did."""
        began_s = time.monotonic()
        deadline = began_s + payload.wait_s
        waiting = list(range(len(outcomes)))
        error = ""
        while waiting:
            ready, lost = self._look(payload, waiting)
            overdue = not self._waits or time.monotonic() >= deadline
            if overdue and not ready and not lost:
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
                began_s = time.monotonic()
            elif waiting:
                waited_s = time.monotonic() - began_s
                pause_s = max(_SHORTEST_PAUSE_S, _PAUSE_SHARE * waited_s)
                await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))
        return error

    def _look(
        self, payload: LoadRequest, waiting: Sequence[int]
    ) -> tuple[list[int], Sequence[int]]:
        """Return which of the chunks at ``waiting`` are there, and which will not come."""
        # Chunks arrive about in order, and looking at thousands takes the engine's time.
        near = waiting[:_LOOKED_AT]
        stamps = [payload.generations[at] for at in near]
        if 0 in stamps:  # that of a chunk without a slot
            first = stamps.index(0)
            near, stamps = near[:first], stamps[:first]
            without = [at for at in waiting[first:] if not payload.generations[at]]
        else:
            without = []
        slots = [payload.plan.slots[at] for at in near]
        whole, lost = self._control.arrivals(self._rank, slots, stamps)
        ready = [yes and not no for yes, no in zip(whole, lost, strict=True)]
        return list(compress(near, ready)), [*compress(near, lost), *without]

    async def _copy(
        self,
        payload: LoadRequest,
        ready: Sequence[int],
        outcomes: list[Outcome],
        *,
        priority: int,
    ) -> bool:
        """Copy the chunks at ``ready``; return whether their slots still bore their stamps."""
        part = payload.plan
        if len(ready) < len(part.slots):
            part = part.restricted_to([part.slots[at] for at in ready])
        stamps = [payload.generations[at] for at in ready]

        def copy() -> bool:
            self._copier.load(part, after=payload.after)
            return self._control.bears(self._rank, part.slots, stamps)

        _mark(outcomes, ready, Outcome.FAILED)
        whole = await self._pool.run(copy, priority=priority)
        _mark(outcomes, ready, Outcome.DONE if whole else Outcome.CORRUPT)
        return whole

    def _record(self, payload: LoadRequest, outcomes: Sequence[Outcome]) -> None:
        """Write down which stamps could not be loaded, and that the slots are let go."""
        slots, stamps = payload.plan.slots, payload.generations
        held = [bool(stamp) for stamp in stamps]
        if outcomes.count(Outcome.DONE) < len(outcomes):
            lost = [
                yes and outcome not in _UNBLAMED
                for yes, outcome in zip(held, outcomes, strict=True)
            ]
            refused = list(compress(slots, lost))
            self._control.refuse(self._rank, refused, list(compress(stamps, lost)))
        self._control.acknowledge(self._rank, list(compress(slots, held)))


def _mark(outcomes: list[Outcome], places: Sequence[int], outcome: Outcome) -> None:
    for at in places:
        outcomes[at] = outcome


def _reason(payload: LoadRequest, lost: int) -> str:
    if not payload.generations[lost]:
        return "there was no RAM slot for a chunk after all"
    if not payload.wait_s:
        return "a slot's stamp is not the one promised"
    return "a chunk did not come up from a slower tier"
