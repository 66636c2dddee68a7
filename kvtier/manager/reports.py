"""Reports of the manager: counters, snapshots, residency events and reuse gaps."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Final

from kvtier.keys import GROUP_NBYTES, ChunkKey
from kvtier.manager.cost_model import CostFigures
from kvtier.policies import ChunkCopy
from kvtier.types import Outcome

__all__ = [
    "SAMPLING_BYTE",
    "EventLog",
    "ManagerSnapshot",
    "ResidencyEvent",
    "ReuseGaps",
    "TierCounters",
    "TierSnapshot",
]

_MAX_EVENT_CHUNKS: Final = 1024
_MAX_TAKEN_CHUNKS: Final = 8192
_MAX_KEYS: Final = 1 << 14
_SAMPLED_CHUNKS: Final = 1 << 8
"""Number of evicted chunks to track per tier, because a distribution needs hundreds of gaps."""
SAMPLING_BYTE: Final = -1 - GROUP_NBYTES
"""Index of the last byte of the hash in a key; all bytes of the hash are equally random."""


@dataclass(slots=True)
class TierCounters:
    """Event counts of one tier since the manager was made."""

    hits: int = 0
    """Chunks whose bytes an engine loaded from this tier."""
    prompt_hits: int = 0
    """Hits of the counting group, which is used to count prompt tokens."""
    misses: int = 0
    """Requests with a missing chunk, each counted once; in RAM also each promoted chunk."""
    stored: int = 0
    """Chunks written to this tier by a store, a promotion or a demotion."""
    evicted: int = 0
    """Chunks evicted to free slots."""
    followed: int = 0
    """Evicted chunks tracked until their next lookup; only a sample in a large tier."""
    refused: int = 0
    """Chunks refused for lack of slots or by the placement policy."""
    failed: int = 0
    """Failed transfers of chunks into this tier."""
    read_failed: int = 0
    """Failed transfers of chunks out of this tier."""
    expired: int = 0
    """Transfers of chunks to or from this tier that missed their deadline."""
    shut_out: int = 0
    """Transfers refused because this tier is out of service, its queue is full, or a worker
    cannot do GDS reads."""
    load_failed: int = 0
    """Chunks of this tier that a worker could not load into the GPU."""
    missing: int = 0
    """Chunks that could not be read because this shared tier had lost them."""
    corrupt: int = 0
    """Chunks dropped because their bytes were corrupt."""
    lost: int = 0
    """Chunks of this tier that failed to reach the slower tier that must receive them."""
    dropped: int = 0
    """Chunks not sent to this tier because it was too slow. In RAM: chunks refused because
    dirty copies occupied the slots."""
    promoted: int = 0
    """Chunks of this tier promoted to RAM."""
    demoted: int = 0
    """Chunks of this tier that arrived in a slower tier."""
    stranded: int = 0
    """Chunks of this tier that the engine computed because an earlier chunk was in no tier."""
    unretained: int = 0
    """Chunks that were refused for retention, or released before their deadline."""

    def record_failure(self, outcome: Outcome, *, reading: bool) -> None:
        """Count a chunk that failed to arrive, by the cause.

        Cancelled chunks are ignored. Corrupt chunks of this tier are counted when dropped.
        """
        if outcome is Outcome.EXPIRED:
            self.expired += 1
        elif outcome is Outcome.REFUSED:
            self.shut_out += 1
        elif outcome is Outcome.MISSING:
            self.missing += 1
        elif outcome is Outcome.CANCELLED or (reading and outcome is Outcome.CORRUPT):
            return
        elif reading:
            self.read_failed += 1
        else:
            self.failed += 1

    def snapshot(self) -> TierCounters:
        """Return a copy of the counters; faster than :func:`dataclasses.replace`."""
        return TierCounters(*_values_of(self))


_values_of = operator.attrgetter(*(field.name for field in fields(TierCounters)))


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """State of one tier at one moment.

    Attributes:
        name: The tier's name.
        capacity: Number of slots.
        used: Number of occupied slots.
        resident: Number of resident chunks.
        held: Number of copies that cannot be evicted now: pinned, dirty or being written.
        dirty: Number of copies that a slower tier must still receive.
        quarantined: Number of slots unused until the workers have acknowledged their jobs.
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
        tiers: The state of each tier, fastest first.
        requests: Number of requests in progress.
        waiting: Number of requests that wait for promotions, or for their turn.
        granted: Number of RAM slots held for waiting requests.
        retained: Number of RAM slots retained until a deadline.
        jobs: Number of storage jobs in flight.
        cost_model: Estimated load and compute times, and the skipped loads.
    """

    tiers: Sequence[TierSnapshot]
    requests: int
    waiting: int
    granted: int
    retained: int
    jobs: int
    cost_model: CostFigures


@dataclass(frozen=True, slots=True)
class ResidencyEvent:
    """Chunks that became resident in a tier, or were removed from it.

    Attributes:
        tier: Index of the tier.
        keys: The chunks.
        removed: Whether the chunks were removed; otherwise they became resident.
    """

    tier: int
    keys: Sequence[ChunkKey]
    removed: bool


class EventLog:
    """Residency events that wait for a listener, such as a request router; oldest first.

    A listener that replays all events in order knows exactly which chunks each tier has.
    Recovered chunks are announced when the cache is opened, and a reset announces every
    removal. The removal of a chunk precedes the arrival of the next chunk in its slot.

    A restart or a reset may concern a million chunks, and a listener serializes events between
    two steps of the engine. So consecutive events of one kind are merged, and the length of an
    event is bounded. :meth:`take` returns only as many events as can be serialized in a few
    milliseconds. The copies that a reset removed are converted to events in later steps, a few
    thousand per step. Without a listener they are only freed.

    Attributes:
        has_listener: Whether a listener takes events; otherwise this object keeps no events.
    """

    def __init__(self, *, has_listener: bool) -> None:
        self.has_listener = has_listener
        self._events: deque[tuple[int, bool, list[ChunkKey] | dict[ChunkKey, ChunkCopy]]]
        self._events = deque()

    def __bool__(self) -> bool:
        return self.has_listener and bool(self._events)

    @property
    def is_freeing(self) -> bool:
        """Whether :meth:`end_step` has copies to free."""
        return not self.has_listener and bool(self._events)

    def add(self, tier: int, keys: Sequence[ChunkKey], *, removed: bool) -> None:
        """Record that ``keys`` became resident in a tier, or were removed from it."""
        if not self.has_listener:
            return
        at = 0
        while at < len(keys):
            last = self._open_event(tier, removed=removed)
            room = _MAX_EVENT_CHUNKS - len(last)
            last += keys[at : at + room]
            at += room

    def add_reset(self, tier: int, resident: dict[ChunkKey, ChunkCopy]) -> None:
        """Record that a reset removed all resident copies of a tier.

        Args:
            tier: Index of the tier.
            resident: The removed copies by key. This object empties the dict later, so the
                caller must not use the dict again.
        """
        if resident:
            self._events.append((tier, True, resident))

    def take(self) -> list[ResidencyEvent]:
        """Remove and return the oldest events; empty if there are none."""
        return self._take() if self.has_listener else []

    def end_step(self) -> None:
        """Free some of the copies that a reset removed, if there is no listener."""
        if self.is_freeing:
            self._take()

    def _take(self) -> list[ResidencyEvent]:
        taken: list[ResidencyEvent] = []
        chunks = 0
        while self._events and chunks < _MAX_TAKEN_CHUNKS:
            tier, removed, keys = self._events.popleft()
            if isinstance(keys, dict):
                resident, count = keys, min(len(keys), _MAX_EVENT_CHUNKS)
                keys = [resident.popitem()[0] for _ in range(count)]
                if resident:
                    self._events.appendleft((tier, removed, resident))
            taken.append(ResidencyEvent(tier, keys, removed))
            chunks += len(keys)
        return taken

    def _open_event(self, tier: int, *, removed: bool) -> list[ChunkKey]:
        """Return the key list of the newest event if keys can be added, else of a new event."""
        if self._events:
            last_tier, last_removed, keys = self._events[-1]
            is_same = (last_tier, last_removed) == (tier, removed)
            if is_same and isinstance(keys, list) and len(keys) < _MAX_EVENT_CHUNKS:
                return keys
        new: list[ChunkKey] = []
        self._events.append((tier, removed, new))
        return new


class ReuseGaps:
    """Measures the reuse gaps of one tier: times from a chunk's eviction to its next lookup.

    A low hit ratio has two possible causes: a small tier, or traffic that does not repeat.
    Reuse gaps distinguish them: if many gaps last a minute, a tier that keeps chunks a minute
    longer would have these hits. Only keys of recently evicted chunks are kept. In a large tier
    only a sample of the keys is kept. A chunk's key decides whether it is sampled, so that each
    chunk is sampled always or never (spatially hashed sampling: Waldspurger et al., "Efficient
    MRC Construction with SHARDS", FAST 2015). The gaps of the sample have the same
    distribution.

    A lookup ends at the first chunk that is in no tier. The request needs the later chunks too,
    so the engine computes them and offers them for storing. Therefore an offer counts as a
    lookup: a gap ends at the first lookup or offer.

    Args:
        capacity: Number of slots of the tier.

    Attributes:
        is_changed: Whether :meth:`end_step` has work.
        mask: A key is in the sample if these bits of its :data:`SAMPLING_BYTE` are 0.
    """

    def __init__(self, capacity: int) -> None:
        shift = min((capacity // _SAMPLED_CHUNKS).bit_length(), 8)
        self.mask = (1 << shift) - 1
        self.is_changed = False
        self._evicted: list[ChunkKey] = []
        self._wanted_s: list[float] = []
        self._gaps: list[float] = []
        # Two generations: dropping the older one at once is cheaper than the oldest key each
        # time.
        self._recent: dict[ChunkKey, float] = {}
        self._older: dict[ChunkKey, float] = {}
        # The keys of both: a set is the fastest to search for every new chunk.
        self._keys: set[ChunkKey] = set()

    def record_evicted(self, keys: Sequence[ChunkKey]) -> int:
        """Record that ``keys`` were evicted in this step.

        Returns:
            The number of ``keys`` in the sample.
        """
        self.is_changed = True
        mask = self.mask
        sample = [key for key in keys if not key[SAMPLING_BYTE] & mask] if mask else keys
        self._evicted += sample
        return len(sample)

    def record_wanted(self, key: ChunkKey) -> None:
        """Record that ``key``, which the tier lacks, was looked up in this step."""
        evicted_s = self._recent.pop(key, None)
        if evicted_s is None:
            evicted_s = self._older.pop(key, None)
        if evicted_s is not None:
            self._keys.discard(key)
            self._wanted_s.append(evicted_s)
            self.is_changed = True

    def recently_evicted(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Return the ``keys`` in the sample that were evicted recently."""
        return self._keys.intersection(keys) if self._keys else set()

    def end_step(self, now: float) -> None:
        """Close a step that ends at ``now``, in seconds on a monotonic clock."""
        self.is_changed = False
        if self._wanted_s:
            self._gaps += [now - evicted_s for evicted_s in self._wanted_s]
            self._wanted_s.clear()
            del self._gaps[2 * _MAX_KEYS :]  # in case nobody takes them
        if not self._evicted:
            return
        self._recent.update(zip(self._evicted, repeat(now)))
        self._keys.update(self._evicted)
        self._evicted.clear()
        if len(self._recent) > _MAX_KEYS:
            self._older, self._recent = self._recent, {}
            self._keys = set(self._older)

    def clear(self) -> None:
        """Forget all evicted chunks; after a reset, a larger tier would lack them too."""
        self._evicted.clear()
        self._wanted_s.clear()
        self._recent.clear()
        self._older.clear()
        self._keys.clear()

    def take(self) -> list[float]:
        """Return the gaps since the last call, in seconds."""
        gaps, self._gaps = self._gaps, []
        return gaps
