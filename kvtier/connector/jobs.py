"""Jobs in flight: who must still acknowledge them, and which must end before the next pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvtier.connector.requests import TrackedRequest
from kvtier.keys import ChunkKey
from kvtier.types import JobId

__all__ = ["JobState", "JobTable"]


@dataclass(slots=True)
class JobState:
    """One job.

    Attributes:
        tracked: Whose it is.
        keys: The chunks it moves.
        source_blocks: The engine's blocks that a store reads; empty for a load.
        is_store: Whether out of the engine.
        awaited: Ranks that have not acknowledged it.
        has_failed: Whether a rank could not load all of it.
    """

    tracked: TrackedRequest
    keys: Sequence[ChunkKey]
    source_blocks: AbstractSet[int]
    is_store: bool
    awaited: int
    has_failed: bool = False


class JobTable:
    """Every job from the step that starts it until all ranks acknowledged it.

    The engine may give the blocks that a store reads to another request: after a window left
    them behind, after a preemption, or after their request ended. The store must end before
    they are written, so :meth:`flush_readers_of` is told of all blocks that a step gives away.

    Args:
        ranks: Workers that acknowledge a job.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._to_flush: set[JobId] = set()
        self._jobs: dict[JobId, JobState] = {}
        self._stores: dict[JobId, JobState] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add_load(self, tracked: TrackedRequest, keys: Sequence[ChunkKey]) -> JobId:
        """Begin a load."""
        return self._add(
            JobState(tracked, keys, frozenset(), is_store=False, awaited=self._ranks)
        )

    def add_store(
        self, tracked: TrackedRequest, keys: Sequence[ChunkKey], blocks: Iterable[int]
    ) -> JobId:
        """Begin a store that reads ``blocks``."""
        job = JobState(tracked, keys, frozenset(blocks), is_store=True, awaited=self._ranks)
        job_id = self._add(job)
        self._stores[job_id] = job
        return job_id

    def flush_readers_of(self, blocks: AbstractSet[int]) -> None:
        """Have the stores that read any of ``blocks`` end before the next forward pass."""
        for job_id, job in self._stores.items():
            if not job.source_blocks.isdisjoint(blocks):
                self._to_flush.add(job_id)

    def take_flush(self) -> frozenset[JobId]:
        """Return the jobs that must end before the next forward pass, once."""
        if not self._to_flush:
            return frozenset()
        jobs = frozenset(self._to_flush)
        self._to_flush.clear()
        return jobs

    def readers_of(self, blocks: AbstractSet[int], among: Iterable[JobId]) -> frozenset[JobId]:
        """Return those of the stores ``among`` that read any of ``blocks``."""
        return frozenset(
            job_id
            for job_id in among
            if (job := self._stores.get(job_id)) is not None
            and not job.source_blocks.isdisjoint(blocks)
        )

    def acknowledge(self, job_id: JobId, ranks: int) -> JobState | None:
        """Note that so many ranks are done; return the job when it was the last ones.

        A job from before a reset is unknown and ignored.
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

    def fail(self, job_id: JobId) -> None:
        """Note that a rank could not load all of a job; it is acknowledged as well."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.has_failed = True

    def abandon(self) -> None:
        """Forget every job after a reset; acknowledgements of them are ignored.

        Stores still have to end before the next forward pass: their blocks may be given away.
        The blocks of a load are its request's until its workers report it.
        """
        self._to_flush.update(self._stores)
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
