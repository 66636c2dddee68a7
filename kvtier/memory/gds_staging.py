"""GDS reads: chunks from an NVMe tier's slot file into a rank's blocks, without RAM.

GPUDirect Storage (GDS) reads a file into GPU memory. A slot's bytes must be verified, and a
slot has another layout than the engine's blocks. So slots are read into staging memory on the
device and hashed there. Then the copier for RAM slots copies them to blocks.

If several ranks need different parts of a slot, each rank reads only its own ranges. Otherwise
the disk would read every byte once per rank. GDS reads are not used if the ranges are short,
because loading slots through RAM is faster then.

There are two staging buffers: one is filled while the other is emptied. For each buffer the
caller calls ``read``, ``verify`` and ``copy``, in this order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvtier.errors import UnsupportedError
from kvtier.memory.copy import BlockCopier, KVBlocks
from kvtier.memory.copy_plan import BlockCopyPlan
from kvtier.memory.direct_files import DirectFile, DirectFiles, DirectRead, open_slot_file
from kvtier.memory.part_hashes import HashPlanner, StoreHasher, hash_on_host, open_hasher
from kvtier.memory.slot_layout import RankShare, RegionGeometry
from kvtier.memory.streams import CopyStream, Driver, Fence
from kvtier.slot_ranges import consecutive_ranges
from kvtier.types import SlotFileId
from kvtier.units import approximate_size

__all__ = ["GdsStaging"]

_BUFFER_COUNT: Final = 2
BUFFER_NBYTES: Final = 16 << 20
"""Bytes of a staging buffer. If a slot is longer, the buffer has the length of the slot."""
SHORTEST_NBYTES: Final = 64 << 10
"""Shortest range of a slot for which GDS reads are used."""
_SCATTER_NBYTES: Final = 8 << 20
"""Bytes of memory for the copier, which copies from the staging buffers to blocks."""
_TRIAL_NBYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class _StagedSlots:
    """A staging buffer on the device, divided into slots."""

    geometry: RegionGeometry
    payload: torch.Tensor


class GdsStaging:
    """Reads slots of a tier into staging buffers, verifies them and copies them to blocks.

    One thread at a time may call :meth:`read`. Meanwhile one other thread may call the other
    methods.

    Args:
        kv: The rank's KV memory.
        geometry: The shape of the slots.
        share: The rank's share of each slot.
        blocks_per_chunk: Blocks of a chunk.
        files: Opens the tier's file.
        driver: The GPU; None on a CPU.

    Raises:
        UnsupportedError: The KV memory cannot be hashed word by word, the rank's ranges are
            short, or the device computes wrong hashes.
        RuntimeError: There is not enough memory on the device.

    Attributes:
        part: Number of this rank's part of every slot.
        buffer_count: Number of staging buffers.
        slots_per_buffer: Number of slots of a buffer.
        store_hasher: Hashes the blocks that this rank stores.
    """

    def __init__(
        self,
        kv: KVBlocks,
        geometry: RegionGeometry,
        *,
        share: RankShare,
        blocks_per_chunk: int,
        files: DirectFiles,
        driver: Driver | None,
    ) -> None:
        self.part = share.part
        self.buffer_count = _BUFFER_COUNT
        self.slots_per_buffer = max(BUFFER_NBYTES // geometry.slot_nbytes, 1)
        self._slot_nbytes = geometry.slot_nbytes
        self._planner = HashPlanner(
            kv, geometry, share=share, blocks_per_chunk=blocks_per_chunk
        )
        self._extents: list[list[range]] | None = None  # whole slots
        if share.parts > 1:
            _require_long_ranges(kv)
            self._extents = [self._planner.extents(group) for group in range(len(kv.groups))]
        self._files = files
        self._file: tuple[SlotFileId, DirectFile] | None = None
        self._stream = driver.open_stream() if driver else None
        self._hasher = open_hasher(driver)
        shape = dataclasses.replace(
            geometry, slots=self.buffer_count * self.slots_per_buffer, ranks=1, bounce_slots=0
        )
        self._memory = files.staging_memory(shape.payload_nbytes)
        with ExitStack() as opened:
            opened.callback(files.release, self._memory)
            self._copier = BlockCopier(
                kv,
                _StagedSlots(shape, self._memory),
                share=share,
                blocks_per_chunk=blocks_per_chunk,
                staging_nbytes=_SCATTER_NBYTES if driver else 0,
            )
            if self._stream is not None:
                self._try_hasher(self._stream)
            opened.pop_all()
        self._is_closed = False
        self.store_hasher = StoreHasher(self._planner, driver)

    def staged_slots(self, buffer: int) -> range:
        """Return the numbers of the staging slots in buffer number ``buffer``."""
        first = buffer * self.slots_per_buffer
        return range(first, first + self.slots_per_buffer)

    def read(
        self, staged: range, file: SlotFileId, slots: Sequence[int], groups: Sequence[int]
    ) -> list[str]:
        """Read slots of the tier into staging slots; return an error message for each slot.

        Args:
            staged: The staging slots, one for each of ``slots``.
            file: The tier's slot file.
            slots: Slots of the tier, ascending.
            groups: KV cache group of each slot's chunk.

        Returns:
            For each slot an error message, or an empty string if all its bytes were read.

        Raises:
            TierUnavailableError: The file cannot be opened.
        """
        opened = self._open(file)
        if self._extents is not None:
            return self._read_parts(opened, staged, slots, self._extents, groups)
        ranges = [range(part.start, part.stop) for part in consecutive_ranges(slots)]
        errors = opened.read([self._read_of(staged, slots, some) for some in ranges])
        found: list[str] = []
        for some, error in zip(ranges, errors, strict=True):
            if not error or len(some) == 1:
                found += [error] * len(some)
            else:  # one unreadable sector must not fail the adjacent slots
                singles = [range(at, at + 1) for at in some]
                found += opened.read([self._read_of(staged, slots, at) for at in singles])
        return found

    def _read_parts(
        self,
        opened: DirectFile,
        staged: range,
        slots: Sequence[int],
        extents: Sequence[Sequence[range]],
        groups: Sequence[int],
    ) -> list[str]:
        """Read only this rank's ranges of each slot; return an error message for each slot."""
        nbytes = self._slot_nbytes
        reads, positions = [], []
        for at, (number, slot, group) in enumerate(zip(staged, slots, groups, strict=True)):
            for extent in extents[group]:
                into = self._memory[number * nbytes + extent.start :][: len(extent)]
                reads.append(DirectRead(slot * nbytes + extent.start, into))
                positions.append(at)
        found = [""] * len(slots)
        for at, error in zip(positions, opened.read(reads), strict=True):
            found[at] = found[at] or error
        return found

    def verify(
        self, staged: range, groups: Sequence[int], expected: Sequence[int]
    ) -> list[bool]:
        """Return for each staging slot whether this rank's part has the expected hash.

        Args:
            staged: The staging slots.
            groups: KV cache group of each slot's chunk.
            expected: Hash of this rank's part of each slot.

        Raises:
            KvtierError: The device cannot hash.
        """
        address = self._memory.data_ptr() + staged.start * self._slot_nbytes
        found = self._hasher.hash(self._planner.of_slots(address, groups), len(staged))
        return [int(has) == wants for has, wants in zip(found, expected, strict=True)]

    def copy(self, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        """Copy staging slots to blocks after the fence ``after``; return when all are copied.

        Args:
            plan: The staging slots and the blocks.
            after: Point in the compute stream after which the copies start; None on a CPU.
        """
        if self._stream is None:
            self._copier.load(plan, after=None)
            return
        with self._stream.active():
            try:
                if after is not None:
                    self._stream.follow(after)
                self._copier.load(plan, after=None)
            finally:
                # Also after an error: queued copies still use the buffer and blocks.
                self._stream.record().wait()

    def close(self) -> None:
        """Close the file and release the buffers. Idempotent; no other call may be running."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._file is not None:
            self._file[1].close()
        self._copier.close()
        self._files.release(self._memory)

    def _open(self, file: SlotFileId) -> DirectFile:
        if self._file is None or self._file[0] != file:
            opened = open_slot_file(self._files, file)
            if self._file is not None:
                self._file[1].close()
            self._file = file, opened
        return self._file[1]

    def _read_of(self, staged: range, slots: Sequence[int], some: range) -> DirectRead:
        """Return one read of ``slots[some.start : some.stop]``, which are consecutive."""
        nbytes = self._slot_nbytes
        first = (staged.start + some.start) * nbytes
        into = self._memory[first : first + len(some) * nbytes]
        return DirectRead(slots[some.start] * nbytes, into)

    def _try_hasher(self, stream: CopyStream) -> None:
        """Raise UnsupportedError unless the device computes the same hashes as this process."""
        words = min(_TRIAL_NBYTES, self._memory.numel()) // 8
        content = torch.from_numpy(np.arange(words, dtype=np.int64) * 0x2545F491_4F6CDD1D)
        with stream.active():
            self._memory[: 8 * words].view(torch.int64).copy_(content)
            stream.record().wait()
        staged, here = (
            np.array([[memory.data_ptr(), 7, words, 0]], np.int64)
            for memory in (self._memory, content)
        )
        if self._hasher.hash(staged, 1) != hash_on_host(here):
            raise UnsupportedError("the GPU computes other hashes than the CPU")


def _require_long_ranges(kv: KVBlocks) -> None:
    """Raise UnsupportedError if a rank's ranges of a slot are too short for GDS reads."""
    shortest = min(nbytes for pages in kv.groups for _, nbytes in pages)
    if shortest < SHORTEST_NBYTES:
        raise UnsupportedError(
            f"a rank's part of a page has {approximate_size(shortest)}, which is too short to "
            "read: start vLLM with VLLM_KV_CACHE_LAYOUT=BHLNC or a larger --block-size"
        )
