"""A cache service without threads, files or memory, whose copies end when the test says.

The deciding code is real; storage jobs are a list with the step at which each job ends. Two
services with the same seed and the same calls give the same answers on any machine.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, cast

from kvtier.connector.service import CacheService
from kvtier.connector.storage import Storage
from kvtier.manager import GroupReach, ManagerLimits
from kvtier.transfer import ChannelStatistics
from kvtier.types import Job, JobId, Outcome, TransferResult
from tests.support.fakes import FakeSlotStatus
from tests.support.workbench import Workbench

__all__ = ["SteppedCache", "SteppedEngine"]


class SteppedEngine:
    """A fake :class:`~kvtier.transfer.TransferEngine` of the storage.

    A job ends some steps after it was submitted. How many, and whether it fails, depends on its
    id and the seed alone.

    Args:
        seed: Seed of durations and failures.
        slowest_steps: Most steps of a job; with 0 every job ends before the next call.
        failing: Share of the jobs that fail.

    Attributes:
        hangs: While set, no job ends.
        posted: The results that nobody has taken yet.
    """

    def __init__(self, *, seed: int, slowest_steps: int, failing: float) -> None:
        self._seed = seed
        self._slowest_steps = slowest_steps
        self._failing = failing
        self.hangs = False
        self._step = 0
        self._running: list[tuple[int, TransferResult]] = []
        self.posted: deque[TransferResult] = deque()

    @property
    def idle(self) -> bool:
        """Whether no job is running."""
        return not self._running

    def tick(self) -> None:
        """Advance one step."""
        self._step += 1
        self._post()

    def out_of_service(self) -> list[tuple[str, str]]:
        """Return nothing: a copy may fail, but no breaker opens."""
        return []

    def submit(self, *jobs: Job) -> None:
        """Start jobs."""
        for job in jobs:
            fate = random.Random(f"{self._seed}.{job.job_id}")
            ends = self._step + fate.randint(0, self._slowest_steps)
            outcome = Outcome.FAILED if fate.random() < self._failing else Outcome.DONE
            self._running.append((ends, TransferResult(job.job_id, [outcome] * len(job.keys))))
        self._post()

    def abandon(self, *jobs: Job) -> None:
        """Do nothing: no worker waits for a copy."""

    def cancel(self, job_id: JobId) -> None:
        """Do nothing: started jobs always end."""

    def poll(self) -> list[TransferResult]:
        """Return the results of the jobs that ended."""
        results = list(self.posted)
        self.posted.clear()
        return results

    def _post(self) -> None:
        """Post the results of the jobs that ended."""
        if not self.hangs:
            self.posted += [result for ends, result in self._running if ends <= self._step]
            self._running = [(ends, job) for ends, job in self._running if ends > self._step]

    def wait(
        self,
        job_ids: Collection[JobId],
        *,
        timeout_s: float,
    ) -> bool:
        """Advance steps until these jobs end."""
        ends = (ends for ends, result in self._running if result.job_id in job_ids)
        self._step = max(self._step, *ends, 0)
        self._post()
        return True

    def wait_any(self, *, timeout_s: float) -> bool:
        """Advance one step."""
        self.tick()
        return True

    def exclusively_each(
        self,
        actions: Mapping[str, Callable[[], Awaitable[None]]],
        *,
        timeout_s: float,
    ) -> bool:
        """Run ``actions`` at once; running jobs are unaffected."""

        async def run() -> None:
            for action in actions.values():
                await action()

        asyncio.run(run())
        return True

    def statistics(self) -> dict[tuple[str, str], ChannelStatistics]:
        """Return nothing: no byte was moved."""
        return {}

    def close(self, *, timeout_s: float) -> bool:
        """Drop the running jobs."""
        self._running.clear()
        return True


class _NoTier:
    """A slower tier that has a name and nothing else."""

    is_local = True

    def __init__(self, name: str) -> None:
        self.name = name

    async def reset(self) -> None:
        """Do nothing."""

    def forget(self, slots: Sequence[int]) -> None:
        """Do nothing."""


class SteppedCache:
    """A :class:`~kvtier.connector.service.CacheService` over tiers of a few slots.

    Args:
        *capacities: Slots per tier, fastest first.
        seed: Of what happens to storage jobs.
        slowest_steps: Most steps a storage job takes.
        failing: Share of the storage jobs that fail.
        write: When chunks go down, of the :class:`~kvtier.policies.TieredPlacement`.
        limits: The manager's bounds; by default all of RAM may be pinned.
        tokens_per_chunk: For the figures.
        counting_group: Index of the KV cache group whose chunks stand for tokens.
        groups: What each KV cache group needs of a prefix.
        shared: Whether the last tier is a shared tier.

    Attributes:
        service: The cache.
        bench: The manager's workbench, for its books.
        slot_status: What the workers say: the test sets generations and acknowledges.
        engine: The storage jobs.
        tiers: The slower tiers, which hold no bytes.
        storage: All of these, as the cache has them.
    """

    def __init__(
        self,
        *capacities: int,
        seed: int = 0,
        slowest_steps: int = 0,
        failing: float = 0.0,
        write: Literal["through", "evict"] = "through",
        limits: ManagerLimits | None = None,
        tokens_per_chunk: int = 16,
        counting_group: int = 0,
        groups: Sequence[GroupReach] = (GroupReach(chunk_tokens=1),),
        shared: bool = False,
    ) -> None:
        self.slot_status = FakeSlotStatus(driven=True)
        self.bench = Workbench(
            *capacities,
            write=write,
            slot_status=self.slot_status,
            limits=limits,
            counting_group=counting_group,
            groups=groups,
            shared=shared,
        )
        self.engine = SteppedEngine(seed=seed, slowest_steps=slowest_steps, failing=failing)
        self.tiers = [_NoTier(tier.name) for tier in self.bench.tiers[1:]]
        nothing = SimpleNamespace(
            close=lambda **_: None,
            geometry=SimpleNamespace(slot_nbytes=4096),
            control=SimpleNamespace(pageable_ranks=lambda: 0, gds_ranks=lambda: 0),
        )
        self.storage = Storage(
            manager=self.bench.manager,
            engine=cast("Any", self.engine),
            tiers=cast("Any", self.tiers),
            pools=(),
            region=cast("Any", nothing),
            recorder=None,
            observer=None,
        )
        self.service = CacheService(
            self.storage, tokens_per_chunk=tokens_per_chunk, close_timeout_s=1.0
        )

    def tick(self) -> None:
        """Advance the storage jobs by a step, and check the invariants."""
        self.engine.tick()
        self.bench.check()

    def finish(self, slots: Sequence[int], *, stored: int | None = None) -> None:
        """Report the end of a job as the workers do.

        Args:
            slots: The job's slots.
            stored: Generation that a store leaves; None for a load, or a store that failed.
        """
        if stored is not None:
            self.slot_status.set_generation(slots, stored)
        self.slot_status.acknowledge(slots)
