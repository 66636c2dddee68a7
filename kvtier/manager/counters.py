"""What happened in one tier, and what it is like at one moment."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields

from kvtier.types import Outcome

__all__ = ["TierCounters", "TierSnapshot"]


@dataclass(slots=True)
class TierCounters:
    """What happened in one tier since the manager was made; all in chunks."""

    hits: int = 0
    """Chunks whose bytes came from this tier and that an engine loaded rather than computed."""
    prompt_hits: int = 0
    """Those of the counting group: each stands for prompt tokens of its own."""
    misses: int = 0
    """Chunks asked for and not here: one per request for the first that was nowhere and, of
    RAM alone, those that were brought up from a slower tier."""
    stored: int = 0
    """Chunks that became resident, from wherever."""
    evicted: int = 0
    """Chunks that left to make room."""
    followed: int = 0
    """Those of them of which it is known when they are asked for again: of a large tier a
    sample, and none if nobody wants to know."""
    refused: int = 0
    """Chunks not taken for lack of room or by the placement policy."""
    failed: int = 0
    """Chunks whose transfer into this tier failed."""
    read_failed: int = 0
    """Chunks whose transfer out of this tier failed."""
    expired: int = 0
    """Chunks whose transfer to or from this tier did not end before its deadline."""
    shut_out: int = 0
    """Chunks whose transfer to or from this tier was refused: out of service, or queue full."""
    load_failed: int = 0
    """Chunks that were here and that a worker could not load into the GPU."""
    corrupt: int = 0
    """Chunks dropped because their bytes were not the bytes stored."""
    lost: int = 0
    """Chunks that left, or stay, without reaching the slower tier they were meant for."""
    dropped: int = 0
    """Chunks meant for this tier that were not sent because it did not keep up; in RAM, those
    refused that would have found room, had no other waited for a slower tier."""
    promoted: int = 0
    """Chunks of this tier that came up to RAM to stay there."""
    demoted: int = 0
    """Chunks of this tier that arrived in a slower one."""
    stranded: int = 0
    """Chunks that were here and had to be computed all the same, because one that comes before
    them was in no tier."""
    unretained: int = 0
    """Chunks that somebody asked to keep and that were not kept, or not as long."""

    def note_failure(self, outcome: Outcome, *, reading: bool) -> None:
        """Count a chunk that did not arrive, by cause.

        What was cancelled did not fail.
        """
        if outcome is Outcome.EXPIRED:
            self.expired += 1
        elif outcome is Outcome.REFUSED:
            self.shut_out += 1
        elif outcome is Outcome.CANCELLED:
            return
        elif reading:
            self.read_failed += 1
        else:
            self.failed += 1

    def snapshot(self) -> TierCounters:
        """Return a copy; at half the price of :func:`dataclasses.replace`."""
        return TierCounters(*_values_of(self))


_values_of = operator.attrgetter(*(field.name for field in fields(TierCounters)))


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier at one moment.

    Attributes:
        name: The tier's name.
        capacity: Slots.
        used: Slots that are not free.
        resident: Chunks that are hits.
        held: Copies that could not be evicted now: being moved, kept for a request, or dirty.
        dirty: Copies that must still reach a slower tier.
        quarantined: Slots kept from reuse until a worker acknowledged its jobs.
        counters: A copy of the counters.
    """

    name: str
    capacity: int
    used: int
    resident: int
    held: int
    dirty: int
    quarantined: int
    counters: TierCounters
