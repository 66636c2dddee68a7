"""The values the manager answers with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from kvtier.keys import ChunkKey
from kvtier.manager.cost_model import CostFigures
from kvtier.manager.counters import TierSnapshot

__all__ = [
    "NOTHING_TO_STORE",
    "NO_GENERATION",
    "NO_SLOT",
    "LoadPlan",
    "ManagerLimits",
    "ManagerSnapshot",
    "SlotStatus",
    "StorePlan",
]


NO_SLOT: Final = -1
"""Stands for a slot in a :class:`LoadPlan`; the load of its chunk fails."""
NO_GENERATION: Final = 0
"""The stamp of no write."""


class StorePlan(NamedTuple):
    """Where a request's new chunks go.

    Attributes:
        keys: The chunks to store, in the order they were offered.
        slots: RAM slot of each.
        generation: Stamp the worker writes beside each slot once its bytes are whole.
        evicted: Keys that left RAM to make room; announce them before the stores.
    """

    keys: Sequence[ChunkKey]
    slots: Sequence[int]
    generation: int
    evicted: Sequence[ChunkKey]


NOTHING_TO_STORE: Final = StorePlan((), (), NO_GENERATION, ())


class LoadPlan(NamedTuple):
    """Where a request's chunks are.

    Attributes:
        slots: RAM slot of each chunk, in the order asked; :data:`NO_SLOT` for one that has
            none after all.
        generations: Stamp each slot must bear; a worker that finds another must not load it.
            :data:`NO_GENERATION` where there is no slot: the load of that chunk fails.
        origins: Index of the tier each chunk's bytes come from.
        wait_s: How long a slot may take to bear its stamp; 0 if all do now.
    """

    slots: Sequence[int]
    generations: Sequence[int]
    origins: Sequence[int]
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Bounds the manager keeps to, in chunks unless the name says otherwise.

    Attributes:
        pin_budget: RAM slots that chunks kept for waiting requests may hold.
        reserve: Share of a tier's slots that write-on-evict keeps free ahead of need.
        queue: Chunks that may be on their way to one slower tier at a time.
        batch: Most chunks of one job.
        retained: RAM slots that chunks kept until a deadline may hold.
        backlog: Chunks that may wait for one slower tier or be on their way there; newer ones
            stay in RAM only.
        load_timeout_s: Deadline of a promotion.
        store_timeout_s: Deadline of a demotion.
        patience_lookups: Steps a request may wait for its turn to be promoted, ...
        patience_s: ... and seconds; it waits until both have passed.
        patience_arrivals: Steps a request may wait for chunks on their way.
        patience_grants: Steps for which chunks are kept for a request nobody asks about.
        patience_stores: Refusals after which a request's store is cut to what fits.
        streams: Whether a chunk in a slower tier is a hit at once, to be loaded as it arrives.
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


@dataclass(frozen=True, slots=True)
class ManagerSnapshot:
    """The manager at one moment.

    Attributes:
        tiers: One per tier, fastest first.
        requests: Requests that began and did not end.
        waiting: Requests that wait for promotions, or for their turn.
        granted: RAM slots kept for waiting requests.
        retained: RAM slots of chunks kept until a deadline.
        jobs: Storage jobs in flight.
        cost_model: What loading and computing take, and what was therefore not loaded.
    """

    tiers: Sequence[TierSnapshot]
    requests: int
    waiting: int
    granted: int
    retained: int
    jobs: int
    cost_model: CostFigures


class SlotStatus(Protocol):
    """What the workers say about RAM slots, read without asking them.

    vLLM's offloading contract has no way to report a failed job: the workers acknowledge every
    job and write what really happened into memory shared with the scheduler.
    """

    def issue(self, slots: Sequence[int]) -> None:
        """Note that the workers are about to be given one more job on each of ``slots``."""

    def withdraw(self, slots: Sequence[int]) -> None:
        """Take the stamps off ``slots``: their bytes are about to change, so none may load."""

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> Sequence[bool]:
        """Return for each slot whether every rank's bytes of that generation are whole."""

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> Sequence[bool]:
        """Return for each slot whether no rank failed to load the bytes of that generation."""

    def forgive(self, slots: Sequence[int]) -> None:
        """Forget who could not load from ``slots``, where no load is: the bytes were late."""

    def quiet(self, slots: Sequence[int]) -> Sequence[bool]:
        """Return for each slot whether all ranks acknowledged every job issued on it."""
