"""Jobs that copy chunks down: planned for who sends them, and what became of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.manager.ladder import Ladder
from kvtier.manager.ledger import Failure, JobRecord
from kvtier.manager.run import Run
from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy
from kvtier.types import Outcome, Purpose, TransferResult

__all__ = ["DemotionJobs"]

_DEMOTE = Purpose.DEMOTE


class DemotionJobs:
    """Plans demotion jobs and takes their results.

    Attributes:
        in_flight: Chunks on their way to each tier, by its index; not those of jobs past their
            deadline.
    """

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self.in_flight = [0] * len(ladder.tiers)

    def send(
        self, source: TierState, run: Run, index: int, *, is_eviction: bool = False
    ) -> int:
        """Plan jobs; what finds no room below is counted as lost.

        Args:
            source: Tier of the run.
            run: What to copy down.
            index: Of the tier that it goes to.
            is_eviction: Whether the run leaves its tier, in its order, to make room.

        Returns:
            How many of the run are on their way; its job needs a pin on each of them.
        """
        ladder = self._ladder
        target = ladder.tiers[index]
        chunks = len(run.copies)
        fits = min(chunks, target.room)
        room = ladder.make_room(target, run.keys[:fits])
        if room is None:
            fits = target.slots.free
        slots = target.slots.allocate(fits) if room is None else room[0]
        if fits < chunks:
            run, left = run.cut(fits)
            target.want(chunks)
            target.counters.refused += chunks - fits
            source.counters.lost += chunks - fits
            self.settle_sources(source, left.copies)
        if not fits:
            return 0
        copies = target.begin_copying(run.keys, slots, run.copies)
        self.in_flight[index] += fits
        batch = ladder.limits.batch
        for at in range(0, fits, batch):
            part = slice(at, at + batch)
            record = JobRecord(
                _DEMOTE,
                source.index,
                index,
                run.copies[part],
                run.keys[part],
                run.slots[part],
                copies[part],
                ladder.epoch,
                is_eviction=is_eviction,
            )
            timeout_s = ladder.limits.store_timeout_s
            ladder.ledger.open(
                record, slots=slots[part], names=ladder.names, timeout_s=timeout_s
            )
        return fits

    def apply(self, record: JobRecord, result: TransferResult) -> Sequence[ChunkCopy]:
        """Take a demotion job's outcome into account.

        Returns:
            What is new in the tier that it writes, and whole.
        """
        if not result.settled:
            # Its slots stay taken, but it must not keep later jobs from being sent, and
            # refused.
            record.late = True
            self.in_flight[record.destination] -= len(record.sources)
            self._ladder.tiers[record.destination].counters.expired += len(record.sources)
            return ()
        ladder = self._ladder
        source_tier = ladder.tiers[record.source]
        target = ladder.tiers[record.destination]
        if not record.late:
            self.in_flight[record.destination] -= len(record.sources)
        arrived, failures = record.sort_out(result.outcomes)
        if failures:
            self._give_up(record, failures)
        source_tier.sent(record.sources)
        if source_tier.leaving:
            self._let_go(
                source_tier,
                Run(record.sources, record.keys, record.source_slots, source_tier.departed),
            )
        source_tier.counters.demoted += len(arrived)
        ladder.publish(target, arrived, is_ordered=record.is_eviction)
        return arrived

    def sources(self, tier: TierState) -> Iterator[ChunkCopy]:
        """Yield the copies of ``tier`` that jobs in flight copy down."""
        for record in self._ladder.ledger.records():
            if record.purpose is _DEMOTE and record.source == tier.index:
                yield from record.sources

    def settle_sources(self, tier: TierState, copies: Sequence[ChunkCopy]) -> None:
        """Note that ``copies`` need not be sent down; let go of those that were leaving."""
        for copy in copies:
            if copy.dirty:
                tier.mark_clean(copy)
        if tier.leaving and copies:
            self._let_go(tier, tier.run_of(copies))

    def clear(self) -> None:
        """Count nothing as on its way; for a reset of the cache."""
        self.in_flight = [0] * len(self.in_flight)

    def _give_up(self, record: JobRecord, failures: Sequence[Failure]) -> None:
        """Give up the chunks of a job that did not arrive."""
        source_tier = self._ladder.tiers[record.source]
        target = self._ladder.tiers[record.destination]
        for source, copy, outcome in failures:
            target.abort(copy)
            if not record.late:  # else it was counted when its deadline passed
                target.counters.note_failure(outcome, reading=False)
            source_tier.counters.lost += 1
            if outcome is Outcome.CORRUPT and record.source:
                self._ladder.condemn(source_tier, source)

    def _let_go(self, tier: TierState, run: Run) -> None:
        """Let those of ``run`` leave that were leaving and have nothing to wait for."""
        waiting = [copy.pins or copy.dirty for copy in run.copies]
        if not any(waiting) and tier.leaving.issuperset(run.copies):
            self._ladder.evict(tier, run)
            return
        gone: list[ChunkCopy] = []
        for copy in run.copies:
            if copy.dirty or copy not in tier.leaving:
                continue
            if copy.pins:
                tier.stay(copy, self._ladder.ctx)
            else:
                gone.append(copy)
        if gone:
            self._ladder.evict(tier, tier.run_of(gone))
