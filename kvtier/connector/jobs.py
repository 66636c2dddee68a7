"""Counts the acknowledgements of jobs in flight, and selects the stores to flush."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvtier.connector.metadata import FailedLoad
from kvtier.connector.requests import TrackedRequest
from kvtier.keys import ChunkKey
from kvtier.types import JobId

__all__ = ["JobState", "WorkerJobs"]


@dataclass(slots=True)
class JobState:
    """One job in flight.

    Attributes:
        tracked: The job's request.
        keys: The job's chunks.
        source_blocks: The engine's blocks that a store reads; empty for a load.
        is_store: Whether the job is a store; otherwise it is a load.
        load_id: The cache's id of a load; None for a store.
        awaited: Number of ranks that have not acknowledged the job.
        failure: The failures of all ranks in a load; None if no rank has failed.
    """

    tracked: TrackedRequest
    keys: Sequence[ChunkKey]
    source_blocks: AbstractSet[int]
    is_store: bool
    awaited: int
    load_id: int | None = None
    failure: FailedLoad | None = None


class WorkerJobs:
    """Tracks every job until all ranks have acknowledged it.

    The engine may reuse the blocks that a store reads: after a window has passed them, after a
    preemption, or after their request ends. The store must end before these blocks are
    overwritten. So the caller passes all blocks that a step reuses to :meth:`flush_readers_of`.

    Args:
        ranks: Number of workers that acknowledge a job.

    Attributes:
        to_flush: Stores that must end before the next forward pass.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.to_flush: set[JobId] = set()
        self._jobs: dict[JobId, JobState] = {}
        self._stores: dict[JobId, JobState] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add_load(
        self, tracked: TrackedRequest, keys: Sequence[ChunkKey], load_id: int
    ) -> JobId:
        """Record a new load and return its job id."""
        ranks = self._ranks
        return self._add(
            JobState(tracked, keys, frozenset(), is_store=False, awaited=ranks, load_id=load_id)
        )

    def add_store(
        self, tracked: TrackedRequest, keys: Sequence[ChunkKey], blocks: Iterable[int]
    ) -> JobId:
        """Record a new store that reads ``blocks``, and return its job id."""
        job = JobState(tracked, keys, frozenset(blocks), is_store=True, awaited=self._ranks)
        job_id = self._add(job)
        self._stores[job_id] = job
        return job_id

    def flush_readers_of(self, blocks: AbstractSet[int]) -> None:
        """Make the next :meth:`take_flush` return the stores that read any of ``blocks``."""
        for job_id, job in self._stores.items():
            if not job.source_blocks.isdisjoint(blocks):
                self.to_flush.add(job_id)

    def take_flush(self) -> frozenset[JobId]:
        """Return the stores to flush before the next forward pass; each is returned once."""
        if not self.to_flush:
            return frozenset()
        jobs = frozenset(self.to_flush)
        self.to_flush.clear()
        return jobs

    def readers_of(self, blocks: AbstractSet[int], among: Iterable[JobId]) -> frozenset[JobId]:
        """Return the stores in ``among`` that read any of ``blocks``."""
        return frozenset(
            job_id
            for job_id in among
            if (job := self._stores.get(job_id)) is not None
            and not job.source_blocks.isdisjoint(blocks)
        )

    def acknowledge(self, job_id: JobId, ranks: int) -> JobState | None:
        """Count ``ranks`` more acknowledgements of a job; return the job after the last one.

        Before the last acknowledgement, the result is None. Acknowledgements of jobs from
        before a reset are ignored.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return None
        job.awaited -= ranks
        if job.awaited > 0:
            return None
        del self._jobs[job_id]
        self._stores.pop(job_id, None)
        job.tracked.jobs.discard(job_id)
        return job

    def fail(self, job_id: JobId, failed: FailedLoad) -> None:
        """Record that a rank failed to load some chunks of a job."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.failure = failed if job.failure is None else job.failure.united(failed)

    def abandon(self) -> None:
        """Forget every job after a reset; later acknowledgements are ignored.

        Stores are still flushed, because their blocks may be reused. The blocks of a load
        belong to its request until the workers report the load.
        """
        self.to_flush.update(self._stores)
        for job in self._jobs.values():
            job.tracked.jobs.clear()
        self._jobs.clear()
        self._stores.clear()

    def _add(self, job: JobState) -> JobId:
        job_id = self._next_id
        self._next_id += 1
        self._jobs[job_id] = job
        job.tracked.jobs.add(job_id)
        return job_id
