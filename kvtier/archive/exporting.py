"""Export: copy chunks of a cache into an archive, even while an engine uses the cache.

The chunks of one part are read together, in the order of their slots. Each chunk is compared
with its checksum. A mismatch may mean that the engine has just replaced the chunk. So the
export reads the chunk's index row again a moment later. If the row has changed, the export
skips the chunk; otherwise the chunk is bad.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Final

from kvtier.archive.buffers import threads_for
from kvtier.archive.locations import Location
from kvtier.archive.part import Record
from kvtier.archive.writing import ArchiveWriter, WrittenPart
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.os.block_io import IOV_MAX, BlockIo
from kvtier.os.ordered_calls import run_in_order
from kvtier.slot_ranges import consecutive_ranges
from kvtier.tiers.slab.index_reader import Entry, IndexReader
from kvtier.tiers.slab.inspect import StoredNamespace
from kvtier.tiers.slab.namespace import SLOTS
from kvtier.tiers.slab.piece_io import PieceBuffers, hash_key, read_piece, select_digest
from kvtier.tiers.slab.slots import SlotFile
from kvtier.types import Outcome

__all__ = ["Exported", "export_chunks"]

_ROWS_AT_ONCE: Final = 1 << 14
_SETTLE_S: Final = 2.0  # an engine commits a row much sooner after its payload
_PROBLEMS: Final = {
    Outcome.DONE: "",
    Outcome.FAILED: "unreadable",
    Outcome.CORRUPT: "not the bytes stored",
}


@dataclass(slots=True)
class Exported:
    """Result of an export.

    Attributes:
        chunks: Number of written chunks.
        present: Number of chunks that the archive had already.
        changed: Number of chunks that an engine replaced during the export.
        bad: Bad chunks and their problems. Bad chunks are not exported.
        archive_chunks: Number of chunks of the whole archive.
        archive_nbytes: Size in bytes of the whole archive.
    """

    chunks: int = 0
    present: int = 0
    changed: int = 0
    bad: list[tuple[Entry, str]] = field(default_factory=list)
    archive_chunks: int = 0
    archive_nbytes: int = 0


def export_chunks(
    space: StoredNamespace,
    location: Location,
    *,
    compression: str = "none",
    wanted: Callable[[ChunkKey], bool] = lambda _: True,
    on_progress: Callable[[int], None] = lambda _: None,
    pause: Callable[[float], None] = time.sleep,
) -> Exported:
    """Copy the chunks of ``space`` into the archive at ``location``. This call blocks.

    Args:
        space: The namespace.
        location: The location of the archive. A missing archive is created.
        compression: ``none`` or ``zstd``.
        wanted: Returns whether to export the chunk of a key.
        on_progress: Called with the number of slots finished since the last call.
        pause: Sleeps for the given seconds.

    Raises:
        ConfigError: The cache was reset, so its chunks may belong to other weights. Or the
            archive cannot be written.
        IndexDamagedError: The cache's index cannot be used.
        OSError: The medium of the cache or of the archive failed.
        sqlite3.Error: The cache's index cannot be read now.
    """
    slot_nbytes = space.layout.slot_nbytes
    buffers = 1 if compression == "none" else 2
    threads = threads_for(slot_nbytes, buffers=buffers)
    with IndexReader(space) as reader:
        _require_trusted(space, reader)
        file = SlotFile.open_to_read(space.directory / SLOTS, slot_nbytes, BlockIo())
        try:
            with ArchiveWriter.open(
                location, space.layout, compression=compression, threads=threads
            ) as writer:
                export = _Export(reader, file, writer, slot_nbytes)
                export.run(wanted, on_progress, threads)
                export.classify(pause)
                manifest = writer.finish()
        finally:
            file.close()
    export.found.archive_chunks = manifest.chunks
    export.found.archive_nbytes = manifest.nbytes
    return export.found


class _Export:
    """One export. Only the caller's thread changes its state."""

    def __init__(
        self, reader: IndexReader, file: SlotFile, writer: ArchiveWriter, slot_nbytes: int
    ) -> None:
        self.found = Exported()
        self._reader = reader
        self._file = file
        self._writer = writer
        self._slot_nbytes = slot_nbytes
        self._slots = file.found_nbytes // slot_nbytes
        self._digest = select_digest(alone=True)
        self._suspects: list[tuple[Entry, str]] = []

    def run(
        self,
        wanted: Callable[[ChunkKey], bool],
        on_progress: Callable[[int], None],
        threads: int,
    ) -> None:
        first_use = self._reader.first_use()
        parts: list[Sequence[Entry]] = []

        def calls() -> Iterator[Callable[[], WrittenPart]]:
            entries = self._entries(wanted, on_progress)
            while part := list(islice(entries, self._writer.chunks_per_part)):
                parts.append(part)
                records = [self._record(each, first_use) for each in part]
                yield partial(self._writer.write_part, records, partial(self._fill, part))

        for written in run_in_order(calls(), threads=threads, name="kvtier-export"):
            part = parts.pop(0)
            self._writer.add(written)
            self._suspects += [
                (entry, problem)
                for entry, problem in zip(part, written.problems, strict=True)
                if problem
            ]
            self.found.chunks += written.problems.count("")
            on_progress(len(part))

    def classify(self, pause: Callable[[float], None]) -> None:
        """Record each suspect as bad, or as changed if an engine replaced it meanwhile."""
        if self._suspects and self._reader.live:
            pause(_SETTLE_S)
        for entry, problem in self._suspects:
            rows = self._reader.entries_of_slots(entry.slot, entry.slot + 1)
            if rows and rows[0].generation == entry.generation:
                self.found.bad.append((entry, problem))
            else:
                self.found.changed += 1

    def _entries(
        self, wanted: Callable[[ChunkKey], bool], on_progress: Callable[[int], None]
    ) -> Iterator[Entry]:
        """Yield the chunks to export, in the order of their slots."""
        for first in range(0, self._slots, _ROWS_AT_ONCE):
            end = min(first + _ROWS_AT_ONCE, self._slots)
            rows = self._reader.entries_of_slots(first, end)
            on_progress(end - first - len(rows))
            for entry in rows:
                chosen = wanted(entry.key)
                if chosen and self._writer.claim(entry.key):
                    yield entry
                else:
                    self.found.present += chosen
                    on_progress(1)
        beyond = self._reader.entries_of_slots(self._slots, 1 << 62)
        self.found.bad += [(entry, "behind the end of slots.bin") for entry in beyond]

    def _record(self, entry: Entry, first_use: int) -> Record:
        last_use = max(entry.last_use - first_use, 0)
        return Record(entry.key, entry.checksum, last_use, self._slot_nbytes)

    def _fill(self, entries: Sequence[Entry], views: Sequence[memoryview]) -> list[str]:
        """Read the chunks of ``entries`` into ``views``. Several threads may call this at once.

        Return a message for each chunk; empty if the chunk is good.
        """
        problems = list[str]()
        for group in consecutive_ranges([entry.slot for entry in entries], IOV_MAX):
            some = entries[group]
            piece = PieceBuffers(
                some[0].slot, views[group], [hash_key(entry.key) for entry in some]
            )
            stored = [entry.checksum for entry in some]
            moved = read_piece(self._file, piece, stored, self._digest)
            problems += [_PROBLEMS[outcome] for outcome in moved.outcomes]
        return problems


def _require_trusted(space: StoredNamespace, reader: IndexReader) -> None:
    """Raise ConfigError if the cache was reset: its chunks may belong to other weights."""
    at = reader.reset_at()
    if at is None:
        return
    when = f" at {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" if at else ""
    raise ConfigError(
        f"{space.directory}: the cache was reset{when}, and what was stored since may be of "
        "other weights; start an engine, which drops it, or set keep_after_reset: true if "
        "weights never change while an engine runs"
    )
