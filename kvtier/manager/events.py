"""What became resident where, for those who route requests to where their chunks are.

Whoever replays the events, in order, from the first one on, knows exactly which chunks each
tier has: what survived a restart is announced when the cache is opened, and a reset announces
every removal. A removal stands before the arrival that takes the room.

A restart or a reset concerns a million chunks at once, and a listener serializes what it is
given between two steps of the engine. So events of one kind in a row are one event, no event is
long, and no more is handed out at a time than takes some milliseconds; the rest comes later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.keys import ChunkKey

__all__ = ["EventLog", "ResidencyEvent"]

_LONGEST: Final = 1024
"""Chunks of one event."""
_MOST: Final = 8192
"""Chunks handed out at a time."""


@dataclass(frozen=True, slots=True)
class ResidencyEvent:
    """Chunks that became resident in a tier, or left it.

    Attributes:
        tier: Index of the tier.
        keys: The chunks.
        removed: Whether they left.
    """

    tier: int
    keys: Sequence[ChunkKey]
    removed: bool


class EventLog:
    """Events that nobody took yet, oldest first.

    Attributes:
        listened_to: Whether somebody takes them; if not, none are kept.
    """

    def __init__(self, *, listened_to: bool) -> None:
        self.listened_to = listened_to
        self._events: deque[tuple[int, bool, list[ChunkKey]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, tier: int, keys: Sequence[ChunkKey], *, removed: bool) -> None:
        """Note that ``keys`` became resident in a tier, or left it."""
        if not self.listened_to:
            return
        at = 0
        while at < len(keys):
            last = self._open_event(tier, removed=removed)
            room = _LONGEST - len(last)
            last += keys[at : at + room]
            at += room

    def take(self) -> list[ResidencyEvent]:
        """Return the oldest events; none if all were taken."""
        taken: list[ResidencyEvent] = []
        chunks = 0
        while self._events and chunks < _MOST:
            tier, removed, keys = self._events.popleft()
            taken.append(ResidencyEvent(tier, keys, removed))
            chunks += len(keys)
        return taken

    def _open_event(self, tier: int, *, removed: bool) -> list[ChunkKey]:
        """Return the keys of the newest event if more of its kind fit, else of a new one."""
        if self._events:
            last_tier, last_removed, keys = self._events[-1]
            if (last_tier, last_removed) == (tier, removed) and len(keys) < _LONGEST:
                return keys
        fresh: list[ChunkKey] = []
        self._events.append((tier, removed, fresh))
        return fresh
