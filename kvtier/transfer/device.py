"""Routes between the device's KV blocks and RAM slots; they run in the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from kvtier.iopool import IoPool
from kvtier.memory import ControlBlock
from kvtier.tiers.base import SlotOutcomes
from kvtier.transfer.routes import Route
from kvtier.types import Job, JobId, Outcome

if TYPE_CHECKING:
    from kvtier.memory.copy import BlockCopier, BlockCopyPlan
    from kvtier.memory.streams import Fence

__all__ = ["DeviceLoad", "DevicePayload", "DeviceStore"]


@dataclass(frozen=True, slots=True)
class DevicePayload:
    """What a device job needs besides slots.

    Attributes:
        plan: The copies.
        after: Point in the compute stream that they must come after; None on a CPU.
        generations: Stamp per slot: what a store leaves, what a load insists on.
    """

    plan: BlockCopyPlan
    after: Fence | None
    generations: Sequence[int]


class _DeviceRoute(Route):
    """What both directions need: the copier, the workers' record and a thread."""

    def __init__(
        self, copier: BlockCopier, control: ControlBlock, *, rank: int, pool: IoPool
    ) -> None:
        self._copier = copier
        self._control = control
        self._rank = rank
        self._pool = pool


class DeviceStore(_DeviceRoute):
    """KV blocks to RAM slots; leaves the truth in the control block before the job settles."""

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
        payload: DevicePayload = job.payload
        slots = payload.plan.slots

        def copy() -> None:
            self._copier.store(payload.plan, after=payload.after)

        try:
            await self._pool.run(copy, priority=int(job.why))
            if job.job_id in self._revoked:
                return SlotOutcomes([Outcome.EXPIRED] * len(slots), "revoked")
            self._control.stamp(self._rank, slots, payload.generations[0] if slots else 0)
        finally:
            self._control.acknowledge(self._rank, slots)
        return SlotOutcomes([Outcome.DONE] * len(slots))


class DeviceLoad(_DeviceRoute):
    """RAM slots to KV blocks; refuses a slot whose stamp is not the one it was promised."""

    @override
    async def run(self, job: Job) -> SlotOutcomes:
        payload: DevicePayload = job.payload
        slots = payload.plan.slots

        def copy() -> bool:
            if not self._control.bears(self._rank, slots, payload.generations):
                return False
            self._copier.load(payload.plan, after=payload.after)
            return self._control.bears(self._rank, slots, payload.generations)

        whole = False
        try:
            whole = await self._pool.run(copy, priority=int(job.why))
        finally:
            if not whole:
                self._control.refuse(self._rank, slots, payload.generations)
            self._control.acknowledge(self._rank, slots)
        if not whole:
            return SlotOutcomes(
                [Outcome.CORRUPT] * len(slots), "a slot's stamp is not the one promised"
            )
        return SlotOutcomes([Outcome.DONE] * len(slots))
