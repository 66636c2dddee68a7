"""Reads an archive, and reports each damage with its part, record and byte.

Damage never stops the reader. The reader skips and reports a damaged record, and all other
records of the archive can be used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from kvtier.archive.buffers import (
    BufferPool,
    decompress,
    require_compression,
    threads_for,
    views_of,
)
from kvtier.archive.locations import Location, whole_pages
from kvtier.archive.manifest import MANIFEST, Manifest, ManifestError, PartEntry
from kvtier.archive.part import (
    PART_SUFFIX,
    PREFIX_NBYTES,
    PartDamagedError,
    PartHeader,
)
from kvtier.errors import ConfigError
from kvtier.keys import short_key
from kvtier.os.block_io import aligned_buffer
from kvtier.os.ordered_calls import run_in_order
from kvtier.tiers.slab.piece_io import hash_key, select_digest

__all__ = [
    "Archive",
    "Damage",
    "PartReader",
    "Slots",
    "open_archive",
    "read_header",
    "read_manifest",
    "verify_archive",
]

_FIRST_NBYTES: Final = 64 << 10  # most headers are shorter
_HEADER_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged part or record of an archive.

    Attributes:
        part: Name of the part.
        chunks: Number of lost chunks.
        problem: Description of the damage.
        record: Number of the record in the part; None if the whole part is lost.
        offset: First byte of the record in the part.
        key: Short form of the chunk's key; empty if the whole part is lost.
    """

    part: str
    chunks: int
    problem: str
    record: int | None = None
    offset: int = 0
    key: str = ""

    def __str__(self) -> str:
        if self.record is None:
            return f"{self.part}: {self.problem}"
        where = f"record {self.record} at byte {self.offset:,}, chunk {self.key}"
        return f"{self.part}: {where}: {self.problem}"


class Slots(NamedTuple):
    """The slots of a part in memory.

    Attributes:
        views: The slot of each record.
        problems: A message for each record; empty if the record's slot is verified.
    """

    views: Sequence[memoryview]
    problems: Sequence[str]

    def damages(self, header: PartHeader, picked: Sequence[int]) -> list[Damage]:
        """Return a :class:`Damage` for each damaged record among the ``picked`` records."""
        offsets = header.offsets()
        return [
            Damage(
                header.name,
                1,
                self.problems[at],
                at,
                offsets[at],
                short_key(header.records[at].key),
            )
            for at in picked
            if self.problems[at]
        ]


@dataclass(frozen=True, slots=True)
class Archive:
    """A complete archive.

    Attributes:
        location: The location of the archive.
        manifest: The archive's manifest.
        sizes: Size in bytes of each object at ``location``, by the object's name.
    """

    location: Location
    manifest: Manifest
    sizes: Mapping[str, int]

    def headers(self) -> Iterator[PartHeader | Damage]:
        """Yield the header of each part, or a :class:`Damage` if the header cannot be used."""
        calls = (partial(self._header, entry) for entry in self.manifest.parts)
        yield from run_in_order(calls, threads=_HEADER_THREADS, name="kvtier-headers")

    def _header(self, entry: PartEntry) -> PartHeader | Damage:
        if entry.name not in self.sizes:
            return Damage(entry.name, entry.chunks, "it is missing")
        header = read_header(self.location, entry.name, self.sizes[entry.name])
        return Damage(entry.name, entry.chunks, header) if isinstance(header, str) else header


class PartReader:
    """Reads and verifies parts; several threads may use it at once.

    Args:
        location: The location of the archive.
        threads: Number of threads.
    """

    def __init__(self, location: Location, threads: int) -> None:
        self._location = location
        self._buffers = BufferPool(threads)
        self._slots = BufferPool(threads)
        self._digest = select_digest(alone=True)

    @contextlib.contextmanager
    def opened(self, header: PartHeader) -> Iterator[Slots]:
        """Yield the slots of a part. Their memory is valid only in the ``with`` block.

        Raises:
            OSError: The medium failed.
        """
        slot_nbytes, count = header.layout.slot_nbytes, len(header.records)
        with self._buffers.lease(header.nbytes) as buffer, contextlib.ExitStack() as stack:
            read = self._location.read(header.name, buffer)
            if header.compression == "none":
                views = views_of(buffer[header.header_nbytes :], slot_nbytes, count)
            else:
                memory = stack.enter_context(self._slots.lease(count * slot_nbytes))
                views = views_of(memory, slot_nbytes, count)
            problems = [
                self._verify(header, number, view, buffer[start : start + nbytes], read - start)
                for number, (view, start, nbytes) in enumerate(
                    zip(views, header.offsets(), header.sizes(), strict=False)
                )
            ]
            yield Slots(views, problems)

    def _verify(
        self,
        header: PartHeader,
        number: int,
        slot: memoryview,
        stored: memoryview,
        available: int,
    ) -> str:
        """Decompress and verify a record; return a message if the record is damaged.

        Args:
            header: The part's header.
            number: Number of the record in the part.
            slot: Memory for the slot; the same as ``stored`` if the record is not compressed.
            stored: Content of the record.
            available: Number of bytes from the start of the record to the end of the part.
        """
        record = header.records[number]
        if available < record.nbytes:
            return f"the file ends {max(available, 0):,} bytes behind this byte"
        if header.compression != "none" and (problem := decompress(stored, slot)):
            return problem
        same = self._digest(slot, hash_key(record.key)) == record.checksum
        return "" if same else "not the bytes exported"


def open_archive(location: Location) -> Archive:
    """Open the archive at ``location``.

    Raises:
        ConfigError: The archive is missing or incomplete, or its manifest is damaged.
        OSError: The medium failed.
    """
    try:
        sizes = location.names()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{location}: {error.strerror}; name an archive") from error
    return Archive(location, read_manifest(location, sizes), sizes)


def verify_archive(
    archive: Archive, on_progress: Callable[[int], None] = lambda _: None
) -> list[Damage]:
    """Read every record of ``archive``, and return all damage. This call blocks.

    Args:
        archive: The archive.
        on_progress: Called with the number of chunks finished since the last call.

    Raises:
        OSError: The medium failed.
    """
    threads = threads_for(archive.manifest.layout.slot_nbytes, buffers=2)
    reader = PartReader(archive.location, threads)
    damaged = list[Damage]()

    def check(header: PartHeader) -> tuple[int, list[Damage]]:
        with reader.opened(header) as slots:
            return len(slots.views), slots.damages(header, range(len(slots.views)))

    def calls() -> Iterator[Callable[[], tuple[int, list[Damage]]]]:
        for header in archive.headers():
            if isinstance(header, Damage):
                damaged.append(header)
                on_progress(header.chunks)
            else:
                yield partial(check, header)

    for chunks, found in run_in_order(calls(), threads=threads, name="kvtier-verify"):
        damaged += found
        on_progress(chunks)
    return damaged


def read_manifest(location: Location, sizes: Mapping[str, int]) -> Manifest:
    """Return the manifest of the archive at ``location``.

    Raises:
        ConfigError: The manifest is missing or damaged.
        OSError: The medium failed.
    """
    nbytes = sizes.get(MANIFEST)
    if nbytes is None:
        parts = sum(name.endswith(PART_SUFFIX) for name in sizes)
        if not parts:
            raise ConfigError(f"{location} is no archive; name the location of an export")
        remedy = "run the export again, which goes on where it stopped"
        raise ConfigError(f"{location} has {parts} parts and no {MANIFEST}: {remedy}")
    buffer = aligned_buffer(whole_pages(nbytes + 1))
    read = location.read(MANIFEST, buffer) if nbytes else 0
    try:
        return Manifest.from_json(bytes(buffer[:read]))
    except ManifestError as error:
        remedy = f"remove {MANIFEST} and run the export again, or copy the archive again"
        raise ConfigError(f"{location}/{MANIFEST}: {error}; {remedy}") from error


def read_header(location: Location, name: str, nbytes: int) -> PartHeader | str:
    """Return the header of a part, or a message if the header cannot be used.

    Args:
        location: The location of the archive.
        name: Name of the part.
        nbytes: Size in bytes of the part, as reported by the location.

    Raises:
        ConfigError: The part is compressed, and the package for its compression is missing.
        OSError: The medium failed.
    """
    try:
        if not nbytes:
            return "it is empty"
        buffer = aligned_buffer(_FIRST_NBYTES)
        read = location.read(name, buffer)
        header_nbytes = PartHeader.header_nbytes_of(buffer[: min(read, PREFIX_NBYTES)])
        if header_nbytes > min(len(buffer), nbytes):
            if header_nbytes > nbytes:
                return f"it ends at byte {nbytes:,}, within its header"
            buffer = aligned_buffer(header_nbytes)
            read = location.read(name, buffer)
        header = PartHeader.parse(buffer[: min(read, header_nbytes)], name)
    except PartDamagedError as error:
        return str(error)
    require_compression(header.compression)
    if nbytes > header.nbytes:
        return f"it has {nbytes - header.nbytes:,} bytes behind its end"
    return header
