"""Empties the tiers at a reset, and quarantines slots that are still in use.

A reset makes every chunk a miss at once, but jobs in flight continue. A storage job or a worker
may be reading or writing a slot. After a reset, the engine does not report when a worker's job
ends. Such a slot stays pinned until its storage job has settled and the workers have
acknowledged their jobs.

A tier may hold millions of chunks, and the scheduler waits for the reset. So the reset does no
work per chunk: every tier starts empty, except for the pinned copies. Later steps free the
other copies and announce their removal, a few thousand per step
(:class:`~kvtier.manager.reports.EventLog`).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.manager.storage_jobs import JobRecord, StorageJobs
from kvtier.manager.tier_stack import TierStack
from kvtier.policies import ChunkCopy
from kvtier.types import TransferResult

__all__ = ["Quarantine"]


class Quarantine:
    """Keeps dropped RAM copies pinned after a reset until no worker can touch them."""

    def __init__(self, stack: TierStack, jobs: StorageJobs) -> None:
        self._stack = stack
        self._jobs = jobs
        self._held: list[ChunkCopy] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def __len__(self) -> int:
        return len({copy.slot for copy in self._held})

    def reset(self, in_use: Iterable[ChunkCopy]) -> None:
        """Make every chunk in every tier a miss.

        Args:
            in_use: RAM copies that workers may touch. This object takes over one pin of each
                copy. Only these copies and the copies of storage jobs may be pinned.
        """
        self._held += in_use
        stack = self._stack
        pinned: list[list[ChunkCopy]] = [[] for _ in stack.tiers]
        pinned[0] += self._held
        for record in self._jobs.records():
            pinned[record.source] += record.sources.copies
            pinned[record.destination] += record.destinations
        for tier, copies in zip(stack.tiers, pinned, strict=True):
            stack.events.add_reset(tier.index, tier.reset(copies))
        self.end_step()

    def end_step(self) -> None:
        """Unpin the copies whose jobs all workers have acknowledged."""
        if not self._held:
            return
        held, self._held = self._held, []
        over = self._stack.slot_status.all_acknowledged([copy.slot for copy in held])
        for copy, is_over in zip(held, over, strict=True):
            if is_over:
                self._stack.ram.unpin((copy,))
            else:
                self._held.append(copy)

    def apply(self, record: JobRecord, result: TransferResult) -> None:
        """Free the slots of a job planned before the reset, once the job is settled."""
        if not result.settled:
            record.is_late = True
            return
        if record.destination:
            # The job may have written after the reset emptied the tier.
            self._stack.record_corrupt(record.destination, record.destinations)
        self._stack.tiers[record.source].unpin(record.sources.copies)
        self._stack.tiers[record.destination].unpin(record.destinations)
