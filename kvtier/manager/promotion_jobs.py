"""Jobs that bring chunks up into RAM: planned for who needs them, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from kvtier.manager.grants import Grants
from kvtier.manager.ladder import Ladder
from kvtier.manager.ledger import JobRecord
from kvtier.policies import ChunkCopy, CopyState
from kvtier.types import JobId, Outcome, TransferResult, Why

__all__ = ["PromotionJob", "PromotionJobs"]

_RESIDENT = CopyState.RESIDENT
_DONE = Outcome.DONE


class PromotionJob(NamedTuple):
    """One job that was planned.

    Attributes:
        job_id: The job.
        copies: The RAM copies it writes.
    """

    job_id: JobId
    copies: Sequence[ChunkCopy]


class PromotionJobs:
    """Plans promotion jobs and takes their results."""

    def __init__(self, ladder: Ladder, grants: Grants) -> None:
        self._ladder = ladder
        self._grants = grants

    def plan(
        self, sources: Sequence[ChunkCopy], tiers: Sequence[int]
    ) -> list[PromotionJob] | None:
        """Give chunks RAM slots, evicting as needed, and plan the jobs that fill them.

        Args:
            sources: Copies of chunks that are not in RAM; at least one.
            tiers: Index of the tier that each is in.

        Returns:
            The jobs; None, and nothing changed, when there is not enough to evict.
        """
        ladder = self._ladder
        room = ladder.make_room(ladder.ram, [source.key for source in sources])
        if room is None:
            return None
        slots, _ = room
        ladder.ram.counters.misses += len(sources)
        ladder.slot_status.withdraw(slots)
        jobs = []
        for index in dict.fromkeys(tiers):
            here = [tier == index for tier in tiers]
            some, places = list(compress(sources, here)), list(compress(slots, here))
            for at in range(0, len(some), ladder.limits.batch):
                end = at + ladder.limits.batch
                jobs.append(self._plan_one(index, some[at:end], places[at:end]))
        return jobs

    def apply(self, record: JobRecord, result: TransferResult) -> list[ChunkCopy]:
        """Take a promotion job's outcome into account.

        Returns:
            Copies now in RAM whose source left.
        """
        if not result.settled:
            self._expire(record)
            return []
        ram = self._ladder.ram
        source_tier = self._ladder.tiers[record.source]
        source_tier.unpin_many(record.sources)
        arrived, failures = record.sort_out(result.outcomes)
        for source, copy, outcome in failures:
            self._grants.settle_missing(copy)
            ram.abort(copy)
            self._blame(record, source, outcome)
        self._ladder.publish(ram, arrived)
        moved = self._take_away(record, result)
        unread = {source for source, _, _ in failures}
        read = [
            source
            for source in record.sources
            if source.state == _RESIDENT and source not in unread
        ]
        source_tier.touch(read, self._ladder.ctx)
        self._grants.settle_arrived(arrived)
        passing = sum([copy.transient for copy in arrived]) if ram.passing else 0
        source_tier.counters.promoted += len(arrived) - passing
        self._ladder.drop_passed(arrived)  # those whose request is gone
        return moved

    def _plan_one(
        self, index: int, sources: Sequence[ChunkCopy], slots: Sequence[int]
    ) -> PromotionJob:
        """Plan one job that brings chunks of tier ``index`` up into the slots beside them."""
        ladder = self._ladder
        keys = [source.key for source in sources]
        generation = ladder.next_generation()
        copies = ladder.ram.begin_copying(
            keys, slots, sources, origin=index, generation=generation
        )
        ladder.tiers[index].pin_many(sources)
        ways = ladder.placement.promote_many(sources, index, ladder.ctx)
        moved: set[ChunkCopy] = set()
        how = ways[0]
        if not (how.keep_source and how.stay and ways.count(how) == len(ways)):
            for source, copy, how in zip(sources, copies, ways, strict=True):
                if not how.keep_source:
                    moved.add(source)
                elif not how.stay:
                    copy.transient = True
                    ladder.ram.passing += 1
        for source in sources:
            source.hits += 1
        places = [source.slot for source in sources]
        record = JobRecord(
            Why.PROMOTE, index, 0, sources, keys, places, copies, ladder.epoch, moved=moved
        )
        job_id = ladder.ledger.open(
            record,
            slots=slots,
            names=ladder.names,
            timeout_s=ladder.limits.load_timeout_s,
            generations=[generation] * len(copies),
        )
        ladder.cost_model.record_job(job_id, index, len(copies))
        return PromotionJob(job_id, copies)

    def _expire(self, record: JobRecord) -> None:
        """Let nobody wait any longer for what a job past its deadline was to bring."""
        record.late = True
        self._ladder.tiers[record.source].counters.expired += len(record.sources)
        for copy in record.destinations:
            if copy.state == CopyState.WRITING:
                copy.state = CopyState.LATE
                self._grants.settle_missing(copy)

    def _take_away(self, record: JobRecord, result: TransferResult) -> list[ChunkCopy]:
        """Drop the sources that were to move; return the copies that took their place."""
        tier = self._ladder.tiers[record.source]
        moved: list[ChunkCopy] = []
        if not record.moved:
            return moved
        for source, copy, outcome in zip(
            record.sources, record.destinations, result.outcomes, strict=True
        ):
            if source in record.moved and outcome is _DONE:
                moved.append(copy)
                self._ladder.drop(tier, source)
        return moved

    def _blame(self, record: JobRecord, source: ChunkCopy, outcome: Outcome) -> None:
        """Count a chunk that did not come up, and forget one whose bytes are wrong."""
        tier = self._ladder.tiers[record.source]
        if outcome is Outcome.CORRUPT:
            self._ladder.condemn(tier, source)
        elif not record.late:  # else it was counted when its deadline passed
            tier.counters.note_failure(outcome, reading=True)
