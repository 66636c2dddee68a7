"""Copies between an engine's KV blocks and RAM slots.

A slot holds one chunk for all ranks; a rank's shard of it holds ``blocks_per_chunk`` blocks one
after the other, and a block holds the pages of all its layers one after the other::

    slot | rank 0: block 0 [layer 0 | layer 1 | ...] block 1 [...] | rank 1: ... | padding |

The engine keeps the same pages layer by layer. Copying page by page would cost one call for each,
so blocks are gathered into a staging tensor on their own device, one call per layer, and rows of
it go to consecutive slots in one copy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import UnsupportedError
from kvtier.memory.host_region import HostRegion

__all__ = ["BlockCopier", "BlockCopyPlan", "GroupCopy", "KVBlocks", "plan_copy"]

logger = logging.getLogger(__name__)

Indices = npt.NDArray[np.int64]


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
        block_indices: Logical index in the request of each group's first block; where it is not a
            multiple of ``blocks_per_chunk`` the group's first chunk is partial. The last may be.
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
        self._pinned_at = _pin(flat) if self._device.type == "cuda" else 0
        self._host = flat.as_strided(
            (geometry.slots, blocks_per_chunk, block_nbytes),
            (geometry.slot_nbytes, block_nbytes, 1),
            rank * geometry.shard_nbytes,
        )
        self._stream = torch.cuda.Stream(self._device) if self._pinned_at else None

    def mark(self) -> torch.cuda.Event | None:
        """Return the point in the compute stream that a copy must come after.

        Called on the engine's thread: a store reads what the forward pass just wrote, a load
        overwrites blocks that the engine may still be clearing.
        """
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def store(self, plan: BlockCopyPlan, *, after: torch.cuda.Event | None) -> None:
        """Copy blocks to slots; returns when the bytes are there."""
        with self._ordered(after):
            for copy in plan.groups:
                staged = self._gather(copy)
                width = staged.shape[1]
                for rows, slots, sub in _runs(copy):
                    self._host[slots, sub, :width].copy_(staged[rows], non_blocking=True)

    def load(self, plan: BlockCopyPlan, *, after: torch.cuda.Event | None) -> None:
        """Copy slots to blocks; returns when the bytes are there."""
        with self._ordered(after):
            for copy in plan.groups:
                staged = self._staging(copy)
                width = staged.shape[1]
                for rows, slots, sub in _runs(copy):
                    staged[rows].copy_(self._host[slots, sub, :width], non_blocking=True)
                self._scatter(copy, staged)

    def close(self) -> None:
        """Unpin the slots."""
        if self._pinned_at:
            torch.cuda.cudart().cudaHostUnregister(self._pinned_at)
            self._pinned_at = 0
        self._host = torch.empty((0, 0, 0), dtype=torch.int8)

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

    def _ordered(self, after: torch.cuda.Event | None) -> _Ordered:
        return _Ordered(self._stream, after)


class _Ordered:
    """Runs copies on a stream of their own after ``after``, and waits for them; on a CPU nothing."""

    def __init__(self, stream: torch.cuda.Stream | None, after: torch.cuda.Event | None) -> None:
        self._stream = stream
        self._after = after
        self._context = None if stream is None else torch.cuda.stream(stream)

    def __enter__(self) -> None:
        if self._stream is None or self._context is None:
            return
        self._context.__enter__()
        if self._after is not None:
            self._stream.wait_event(self._after)

    def __exit__(self, *exc_info: object) -> None:
        if self._stream is None or self._context is None:
            return
        self._context.__exit__(None, None, None)
        done = torch.cuda.Event()
        done.record(self._stream)
        done.synchronize()


def _runs(copy: GroupCopy) -> Iterator[tuple[slice, slice, int]]:
    """Yield (rows, slots, sub) of maximal runs of consecutive slots."""
    slots, subs = copy.slots, copy.subs
    breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(subs) != 0)) + 1
    edges = [0, *breaks.tolist(), len(slots)]
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        first = int(slots[start])
        yield slice(start, end), slice(first, first + end - start), int(subs[start])


def _pin(flat: torch.Tensor) -> int:
    """Page-lock ``flat`` for CUDA; returns its address.

    Raises:
        UnsupportedError: The driver refused.
    """
    address = flat.data_ptr()
    error = torch.cuda.cudart().cudaHostRegister(address, flat.numel(), 0)
    if int(error) != 0:
        raise UnsupportedError(
            f"CUDA cannot page-lock the RAM tier (error {int(error)}): raise the memlock limit "
            "(ulimit -l unlimited) or lower tiers[0].capacity"
        )
    return address
