"""Writes chunks to an archive, part by part.

Chunks that the archive has already are not written again. So an interrupted export continues
where it stopped, and an export to a complete archive adds only new chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, Self

from kvtier.archive.buffers import (
    BufferPool,
    compress,
    record_room_nbytes,
    require_compression,
    slots_per_part,
    views_of,
)
from kvtier.archive.locations import Location
from kvtier.archive.manifest import MANIFEST, Manifest, PartEntry, differences
from kvtier.archive.part import PART_SUFFIX, PartHeader, Record
from kvtier.archive.reading import read_header, read_manifest
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.os.block_io import aligned_buffer
from kvtier.os.ordered_calls import run_in_order
from kvtier.tiers.slab.namespace import Layout
from kvtier.tiers.slab.piece_io import hash_key

__all__ = ["ArchiveWriter", "Fill", "WrittenPart"]

Fill = Callable[[Sequence[memoryview]], Sequence[str]]
"""Reads chunks into slots; returns a message for each chunk, which is empty on success."""

_HEADER_THREADS: Final = 8


class WrittenPart(NamedTuple):
    """Result of writing one part.

    Attributes:
        entry: The part's entry in the manifest; None if no chunk could be written.
        chunks: The chunks that the caller asked to write.
        problems: A message for each chunk; empty if the chunk was written to the part.
    """

    entry: PartEntry | None
    chunks: Sequence[Record]
    problems: Sequence[str]


class ArchiveWriter:
    """Writes parts of one archive, and its manifest at the end.

    Args:
        location: The place of the archive.
        layout: Describes the bytes of a slot.
        compression: ``none`` or ``zstd``.
        threads: Number of threads that call :meth:`write_part` at once.
    """

    def __init__(
        self, location: Location, layout: Layout, compression: str, threads: int
    ) -> None:
        self._location = location
        self._layout = layout
        self._compression = compression
        self._buffers = BufferPool(threads)
        self._slots = BufferPool(threads)
        self._keys: set[int] = set()
        self._parts: dict[str, PartEntry] = {}

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, location: Location, layout: Layout, *, compression: str, threads: int
    ) -> Iterator[Self]:
        """Yield a writer of the archive at ``location``; create a missing archive.

        Raises:
            ConfigError: The location cannot be written, or its archive is damaged or has
                another layout.
            OSError: The medium failed.
        """
        require_compression(compression)
        with location.writing():
            writer = cls(location, layout, compression, threads)
            writer._find_parts()
            yield writer

    @property
    def chunks_per_part(self) -> int:
        """Number of chunks of a full part."""
        return slots_per_part(self._layout.slot_nbytes)

    def claim(self, key: ChunkKey) -> bool:
        """Claim ``key`` and return True; return False if it is stored or claimed already."""
        hashed = hash_key(key)
        if hashed in self._keys:
            return False
        self._keys.add(hashed)
        return True

    def write_part(self, chunks: Sequence[Record], fill: Fill) -> WrittenPart:
        """Write ``chunks`` as one part. Several threads may call this at once.

        Args:
            chunks: At most :attr:`chunks_per_part` chunks. Each chunk's ``nbytes`` is the size
                of a slot.
            fill: Function that reads the slot of each chunk into memory.

        Raises:
            OSError: The medium failed.
        """
        write = self._write_raw if self._compression == "none" else self._write_compressed
        return write(chunks, fill)

    def add(self, written: WrittenPart) -> None:
        """Add a written part to the manifest."""
        if written.entry is not None:
            self._parts[written.entry.name] = written.entry

    def finish(self) -> Manifest:
        """Write and return the manifest, and make the archive durable.

        Raises:
            OSError: The medium failed.
        """
        manifest = Manifest(self._layout, list(self._parts.values()))
        text = manifest.to_json()
        buffer = aligned_buffer(len(text))
        buffer[: len(text)] = text
        self._location.sync()
        self._location.write(MANIFEST, buffer, len(text))
        self._location.sync()
        return manifest

    def _write_raw(self, chunks: Sequence[Record], fill: Fill) -> WrittenPart:
        slot_nbytes = self._layout.slot_nbytes
        room = PartHeader.room_nbytes(self._layout, self._compression, chunks)
        with self._buffers.lease(room + len(chunks) * slot_nbytes) as buffer:
            slots = views_of(buffer[room:], slot_nbytes, len(chunks))
            problems = fill(slots)
            good = [at for at, problem in enumerate(problems) if not problem]
            for to, at in enumerate(good):
                if to != at:
                    slots[to][:] = slots[at]
            entry = self._put(buffer, room, [chunks[at] for at in good])
        return WrittenPart(entry, chunks, problems)

    def _write_compressed(self, chunks: Sequence[Record], fill: Fill) -> WrittenPart:
        slot_nbytes = self._layout.slot_nbytes
        most = record_room_nbytes(self._compression, slot_nbytes)
        longest = [chunk._replace(nbytes=most) for chunk in chunks]
        room = PartHeader.room_nbytes(self._layout, self._compression, longest)
        with (
            self._slots.lease(len(chunks) * slot_nbytes) as memory,
            self._buffers.lease(room + len(chunks) * most) as buffer,
        ):
            slots = views_of(memory, slot_nbytes, len(chunks))
            problems = fill(slots)
            good = [at for at, problem in enumerate(problems) if not problem]
            sizes = compress([slots[at] for at in good], buffer[room:])
            records = [
                chunks[at]._replace(nbytes=nbytes)
                for at, nbytes in zip(good, sizes, strict=True)
            ]
            return WrittenPart(self._put(buffer, room, records), chunks, problems)

    def _put(
        self, buffer: memoryview, room: int, records: Sequence[Record]
    ) -> PartEntry | None:
        """Write one part to the location; return its entry, or None if there are no records.

        The header goes into the first ``room`` bytes of ``buffer``, before the chunks.
        """
        if not records:
            return None
        header = PartHeader.write(buffer[:room], self._layout, self._compression, records)
        self._location.write(header.name, buffer, header.nbytes)
        return PartEntry(header.name, header.nbytes, len(records))

    def _find_parts(self) -> None:
        """Register the parts that are at the location, with or without a manifest."""
        found = self._location.names()
        names = sorted(name for name in found if name.endswith(PART_SUFFIX))
        if MANIFEST in found:
            manifest = read_manifest(self._location, found)
            self._require_same(manifest.layout)
            order = {part.name: at for at, part in enumerate(manifest.parts)}
            names.sort(key=lambda name: order.get(name, len(order)))
        calls = (partial(read_header, self._location, name, found[name]) for name in names)
        headers = run_in_order(calls, threads=_HEADER_THREADS, name="kvtier-headers")
        for name, header in zip(names, headers, strict=True):
            if isinstance(header, str):
                remedy = "remove this part, and run the command again"
                raise ConfigError(f"{self._location}/{name}: {header}; {remedy}")
            self._require_same(header.layout)
            self._keys.update(hash_key(record.key) for record in header.records)
            self._parts[name] = PartEntry(name, header.nbytes, len(header.records))

    def _require_same(self, theirs: Layout) -> None:
        if differing := differences(theirs, self._layout):
            raise ConfigError(
                f"{self._location} has an archive of another cache: {', '.join(differing)}; "
                "name another location"
            )
