"""Compute *fragments*: the contiguous ranges to copy between device memory and RAM slots.

A GPU's copy engine gets addresses and lengths, and needs a fixed time for each range, even a
short one. So ranges that are adjacent both on the device and in the slots are merged into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.errors import UnsupportedError
from kvtier.memory.copy import KVBlocks
from kvtier.memory.copy_plan import BlockCopyPlan, GroupCopy
from kvtier.memory.slot_layout import Indices, RankShare, RegionGeometry, require_room

__all__ = ["FragmentPlanner", "Fragments", "Pages", "fragment_nbytes", "locate_pages"]


@dataclass(frozen=True, slots=True)
class Fragments:
    """Contiguous ranges to copy between device and host memory.

    Within each KV cache group the ranges are ordered by host address.

    Attributes:
        device: Addresses in device memory, int64 of shape (n,).
        host: Addresses in the host region's mapping of this process, int64 of shape (n,).
        nbytes: Bytes of each range, int64 of shape (n,).
    """

    device: Indices
    host: Indices
    nbytes: Indices

    def part(self, which: slice) -> Fragments:
        """Return the ranges that ``which`` selects, in the same order."""
        return Fragments(self.device[which], self.host[which], self.nbytes[which])


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the pages of a KV cache group's blocks are.

    A block has several pages, usually one per layer. Each array has one element per page.

    Attributes:
        first: Address of this page in block 0.
        step: Distance in bytes between this page in one block and in the next.
        offset: Offset in bytes of the rank's part of the page, from the start of the block's
            place in a slot.
        nbytes: Bytes of the page.
        blocks: Number of blocks that every tensor of the group has.
    """

    first: Indices
    step: Indices
    offset: Indices
    nbytes: Indices
    blocks: int


class FragmentPlanner:
    """Converts a plan of block copies to the contiguous ranges that one rank must copy.

    Args:
        kv: The rank's KV memory.
        host_address: Address at which this process maps the host region.
        geometry: The region's shape.
        share: The rank's share of each slot.
        blocks_per_chunk: Blocks of a chunk.

    Raises:
        UnsupportedError: A group's block does not fit its place in the slot.
    """

    def __init__(
        self,
        kv: KVBlocks,
        host_address: int,
        geometry: RegionGeometry,
        *,
        share: RankShare,
        blocks_per_chunk: int,
    ) -> None:
        require_room(kv.page_nbytes, geometry, share, blocks_per_chunk)
        self._host_address = host_address
        self._geometry = geometry
        self._share = share
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = [locate_pages(kv, pages, share) for pages in kv.groups]

    def plan(self, plan: BlockCopyPlan, *, stores: bool) -> Fragments:
        """Return the ranges to copy for all blocks of ``plan``.

        Args:
            plan: The blocks and slots.
            stores: True for a store, False for a load. A store leaves out blocks that another
                rank stores.

        Raises:
            UnsupportedError: A block or a slot does not exist.
        """
        planned = self.plan_gradually(plan, stores=stores, first_nbytes=_UNLIMITED)
        return next(planned, Fragments(_NONE, _NONE, _NONE))

    def plan_gradually(
        self, plan: BlockCopyPlan, *, stores: bool, first_nbytes: int
    ) -> Iterator[Fragments]:
        """Plan the ranges in batches and yield each batch, so that copies can start early.

        The next ranges are planned while the previous ones are copied. The limit on their bytes
        doubles each time, so the ranges are yielded in few steps.

        Args:
            plan: The blocks and slots.
            stores: True for a store, False for a load. A store leaves out blocks that another
                rank stores.
            first_nbytes: Largest number of bytes to yield first; at least one block is yielded.

        Raises:
            UnsupportedError: A block or a slot does not exist. Nothing has been yielded.
        """
        copies = [self._ordered(copy, stores=stores) for copy in plan.groups]
        ranges: list[tuple[Indices, Indices, Indices]] = []
        limit_nbytes = left_nbytes = first_nbytes
        for copy in copies:
            block_nbytes = max(int(self._groups[copy.group].nbytes.sum()), 1)
            start = 0
            while start < len(copy.blocks):
                room = max(left_nbytes // block_nbytes, 0 if ranges else 1)
                if not room:
                    yield _join(ranges)
                    limit_nbytes *= 2
                    ranges, left_nbytes = [], limit_nbytes
                    continue
                part = copy.part(slice(start, start + room))
                ranges.append(self._ranges(part))
                left_nbytes -= len(part.blocks) * block_nbytes
                start += room
        if ranges:
            yield _join(ranges)

    def _ordered(self, copy: GroupCopy, *, stores: bool) -> GroupCopy:
        """Return the blocks that this rank copies, ordered by their addresses in the slots."""
        _require_range("block", copy.blocks, self._groups[copy.group].blocks)
        _require_range("slot", copy.slots, self._geometry.slots)
        _require_range("place", copy.places, self._blocks_per_chunk)
        written = self._share.written(copy.blocks) if stores else None
        if written is not None:
            copy = copy.part(written)
        order = np.lexsort((copy.places, copy.slots))
        return GroupCopy(copy.group, copy.blocks[order], copy.slots[order], copy.places[order])

    def _ranges(self, copy: GroupCopy) -> tuple[Indices, Indices, Indices]:
        """Return the device addresses, host addresses and sizes in bytes of all pages."""
        pages = self._groups[copy.group]
        starts = copy.slots * self._geometry.slot_nbytes
        starts += copy.places * self._geometry.block_nbytes
        device = pages.first + copy.blocks[:, np.newaxis] * pages.step
        host = self._host_address + starts[:, np.newaxis] + pages.offset
        return device.ravel(), host.ravel(), np.broadcast_to(pages.nbytes, host.shape).ravel()


def fragment_nbytes(kv: KVBlocks, share: RankShare) -> int:
    """Return the mean size of a block's contiguous ranges, in the group of the largest blocks.

    Args:
        kv: The rank's KV memory.
        share: The rank's share of each slot.
    """
    longest = max(kv.groups, key=lambda each: sum(nbytes for _, nbytes in each))
    pages = locate_pages(kv, longest, share)
    lengths = _merge(pages.first, pages.offset, pages.nbytes).nbytes
    return int(lengths.sum()) // len(lengths)


_NONE: Final = np.empty(0, np.int64)
_UNLIMITED: Final = 1 << 62


def locate_pages(kv: KVBlocks, pages: Sequence[tuple[int, int]], share: RankShare) -> Pages:
    """Return where the pages of a KV cache group's blocks are, in KV memory and in slots.

    Args:
        kv: The rank's KV memory.
        pages: The group's entry of ``kv.groups``.
        share: The rank's share of each slot.
    """
    tensors = [kv.tensors[number] for number, _ in pages]
    lengths = [nbytes for _, nbytes in pages]
    return Pages(
        first=np.array([tensor.data_ptr() for tensor in tensors], np.int64),
        step=np.array([tensor.stride(0) for tensor in tensors], np.int64),
        offset=share.part_offsets(lengths),
        nbytes=np.array(lengths, np.int64),
        blocks=min((len(tensor) for tensor in tensors), default=0),
    )


def _merge(device: Indices, host: Indices, nbytes: Indices) -> Fragments:
    """Merge consecutive ranges that are adjacent in both memories."""
    if not len(nbytes):
        return Fragments(device, host, nbytes)
    ends = (device[1:] == device[:-1] + nbytes[:-1]) & (host[1:] == host[:-1] + nbytes[:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~ends]))
    return Fragments(device[starts], host[starts], np.add.reduceat(nbytes, starts))


def _join(parts: Sequence[tuple[Indices, Indices, Indices]]) -> Fragments:
    """Concatenate the ranges of all ``parts``, and merge adjacent ranges."""
    device, host, nbytes = (np.concatenate(each) for each in zip(*parts, strict=True))
    return _merge(device, host, nbytes)


def _require_range(what: str, numbers: Indices, limit: int) -> None:
    """Raise UnsupportedError unless all ``numbers`` are in ``range(limit)``."""
    absent = numbers[(numbers < 0) | (numbers >= limit)]
    if len(absent):
        raise UnsupportedError(f"{what} {absent[0]} does not exist, there are {limit}")
