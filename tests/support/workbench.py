"""A manager whose storage jobs are run by the test, with invariants checked after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvtier.keys import ChunkKey, group_filter, make_key
from kvtier.manager import (
    CostModel,
    GdsSource,
    GroupReach,
    LoadPlan,
    ManagerLimits,
    Prompt,
    StorePlan,
    TieredOffloadingManager,
    TierState,
)
from kvtier.policies import (
    Admission,
    CopyState,
    Placement,
    TieredPlacement,
    build_eviction,
)
from kvtier.types import Job, Outcome, Purpose, TransferResult
from tests.support.fakes import FakeSlotStatus
from tests.support.invariants import check_manager

__all__ = ["TIER_NAMES", "Workbench", "prefix"]

TIER_NAMES = ("ram", "nvme", "remote")


def prefix(chunks: int, *, of: int = 0, group: int = 0) -> list[ChunkKey]:
    """Return the keys of the first ``chunks`` chunks of prompt number ``of``.

    >>> prefix(2, of=1) == prefix(3, of=1)[:2]
    True
    """
    return [make_key(f"{of}.{depth}".encode(), group) for depth in range(chunks)]


class Workbench:
    """A manager over small tiers, with a fake slot status.

    Args:
        *capacities: Slots per tier, fastest first.
        write: Argument of the :class:`TieredPlacement`.
        placement: A placement to use instead.
        eviction: The eviction policy of every tier, by name.
        slot_status: Slot status; by default that of instant workers.
        limits: Bounds; by default all of RAM may be granted and none is reserved.
        cost_model: Decides which loads are worth their time; by default all.
        record_events: Whether residency events are recorded.
        groups: What each KV cache group needs of a prefix; group ``n`` has the keys of
            ``prefix(..., group=n)``. One of full attention by default, a token per chunk.
        counting_group: Index of the KV cache group whose chunks stand for tokens.
        gds: The slots that workers can read from a tier.
        shared: Whether the last tier is a shared tier.

    Attributes:
        manager: The manager.
        tiers: Its tiers.
        ram: The first of them.
        slot_status: The slot status.
    """

    def __init__(
        self,
        *capacities: int,
        write: Literal["through", "evict"] = "through",
        placement: Placement | None = None,
        conditions: Sequence[Admission] = (),
        eviction: str = "lru",
        slot_status: FakeSlotStatus | None = None,
        limits: ManagerLimits | None = None,
        cost_model: CostModel | None = None,
        record_events: bool = True,
        groups: Sequence[GroupReach] = (GroupReach(chunk_tokens=1),),
        counting_group: int = 0,
        gds: GdsSource | None = None,
        shared: bool = False,
    ) -> None:
        self._groups = groups
        self.slot_status = FakeSlotStatus() if slot_status is None else slot_status
        self.tiers = [
            TierState(
                name,
                index,
                capacity,
                build_eviction(eviction, capacity=capacity),
                is_shared=shared and index == len(capacities) - 1,
            )
            for index, (name, capacity) in enumerate(zip(TIER_NAMES, capacities, strict=False))
        ]
        self.ram = self.tiers[0]
        self.manager = TieredOffloadingManager(
            self.tiers,
            placement=placement or TieredPlacement(len(capacities), write=write),
            conditions=conditions,
            limits=limits or ManagerLimits(pin_budget=capacities[0], reserve=0.0, queue=1024),
            slot_status=self.slot_status,
            record_events=record_events,
            cost_model=cost_model,
            groups=groups,
            counting_group=counting_group,
            gds=gds,
        )

    # -- what an engine does ----------------------------------------------------------------

    def store(self, keys: Sequence[ChunkKey], req_id: str = "writer") -> StorePlan | None:
        """Store ``keys`` at once, as many as fit."""
        plan = self.manager.prepare_store(keys, req_id)
        if plan is not None:
            self.manager.complete_store(set(plan.keys))
        self.check()
        return plan

    def look(
        self, keys: Sequence[ChunkKey], req_id: str = "reader", *, local_tokens: int = 0
    ) -> int | None:
        """Look up a request for ``keys``, of all groups.

        Returns:
            The tokens behind the local ones that can be loaded now; None if it has to wait.
        """
        of_groups = [
            list(filter(group_filter(group), keys)) for group in range(len(self._groups))
        ]
        limit_tokens = max(
            len(some) * group.chunk_tokens
            for some, group in zip(of_groups, self._groups, strict=True)
        )
        prompt = Prompt(of_groups, local_tokens, limit_tokens)
        tokens = self.manager.lookup(req_id, prompt)
        self.check()
        return tokens

    def load(self, keys: Sequence[ChunkKey], req_id: str = "reader") -> LoadPlan:
        """Load ``keys`` at once."""
        plan = self.manager.prepare_load(keys, req_id)
        self.manager.complete_load(req_id)
        self.check()
        return plan

    def step(self, *, started: Sequence[str] = (), preempted: Sequence[str] = ()) -> list[Job]:
        """End the scheduling step and return the jobs it planned."""
        self.manager.end_step(started=started, preempted=preempted)
        self.check()
        return self.manager.take_jobs()

    # -- what a transfer engine does --------------------------------------------------------

    def finish(self, job: Job, *outcomes: Outcome, settled: bool = True) -> None:
        """Report ``outcomes`` for the chunks of ``job``; the last one repeats."""
        padded = outcomes or (Outcome.DONE,)
        every = [padded[min(at, len(padded) - 1)] for at in range(len(job.keys))]
        filled = job.destination_slots if job.purpose is Purpose.PROMOTE else ()
        for slot, generation, outcome in zip(filled, job.payload or (), every, strict=False):
            if outcome is not Outcome.DONE:
                self.slot_status.mark_lost([slot], [generation])
            elif settled:
                self.slot_status.publish([slot], [generation])
        self.manager.apply(TransferResult(job.job_id, every, settled=settled))
        self.check()

    def settle(self, *, started: Sequence[str] = (), steps: int = 20) -> None:
        """Step and run every job until none is left.

        Raises:
            TimeoutError: That takes more than ``steps`` steps.
        """
        for _ in range(steps):
            jobs = self.step(started=started)
            started = ()
            for job in jobs:
                self.finish(job)
            if not jobs and not self.manager.has_work():
                return
        raise TimeoutError(f"still busy after {steps} steps")

    # -- what a test looks at ---------------------------------------------------------------

    def resident(self, tier: int = 0) -> set[ChunkKey]:
        """Return the keys that are hits in ``tier``."""
        return {
            key
            for key, copy in self.tiers[tier].copies.items()
            if copy.state == CopyState.RESIDENT
        }

    def check(self) -> None:
        """Check the manager's invariants."""
        check_manager(self.manager)
