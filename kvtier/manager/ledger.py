"""Storage jobs in flight, and the slots they hold.

A job's slots belong to it until its settled result arrives, whatever else happens: the
request may end, the cache may be reset, the deadline may pass. The ledger is the only place
that knows, and :meth:`JobLedger.close` the only way a job's slots become free again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtier.keys import ChunkKey
from kvtier.policies import ChunkCopy
from kvtier.types import Job, JobId, Outcome, Why

__all__ = ["Failure", "JobLedger", "JobRecord"]

_DONE = Outcome.DONE
Failure: TypeAlias = tuple[ChunkCopy, ChunkCopy, Outcome]
"""The copy that was read, the one that its bytes did not arrive in, and why."""


@dataclass(slots=True)
class JobRecord:
    """One storage job.

    Attributes:
        why: PROMOTE or DEMOTE.
        source: Index of the tier read.
        destination: Index of the tier written.
        sources: The copies read, each pinned by this job.
        keys: Of each.
        source_slots: Of each.
        destinations: The copies written, each pinned by this job.
        epoch: The cache epoch the job belongs to; after a reset its results only free slots.
        late: Whether its deadline passed.
        moved: The sources that leave when their bytes arrived.
        is_eviction: Whether the sources leave their tier, in this order, to make room.
    """

    why: Why
    source: int
    destination: int
    sources: Sequence[ChunkCopy]
    keys: Sequence[ChunkKey]
    source_slots: Sequence[int]
    destinations: Sequence[ChunkCopy]
    epoch: int
    late: bool = False
    moved: Collection[ChunkCopy] = ()
    is_eviction: bool = False

    def sort_out(
        self, outcomes: Sequence[Outcome]
    ) -> tuple[Sequence[ChunkCopy], list[Failure]]:
        """Return the copies written whose bytes arrived, and what became of the others."""
        if outcomes.count(_DONE) == len(self.destinations):
            return self.destinations, []
        arrived: list[ChunkCopy] = []
        failures: list[Failure] = []
        for source, copy, outcome in zip(
            self.sources, self.destinations, outcomes, strict=True
        ):
            if outcome is _DONE:
                arrived.append(copy)
            else:
                failures.append((source, copy, outcome))
        return arrived, failures


class JobLedger:
    """Every storage job from the moment it is planned to its settled result."""

    def __init__(self) -> None:
        self._records: dict[JobId, JobRecord] = {}
        self._next_id = 0
        self._unsent: list[Job] = []
        self._cancels: list[JobId] = []

    def __len__(self) -> int:
        return len(self._records)

    @property
    def active(self) -> bool:
        """Whether any job is still within its deadline; a stuck one is nothing to wait for."""
        return any(not record.late for record in self._records.values())

    @property
    def stuck(self) -> int:
        """RAM slots that reads past their deadline keep until they end, if ever."""
        return sum(
            len(record.destinations)
            for record in self._records.values()
            if record.late and not record.destination
        )

    def moving_out(self, tier: int) -> int:
        """Return how many slots of ``tier`` will be free when what moves up has arrived."""
        return sum(
            len(record.moved)
            for record in self._records.values()
            if record.source == tier and not record.late
        )

    def open(
        self,
        record: JobRecord,
        *,
        slots: Sequence[int],
        names: Sequence[str],
        timeout_s: float,
        generations: Sequence[int] | None = None,
    ) -> JobId:
        """Number ``record``, remember it and queue its job for the engine.

        Args:
            record: The job.
            slots: Of its destinations.
            names: The tiers' names.
            timeout_s: The job's deadline.
            generations: Stamps of the RAM slots that it fills.
        """
        job_id = self._next_id
        self._next_id += 1
        self._records[job_id] = record
        self._unsent.append(
            Job(
                job_id,
                record.why,
                names[record.source],
                names[record.destination],
                record.keys,
                record.source_slots,
                slots,
                timeout_s,
                generations,
            )
        )
        return job_id

    def find(self, job_id: JobId) -> JobRecord | None:
        """Return the record of a job in flight."""
        return self._records.get(job_id)

    def close(self, job_id: JobId) -> None:
        """Forget a job whose settled result was applied."""
        del self._records[job_id]

    def cancel(self, job_id: JobId) -> None:
        """Ask the engine to drop a job that no request needs any more."""
        self._cancels.append(job_id)

    @property
    def has_output(self) -> bool:
        """Whether there are jobs or cancellations to take."""
        return bool(self._unsent or self._cancels)

    def take_unsent(self) -> list[Job]:
        """Return the jobs planned since the last call."""
        unsent = self._unsent
        if unsent:
            self._unsent = []
        return unsent

    def take_cancels(self) -> list[JobId]:
        """Return the jobs to cancel since the last call."""
        cancels = self._cancels
        if cancels:
            self._cancels = []
        return cancels

    def records(self) -> Sequence[JobRecord]:
        """Return all jobs in flight."""
        return list(self._records.values())
