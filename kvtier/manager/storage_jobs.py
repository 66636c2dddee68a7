"""Plans storage jobs, which are transfers between tiers, and tracks jobs in flight.

:class:`StorageJobs` has the common part of promotions and demotions. A plan allocates the
slots, adds the copies to be written and divides the chunks into jobs. A result is *settled*
when no thread can still use the job's slots. A settled result removes the pins of the job and
drops the copies whose bytes did not arrive. :mod:`~kvtier.manager.promote` and
:mod:`~kvtier.manager.demote` choose the chunks to move and handle the consequences of a result.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtier.keys import ChunkKey
from kvtier.manager.copies import CopyList
from kvtier.manager.tier import TierState
from kvtier.manager.tier_stack import NO_GENERATION, TierStack
from kvtier.policies import ChunkCopy
from kvtier.types import Job, JobId, Outcome, Purpose, QuestionPart

__all__ = ["Failure", "JobRecord", "StorageJobs"]

_DONE = Outcome.DONE
_generation_of = operator.attrgetter("generation")
Failure: TypeAlias = tuple[ChunkCopy, ChunkCopy, Outcome]
"""The source copy, the destination copy, and the outcome of the failed transfer."""


@dataclass(slots=True)
class JobRecord:
    """One storage job. It occupies its slots until its settled result arrives.

    The slots stay occupied when a request ends, the cache is reset or the deadline passes.

    Attributes:
        source: Index of the tier that is read.
        destination: Index of the tier that is written; 0, which is RAM, for a promotion.
        sources: The copies read, each pinned by this job.
        destinations: The copies written, each pinned by this job.
        epoch: The cache epoch of the job. After a reset the job's result only frees slots.
        is_late: Whether the job's deadline has passed.
        moved: The sources to drop once their bytes arrive, in the order of ``sources``.
        is_eviction: Whether the sources are victims, in eviction order.
    """

    source: int
    destination: int
    sources: CopyList
    destinations: Sequence[ChunkCopy]
    epoch: int
    is_late: bool = False
    moved: Sequence[ChunkCopy] = ()
    is_eviction: bool = False

    @property
    def is_promotion(self) -> bool:
        """Whether the job moves chunks to RAM; otherwise it demotes them."""
        return not self.destination

    @property
    def ram_copies(self) -> Sequence[ChunkCopy]:
        """The copies in RAM that the job reads or writes; none if both tiers are slower."""
        if self.is_promotion:
            return self.destinations
        return () if self.source else self.sources.copies

    def split(self, outcomes: Sequence[Outcome]) -> tuple[Sequence[ChunkCopy], list[Failure]]:
        """Return the destination copies that arrived, and the failures."""
        if outcomes.count(_DONE) == len(self.destinations):
            return self.destinations, []
        moves = list(zip(self.sources.copies, self.destinations, outcomes, strict=True))
        arrived = [copy for _, copy, outcome in moves if outcome is _DONE]
        return arrived, [move for move in moves if move[2] is not _DONE]


class StorageJobs:
    """Plans storage jobs, and tracks each transfer until its settled result is applied."""

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
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
        """Number of RAM slots that late promotions occupy until they end."""
        return sum(
            len(record.destinations)
            for record in self._records.values()
            if record.is_late and record.is_promotion
        )

    def is_moving_from(self, tier: int) -> bool:
        """Return whether promotions in flight, not late, move chunks out of ``tier``."""
        return any(
            record.moved and record.source == tier and not record.is_late
            for record in self._records.values()
        )

    def plan(
        self,
        source: TierState,
        destination: TierState,
        listed: CopyList,
        *,
        moved: Collection[ChunkCopy] = (),
        is_eviction: bool = False,
    ) -> list[tuple[JobId, Sequence[ChunkCopy]]]:
        """Plan jobs that copy ``listed`` to ``destination``, evicting there if needed.

        Args:
            source: Tier of the copies.
            destination: A tier that lacks the chunks and has an available slot for each chunk.
            listed: The copies. Each has a pin that its job removes at its end.
            moved: The copies among ``listed`` that ``source`` drops once their bytes arrive.
            is_eviction: Whether the copies are victims of ``source``, in eviction order.

        Returns:
            Each job's id and the copies that it writes.
        """
        stack = self._stack
        slots, _ = stack.take_slots(destination, listed.keys)
        if destination is stack.ram:
            stack.slot_status.clear_generations(slots)
        if stack.gds is not None and stack.gds.tier == destination.index:
            stack.gds.begin_overwriting(slots)
        planned: list[tuple[JobId, Sequence[ChunkCopy]]] = []
        for at in range(0, len(slots), stack.limits.batch):
            targets = slots[at : at + stack.limits.batch]
            part = listed.between(at, at + len(targets))
            generation = stack.next_generation() if destination is stack.ram else NO_GENERATION
            copies = destination.begin_copying(
                part.keys, targets, part.copies, origin=source.index, generation=generation
            )
            record = JobRecord(
                source=source.index,
                destination=destination.index,
                sources=part,
                destinations=copies,
                epoch=stack.epoch,
                moved=[copy for copy in part.copies if copy in moved] if moved else (),
                is_eviction=is_eviction,
            )
            planned.append((self._add(record, targets), copies))
        return planned

    def plan_question(
        self, tier: TierState, keys: Sequence[ChunkKey], parts: Sequence[QuestionPart]
    ) -> JobId:
        """Plan a job that asks the shared ``tier`` which of ``keys`` it has; return its id."""
        job_id = self._take_id()
        numbers = range(len(keys))
        self._planned.append(
            Job(
                job_id=job_id,
                purpose=Purpose.QUESTION,
                source=tier.name,
                destination=tier.name,
                keys=keys,
                source_slots=numbers,
                destination_slots=numbers,
                timeout_s=self._stack.limits.lookup_timeout_s,
                payload=parts,
            )
        )
        return job_id

    def settle(
        self, record: JobRecord, outcomes: Sequence[Outcome]
    ) -> tuple[Sequence[ChunkCopy], Sequence[Failure]]:
        """End the pins of a job, and drop the destination copies that did not arrive.

        Returns:
            The destination copies whose bytes arrived, and the failures.
        """
        source = self._stack.tiers[record.source]
        destination = self._stack.tiers[record.destination]
        if record.is_promotion:
            source.unpin(record.sources.copies)
        else:
            source.end_demotion(record.sources.copies)
        arrived, failures = record.split(outcomes)
        for read, written, outcome in failures:
            destination.abort(written)
            if record.source:
                self._stack.drop_unreadable(source, read, outcome)
        return arrived, failures

    def _add(self, record: JobRecord, slots: Sequence[int]) -> JobId:
        """Record a job and queue it for the engine; return the new job id."""
        limits, tiers = self._stack.limits, self._stack.tiers
        is_promotion = record.is_promotion
        job_id = self._take_id()
        self._records[job_id] = record
        self._planned.append(
            Job(
                job_id=job_id,
                purpose=Purpose.PROMOTE if is_promotion else Purpose.DEMOTE,
                source=tiers[record.source].name,
                destination=tiers[record.destination].name,
                keys=record.sources.keys,
                source_slots=record.sources.slots,
                destination_slots=slots,
                timeout_s=limits.load_timeout_s if is_promotion else limits.store_timeout_s,
                payload=list(map(_generation_of, record.ram_copies)),
            )
        )
        return job_id

    def _take_id(self) -> JobId:
        self._next_id += 1
        return self._next_id - 1

    def find(self, job_id: JobId) -> JobRecord | None:
        """Return the record of a job; None if the job is not in flight."""
        return self._records.get(job_id)

    def remove(self, job_id: JobId) -> None:
        """Forget a job whose settled result was applied."""
        del self._records[job_id]

    def cancel(self, job_id: JobId) -> None:
        """Queue the cancellation of a job that requests no longer need."""
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
        """Return the ids of the jobs cancelled since the last call."""
        cancelled = self._cancelled
        if cancelled:
            self._cancelled = []
        return cancelled

    def records(self) -> Sequence[JobRecord]:
        """Return all jobs in flight."""
        return list(self._records.values())
