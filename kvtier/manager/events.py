"""Residency events: which chunks each tier has, for routers of requests.

A listener that replays all events in order knows exactly which chunks each tier has. Chunks
that survived a restart are announced when the cache is opened, and a reset announces every
removal. A removal precedes the arrival that takes its slot.

A restart or a reset concerns a million chunks at once, and a listener serializes events between
two steps of the engine. So consecutive events of one kind are merged, events have bounded
length, and :meth:`EventLog.take` returns only what is serialized in a few milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.keys import ChunkKey

__all__ = ["EventLog", "ResidencyEvent"]

_MAX_EVENT_CHUNKS: Final = 1024
_MAX_TAKEN_CHUNKS: Final = 8192


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
    """Events that were not taken yet, oldest first.

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
