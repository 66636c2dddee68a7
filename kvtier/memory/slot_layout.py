"""The layout of a slot: where each rank's bytes are, independent of the number of ranks.

With tensor parallelism every rank keeps the KV of its own attention heads. The simple layout
gives each rank one contiguous range of the slot, its *shard*, with blocks and layers in any
order. Only an engine with the same number of ranks can read a shard.

A page holds one layer of one block. The pages of all ranks together form the *canonical page*,
the page of an engine with one rank. If an engine keeps heads outermost within a page (vLLM's
``LBHNC``), the canonical page is the ranks' pages in order. Then each eighth of the canonical
page has the same bytes for one, two, four and eight ranks. So a slot has eight *stripes*, and
stripe ``s`` holds the ``s``-th eighth of every canonical page, by block and then by layer::

    slot | stripe 0: block 0 [layer 0 | layer 1 | ...] block 1 [...] | ... | stripe 7 | padding

Stripes keep the advantage of shards: a rank's stripes are adjacent, so its part of a slot is
one contiguous range of memory and disk. A shard is the special case of one stripe per rank. An
order with the heads innermost, ``[block][layer][rank]``, would be as portable, but would split
a rank's part into one range per layer.

There are eight stripes, and not one per head, because the engine describes its pages by bytes
and does not say which bytes are a head. Stripes require that a rank's page is a whole number of
eighths of the canonical page. That is true for 1, 2, 4 and 8 ranks with heads outermost. It is
also true with more ranks than heads, if several ranks then have the same head. And it is true
if all ranks have the same KV (multi-head latent attention), which is then stored once. For
engines with three ranks, with sixteen ranks of one head each, or with tokens outermost,
:mod:`kvtier.vllm.pages` chooses shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvtier.memory.control import ControlBlock

__all__ = [
    "STRIPES",
    "RankShare",
    "RegionGeometry",
    "shard_of",
]

STRIPES: Final = 8
"""Number of stripes of a portable slot, whose bytes do not depend on the number of ranks."""


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """Shape of a host region; all processes of an engine must use the same shape.

    Attributes:
        slots: Slots of the RAM tier.
        slot_nbytes: Bytes of one slot, a multiple of the page size.
        stripe_nbytes: Bytes of one stripe of a slot; stripe s begins at ``s * stripe_nbytes``.
        stripes: Stripes of a slot; a :class:`RankShare` says which ones a rank has.
        ranks: Workers of the engine.
        is_portable: Whether an engine with another number of ranks can read the slots.
        content: The worker's description of the bytes.
        bounce_slots: Bounce slots for moves between storage tiers, after the RAM tier's slots.
    """

    slots: int
    slot_nbytes: int
    stripe_nbytes: int
    stripes: int
    ranks: int
    is_portable: bool = False
    content: str = ""
    bounce_slots: int = 0

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the RAM tier's slots."""
        return self.slots * self.slot_nbytes

    @property
    def bounce_range(self) -> range:
        """Numbers of the bounce slots."""
        return range(self.slots, self.slots + self.bounce_slots)

    @property
    def shared_nbytes(self) -> int:
        """Bytes of all slots, which a tier's process reads and writes."""
        return self.payload_nbytes + self.bounce_slots * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole region, control block included."""
        return self.shared_nbytes + ControlBlock.nbytes(self.slots, self.ranks)


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part of every slot.

    Attributes:
        stripes: The slot's stripes that the rank reads and writes, in the order of their bytes
            in the rank's own pages.
        writers: Number of ranks with the same bytes; each stores every ``writers``-th block.
        writer: This rank's number among those ranks, from 0.
    """

    stripes: tuple[int, ...]
    writers: int = 1
    writer: int = 0

    def runs(self) -> Iterator[tuple[slice, slice]]:
        """Yield pairs of matching ranges: parts of the rank's pages, and adjacent stripes."""
        breaks = [at for at, (a, b) in enumerate(pairwise(self.stripes), 1) if b != a + 1]
        for start, end in pairwise([0, *breaks, len(self.stripes)]):
            first = self.stripes[start]
            yield slice(start, end), slice(first, first + end - start)


def shard_of(rank: int) -> RankShare:
    """Return the share of ``rank`` in slots that have exactly one stripe for each rank."""
    return RankShare((rank,))
