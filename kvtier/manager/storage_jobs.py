"""Storage jobs: what moves between tiers, from the plan to the settled result."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtier.manager.copies import CopyList
from kvtier.policies import ChunkCopy
from kvtier.types import Job, JobId, Outcome, Purpose

__all__ = ["Failure", "JobRecord", "StorageJobs"]

_DONE = Outcome.DONE
_generation_of = operator.attrgetter("generation")
Failure: TypeAlias = tuple[ChunkCopy, ChunkCopy, Outcome]
"""The source copy, the destination copy, and the outcome of the failed transfer."""


@dataclass(slots=True)
class JobRecord:
    """One storage job. It holds its slots until its settled result arrives.

    Neither the end of a request, nor a reset of the cache, nor a missed deadline frees the
    slots.

    Attributes:
        source: Index of the tier that is read.
        destination: Index of the tier that is written; 0, which is RAM, for a promotion.
        sources: The copies read, each pinned by this job.
        destinations: The copies written, each pinned by this job.
        epoch: The cache epoch of the job; after a reset its result only frees slots.
        is_late: Whether its deadline passed.
        moved: The sources to drop once their bytes arrive.
        is_eviction: Whether the sources are victims, in eviction order.
    """

    source: int
    destination: int
    sources: CopyList
    destinations: Sequence[ChunkCopy]
    epoch: int
    is_late: bool = False
    moved: Collection[ChunkCopy] = ()
    is_eviction: bool = False

    @property
    def is_promotion(self) -> bool:
        """Whether the job moves chunks to RAM; if not, the job demotes them."""
        return not self.destination

    @property
    def ram_copies(self) -> Sequence[ChunkCopy]:
        """The copies in RAM that the job reads or writes; none if both tiers are slower."""
        if self.is_promotion:
            return self.destinations
        return () if self.source else self.sources.copies

    def split(self, outcomes: Sequence[Outcome]) -> tuple[Sequence[ChunkCopy], list[Failure]]:
        """Return the destination copies whose bytes arrived, and the failures."""
        if outcomes.count(_DONE) == len(self.destinations):
            return self.destinations, []
        moves = list(zip(self.sources.copies, self.destinations, outcomes, strict=True))
        arrived = [copy for _, copy, outcome in moves if outcome is _DONE]
        return arrived, [move for move in moves if move[2] is not _DONE]


class StorageJobs:
    """Every storage job from its plan to its settled result.

    Args:
        names: Names of the tiers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._records: dict[JobId, JobRecord] = {}
        self._next_id = 0
        self._planned: list[Job] = []
        self._cancelled: list[JobId] = []

    def __len__(self) -> int:
        return len(self._records)

    @property
    def has_awaited(self) -> bool:
        """Whether a job in flight is still within its deadline."""
        return any(not record.is_late for record in self._records.values())

    @property
    def late_slots(self) -> int:
        """RAM slots that late promotions hold until they end."""
        return sum(
            len(record.destinations)
            for record in self._records.values()
            if record.is_late and record.is_promotion
        )

    def slots_to_free(self, tier: int) -> int:
        """Return how many slots of ``tier`` become free when jobs have moved chunks to RAM."""
        return sum(
            len(record.moved)
            for record in self._records.values()
            if record.source == tier and not record.is_late
        )

    def add(self, record: JobRecord, slots: Sequence[int], *, timeout_s: float) -> JobId:
        """Record a job and queue it for the engine; return the new job id.

        Args:
            record: The job.
            slots: Slots of the job's destinations.
            timeout_s: Deadline of the job.
        """
        job_id = self._next_id
        self._next_id += 1
        self._records[job_id] = record
        self._planned.append(
            Job(
                job_id=job_id,
                purpose=Purpose.PROMOTE if record.is_promotion else Purpose.DEMOTE,
                source=self._names[record.source],
                destination=self._names[record.destination],
                keys=record.sources.keys,
                source_slots=record.sources.slots,
                destination_slots=slots,
                timeout_s=timeout_s,
                payload=list(map(_generation_of, record.ram_copies)),
            )
        )
        return job_id

    def find(self, job_id: JobId) -> JobRecord | None:
        """Return the record of a job; None if the job is not in flight."""
        return self._records.get(job_id)

    def remove(self, job_id: JobId) -> None:
        """Forget a job after its settled result was applied."""
        del self._records[job_id]

    def cancel(self, job_id: JobId) -> None:
        """Queue the cancellation of a job that no request needs any more."""
        self._cancelled.append(job_id)

    @property
    def has_output(self) -> bool:
        """Whether there are jobs or cancellations to take."""
        return bool(self._planned or self._cancelled)

    def take_planned(self) -> list[Job]:
        """Return the jobs planned since the last call."""
        planned = self._planned
        if planned:
            self._planned = []
        return planned

    def take_cancelled(self) -> list[JobId]:
        """Return the ids of the jobs to cancel that were queued since the last call."""
        cancelled = self._cancelled
        if cancelled:
            self._cancelled = []
        return cancelled

    def records(self) -> Sequence[JobRecord]:
        """Return all jobs in flight."""
        return list(self._records.values())
