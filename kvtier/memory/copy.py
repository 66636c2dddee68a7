"""Copies between an engine's KV blocks and RAM slots.

A slot holds one chunk for all ranks; a rank's shard of it holds ``blocks_per_chunk`` blocks one
after the other, and a block holds the pages of all its layers one after the other::

    slot | rank 0: block 0 [layer 0 | layer 1 | ...] block 1 [...] | rank 1: ... | padding |

The engine keeps the same pages layer by layer. Copying page by page would cost one call for
each, so blocks are gathered into a staging tensor on their own device, one call per layer,
and rows of it go to consecutive slots in one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import UnsupportedError
from kvtier.memory.host_region import HostRegion
from kvtier.memory.streams import Fence, open_stream

__all__ = ["BlockCopier", "BlockCopyPlan", "GroupCopy", "KVBlocks", "plan_copy"]

Indices = npt.NDArray[np.int64]

_STAGING_NBYTES = 64 << 20
"""Most device memory a copy borrows: the engine leaves little, a long prefix is gigabytes."""


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """An engine's KV memory.

    Attributes:
        tensors: Each int8 of shape (blocks, row bytes); a row is one block's page.
        groups: Per KV cache group, the pages of a block: (index into ``tensors``, page bytes).
    """

    tensors: Sequence[torch.Tensor]
    groups: Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class GroupCopy:
    """The blocks of one KV cache group to copy, ordered by (sub, slot).

    Attributes:
        group: Index of the group.
        blocks: Block numbers in the engine's memory, shape (n,).
        slots: RAM slot of each, shape (n,).
        subs: Place of each within its chunk, shape (n,).
    """

    group: int
    blocks: Indices
    slots: Indices
    subs: Indices


@dataclass(frozen=True, slots=True)
class BlockCopyPlan:
    """A batch of block copies, all in one direction.

    Attributes:
        groups: What to copy, by KV cache group.
        slots: The RAM slots involved, each once.
    """

    groups: Sequence[GroupCopy]
    slots: Sequence[int]


def plan_copy(
    block_ids: Sequence[int] | Indices,
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    slots: Sequence[int],
    *,
    blocks_per_chunk: int,
) -> BlockCopyPlan:
    """Match an engine's blocks with the RAM slots of their chunks.

    Args:
        block_ids: Block numbers, group after group.
        group_sizes: How many of them belong to each group.
        block_indices: Logical index in the request of each group's first block; where it is
            not a multiple of ``blocks_per_chunk`` the group's first chunk is partial. The
            last may be.
        slots: RAM slots of the chunks, group after group.
        blocks_per_chunk: Blocks of a chunk.

    Raises:
        UnsupportedError: Blocks and slots do not match.
    """
    blocks = np.asarray(block_ids, np.int64)
    places = np.asarray(slots, np.int64)
    groups: list[GroupCopy] = []
    block_at = slot_at = 0
    for group, (size, first) in enumerate(zip(group_sizes, block_indices, strict=True)):
        if not size:
            continue
        index = np.arange(size) + first % blocks_per_chunk
        chunks = int(index[-1]) // blocks_per_chunk + 1
        subs = index % blocks_per_chunk
        if slot_at + chunks > len(places):
            raise UnsupportedError(f"{len(places)} slots for more than {slot_at} chunks")
        of_block = places[slot_at + index // blocks_per_chunk]
        order = np.lexsort((of_block, subs))
        own = blocks[block_at : block_at + size]
        groups.append(GroupCopy(group, own[order], of_block[order], subs[order]))
        block_at += size
        slot_at += chunks
    if block_at != len(blocks) or slot_at != len(places):
        raise UnsupportedError(
            f"{len(blocks)} blocks in {len(places)} slots: {block_at} and {slot_at} matched"
        )
    return BlockCopyPlan(groups, [int(slot) for slot in places])


class BlockCopier:
    """Copies blocks between one rank's KV memory and its shard of RAM slots.

    Args:
        kv: The rank's KV memory.
        region: The RAM slots.
        rank: Whose shard of each slot.
        blocks_per_chunk: Blocks of a chunk.

    Raises:
        UnsupportedError: A group's block is larger than its place in the shard.
    """

    def __init__(
        self, kv: KVBlocks, region: HostRegion, *, rank: int, blocks_per_chunk: int
    ) -> None:
        geometry = region.geometry
        block_nbytes = geometry.shard_nbytes // blocks_per_chunk
        for group, pages in enumerate(kv.groups):
            nbytes = sum(page for _, page in pages)
            if nbytes > block_nbytes:
                raise UnsupportedError(
                    f"a block of KV cache group {group} has {nbytes} bytes, its slot has room "
                    f"for {block_nbytes}: this KV layout is not supported"
                )
        self._kv = kv
        self._device = kv.tensors[0].device if kv.tensors else torch.device("cpu")
        flat = torch.frombuffer(region.payload, dtype=torch.int8)
        self._stream = open_stream(self._device, flat)
        self._host = flat.as_strided(
            (geometry.slots, blocks_per_chunk, block_nbytes),
            (geometry.slot_nbytes, block_nbytes, 1),
            rank * geometry.shard_nbytes,
        )

    def mark(self) -> Fence | None:
        """Return the point in the compute stream that a copy asked for now must come after."""
        return self._stream.mark()

    def store(self, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        """Copy blocks to slots; returns when the bytes are there."""
        with self._stream.after(after):
            for copy in self._pieces(plan):
                staged = self._gather(copy)
                width = staged.shape[1]
                for rows, slots, sub in _runs(copy):
                    self._host[slots, sub, :width].copy_(staged[rows], non_blocking=True)

    def load(self, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        """Copy slots to blocks; returns when the bytes are there."""
        with self._stream.after(after):
            for copy in self._pieces(plan):
                staged = self._staging(copy)
                width = staged.shape[1]
                for rows, slots, sub in _runs(copy):
                    staged[rows].copy_(self._host[slots, sub, :width], non_blocking=True)
                self._scatter(copy, staged)

    def close(self) -> None:
        """Unpin the slots and let go of them. Idempotent; no copy may be running."""
        self._stream.close()
        self._host = torch.empty((0, 0, 0), dtype=torch.int8)

    def _pieces(self, plan: BlockCopyPlan) -> Iterator[GroupCopy]:
        """Yield the plan's copies in pieces that need a bounded staging tensor each."""
        for copy in plan.groups:
            width = sum(page for _, page in self._kv.groups[copy.group])
            step = max(_STAGING_NBYTES // max(width, 1), 1)
            for at in range(0, len(copy.blocks), step):
                piece = slice(at, at + step)
                yield GroupCopy(
                    copy.group, copy.blocks[piece], copy.slots[piece], copy.subs[piece]
                )

    def _staging(self, copy: GroupCopy) -> torch.Tensor:
        width = sum(page for _, page in self._kv.groups[copy.group])
        return torch.empty((len(copy.blocks), width), dtype=torch.int8, device=self._device)

    def _gather(self, copy: GroupCopy) -> torch.Tensor:
        staged = self._staging(copy)
        blocks = torch.from_numpy(copy.blocks).to(self._device)
        at = 0
        for tensor, page in self._kv.groups[copy.group]:
            rows = self._kv.tensors[tensor].index_select(0, blocks)
            staged[:, at : at + page] = rows[:, :page]
            at += page
        return staged

    def _scatter(self, copy: GroupCopy, staged: torch.Tensor) -> None:
        blocks = torch.from_numpy(copy.blocks).to(self._device)
        at = 0
        for tensor, page in self._kv.groups[copy.group]:
            pages = self._kv.tensors[tensor][:, :page]
            pages.index_copy_(0, blocks, staged[:, at : at + page])
            at += page


def _runs(copy: GroupCopy) -> Iterator[tuple[slice, slice, int]]:
    """Yield (rows, slots, sub) of maximal runs of consecutive slots."""
    slots, subs = copy.slots, copy.subs
    breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(subs) != 0)) + 1
    edges = [0, *breaks.tolist(), len(slots)]
    for start, end in pairwise(edges):
        first = int(slots[start])
        yield slice(start, end), slice(first, first + end - start), int(subs[start])
