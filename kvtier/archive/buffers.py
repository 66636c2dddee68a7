"""Buffers and compression for the threads of an export, an import or a merge.

All three commands work part by part. A part has at most 16 MiB of slots, or one larger slot.
Few parts are in memory at a time, so an archive of any size needs bounded memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from kvtier.archive.locations import whole_pages
from kvtier.errors import ConfigError
from kvtier.os.block_io import aligned_buffer

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "COMPRESSIONS",
    "BufferPool",
    "compress",
    "decompress",
    "record_room_nbytes",
    "require_compression",
    "slots_per_part",
    "threads_for",
    "views_of",
]

COMPRESSIONS: Final = ("none", "zstd")
_PART_NBYTES: Final = 16 << 20
_MOST_SLOTS: Final = 1024  # their keys make a header of some 150 KB
_IN_FLIGHT_NBYTES: Final = 64 << 20
_MOST_THREADS: Final = 4
_LEVEL: Final = 1
"""Compression level. KV is mostly noise, so a higher level takes longer and saves no space."""


class BufferPool:
    """A pool of page-aligned buffers, which several threads lease and return.

    Args:
        count: Largest number of buffers leased at once.
    """

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(count):
            self._free.put(memoryview(b""))

    @contextlib.contextmanager
    def lease(self, nbytes: int) -> Iterator[memoryview]:
        """Wait for a free buffer; yield ``nbytes`` bytes of it, rounded up to whole pages."""
        buffer = self._free.get()
        try:
            if len(buffer) < nbytes:
                buffer = aligned_buffer(whole_pages(nbytes))
            yield buffer[: whole_pages(nbytes)]
        finally:
            self._free.put(buffer)


def slots_per_part(slot_nbytes: int) -> int:
    """Return the largest number of slots that a part may have."""
    return min(_MOST_SLOTS, max(1, _PART_NBYTES // slot_nbytes))


def threads_for(slot_nbytes: int, *, buffers: int = 1) -> int:
    """Return the number of parts to handle at once, each in its own thread.

    Args:
        slot_nbytes: Size in bytes of one slot.
        buffers: Number of buffers that each thread needs. A buffer has the size of a part.
    """
    part_nbytes = slots_per_part(slot_nbytes) * slot_nbytes * buffers
    return max(1, min(_MOST_THREADS, 2 * _IN_FLIGHT_NBYTES // (part_nbytes + 1)))


def views_of(buffer: memoryview, slot_nbytes: int, slots: int) -> list[memoryview]:
    """Return a view of each of the first ``slots`` slots in ``buffer``."""
    return [buffer[at * slot_nbytes : (at + 1) * slot_nbytes] for at in range(slots)]


def require_compression(compression: str) -> None:
    """Check that this process can read and write ``compression``.

    Raises:
        ConfigError: The package for this compression is missing.
    """
    if compression != "none":
        _zstandard()


def record_room_nbytes(compression: str, slot_nbytes: int) -> int:
    """Return the largest possible size of a record in bytes."""
    return slot_nbytes if compression == "none" else slot_nbytes + (slot_nbytes >> 8) + 64


def compress(slots: list[memoryview], into: memoryview) -> list[int]:
    """Compress each slot separately into ``into``, without gaps; return the new sizes."""
    compressor = _zstandard().ZstdCompressor(level=_LEVEL)
    sizes, end = list[int](), 0
    for slot in slots:
        frame = compressor.compress(slot)
        into[end : end + len(frame)] = frame
        end += len(frame)
        sizes.append(len(frame))
    return sizes


def decompress(record: memoryview, into: memoryview) -> str:
    """Decompress a record into a slot; return a message if the record is damaged, else ""."""
    zstandard = _zstandard()
    try:
        slot = zstandard.ZstdDecompressor().decompress(record, max_output_size=len(into))
    except zstandard.ZstdError as error:
        return f"damaged zstd data ({error})"
    if len(slot) != len(into):
        return f"damaged zstd data (a slot of {len(slot)} bytes)"
    into[:] = slot
    return ""


def _zstandard() -> ModuleType:
    try:
        import zstandard  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        remedy = "install it with: pip install 'kvtier[zstd]'"
        raise ConfigError(f"zstd needs the package zstandard; {remedy}") from error
    return zstandard
