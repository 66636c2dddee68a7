"""Copies between an engine's KV blocks and RAM slots.

A slot holds one chunk for all ranks. It is divided into ``blocks_per_chunk`` places, one for
each block of the chunk. A place holds every rank's part of each page of the block, in order
(:mod:`kvtier.memory.slot_layout`).

The engine keeps these pages layer by layer. Copying each page separately would take one call
per page. So a store gathers the blocks of a layer with one call, into a staging tensor on the
blocks' device. Then it copies whole rows of the staging tensor to consecutive slots. A load
does the reverse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Protocol

import numpy as np
import torch
from typing_extensions import override

from kvtier.errors import UnsupportedError
from kvtier.memory.copy_plan import BlockCopyPlan, GroupCopy
from kvtier.memory.slot_layout import RankShare, RegionGeometry, require_room
from kvtier.memory.streams import Fence

__all__ = [
    "BlockCopier",
    "Copier",
    "KVBlocks",
    "Slots",
    "copy_between",
]

_KEPT_NBYTES = 8 << 20
"""Number of bytes of staging memory to keep on a CPU. Memory that is allocated anew has a page
fault every 4 KiB, and the faults take longer than the copy. A small buffer also stays in the
processor's caches."""
_SHORTEST_NBYTES = 64 << 10
"""Length of the shortest contiguous range, in bytes, that gets a separate copy call between
host and device. A call takes a few microseconds. In this time torch can copy a range of this
length through memory that is not page-locked."""


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """An engine's KV memory.

    Attributes:
        tensors: int8 tensors of shape (blocks, row bytes). A row is one block's page.
        groups: For each KV cache group, the pages of a block. A page is a pair: index into
            ``tensors``, and bytes of the page.
    """

    tensors: Sequence[torch.Tensor]
    groups: Sequence[Sequence[tuple[int, int]]]

    def __post_init__(self) -> None:
        """Raise an error if a page is longer than the rows of its tensor."""
        for number, nbytes in chain.from_iterable(self.groups):
            if nbytes > self.tensors[number].shape[1]:
                raise UnsupportedError(
                    f"a page of {nbytes} bytes does not fit rows of "
                    f"{self.tensors[number].shape[1]} bytes"
                )

    @property
    def page_nbytes(self) -> list[list[int]]:
        """Size in bytes of each page of a block, for each group."""
        return [[nbytes for _, nbytes in pages] for pages in self.groups]

    @property
    def device(self) -> torch.device:
        """The device that has the memory."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")


class Slots(Protocol):
    """Memory that is divided into slots: the host region or a staging buffer."""

    @property
    def geometry(self) -> RegionGeometry:
        """Shape of the memory."""

    @property
    def payload(self) -> memoryview | torch.Tensor:
        """The bytes of all slots, as one buffer."""


class Copier(ABC):
    """Copies blocks between one rank's KV memory and its share of RAM slots.

    Attributes:
        blocks_per_chunk: Blocks of a chunk.
        is_concurrent: Whether a load may run while a store runs, in another thread.
        is_pageable: Whether copies are slow because the slots could not be page-locked.
    """

    blocks_per_chunk: int
    is_concurrent: bool
    is_pageable: bool

    @abstractmethod
    def mark(self) -> Fence | None:
        """Return the current point of the compute stream. The model thread calls this.

        Copies that are submitted now must start after this point. A store reads blocks that the
        forward pass has just written, and a load overwrites blocks that the engine may still be
        clearing.

        Returns:
            The point; None on a CPU, where the engine has already finished computing.
        """

    @abstractmethod
    def store(self, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        """Copy blocks to slots after the fence ``after``; return when all bytes are copied.

        If this method raises, all copies have ended.
        """

    @abstractmethod
    def load(self, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        """Copy slots to blocks after the fence ``after``; return when all bytes are copied.

        If this method raises, all copies have ended.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the slots. Idempotent; no copy may be running."""


class BlockCopier(Copier):
    """Copies blocks with torch, through a staging buffer.

    On a GPU the operations are queued on torch's current stream. The caller orders them and
    waits for them. One thread at a time may call the methods.

    Args:
        kv: The rank's KV memory.
        region: The slots.
        share: The rank's share of each slot.
        blocks_per_chunk: Blocks of a chunk.
        staging_nbytes: Bytes of the staging buffer on a GPU, allocated by the constructor. If a
            block is longer, the buffer gets the block's length. 0 on a CPU, where the buffer
            grows as needed.

    Raises:
        UnsupportedError: A group's block does not fit its place in the slot.
    """

    is_concurrent = False
    is_pageable = False

    def __init__(
        self,
        kv: KVBlocks,
        region: Slots,
        *,
        share: RankShare,
        blocks_per_chunk: int,
        staging_nbytes: int = 0,
    ) -> None:
        require_room(kv.page_nbytes, region.geometry, share, blocks_per_chunk)
        word = _word(kv, region.geometry)
        self._share = share
        self.blocks_per_chunk = blocks_per_chunk
        self._device = kv.device
        tensors = [tensor.view(word) for tensor in kv.tensors]
        self._pages = [
            [tensors[number][:, : page // word.itemsize] for number, page in pages]
            for pages in kv.groups
        ]
        payload = region.payload
        if not isinstance(payload, torch.Tensor):
            payload = torch.frombuffer(payload, dtype=torch.int8)
        self._copy = copy_between if staging_nbytes else torch.Tensor.copy_
        self._staging_nbytes = staging_nbytes or _KEPT_NBYTES
        kept_nbytes = max(staging_nbytes, *map(sum, kv.page_nbytes)) if staging_nbytes else 0
        self._kept = torch.empty(kept_nbytes // word.itemsize, dtype=word, device=self._device)
        self._word = word
        self._places = [
            self._views(payload.view(word), pages, region.geometry) for pages in kv.page_nbytes
        ]

    def _views(
        self, host: torch.Tensor, pages: Sequence[int], geometry: RegionGeometry
    ) -> list[tuple[slice, torch.Tensor]]:
        """Return pairs: a range of a staged row, and a view of the same bytes in all slots.

        A view has the shape (slots, blocks, pages, words).
        """
        unit = self._word.itemsize
        slot, place = geometry.slot_nbytes // unit, geometry.block_nbytes // unit
        views = []
        for run in self._share.runs(pages):
            start, words = run.offset // unit, run.nbytes // unit
            shape = (geometry.slots, self.blocks_per_chunk, run.pages, words)
            strides = (slot, place, words * self._share.parts, 1)
            offset = host.storage_offset() + run.place_offset // unit
            places = host.as_strided(shape, strides, offset)
            views.append((slice(start, start + run.pages * words), places))
        return views

    @override
    def mark(self) -> None:
        return

    @override
    def store(self, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        for copy in self._divide(plan, stores=True):
            staged = self._gather(copy)
            for part, place in self._placed(copy, staged):
                self._copy(place, part)

    @override
    def load(self, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        for copy in self._divide(plan, stores=False):
            staged = self._staging(copy)
            for part, place in self._placed(copy, staged):
                self._copy(part, place)
            self._scatter(copy, staged)

    @override
    def close(self) -> None:
        self._places = []

    def _divide(self, plan: BlockCopyPlan, *, stores: bool) -> Iterator[GroupCopy]:
        """Yield the blocks that this rank copies, in batches that fit the staging tensor."""
        for copy in plan.groups:
            written = self._share.written(copy.blocks) if stores else None
            whole = copy if written is None else copy.part(written)
            block_nbytes = self._width(copy) * self._word.itemsize
            step = max(self._staging_nbytes // max(block_nbytes, 1), 1)
            for at in range(0, len(whole.blocks), step):
                yield whole.part(slice(at, at + step))

    def _placed(
        self, copy: GroupCopy, staged: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of matching views: one of ``staged`` and one of the slots."""
        runs = list(_runs(copy))
        for columns, places in self._places[copy.group]:
            parts = staged[:, columns].view(len(staged), *places.shape[2:])
            for rows, slots, place in runs:
                yield parts[rows], places[slots, place]

    def _width(self, copy: GroupCopy) -> int:
        """Return the number of words of one block, in all layers of its group."""
        return sum(rows.shape[1] for rows in self._pages[copy.group])

    def _staging(self, copy: GroupCopy) -> torch.Tensor:
        shape = (len(copy.blocks), self._width(copy))
        words = shape[0] * shape[1]
        if words > len(self._kept):
            self._kept = torch.empty(words, dtype=self._word)
        return self._kept[:words].view(shape)

    def _indices(self, copy: GroupCopy) -> torch.Tensor:
        """Return the block numbers on the device."""
        blocks = torch.from_numpy(copy.blocks)
        if self._device.type == "cpu":
            return blocks
        # If this memory were not page-locked, torch would block until the fence is reached.
        return blocks.pin_memory().to(self._device, non_blocking=True)

    def _gather(self, copy: GroupCopy) -> torch.Tensor:
        staged = self._staging(copy)
        blocks = self._indices(copy)
        for rows, part in self._layers(copy, staged):
            torch.index_select(rows, 0, blocks, out=part)
        return staged

    def _scatter(self, copy: GroupCopy, staged: torch.Tensor) -> None:
        blocks = self._indices(copy)
        for rows, part in self._layers(copy, staged):
            rows.index_copy_(0, blocks, part)

    def _layers(
        self, copy: GroupCopy, staged: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield for each layer a view of its pages and a view of its columns in ``staged``."""
        at = 0
        for rows in self._pages[copy.group]:
            width = rows.shape[1]
            yield rows, staged[:, at : at + width]
            at += width


def copy_between(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor between device and host; return before the copy ends if that is safe.

    If one side is not contiguous, torch copies twice: into memory of its own, and from there.
    On the host this memory is not page-locked, so copying twice is slow. So only short
    contiguous ranges are copied twice; long ranges are copied one by one. Copying twice blocks,
    because the second copy must start after the first.

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
    for into, part in zip(destination, source, strict=True):
        copy_between(into, part)


def _contiguous_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements of each contiguous range of ``tensor``."""
    elements = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size > 1 and stride != elements:
            break
        elements *= size
    return elements


def _word(kv: KVBlocks, geometry: RegionGeometry) -> torch.dtype:
    """Return the element type for copies: int64 if all is aligned to 8 bytes, else int8.

    torch moves elements to scattered rows one by one. So copying bytes takes seven times as
    long as copying words of eight bytes.
    """
    units = [geometry.slot_nbytes, geometry.block_nbytes]
    units += [page for pages in kv.groups for _, page in pages]
    for tensor in kv.tensors:
        units += [*tensor.shape[1:], int(tensor.stride(0)), tensor.data_ptr()]
    wide = torch.int64
    return torch.int8 if any(unit % wide.itemsize for unit in units) else wide


def _runs(copy: GroupCopy) -> Iterator[tuple[slice, slice, int]]:
    """Yield (rows, slots, place) for each range of consecutive slots with the same place."""
    slots, places = copy.slots, copy.places
    breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(places) != 0)) + 1
    edges = [0, *breaks.tolist(), len(slots)]
    for start, end in pairwise(edges):
        first = int(slots[start])
        yield slice(start, end), slice(first, first + end - start), int(places[start])
