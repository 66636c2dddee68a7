"""The shape of the memory that all processes of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.memory.control import ControlBlock

__all__ = ["RegionGeometry"]


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """Shape of a host region; equal in every process or the region is refused.

    Attributes:
        slots: Number of slots.
        slot_nbytes: Bytes of one slot, a multiple of the page size.
        stripe_nbytes: Bytes of one stripe of a slot; stripe s begins at ``s * stripe_nbytes``.
        stripes: Stripes of a slot; which rank has which is said by
            :class:`~kvtier.memory.slot_layout.RankShare`.
        ranks: Workers of the engine.
        is_portable: Whether a slot's bytes mean the same to an engine with other ranks.
        content: What the bytes are, which only a worker can tell.
        relay_slots: Slots through which chunks go from one slower tier to another.
    """

    slots: int
    slot_nbytes: int
    stripe_nbytes: int
    stripes: int
    ranks: int
    is_portable: bool = False
    content: str = ""
    relay_slots: int = 0

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the RAM tier's slots."""
        return self.slots * self.slot_nbytes

    @property
    def relay(self) -> range:
        """Numbers of the slots that are no part of the RAM tier."""
        return range(self.slots, self.slots + self.relay_slots)

    @property
    def shared_nbytes(self) -> int:
        """Bytes of all slots, which a tier's process moves chunks to and from."""
        return self.payload_nbytes + self.relay_slots * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole region, control block included."""
        return self.shared_nbytes + ControlBlock.nbytes(self.slots, self.ranks)
