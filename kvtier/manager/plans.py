"""The values that the manager takes and returns: plans, limits, counters, snapshots."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple, Protocol

from kvtier.keys import ChunkKey
from kvtier.manager.cost_model import CostFigures
from kvtier.types import Outcome

__all__ = [
    "NOTHING_TO_STORE",
    "NO_GENERATION",
    "NO_SLOT",
    "LoadPlan",
    "ManagerLimits",
    "ManagerSnapshot",
    "SlotStatus",
    "StorePlan",
    "TierCounters",
    "TierSnapshot",
]


NO_SLOT: Final = -1
"""Stands for a missing slot in a :class:`LoadPlan`; the load of its chunk fails."""
NO_GENERATION: Final = 0
"""A stamp that no write uses."""


class StorePlan(NamedTuple):
    """The RAM slots for new chunks of a request.

    Attributes:
        keys: The chunks to store, in the order they were offered.
        slots: RAM slot of each chunk.
        generation: Stamp that the worker writes beside each slot once its bytes are whole.
        evicted: Keys that were evicted from RAM; announce these evictions before the stores.
    """

    keys: Sequence[ChunkKey]
    slots: Sequence[int]
    generation: int
    evicted: Sequence[ChunkKey]


NOTHING_TO_STORE: Final = StorePlan((), (), NO_GENERATION, ())


class LoadPlan(NamedTuple):
    """The RAM slots of a request's chunks, for a load.

    Attributes:
        slots: RAM slot of each chunk, in the order asked; :data:`NO_SLOT` if it has none.
        generations: Stamp that each slot must have; a worker must not load from a slot with
            another stamp. :data:`NO_GENERATION` where there is no slot.
        origins: Index of the tier that each chunk's bytes come from.
        wait_s: Longest time until all slots have their stamps; 0 if they have them now.
    """

    slots: Sequence[int]
    generations: Sequence[int]
    origins: Sequence[int]
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Bounds of the manager, in chunks unless the name says otherwise.

    Attributes:
        pin_budget: RAM slots that may be held for waiting requests.
        reserve: Share of a tier's slots that write-on-evict keeps free.
        queue: Chunks that may be on their way to one slower tier at a time.
        batch: Most chunks of one job.
        retained: RAM slots that may be retained until a deadline.
        backlog: Chunks that may be queued for one slower tier or on their way there. Newer
            chunks then stay in RAM only.
        load_timeout_s: Deadline of a promotion.
        store_timeout_s: Deadline of a demotion.
        max_queue_steps: Steps that a request waits at most for its promotions to start.
        max_queue_s: Seconds of the same wait, which ends after both limits have passed.
        max_arrival_steps: Steps that a request may wait for chunks on their way.
        max_idle_grant_steps: Steps without a lookup after which a request's grants end.
        max_store_refusals: Refusals after which a store is cut to the chunks that fit.
        direct_loads: Whether chunks in slower tiers are hits at once and loaded as they arrive.
    """

    pin_budget: int
    reserve: float
    queue: int
    batch: int = 256
    retained: int = 0
    backlog: int = sys.maxsize
    load_timeout_s: float = 10.0
    store_timeout_s: float = 60.0
    max_queue_steps: int = 256
    max_queue_s: float = 0.0
    max_arrival_steps: int = 20_000
    max_idle_grant_steps: int = 256
    max_store_refusals: int = 16
    direct_loads: bool = False


@dataclass(slots=True)
class TierCounters:
    """Counts of chunks in one tier since the manager was made."""

    hits: int = 0
    """Chunks that an engine loaded with bytes from this tier."""
    prompt_hits: int = 0
    """Hits of the counting group, which is used to count prompt tokens."""
    misses: int = 0
    """Misses: one per request, for its first chunk that no tier has. In RAM, promoted chunks
    count too."""
    stored: int = 0
    """Chunks that became resident, from any source."""
    evicted: int = 0
    """Chunks evicted to free slots."""
    followed: int = 0
    """Evicted chunks tracked until their next lookup; a large tier is sampled."""
    refused: int = 0
    """Chunks refused for lack of slots or by the placement policy."""
    failed: int = 0
    """Failed transfers of chunks into this tier."""
    read_failed: int = 0
    """Failed transfers of chunks out of this tier."""
    expired: int = 0
    """Transfers of chunks to or from this tier that missed their deadline."""
    shut_out: int = 0
    """Transfers of chunks refused because this tier is out of service or its queue is full."""
    load_failed: int = 0
    """Chunks of this tier that a worker could not load into the GPU."""
    corrupt: int = 0
    """Chunks dropped because their bytes were corrupt."""
    lost: int = 0
    """Chunks of this tier that did not reach their slower tier."""
    dropped: int = 0
    """Chunks not sent to this tier because it did not keep up. In RAM: chunks refused because
    others waited for a slower tier."""
    promoted: int = 0
    """Chunks of this tier promoted to RAM to stay there."""
    demoted: int = 0
    """Chunks of this tier that arrived in a slower tier."""
    stranded: int = 0
    """Chunks of this tier that were computed because no tier had a chunk before them."""
    unretained: int = 0
    """Chunks not retained, or released before their deadline."""

    def record_failure(self, outcome: Outcome, *, reading: bool) -> None:
        """Count a chunk that did not arrive, by cause; cancelled chunks are not counted."""
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
        """Return a copy, in half the time of :func:`dataclasses.replace`."""
        return TierCounters(*_values_of(self))


_values_of = operator.attrgetter(*(field.name for field in fields(TierCounters)))


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """State of one tier at one moment.

    Attributes:
        name: The tier's name.
        capacity: Slots.
        used: Slots that are not free.
        resident: Chunks that are hits.
        held: Copies that cannot be evicted now: pinned, dirty or being written.
        dirty: Copies that a slower tier must still receive.
        quarantined: Slots kept out of use until a worker acknowledged its jobs.
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


@dataclass(frozen=True, slots=True)
class ManagerSnapshot:
    """State of the manager at one moment.

    Attributes:
        tiers: One per tier, fastest first.
        requests: Requests that began and did not end.
        waiting: Requests that wait for promotions, or for their turn.
        granted: RAM slots held for waiting requests.
        retained: RAM slots retained until a deadline.
        jobs: Storage jobs in flight.
        cost_model: Estimated load and compute times, and the loads skipped because of them.
    """

    tiers: Sequence[TierSnapshot]
    requests: int
    waiting: int
    granted: int
    retained: int
    jobs: int
    cost_model: CostFigures


class SlotStatus(Protocol):
    """The workers' reports about RAM slots, read from shared memory.

    vLLM's offloading contract has no way to report a failed job. So the workers acknowledge
    every job, and write its outcome into memory that they share with the scheduler.
    """

    def issue(self, slots: Sequence[int]) -> None:
        """Record that each worker gets one more job on each of ``slots``."""

    def withdraw(self, slots: Sequence[int]) -> None:
        """Clear the stamps of ``slots`` before their bytes change."""

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> Sequence[bool]:
        """Return for each slot whether every rank stored all bytes of that generation."""

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> Sequence[bool]:
        """Return for each slot whether no rank failed to load that generation."""

    def forgive(self, slots: Sequence[int]) -> None:
        """Forget failed loads from ``slots`` that no load is using."""

    def quiet(self, slots: Sequence[int]) -> Sequence[bool]:
        """Return for each slot whether all ranks acknowledged every job issued on it."""
