"""The layout of a slot: the position of each rank's bytes, for any number of ranks.

A slot holds one chunk of all ranks. It is divided into places of equal size, one for each
block. A block consists of pages, for instance one for each layer. With tensor parallelism every
rank keeps the KV of its own attention heads, so each rank has a part of every page. The parts
of all ranks together form the *canonical page*, and a place holds the canonical pages in
order::

    slot  | place of block 0 | place of block 1 | ... | padding
    place | page 0 [part 0 | part 1 | ...] page 1 [part 0 | part 1 | ...] ... | padding

If the heads are the outermost dimension of a page, the canonical page equals the page of an
engine with one rank. Then all engines whose number of ranks divides the number of heads can
read the slot. If heads come before layers (vLLM's ``BHLNC``), a block is one page, so a rank's
part of a block is one contiguous range. If layers come before heads (``LBHNC``, ``BLHNC``), a
rank's part has one range per layer.

If there is only one rank, its part is the whole place. If all ranks have the same KV, as with
multi-head latent attention, the KV is stored once and every rank's part is the whole place. If
tokens are the outermost dimension, the layout is the same, but only an engine with the same
number of ranks can read the slot.
:mod:`kvtier.vllm.pages` knows which case applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import UnsupportedError
from kvtier.memory.control import ControlBlock

__all__ = ["Flags", "Indices", "PageRun", "RankShare", "RegionGeometry", "require_room"]

Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """Shape of a host region; the same for all processes of an engine.

    Attributes:
        slots: Number of slots of the RAM tier.
        slot_nbytes: Bytes of one slot, a multiple of the page size.
        block_nbytes: Bytes of one block of all ranks. The place of block b of a chunk begins at
            ``b * block_nbytes``.
        ranks: Number of workers of the engine.
        is_portable: Whether an engine with another number of ranks can read the slots.
        content: The worker's description of the bytes.
        bounce_slots: Number of bounce slots, which follow the RAM tier's slots.
    """

    slots: int
    slot_nbytes: int
    block_nbytes: int
    ranks: int
    is_portable: bool = False
    content: str = ""
    bounce_slots: int = 0

    @property
    def payload_nbytes(self) -> int:
        """Total size of the RAM tier's slots, in bytes."""
        return self.slots * self.slot_nbytes

    @property
    def bounce_range(self) -> range:
        """Numbers of the bounce slots."""
        return range(self.slots, self.slots + self.bounce_slots)

    @property
    def shared_nbytes(self) -> int:
        """Total size of all slots, in bytes. A tier's process reads and writes these slots."""
        return self.payload_nbytes + self.bounce_slots * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        """Size of the whole region in bytes, including the control block."""
        return self.shared_nbytes + ControlBlock.nbytes(self.slots, self.ranks)


class PageRun(NamedTuple):
    """Consecutive pages of a block, and where a rank's part of these pages is in a place.

    Attributes:
        offset: Start of the first page, in bytes from the start of the rank's own block.
        place_offset: Start of the rank's part of the first page, in bytes from the start of a
            place. The part of the next page begins one canonical page later.
        pages: Number of pages.
        nbytes: Bytes of each of the rank's own pages.
    """

    offset: int
    place_offset: int
    pages: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's share of every slot; by default the whole slot.

    Attributes:
        part: Number of the rank's part of every page.
        parts: Number of parts of every page.
        writers: Number of ranks with the same part. Each of them stores every ``writers``-th
            block.
        writer: This rank's number among the ranks with the same part, from 0.
    """

    part: int = 0
    parts: int = 1
    writers: int = 1
    writer: int = 0

    def written(self, blocks: Indices) -> Flags | None:
        """Return for each block whether this rank stores it; None if the rank stores all."""
        if self.writers == 1:
            return None
        written: Flags = blocks % self.writers == self.writer
        return written

    def part_offsets(self, pages: Sequence[int]) -> Indices:
        """Return the start of the rank's part of each page, in bytes from a place's start.

        Args:
            pages: Bytes of each page of a block, in the rank's own memory.
        """
        nbytes = np.array(pages, np.int64)
        return (np.cumsum(nbytes) - nbytes) * self.parts + self.part * nbytes

    def runs(self, pages: Sequence[int]) -> Iterator[PageRun]:
        """Yield ranges of evenly spaced pages: the rank's pages in a place.

        Args:
            pages: Bytes of each page of a block, in the rank's own memory.
        """
        if self.parts == 1:
            yield PageRun(0, 0, 1, sum(pages))  # the pages are adjacent
            return
        offset = 0
        places = zip(pages, self.part_offsets(pages).tolist(), strict=True)
        for nbytes, equal in groupby(places, lambda page: page[0]):
            (_, first), *others = equal
            yield PageRun(offset, first, 1 + len(others), nbytes)
            offset += nbytes * (1 + len(others))


def require_room(
    groups: Sequence[Sequence[int]],
    geometry: RegionGeometry,
    share: RankShare,
    blocks_per_chunk: int,
) -> None:
    """Check that a rank's blocks fit into the slots.

    Args:
        groups: Bytes of each page of a block, for each KV cache group.
        geometry: The shape of the slots.
        share: The rank's share of a slot.
        blocks_per_chunk: Blocks of a chunk.

    Raises:
        UnsupportedError: The part does not exist, or the blocks or the places do not fit.
    """
    room = geometry.block_nbytes // share.parts
    for group, pages in enumerate(groups):
        if sum(pages) > room:
            raise UnsupportedError(
                f"a block of KV cache group {group} has {sum(pages)} bytes, its slot has room "
                f"for {room}: this KV layout is not supported"
            )
    if share.part >= share.parts:
        raise UnsupportedError(
            f"rank part {share.part} does not exist: there are {share.parts}"
        )
    if blocks_per_chunk * geometry.block_nbytes > geometry.slot_nbytes:
        raise UnsupportedError(
            f"{blocks_per_chunk} blocks of {geometry.block_nbytes} bytes do not fit a slot of "
            f"{geometry.slot_nbytes} bytes"
        )
