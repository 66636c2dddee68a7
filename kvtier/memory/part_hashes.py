"""Hashes of a rank's part of a slot; a GPU and a CPU compute the same hash.

A tier's checksum covers a whole slot and is computed in RAM. A GDS read copies a rank's part of
a slot straight into GPU memory, so the rank cannot use this checksum. Instead, each rank hashes
its part when it stores the chunk, and compares the hash when it reads the chunk.

The hash of a part is the sum of one number for each word of eight bytes, modulo 2**64. The
number depends on the word and on the word's position in the slot. A sum does not depend on the
order, so many instances of a GPU kernel can share the work. If several ranks write one part,
the sums over their words add up to the hash of the part.

For a given position the number is a bijection of the word. So a change within one word always
changes the hash. Any other change stays undetected with probability 2**-64.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvtier.errors import KvtierError, UnsupportedError
from kvtier.logs import get_logger
from kvtier.memory.copy import KVBlocks
from kvtier.memory.copy_plan import BlockCopyPlan
from kvtier.memory.fragments import Pages, locate_pages
from kvtier.memory.slot_layout import Indices, RankShare, RegionGeometry, require_room
from kvtier.memory.streams import Driver

__all__ = [
    "HashPlanner",
    "HashRanges",
    "Hasher",
    "Hashes",
    "StoreHasher",
    "hash_on_host",
    "hash_words",
    "open_hasher",
]

logger = get_logger(__name__)

Hashes: TypeAlias = npt.NDArray[np.uint64]

HashRanges: TypeAlias = npt.NDArray[np.int64]
"""One row per range: its address, the first word's position in the slot, the number of words,
and the chunk's index."""

POSITION_STEP: Final = 0x9E3779B97F4A7C15
FIRST_FACTOR: Final = 0xFF51AFD7ED558CCD
SECOND_FACTOR: Final = 0xC4CEB9FE1A85EC53
FIRST_SHIFT: Final = 32
SECOND_SHIFT: Final = 29

_WORD_NBYTES: Final = 8
_PAGE_NBYTES: Final = 4096
_LONGEST_WORDS: Final = 8192
"""Largest number of words of a range, so that many kernel instances share the work."""
_AT_ONCE: Final = 4096
"""Largest number of ranges of one kernel launch; the tables take 160 KiB of pinned memory."""


class HashPlanner:
    """Finds the byte ranges to hash for one rank's part of each chunk, in blocks or in slots.

    Args:
        kv: The rank's KV memory.
        geometry: The shape of the slots.
        share: The rank's share of each slot.
        blocks_per_chunk: Blocks of a chunk.

    Raises:
        UnsupportedError: A block does not fit its place in the slot, or a page is not made of
            whole words of eight bytes.
    """

    def __init__(
        self,
        kv: KVBlocks,
        geometry: RegionGeometry,
        *,
        share: RankShare,
        blocks_per_chunk: int,
    ) -> None:
        require_room(kv.page_nbytes, geometry, share, blocks_per_chunk)
        self._geometry = geometry
        self._share = share
        self._places = np.arange(blocks_per_chunk)
        self._groups = [locate_pages(kv, pages, share) for pages in kv.groups]
        _require_words(self._groups, geometry)

    def of_blocks(self, plan: BlockCopyPlan) -> HashRanges:
        """Return the ranges to hash in the blocks of ``plan`` that this rank stores."""
        rows = []
        for copy in plan.groups:
            written = self._share.written(copy.blocks)
            mine = copy if written is None else copy.part(written)
            pages = self._groups[copy.group]
            address = pages.first + mine.blocks[:, np.newaxis] * pages.step
            rows.append(self._rows(pages, address, mine.places, plan.slot_indices(mine)))
        return _cut(np.concatenate(rows) if rows else _NONE)

    def of_slots(self, address: int, groups: Sequence[int]) -> HashRanges:
        """Return the ranges to hash in consecutive slots: this rank's part of each slot.

        Args:
            address: Address of the first slot.
            groups: KV cache group of each slot's chunk, slot by slot.
        """
        rows = []
        for chunk, group in enumerate(groups):
            pages = self._groups[group]
            start = address + chunk * self._geometry.slot_nbytes
            blocks = start + self._places[:, np.newaxis] * self._geometry.block_nbytes
            chunks = np.full(len(self._places), chunk)
            rows.append(self._rows(pages, blocks + pages.offset, self._places, chunks))
        return _cut(np.concatenate(rows) if rows else _NONE)

    def extents(self, group: int) -> list[range]:
        """Return the rank's byte ranges of a slot, extended to whole pages of 4 KiB."""
        pages = self._groups[group]
        starts = self._places[:, np.newaxis] * self._geometry.block_nbytes + pages.offset
        ends = starts + pages.nbytes
        merged: list[range] = []
        for start, end in zip(starts.ravel().tolist(), ends.ravel().tolist(), strict=True):
            first = start - start % _PAGE_NBYTES
            last = min(-(-end // _PAGE_NBYTES) * _PAGE_NBYTES, self._geometry.slot_nbytes)
            if merged and first <= merged[-1].stop:
                first, last = merged[-1].start, max(last, merged.pop().stop)
            merged.append(range(first, last))
        return merged

    def _rows(
        self, pages: Pages, address: Indices, places: Indices, chunks: Indices
    ) -> HashRanges:
        """Return one range for each page of each block, from the pages' addresses."""
        at = places[:, np.newaxis] * self._geometry.block_nbytes + pages.offset
        rows = np.empty((address.size, 4), np.int64)
        rows[:, 0] = address.ravel()
        rows[:, 1] = at.ravel() // _WORD_NBYTES
        rows[:, 2] = np.broadcast_to(pages.nbytes // _WORD_NBYTES, address.shape).ravel()
        rows[:, 3] = np.broadcast_to(chunks[:, np.newaxis], address.shape).ravel()
        return rows


def hash_words(words: Hashes, position: int) -> int:
    """Return the hash of consecutive words that begin at ``position`` in a slot.

    >>> words = np.arange(6, dtype=np.uint64)
    >>> parts = hash_words(words[:2], 10) + hash_words(words[2:], 12)
    >>> parts % 2**64 == hash_words(words, 10)
    True
    """
    positions = np.arange(position, position + len(words), dtype=np.uint64)
    mixed = words ^ positions * np.uint64(POSITION_STEP)
    mixed = mixed * np.uint64(FIRST_FACTOR)
    mixed ^= mixed >> np.uint64(FIRST_SHIFT)
    mixed *= np.uint64(SECOND_FACTOR)
    mixed ^= mixed >> np.uint64(SECOND_SHIFT)
    return int(mixed.sum(dtype=np.uint64))


def hash_on_host(ranges: HashRanges) -> Hashes:
    """Return the hash of each range of this process's own memory."""
    sums = np.empty(len(ranges), np.uint64)
    for row, (address, position, words, _) in enumerate(ranges.tolist()):
        memory = (ctypes.c_uint64 * words).from_address(address)
        sums[row] = hash_words(np.frombuffer(memory, np.uint64), position)
    return sums


def _sum_ranges(ranges: HashRanges, sums: Hashes, chunks: int) -> Hashes:
    """Return for each chunk the sum of the hashes of its ranges.

    Args:
        ranges: The ranges.
        sums: The hash of each range.
        chunks: Number of chunks.
    """
    totals = np.zeros(chunks, np.uint64)
    np.add.at(totals, ranges[:, 3], sums)
    return totals


class Hasher(ABC):
    """Hashes ranges of memory. One thread at a time may call the methods."""

    @abstractmethod
    def hash(self, ranges: HashRanges, chunks: int) -> Hashes:
        """Return the hash of each of ``chunks`` chunks; block until all hashes are known.

        Raises:
            KvtierError: The device cannot hash.
        """


class HostHasher(Hasher):
    """Hashes memory of this process."""

    @override
    def hash(self, ranges: HashRanges, chunks: int) -> Hashes:
        return _sum_ranges(ranges, hash_on_host(ranges), chunks)


class DeviceHasher(Hasher):
    """Hashes memory of a GPU, on a separate stream.

    Args:
        driver: The GPU.
    """

    def __init__(self, driver: Driver) -> None:
        self._stream = driver.open_stream()
        self._table = driver.pinned_words(_AT_ONCE, 4)
        self._sums = driver.pinned_words(_AT_ONCE, 1)

    @override
    def hash(self, ranges: HashRanges, chunks: int) -> Hashes:
        totals = np.zeros(chunks, np.uint64)
        with self._stream.active():
            for start in range(0, len(ranges), _AT_ONCE):
                some = ranges[start : start + _AT_ONCE]
                self._table[: len(some)] = some
                self._stream.hash_by_kernel(self._table, self._sums, len(some))
                self._stream.record().wait()
                sums = self._sums[: len(some), 0].view(np.uint64)
                totals += _sum_ranges(some, sums, chunks)
        return totals


def open_hasher(driver: Driver | None) -> Hasher:
    """Return a hasher for a GPU's memory; without a GPU, for this process's memory."""
    return HostHasher() if driver is None else DeviceHasher(driver)


class StoreHasher:
    """Hashes the blocks that a rank stores, so that later GDS reads can be verified.

    Args:
        planner: Finds the ranges to hash.
        driver: The GPU; None on a CPU.
    """

    def __init__(self, planner: HashPlanner, driver: Driver | None) -> None:
        self._planner = planner
        self._hasher = open_hasher(driver)
        self._has_failed = False

    def hash(self, plan: BlockCopyPlan) -> Hashes | None:
        """Return the hash of the bytes that this rank stored in each of ``plan.slots``.

        Call this after the store of ``plan`` has ended, while its blocks are unchanged.

        Returns:
            The hashes; None if the device failed to hash, which is logged once.
        """
        try:
            return self._hasher.hash(self._planner.of_blocks(plan), len(plan.slots))
        except (KvtierError, RuntimeError) as error:
            if not self._has_failed:
                logger.warning("chunks get no hash, so they are loaded through RAM: %s", error)
            self._has_failed = True
            return None


_NONE = np.empty((0, 4), np.int64)


def _require_words(groups: Sequence[Pages], geometry: RegionGeometry) -> None:
    units = [geometry.slot_nbytes, geometry.block_nbytes]
    for pages in groups:
        for numbers in (pages.first, pages.step, pages.offset, pages.nbytes):
            units += numbers.tolist()
    if any(unit % _WORD_NBYTES for unit in units):
        raise UnsupportedError("the pages of the KV cache are not whole words of 8 bytes")


def _cut(ranges: HashRanges) -> HashRanges:
    """Split long ranges, so that each instance of the GPU kernel hashes a short range."""
    counts = -(-ranges[:, 2] // _LONGEST_WORDS)
    cut = np.repeat(ranges, counts, axis=0)
    ends = np.cumsum(counts)
    skipped = (np.arange(len(cut)) - np.repeat(ends - counts, counts)) * _LONGEST_WORDS
    cut[:, 0] += skipped * _WORD_NBYTES
    cut[:, 1] += skipped
    cut[:, 2] = np.minimum(cut[:, 2] - skipped, _LONGEST_WORDS)
    return cut
