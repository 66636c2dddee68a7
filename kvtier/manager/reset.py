"""Quarantined slots: slots that jobs may still touch after a reset of the cache.

A reset makes every chunk a miss at once, but does not stop bytes in flight: a storage job may
be reading or writing a slot, and so may a worker, although the engine no longer reports its
completion. Such a slot stays pinned until its job has settled and the workers acknowledged
their jobs.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.manager.jobs import JobRecord
from kvtier.manager.tier_stack import TierStack
from kvtier.policies import ChunkCopy
from kvtier.types import TransferResult

__all__ = ["Quarantine"]


class Quarantine:
    """RAM copies from before a reset that a worker may still touch."""

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self._held: list[ChunkCopy] = []

    def __len__(self) -> int:
        return len({copy.slot for copy in self._held})

    def hold(self, copies: Iterable[ChunkCopy]) -> None:
        """Take over one pin of each of ``copies``."""
        self._held += copies

    def end_step(self) -> None:
        """Unpin the copies that no worker touches any more."""
        if not self._held:
            return
        held, self._held = self._held, []
        quiet = self._stack.slot_status.quiet([copy.slot for copy in held])
        for copy, is_quiet in zip(held, quiet, strict=True):
            if is_quiet:
                self._stack.ram.unpin((copy,))
            else:
                self._held.append(copy)

    def apply(self, record: JobRecord, result: TransferResult) -> None:
        """Free the slots of a job planned before the reset."""
        if not result.settled:
            record.is_late = True
            return
        if record.destination:
            # It may have written after the reset emptied the tier.
            self._stack.corrupt.extend(
                (record.destination, copy.slot) for copy in record.destinations
            )
        self._stack.tiers[record.source].unpin(record.sources)
        self._stack.tiers[record.destination].unpin(record.destinations)
