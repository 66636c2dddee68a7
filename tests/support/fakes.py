"""Fakes that check what they are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.errors import KvtierError

__all__ = ["FakeSlotStatus", "SlotStatusError"]


class SlotStatusError(KvtierError):
    """A slot was written on behalf of two owners."""


class FakeSlotStatus:
    """A :class:`~kvtier.manager.SlotStatus` that remembers, and stands in for the workers.

    Stamps are handed out in ascending order, so a stamp that is not newer than the one a slot
    bears is a write of a former owner over the present one's bytes; it raises.

    Args:
        driven: Whether a test plays the workers, with :meth:`stamp` and :meth:`acknowledge`. If
            not, they are instant and only fail where told to.

    Attributes:
        not_stored: Slots whose stores fail, whatever was stamped.
        not_loaded: Slots that a worker cannot load from.
        not_quiet: Slots that a worker never lets go of.
        issued: Jobs issued, per slot.
        published: Every (slot, generation) stamped on behalf of a slower tier, in order.
        poisoned: Every (slot, generation) that was said not to come.
        generations: The stamp each slot bears.
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
        """Say that the bytes of ``slots`` are whole as of ``generation``.

        Raises:
            SlotStatusError: A slot bears that stamp or a newer one.
        """
        for slot in slots:
            self._stamp(slot, generation)

    def refuse(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Say that the bytes of these stamps could not be loaded from ``slots``."""
        self._refused.update(zip(slots, generations, strict=True))

    def acknowledge(self, slots: Sequence[int]) -> None:
        """Say that one job issued on each of ``slots`` is over.

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
        """Take the stamps off ``slots``."""
        self._bare.update(slots)

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return whether each slot bears its stamp and is not told to fail."""
        if not self._driven:
            for slot, generation in zip(slots, generations, strict=True):
                self._stamp(slot, generation)
        return [
            slot not in self.not_stored | self._bare
            and self.generations.get(slot) == generation
            for slot, generation in zip(slots, generations, strict=True)
        ]

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return whether loading each slot worked, as far as the test says otherwise."""
        return [
            slot not in self.not_loaded and self._refused.get(slot) != generation
            for slot, generation in zip(slots, generations, strict=True)
        ]

    def forgive(self, slots: Sequence[int]) -> None:
        """Forget which stamps could not be loaded from ``slots``."""
        for slot in slots:
            self._refused.pop(slot, None)

    # -- the storage engine's side ----------------------------------------------------------

    def poison(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Say that the bytes of these stamps will not come."""
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
        """Return whether each slot's jobs are all over."""
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
