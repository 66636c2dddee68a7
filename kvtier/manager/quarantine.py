"""Keeps slots out of use that somebody may still touch after a reset.

A reset makes every chunk a miss at once, but bytes in flight do not stop: a storage job may be
reading or writing a slot, and a worker may have been told to, without any completion that the
engine would still pass on. Such a slot stays taken until the jobs have settled and the workers'
own record says that they are done with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtier.manager.ladder import Ladder
from kvtier.manager.ledger import JobRecord
from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy, CopyState
from kvtier.types import TransferResult

__all__ = ["Quarantine"]


class Quarantine:
    """RAM slots that a worker may still touch."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._held: list[ChunkCopy] = []

    def __len__(self) -> int:
        return len(self._held)

    def evacuate(self, pinned: Iterable[ChunkCopy]) -> None:
        """Make every chunk in every tier a miss, and free the slots that nobody can touch.

        Args:
            pinned: RAM copies that workers may be loading or that were to be sent down, some
                perhaps gone already: the pins that keep their slots end without a word.
        """
        moving = self._moving()
        for copy in {copy for copy in pinned if copy.state == CopyState.GONE}:
            self._hold(copy, moving)
        for tier in self._ladder.tiers:
            for copy in list(tier.copies.values()):
                self._evacuate(tier, copy, moving)
        self.release()

    def release(self) -> None:
        """Let go of the slots whose workers are done."""
        if not self._held:
            return
        held, self._held = self._held, []
        quiet = self._ladder.slot_status.quiet([copy.slot for copy in held])
        for copy, ok in zip(held, quiet, strict=True):
            if ok:
                self._ladder.ram.unpin(copy)
            else:
                self._held.append(copy)

    def apply(self, record: JobRecord, result: TransferResult) -> None:
        """Free the slots of a job of before a reset."""
        if not result.settled:
            record.late = True
            return
        if record.destination:
            # It may have written after the reset emptied the tier.
            self._ladder.corrupt.extend(
                (record.destination, copy.slot) for copy in record.destinations
            )
        for tier, copies in (
            (record.source, record.sources),
            (record.destination, record.destinations),
        ):
            for copy in copies:
                self._ladder.tiers[tier].unpin(copy)

    def _moving(self) -> Counter[int]:
        """Return how many storage jobs hold each copy's slot, by the copy's id."""
        return Counter(
            id(copy)
            for record in self._ladder.ledger.records()
            for copy in (*record.sources, *record.destinations)
        )

    def _evacuate(self, tier: TierState, copy: ChunkCopy, moving: Counter[int]) -> None:
        """Make ``copy`` a miss now and its slot free once nobody can touch it."""
        self._ladder.drop(tier, copy)
        if not copy.pins or tier.index:
            return
        self._hold(copy, moving)

    def _hold(self, copy: ChunkCopy, moving: Counter[int]) -> None:
        # Requests' and workers' pins will not be taken back one by one: no completion is
        # coming. One pin stands for the workers until they are quiet, one for each storage
        # job.
        copy.grants = 0
        copy.pins = 1 + moving[id(copy)]
        self._held.append(copy)
