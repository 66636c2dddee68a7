"""A rank whose blocks and slots hold notes: the copies of an engine without a model.

A copy takes as many steps as the seed says and is made at the end of them. So a block that is
overwritten before its store ended is noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.memory.copy_plan import BlockCopyPlan, plan_copy
from kvtier.types import Outcome, Purpose, TransferResult

if TYPE_CHECKING:
    from tests.integration.engine_world import EngineWorld

SLOWEST_STEPS = 3


@dataclass(slots=True)
class _Copy:
    """A job that has not been reported yet."""

    job_id: int
    purpose: Purpose
    plan: BlockCopyPlan
    generations: Sequence[int]
    steps: int = 0
    outcomes: Sequence[Outcome] = ()
    is_retracted: bool = False


class NotesDevice:
    """Stands in for a :class:`~kvtier.connector.device.DeviceEngine`.

    Args:
        world: Whose notes they are.
    """

    def __init__(self, world: EngineWorld) -> None:
        self._world = world
        self._copies: dict[int, _Copy] = {}
        self._held: list[_Copy] = []
        self._failed: list[TransferResult] = []

    def plan(
        self,
        block_ids: Sequence[int],
        group_sizes: Sequence[int],
        first_blocks: Sequence[int],
        slots: Sequence[int],
    ) -> BlockCopyPlan:
        size = self._world.setup.blocks_per_chunk
        return plan_copy(block_ids, group_sizes, first_blocks, slots, blocks_per_chunk=size)

    def store(self, job_id: int, plan: BlockCopyPlan, generations: Sequence[int]) -> None:
        self._held.append(_Copy(job_id, Purpose.STORE, plan, generations))

    def begin_stores(self) -> None:
        held, self._held = self._held, []
        for copy in held:
            self._begin(copy)

    def load(
        self,
        job_id: int,
        plan: BlockCopyPlan,
        generations: Sequence[int],
        *,
        wait_s: float,
        gds: None,
    ) -> None:
        assert wait_s == 0
        assert gds is None
        self._world.seen["loads"] += 1
        self.begin_stores()
        self._begin(_Copy(job_id, Purpose.LOAD, plan, generations))

    def fail(
        self,
        job_id: int,
        purpose: Purpose,
        slots: Sequence[int],
        generations: Sequence[int],
        error: Exception,
    ) -> None:
        self._world.seen["not started"] += 1
        outcomes = [Outcome.FAILED] * len(slots)
        self._settle(purpose, slots, generations, outcomes)
        self._failed.append(TransferResult(job_id, outcomes, error=str(error)))

    def poll(self) -> list[TransferResult]:
        ended, self._failed = self._failed, []
        for copy in list(self._copies.values()):
            copy.steps -= 1
            if copy.steps < 0:
                self._end(copy)
                ended.append(self._report(copy))
        return ended

    def retract(self, job_ids: Iterable[int]) -> None:
        for copy in [*self._held, *self._copies.values()]:
            if copy.job_id in set(job_ids):
                copy.is_retracted = True

    def wait(self, job_ids: Collection[int]) -> bool:
        self.begin_stores()
        for job_id in sorted(self._copies.keys() & set(job_ids)):
            self._world.seen["flushes"] += 1
            self._copies[job_id].steps = 0
            self._end(self._copies[job_id])
        return True

    def wait_for_stores(self) -> bool:
        self.begin_stores()
        return self.wait(
            [copy.job_id for copy in self._copies.values() if copy.purpose is Purpose.STORE]
        )

    def close(self) -> None:
        pass

    def _begin(self, copy: _Copy) -> None:
        copy.steps = self._world.draw.randint(0, SLOWEST_STEPS)
        self._copies[copy.job_id] = copy

    def _end(self, copy: _Copy) -> None:
        """Make a copy, once."""
        if copy.outcomes:
            return
        world = self._world
        failing = world.setup.failing
        share = max(failing, 0.5) if world.draw.random() < failing else 0.0
        outcomes = [
            Outcome.FAILED
            if not generation or (share and world.draw.random() < share)
            else Outcome.DONE
            for generation in copy.generations
        ]
        copy.outcomes = outcomes
        if copy.purpose is Purpose.LOAD:
            world.seen["loads that failed"] += Outcome.FAILED in outcomes
            world.note_load(copy.plan, copy.generations, outcomes)
        elif not copy.is_retracted:
            world.check_store(copy.plan, copy.generations)

    def _report(self, copy: _Copy) -> TransferResult:
        del self._copies[copy.job_id]
        if copy.is_retracted:
            self._world.seen["stores retracted"] += 1
            copy.outcomes = [Outcome.OVERWRITTEN] * len(copy.outcomes)
        self._settle(copy.purpose, copy.plan.slots, copy.generations, copy.outcomes)
        return TransferResult(copy.job_id, copy.outcomes, error="drawn")

    def _settle(
        self,
        purpose: Purpose,
        slots: Sequence[int],
        generations: Sequence[int],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Write into the control block what became of each slot."""
        cache = self._world.cache
        for slot, generation, outcome in zip(slots, generations, outcomes, strict=True):
            if not generation:
                continue
            is_whole = outcome is Outcome.DONE
            if purpose is Purpose.LOAD and not is_whole:
                cache.slot_status.record_failed_loads([slot], [generation])
            cache.finish(
                [slot], stored=generation if purpose is Purpose.STORE and is_whole else None
            )
