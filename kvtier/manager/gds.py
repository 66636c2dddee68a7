"""GDS reads: chunks that workers read from an NVMe tier straight into their blocks.

GDS is GPUDirect Storage. A GDS read of a chunk needs no RAM slot and no job between tiers. The
chunk's copy in the tier is pinned from the plan of the load until all workers have acknowledged
the load. When a chunk is stored, each worker hashes its part of the chunk. A GDS read verifies
the bytes against this hash. A chunk without hashes is loaded through RAM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["GdsPlan", "GdsSource"]


class GdsSource(Protocol):
    """Reports which slots of one tier the workers can read. The methods return at once."""

    @property
    def tier(self) -> int:
        """Index of the tier."""

    def readable(self, slots: Sequence[int]) -> Sequence[bool]:
        """Return, for each of ``slots``, whether all workers can read and verify it now."""

    def hashes(self, slots: Sequence[int]) -> bytes:
        """Return the part hashes of ``slots`` as bytes, all of one slot before the next."""

    def begin_overwriting(self, slots: Sequence[int]) -> None:
        """Forget the hashes of ``slots``, because other chunks will be written there."""

    def touch(self, slots: Sequence[int]) -> None:
        """Record that ``slots`` were read."""


class GdsPlan(NamedTuple):
    """The GDS reads of a load.

    Attributes:
        positions: Positions of the chunks in the load, ascending.
        slots: Slots of the chunks in the tier.
        hashes: Part hashes of the chunks, all of one chunk before the next.
    """

    positions: Sequence[int]
    slots: Sequence[int]
    hashes: bytes
