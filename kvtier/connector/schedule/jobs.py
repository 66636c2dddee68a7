"""Jobs in flight: who must still acknowledge them, and which must end before the next step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from kvtier.connector.schedule.tracking import TrackedRequest
from kvtier.keys import ChunkKey
from kvtier.types import JobId

__all__ = ["JobState", "JobTable"]


@dataclass(slots=True)
class JobState:
    """One job.

    Attributes:
        tracked: Whose it is.
        keys: The chunks it moves.
        is_store: Whether out of the engine.
        awaited: Ranks that have not acknowledged it.
        lasting: Source blocks that nobody else can get before the request ends.
        failed: Whether a rank could not load all of it.
        watched: Source blocks that somebody else may get while it runs.
    """

    tracked: TrackedRequest
    keys: Sequence[ChunkKey]
    is_store: bool
    awaited: int
    lasting: Sequence[int] = ()
    failed: bool = False
    watched: list[int] = field(default_factory=list)


class JobTable:
    """Every job from the step that starts it until all ranks acknowledged it.

    Args:
        ranks: Workers that acknowledge a job.

    Attributes:
        ranks: The same; a change counts for jobs that begin after it.
        to_flush: Jobs that must end before the next forward pass.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.to_flush: set[JobId] = set()
        self._jobs: dict[JobId, JobState] = {}
        self._next_id = 0
        self._by_block: dict[int, set[JobId]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add_load(self, tracked: TrackedRequest, keys: Sequence[ChunkKey]) -> JobId:
        """Begin a load."""
        return self._add(JobState(tracked, keys, is_store=False, awaited=self.ranks))

    def add_store(
        self,
        tracked: TrackedRequest,
        keys: Sequence[ChunkKey],
        *,
        lasting: Sequence[int],
        passing: Sequence[int],
    ) -> JobId:
        """Begin a store from blocks that last as long as the request, and from passing ones."""
        job = JobState(tracked, keys, is_store=True, awaited=self.ranks, lasting=lasting)
        job_id = self._add(job)
        self._watch(job_id, passing)
        return job_id

    def release_blocks(self, job_ids: Iterable[JobId]) -> None:
        """Note that the request of these jobs ended: from now on others may get its blocks."""
        for job_id in job_ids:
            job = self._jobs[job_id]
            self._watch(job_id, job.lasting)
            job.lasting = ()

    def flush(self, job_ids: Iterable[JobId]) -> None:
        """Have jobs end before the next forward pass."""
        self.to_flush.update(job_ids)

    def flush_reused(self, allocated: AbstractSet[int]) -> None:
        """Do so with jobs that read blocks which were given to somebody else."""
        if not self._by_block:
            return
        for block_id in self._by_block.keys() & allocated:
            self.to_flush.update(self._by_block[block_id])

    def take_flush(self) -> frozenset[JobId]:
        """Return the jobs that must end before the next forward pass, once."""
        jobs = frozenset(self.to_flush)
        self.to_flush.clear()
        return jobs

    def acknowledge(self, job_id: JobId, ranks: int) -> JobState | None:
        """Note that so many ranks are done; return the job when it was the last ones.

        A job from before a reset is not known any more and ignored.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return None
        job.awaited -= ranks
        if job.awaited > 0:
            return None
        del self._jobs[job_id]
        job.tracked.jobs.discard(job_id)
        self._unwatch(job_id, job.watched)
        return job

    def fail(self, job_id: JobId) -> None:
        """Note that a rank could not load all of it; it is acknowledged as well."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.failed = True

    def abandon(self) -> None:
        """Forget every job, after a reset: whoever is done with one later is not listened to.

        They still have to end before the next forward pass, for their blocks may be given away.
        """
        self.flush(self._jobs)
        for job in self._jobs.values():
            job.tracked.jobs.clear()
        self._jobs.clear()
        self._by_block.clear()

    def _add(self, job: JobState) -> JobId:
        job_id = self._next_id
        self._next_id += 1
        self._jobs[job_id] = job
        job.tracked.jobs.add(job_id)
        return job_id

    def _watch(self, job_id: JobId, block_ids: Collection[int]) -> None:
        self._jobs[job_id].watched.extend(block_ids)
        for block_id in block_ids:
            self._by_block.setdefault(block_id, set()).add(job_id)

    def _unwatch(self, job_id: JobId, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            jobs = self._by_block.get(block_id)
            if jobs is None:
                continue
            jobs.discard(job_id)
            if not jobs:
                del self._by_block[block_id]
