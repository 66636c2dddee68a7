"""Fakes of what the manager asks about slots; that of the slot status checks its callers."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence

from kvtier.errors import KvtierError
from kvtier.types import GdsReads, SlotFileId

__all__ = ["FakeGdsSlots", "FakeSlotStatus", "SlotStatusError"]


class SlotStatusError(KvtierError):
    """A slot was written on behalf of two owners."""


class FakeSlotStatus:
    """A :class:`~kvtier.manager.SlotStatus` that records calls and replaces the workers.

    Generations ascend. A generation that is not newer than the slot's is a write of a former
    owner over the bytes of the current one; it raises.

    Args:
        driven: Whether the test acts for the workers, with :meth:`set_generation` and
            :meth:`acknowledge`. If not, every store is instant and works unless the test says
            otherwise.

    Attributes:
        not_stored: Slots whose stores fail.
        not_loaded: Slots whose loads fail.
        not_acknowledged: Slots whose jobs never end.
        issued: Jobs issued, per slot.
        published: Every (slot, generation) filled from a slower tier, in order.
        lost: Every (slot, generation) whose bytes will not arrive.
        generations: Generation of each slot.
    """

    def __init__(self, *, driven: bool = False) -> None:
        self._driven = driven
        self._acknowledged: Counter[int] = Counter()
        self.not_stored: set[int] = set()
        self.not_loaded: set[int] = set()
        self.not_acknowledged: set[int] = set()
        self.issued: Counter[int] = Counter()
        self.published: list[tuple[int, int]] = []
        self.lost: set[tuple[int, int]] = set()
        self.generations: dict[int, int] = {}
        self._failed: dict[int, int] = {}
        self._bare: set[int] = set()

    # -- the workers' side ------------------------------------------------------------------

    def set_generation(self, slots: Sequence[int], generation: int) -> None:
        """Mark ``slots`` as completely written by ``generation``.

        Raises:
            SlotStatusError: A slot has that generation or a newer one.
        """
        for slot in slots:
            self._set_generation(slot, generation)

    def record_failed_loads(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Mark these generations of ``slots`` as failed to load."""
        self._failed.update(zip(slots, generations, strict=True))

    def acknowledge(self, slots: Sequence[int]) -> None:
        """Acknowledge one job on each of ``slots``.

        Raises:
            SlotStatusError: No job was issued on one of them.
        """
        for slot in slots:
            self._acknowledged[slot] += 1
            if self._acknowledged[slot] > self.issued[slot]:
                raise SlotStatusError(f"slot {slot} was acknowledged more often than issued")

    # -- SlotStatus --------------------------------------------------------------------------

    def issue(self, slots: Sequence[int]) -> None:
        """Count one more job on each of ``slots``.

        Raises:
            SlotStatusError: A slot is named twice: a control block counts it once.
        """
        if len(set(slots)) != len(slots):
            raise SlotStatusError(f"a slot is issued twice: {slots}")
        self.issued.update(slots)

    def clear_generations(self, slots: Sequence[int]) -> None:
        """Remove the generations of ``slots``."""
        self._bare.update(slots)

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return whether each slot has its generation and is not set to fail."""
        if not self._driven:
            for slot, generation in zip(slots, generations, strict=True):
                self._set_generation(slot, generation)
        return [
            slot not in self.not_stored | self._bare
            and self.generations.get(slot) == generation
            for slot, generation in zip(slots, generations, strict=True)
        ]

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return whether loading each slot worked; True unless the test set a failure."""
        return [
            slot not in self.not_loaded and self._failed.get(slot) != generation
            for slot, generation in zip(slots, generations, strict=True)
        ]

    def clear_failed_loads(self, slots: Sequence[int]) -> None:
        """Clear the failed loads of ``slots``."""
        for slot in slots:
            self._failed.pop(slot, None)

    # -- the transfer engine's side ---------------------------------------------------------

    def mark_lost(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Record that the bytes of these generations will not arrive."""
        self.lost.update(zip(slots, generations, strict=True))

    def publish(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Set the generations of slots filled from a slower tier.

        Raises:
            SlotStatusError: A slot has that generation or a newer one.
        """
        for slot, generation in zip(slots, generations, strict=True):
            self._set_generation(slot, generation)
            self.published.append((slot, generation))

    def all_acknowledged(self, slots: Sequence[int]) -> list[bool]:
        """Return whether all jobs of each slot have ended."""
        return [
            slot not in self.not_acknowledged
            and (not self._driven or self._acknowledged[slot] == self.issued[slot])
            for slot in slots
        ]

    def _set_generation(self, slot: int, generation: int) -> None:
        if generation <= self.generations.get(slot, 0):
            has = self.generations[slot]
            raise SlotStatusError(f"slot {slot} has generation {has} and is given {generation}")
        self.generations[slot] = generation
        self._bare.discard(slot)


class FakeGdsSlots:
    """Slots of tier 1 that workers can read; the hash of a slot is its number.

    Args:
        slots: Number of slots; all have hashes at first.

    Attributes:
        tier: Index of the tier.
        known: Slots with hashes.
        is_off: Whether workers can read nothing.
        touched: Slots that were read, in order.
        overwritten: Slots that got other chunks, in order.
    """

    tier = 1

    def __init__(self, slots: int) -> None:
        self.known = set(range(slots))
        self.is_off = False
        self.touched: list[int] = []
        self.overwritten: list[int] = []

    def readable(self, slots: Sequence[int]) -> list[bool]:
        return [slot in self.known and not self.is_off for slot in slots]

    def plan_reads(self, positions: Sequence[int], slots: Sequence[int]) -> GdsReads:
        hashes = struct.pack(f"={len(slots)}Q", *slots)
        return GdsReads(SlotFileId("nvme", "slots.bin", 0, 0), positions, slots, hashes)

    def begin_overwriting(self, slots: Sequence[int]) -> None:
        self.overwritten += slots
        self.known.difference_update(slots)

    def touch(self, slots: Sequence[int]) -> None:
        self.touched += slots
