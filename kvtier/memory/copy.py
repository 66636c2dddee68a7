"""Copies between an engine's KV blocks and RAM slots.

A slot holds one chunk for all ranks, in stripes (:mod:`kvtier.memory.slot_layout`). A stripe
holds a part of each of the chunk's ``blocks_per_chunk`` blocks, in order. Within a block it
holds a part of each layer's page, in order.

The engine keeps these pages layer by layer. Copying page by page would take one call per
page. So blocks are gathered into a staging tensor on their device, one call per layer, and
whole rows of that tensor are copied to consecutive slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import UnsupportedError
from kvtier.memory.host_region import HostRegion
from kvtier.memory.slot_layout import RankShare
from kvtier.memory.streams import Fence, open_stream

__all__ = [
    "BlockCopier",
    "BlockCopyPlan",
    "GroupCopy",
    "Indices",
    "KVBlocks",
    "copy_between",
    "plan_copy",
]

Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_STAGING_NBYTES = 64 << 20
"""Limit of the device memory that a copy uses, because the engine leaves little memory."""
_KEPT_NBYTES = 8 << 20
"""Staging memory kept on a CPU. New memory has a page fault every 4 KiB, which takes longer
than the copy. A small buffer also stays in the processor's caches."""
_SHORTEST_NBYTES = 64 << 10
"""Shortest contiguous range that gets its own copy call between host and device. In the few
microseconds of a call, torch can copy a range of this length through memory that is not
page-locked."""


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
    """The blocks of one KV cache group to copy, ordered by ``subs`` and then by ``slots``.

    Attributes:
        group: Index of the group.
        blocks: Block numbers in the engine's memory, shape (n,).
        slots: RAM slot of each block, shape (n,).
        subs: Place of each block within its chunk, shape (n,).
    """

    group: int
    blocks: Indices
    slots: Indices
    subs: Indices

    def part(self, which: slice | Flags) -> GroupCopy:
        """Return the copies that ``which`` selects, without changing their order."""
        return GroupCopy(self.group, self.blocks[which], self.slots[which], self.subs[which])


@dataclass(frozen=True, slots=True)
class BlockCopyPlan:
    """A batch of block copies, all in one direction.

    Attributes:
        groups: What to copy, by KV cache group.
        slots: The RAM slots involved, each once.
    """

    groups: Sequence[GroupCopy]
    slots: Sequence[int]

    def restricted_to(self, slots: Sequence[int]) -> BlockCopyPlan:
        """Return the part of this plan for ``slots``, which are some of the plan's slots."""
        wanted = np.asarray(slots, np.int64)
        parts = []
        for copy in self.groups:
            chosen = np.isin(copy.slots, wanted)
            if chosen.any():
                parts.append(copy.part(chosen))
        return BlockCopyPlan(parts, slots)

    def joined_with(self, others: Sequence[BlockCopyPlan]) -> BlockCopyPlan:
        """Return one plan with the copies of this one and ``others``."""
        if not others:
            return self
        plans = (self, *others)
        copies: dict[int, list[GroupCopy]] = {}
        for plan in plans:
            for copy in plan.groups:
                copies.setdefault(copy.group, []).append(copy)
        groups = [_join(group, parts) for group, parts in copies.items()]
        return BlockCopyPlan(groups, [slot for plan in plans for slot in plan.slots])

    def slots_filled(self, blocks_per_chunk: int) -> Sequence[int]:
        """Return the slots that certainly receive every block of their chunk in a store.

        The first chunk of a group may lack its head; the index of the group's first block shows
        this. If other blocks are missing, the engine does not say which. The later blocks then
        move up into wrong places, and the group's last chunk lacks its end. In this case no
        slot of the group counts as filled.
        """
        if blocks_per_chunk == 1 or not self.groups:
            return self.slots
        filled: set[int] = set()
        for copy in self.groups:
            numbers, blocks = np.unique(copy.slots, return_counts=True)
            if np.count_nonzero(copy.subs == blocks_per_chunk - 1) == len(numbers):
                filled.update(numbers[blocks == blocks_per_chunk].tolist())
        return self.slots if len(filled) == len(self.slots) else sorted(filled)


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
        group_sizes: How many of ``block_ids`` belong to each group.
        block_indices: Index, within the request, of each group's first block. If it is not
            a multiple of ``blocks_per_chunk``, the group's first chunk is partial. The last
            chunk may be partial too.
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
            raise UnsupportedError(f"the blocks need more than the {len(places)} slots given")
        of_block = places[slot_at + index // blocks_per_chunk]
        order = np.lexsort((of_block, subs))
        own = blocks[block_at : block_at + size]
        groups.append(GroupCopy(group, own[order], of_block[order], subs[order]))
        block_at += size
        slot_at += chunks
    if block_at == len(blocks) and slot_at < len(places):
        # Blocks after a gap have moved up, so it is unknown which chunks are whole.
        raise UnsupportedError(
            f"some blocks of the chunks are missing: the {block_at} given belong to {slot_at} "
            f"chunks, not to {len(places)}"
        )
    if block_at != len(blocks) or slot_at != len(places):
        raise UnsupportedError(
            f"{len(blocks)} blocks and {len(places)} slots were given, but the groups have "
            f"{block_at} blocks and {slot_at} chunks"
        )
    return BlockCopyPlan(groups, [int(slot) for slot in places])


def _join(group: int, copies: Sequence[GroupCopy]) -> GroupCopy:
    """Merge ``copies`` of one group into one, ordered by (sub, slot)."""
    blocks = np.concatenate([copy.blocks for copy in copies])
    slots = np.concatenate([copy.slots for copy in copies])
    subs = np.concatenate([copy.subs for copy in copies])
    order = np.lexsort((slots, subs))
    return GroupCopy(group, blocks[order], slots[order], subs[order])


class BlockCopier:
    """Copies blocks between one rank's KV memory and its stripes of RAM slots.

    Args:
        kv: The rank's KV memory.
        region: The RAM slots.
        share: The stripes of each slot that belong to the rank.
        blocks_per_chunk: Blocks of a chunk.

    Raises:
        UnsupportedError: A group's block does not fit its place in the slot.

    Attributes:
        blocks_per_chunk: Blocks of a chunk.
    """

    def __init__(
        self, kv: KVBlocks, region: HostRegion, *, share: RankShare, blocks_per_chunk: int
    ) -> None:
        geometry = region.geometry
        place_nbytes = geometry.stripe_nbytes // blocks_per_chunk
        _require_room(kv, geometry.stripes, place_nbytes, share)
        word = _word(kv, place_nbytes, len(share.stripes))
        self._share = share
        self.blocks_per_chunk = blocks_per_chunk
        self._device = kv.tensors[0].device if kv.tensors else torch.device("cpu")
        self._tensors = [tensor.view(word) for tensor in kv.tensors]
        self._pages = [
            [(tensor, page // word.itemsize) for tensor, page in pages] for pages in kv.groups
        ]
        flat = torch.frombuffer(region.payload, dtype=torch.int8)
        self._stream = open_stream(self._device, flat)
        on_cpu = self._device.type == "cpu"
        self._copy = torch.Tensor.copy_ if on_cpu else copy_between
        self._staging_nbytes = _KEPT_NBYTES if on_cpu else _STAGING_NBYTES
        self._kept = torch.empty(0, dtype=word) if on_cpu else None
        slot, stripe, place = (
            nbytes // word.itemsize
            for nbytes in (geometry.slot_nbytes, geometry.stripe_nbytes, place_nbytes)
        )
        self._word = word
        self._host = flat.view(word).as_strided(
            (geometry.slots, geometry.stripes, blocks_per_chunk, place),
            (slot, stripe, place, 1),
        )

    def mark(self) -> Fence | None:
        """Return the point in the compute stream that a copy submitted now must follow."""
        return self._stream.mark()

    def store(self, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        """Copy blocks to slots; return when the bytes are there."""
        with self._stream.after(after):
            for copy in self._pieces(plan, self._is_written):
                staged = self._gather(copy)
                for part, place in self._places(copy, staged):
                    self._copy(place, part)

    def load(self, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        """Copy slots to blocks; return when the bytes are there."""
        with self._stream.after(after):
            for copy in self._pieces(plan, None):
                staged = self._staging(copy)
                for part, place in self._places(copy, staged):
                    self._copy(part, place)
                self._scatter(copy, staged)

    def close(self) -> None:
        """Unpin and release the slots. Idempotent; no copy may be running."""
        self._stream.close()
        self._host = torch.empty((0, 0, 0, 0), dtype=self._word)

    def _is_written(self, copy: GroupCopy) -> Flags | None:
        """Return which blocks of ``copy`` this rank stores; None if this rank stores all."""
        if self._share.writers == 1:
            return None
        written: Flags = copy.blocks % self._share.writers == self._share.writer
        return written

    def _pieces(
        self, plan: BlockCopyPlan, choose: Callable[[GroupCopy], Flags | None] | None
    ) -> Iterator[GroupCopy]:
        """Yield the chosen copies of a plan in pieces that fit the staging tensor."""
        for copy in plan.groups:
            chosen = choose(copy) if choose else None
            whole = copy if chosen is None else copy.part(chosen)
            block_nbytes = self._width(copy) * self._word.itemsize
            step = max(self._staging_nbytes // max(block_nbytes, 1), 1)
            for at in range(0, len(whole.blocks), step):
                yield whole.part(slice(at, at + step))

    def _places(
        self, copy: GroupCopy, staged: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of views: a part of ``staged``, and its place in the slots."""
        words = slice(staged.shape[2])
        for rows, slots, sub in _runs(copy):
            for parts, stripes in self._share.runs():
                yield staged[rows, parts], self._host[slots, stripes, sub, words]

    def _width(self, copy: GroupCopy) -> int:
        """Return the number of words of one block, added up over all layers of its group."""
        return sum(page for _, page in self._pages[copy.group])

    def _staging(self, copy: GroupCopy) -> torch.Tensor:
        parts = len(self._share.stripes)
        shape = (len(copy.blocks), parts, self._width(copy) // parts)
        if self._kept is None:
            return torch.empty(shape, dtype=self._word, device=self._device)
        words = math.prod(shape)
        if words > len(self._kept):
            self._kept = torch.empty(words, dtype=self._word)
        return self._kept[:words].view(shape)

    def _gather(self, copy: GroupCopy) -> torch.Tensor:
        staged = self._staging(copy)
        blocks = torch.from_numpy(copy.blocks).to(self._device)
        for rows, part in self._layers(copy, staged):
            torch.index_select(rows, 0, blocks, out=part)
        return staged

    def _scatter(self, copy: GroupCopy, staged: torch.Tensor) -> None:
        blocks = torch.from_numpy(copy.blocks).to(self._device)
        for rows, part in self._layers(copy, staged):
            rows.index_copy_(0, blocks, part)

    def _layers(
        self, copy: GroupCopy, staged: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for each layer, a view of its pages and the part of ``staged`` for them."""
        at, parts = 0, len(self._share.stripes)
        for tensor, page in self._pages[copy.group]:
            width = page // parts
            rows = _in_parts(self._tensors[tensor][:, :page], parts)
            yield rows, staged[:, :, at : at + width]
            at += width


def copy_between(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between device and host, without waiting for the copy where that is safe.

    If one side is not contiguous, torch copies in two steps through its own memory, which on
    the host is not page-locked. That is slow, so long contiguous ranges are copied one by one,
    and only shorter ranges are copied in two steps. Such a copy waits, because otherwise the
    second step might use bytes that the first has not delivered.

    Args:
        destination: A tensor on the device or the host.
        source: A tensor of the same shape on the other side.
    """
    if destination.is_contiguous() and source.is_contiguous():
        destination.copy_(source, non_blocking=True)
        return
    elements = min(map(_contiguous_elements, (destination, source)))
    if elements * source.itemsize < _SHORTEST_NBYTES:
        destination.copy_(source)
        return
    for place, part in zip(destination, source, strict=True):
        copy_between(place, part)


def _contiguous_elements(tensor: torch.Tensor) -> int:
    """Return how many elements are contiguous, counted from the last dimension."""
    elements = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size > 1 and stride != elements:
            break
        elements *= size
    return elements


def _word(kv: KVBlocks, place_nbytes: int, parts: int) -> torch.dtype:
    """Return int64 if all sizes and addresses are multiples of eight bytes, else int8.

    torch moves elements one by one to scattered rows, so single bytes take seven times as long
    as words of eight bytes.
    """
    units = [place_nbytes]
    units += [page // parts for pages in kv.groups for _, page in pages]
    for tensor in kv.tensors:
        units += [*tensor.shape[1:], int(tensor.stride(0)), tensor.data_ptr()]
    wide = torch.int64
    return torch.int8 if any(unit % wide.itemsize for unit in units) else wide


def _in_parts(pages: torch.Tensor, parts: int) -> torch.Tensor:
    """Return a view of ``pages`` that cuts each page into ``parts`` parts of equal size.

    The shape (n, words) becomes (n, parts, words per part).
    """
    rows, words = pages.shape
    width = words // parts
    return pages.as_strided(
        (rows, parts, width), (pages.stride(0), width, 1), pages.storage_offset()
    )


def _require_room(kv: KVBlocks, stripes: int, place_nbytes: int, share: RankShare) -> None:
    """Raise UnsupportedError for blocks that do not fit their place in a chunk."""
    parts = len(share.stripes)
    if max(share.stripes) >= stripes:
        raise UnsupportedError(
            f"a slot has {stripes} stripes, a rank wants stripe {max(share.stripes)}"
        )
    for group, pages in enumerate(kv.groups):
        nbytes = sum(page for _, page in pages)
        if nbytes > place_nbytes * parts:
            raise UnsupportedError(
                f"a block of KV cache group {group} has {nbytes} bytes, its slot has room "
                f"for {place_nbytes * parts}: this KV layout is not supported"
            )
        if any(page % parts for _, page in pages):
            raise UnsupportedError(
                f"a page of KV cache group {group} cannot be split into {parts} parts"
            )


def _runs(copy: GroupCopy) -> Iterator[tuple[slice, slice, int]]:
    """Yield each run of rows that have consecutive slots and the same place in the chunk.

    Each run has its rows, its slots, and that place (``sub``).
    """
    slots, subs = copy.slots, copy.subs
    breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(subs) != 0)) + 1
    edges = [0, *breaks.tolist(), len(slots)]
    for start, end in pairwise(edges):
        first = int(slots[start])
        yield slice(start, end), slice(first, first + end - start), int(subs[start])
