"""What keeps copies from being evicted: pins and dirt.

A copy is pinned while anybody touches it or counts on it, and dirty while a slower tier must
still receive it. How many copies are neither is known at any time, because whoever makes a copy
idle, or no longer idle, counts it; so a store that cannot succeed is refused without a scan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.manager.slots import SlotAllocator
from kvtier.policies import ChunkCopy, CopyState

__all__ = ["Holds"]

_RESIDENT = CopyState.RESIDENT
_GONE = CopyState.GONE


class Holds:
    """Counts what holds the copies of one tier; the lower half of its books.

    Args:
        capacity: Slots of the tier.

    Attributes:
        slots: The tier's slots; that of a copy that left is free when its last pin is.
        idle: Resident copies that could be evicted right now.
        dirty: Copies that a slower tier must still receive.
        passing: Copies that are transient: they leave by themselves.
    """

    __slots__ = ("dirty", "idle", "passing", "slots")

    def __init__(self, capacity: int) -> None:
        self.slots = SlotAllocator(capacity)
        self.idle = 0
        self.dirty = 0
        self.passing = 0

    @property
    def room(self) -> int:
        """Slots that are free or could be made free right now."""
        return self.slots.free + self.idle

    def pin(self, copy: ChunkCopy) -> None:
        """Forbid evicting ``copy`` until the matching :meth:`unpin`."""
        if not copy.pins and not copy.dirty and copy.state == _RESIDENT:
            self.idle -= 1
        copy.pins += 1

    def unpin(self, copy: ChunkCopy) -> None:
        """Take back one :meth:`pin`; the last frees the slot of a copy that left."""
        copy.pins -= 1
        if copy.pins:
            return
        if copy.state == _GONE:
            self.slots.release((copy.slot,))
        elif not copy.dirty and copy.state == _RESIDENT:
            self.idle += 1

    def pin_many(self, copies: Iterable[ChunkCopy]) -> None:
        """Do :meth:`pin` for ``copies``."""
        held = 0
        for copy in copies:
            if not copy.pins and not copy.dirty:
                held += 1
            copy.pins += 1
        self.idle -= held

    def pin_dirty(self, copies: Iterable[ChunkCopy]) -> None:
        """Do :meth:`pin` for ``copies`` that are all dirty, and so never idle."""
        for copy in copies:
            copy.pins += 1

    def unpin_many(self, copies: Iterable[ChunkCopy]) -> None:
        """Do :meth:`unpin` for ``copies``."""
        freed = 0
        for copy in copies:
            copy.pins = pins = copy.pins - 1
            if pins or copy.dirty:
                continue
            if copy.state == _RESIDENT:
                freed += 1
            elif copy.state == _GONE:
                self.slots.release((copy.slot,))
        self.idle += freed

    def owe_many(self, copies: Iterable[ChunkCopy]) -> None:
        """Stop passing each of the resident ``copies``, mark it dirty, and pin it."""
        held = dirtied = 0
        for copy in copies:
            if copy.transient:
                self.stop_passing(copy)
            pins, dirty = copy.pins, copy.dirty
            copy.pins = pins + 1
            copy.dirty = dirty + 1
            if not dirty:
                dirtied += 1
                if not pins:
                    held += 1
        self.idle -= held
        self.dirty += dirtied

    def mark_dirty_many(self, copies: Iterable[ChunkCopy]) -> None:
        """Note that each of the resident ``copies`` must still reach one more slower tier."""
        held = dirtied = 0
        for copy in copies:
            if not copy.dirty:
                dirtied += 1
                if not copy.pins:
                    held += 1
            copy.dirty += 1
        self.idle -= held
        self.dirty += dirtied

    def mark_clean(self, copy: ChunkCopy) -> None:
        """Note that ``copy`` reached one of them, or will not."""
        copy.dirty -= 1
        if not copy.dirty:
            self.dirty -= 1
            if not copy.pins and copy.state == _RESIDENT:
                self.idle += 1

    def stop_passing(self, copy: ChunkCopy) -> None:
        """Let a copy stay that was to leave after its load; nothing for any other."""
        if copy.transient:
            copy.transient = False
            self.passing -= 1

    def sent(self, copies: Sequence[ChunkCopy]) -> None:
        """Do :meth:`unpin` and :meth:`mark_clean` for what a job was to bring down."""
        others = []
        for copy in copies:
            if copy.pins == 1 and copy.dirty == 1:
                copy.pins = copy.dirty = 0
            else:
                others.append(copy)
        cleaned = len(copies) - len(others)
        self.dirty -= cleaned
        self.idle += cleaned
        for copy in others:
            if copy.dirty:
                self.mark_clean(copy)
            self.unpin(copy)
