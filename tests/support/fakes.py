"""A fake of the slot status that checks its callers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.errors import KvtierError

__all__ = ["FakeSlotStatus", "SlotStatusError"]


class SlotStatusError(KvtierError):
    """A slot was written on behalf of two owners."""


class FakeSlotStatus:
    """A :class:`~kvtier.manager.SlotStatus` that records calls and replaces the workers.

    Generations ascend. A stamp that is not newer than the slot's is a write of a former owner
    over the bytes of the current one; it raises.

    Args:
        driven: Whether the test acts for the workers, with :meth:`stamp` and
            :meth:`acknowledge`. If not, every store is instant and works unless the test says
            otherwise.

    Attributes:
        not_stored: Slots whose stores fail.
        not_loaded: Slots whose loads fail.
        not_quiet: Slots whose jobs never end.
        issued: Jobs issued, per slot.
        published: Every (slot, generation) stamped for a slower tier, in order.
        poisoned: Every (slot, generation) whose bytes will not arrive.
        generations: Stamp of each slot.
    """

    def __init__(self, *, driven: bool = False) -> None:
        self._driven = driven
        self._acknowledged: Counter[int] = Counter()
        self.not_stored: set[int] = set()
        self.not_loaded: set[int] = set()
        self.not_quiet: set[int] = set()
        self.issued: Counter[int] = Counter()
        self.published: list[tuple[int, int]] = []
        self.poisoned: set[tuple[int, int]] = set()
        self.generations: dict[int, int] = {}
        self._refused: dict[int, int] = {}
        self._bare: set[int] = set()

    # -- the workers' side ------------------------------------------------------------------

    def stamp(self, slots: Sequence[int], generation: int) -> None:
        """Mark ``slots`` as completely written by ``generation``.

        Raises:
            SlotStatusError: A slot bears that stamp or a newer one.
        """
        for slot in slots:
            self._stamp(slot, generation)

    def refuse(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Mark these generations of ``slots`` as failed to load."""
        self._refused.update(zip(slots, generations, strict=True))

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

    def withdraw(self, slots: Sequence[int]) -> None:
        """Remove the stamps of ``slots``."""
        self._bare.update(slots)

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return whether each slot has its stamp and is not set to fail."""
        if not self._driven:
            for slot, generation in zip(slots, generations, strict=True):
                self._stamp(slot, generation)
        return [
            slot not in self.not_stored | self._bare
            and self.generations.get(slot) == generation
            for slot, generation in zip(slots, generations, strict=True)
        ]

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return whether loading each slot worked; True unless the test set a failure."""
        return [
            slot not in self.not_loaded and self._refused.get(slot) != generation
            for slot, generation in zip(slots, generations, strict=True)
        ]

    def forgive(self, slots: Sequence[int]) -> None:
        """Clear the failed loads of ``slots``."""
        for slot in slots:
            self._refused.pop(slot, None)

    # -- the storage engine's side ----------------------------------------------------------

    def poison(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Record that the bytes of these stamps will not arrive."""
        self.poisoned.update(zip(slots, generations, strict=True))

    def publish(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Stamp slots filled from a slower tier.

        Raises:
            SlotStatusError: A slot bears that stamp or a newer one.
        """
        for slot, generation in zip(slots, generations, strict=True):
            self._stamp(slot, generation)
            self.published.append((slot, generation))

    def quiet(self, slots: Sequence[int]) -> list[bool]:
        """Return whether all jobs of each slot have ended."""
        return [
            slot not in self.not_quiet
            and (not self._driven or self._acknowledged[slot] == self.issued[slot])
            for slot in slots
        ]

    def _stamp(self, slot: int, generation: int) -> None:
        if generation <= self.generations.get(slot, 0):
            bears = self.generations[slot]
            raise SlotStatusError(f"slot {slot} bears {bears} and is stamped {generation}")
        self.generations[slot] = generation
        self._bare.discard(slot)
