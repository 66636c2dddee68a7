"""What the manager reports beside its counters: residency events and reuse gaps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

from kvtier.keys import GROUP_NBYTES, ChunkKey

__all__ = ["SAMPLING_BYTE", "EventLog", "ResidencyEvent", "ReuseGaps"]

_MAX_EVENT_CHUNKS: Final = 1024
_MAX_TAKEN_CHUNKS: Final = 8192
_MAX_KEYS: Final = 1 << 14
_SAMPLED_CHUNKS: Final = 1 << 8
"""Number of chunks to track per tier: a distribution needs hundreds of gaps."""
SAMPLING_BYTE: Final = -1 - GROUP_NBYTES
"""Position in a key of the last byte of its hash, which is as random as any other."""


@dataclass(frozen=True, slots=True)
class ResidencyEvent:
    """Chunks that became resident in a tier, or were removed from it.

    Attributes:
        tier: Index of the tier.
        keys: The chunks.
        removed: Whether they were removed.
    """

    tier: int
    keys: Sequence[ChunkKey]
    removed: bool


class EventLog:
    """Events that were not taken yet, oldest first, for routers of requests.

    A listener that replays all events in order knows exactly which chunks each tier has. Chunks
    that survived a restart are announced when the cache is opened, and a reset announces every
    removal. A removal precedes the arrival that takes its slot.

    A restart or a reset concerns a million chunks at once, and a listener serializes events
    between two steps of the engine. So consecutive events of one kind are merged, events have
    bounded length, and :meth:`take` returns only what is serialized in a few milliseconds.

    Attributes:
        has_listener: Whether a listener takes events; otherwise none are kept.
    """

    def __init__(self, *, has_listener: bool) -> None:
        self.has_listener = has_listener
        self._events: deque[tuple[int, bool, list[ChunkKey]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._events)

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

    def take(self) -> list[ResidencyEvent]:
        """Return the oldest events; none if all were taken."""
        taken: list[ResidencyEvent] = []
        chunks = 0
        while self._events and chunks < _MAX_TAKEN_CHUNKS:
            tier, removed, keys = self._events.popleft()
            taken.append(ResidencyEvent(tier, keys, removed))
            chunks += len(keys)
        return taken

    def _open_event(self, tier: int, *, removed: bool) -> list[ChunkKey]:
        """Return the keys of the event to extend: the newest, or a new event."""
        if self._events:
            last_tier, last_removed, keys = self._events[-1]
            if (last_tier, last_removed) == (tier, removed) and len(keys) < _MAX_EVENT_CHUNKS:
                return keys
        new: list[ChunkKey] = []
        self._events.append((tier, removed, new))
        return new


class ReuseGaps:
    """The reuse gaps of one tier: how soon evicted chunks are looked up again.

    A hit ratio cannot distinguish a tier that is too small from traffic that does not repeat.
    The time from a chunk's eviction to its next lookup can: many gaps of a minute mean that a
    tier which kept chunks a minute longer would have hit. Only keys of recently evicted chunks
    are kept. In a large tier they are a sample, selected by the key, so that a chunk is in it
    always or never (spatially hashed sampling: Waldspurger et al., "Efficient MRC Construction
    with SHARDS", FAST 2015). The distribution is the same.

    A lookup ends at the first chunk that is in no tier, but the request needs the later chunks
    too: the engine computes them and offers them for storing. So an offer counts as a lookup. A
    gap ends at the first lookup or offer.

    Args:
        capacity: Slots of the tier.

    Attributes:
        is_changed: Whether :meth:`end_step` has anything to do.
        mask: Bits of a key's :data:`SAMPLING_BYTE` that are 0 in the sample.
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
        """Record that ``key``, which is not in the tier, was looked up in this step."""
        evicted_s = self._recent.pop(key, None)
        if evicted_s is None:
            evicted_s = self._older.pop(key, None)
        if evicted_s is not None:
            self._keys.discard(key)
            self._wanted_s.append(evicted_s)
            self.is_changed = True

    def recently_evicted(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Return the ``keys`` that are in the sample and were recently evicted."""
        return self._keys.intersection(keys) if self._keys else set()

    def end_step(self, now: float) -> None:
        """Close a step that ends ``now``, in seconds on a monotonic clock."""
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
        """Forget evicted chunks: after a reset a larger tier would not have kept them."""
        self._evicted.clear()
        self._wanted_s.clear()
        self._recent.clear()
        self._older.clear()
        self._keys.clear()

    def take(self) -> list[float]:
        """Return the gaps since the last call, in seconds."""
        gaps, self._gaps = self._gaps, []
        return gaps
