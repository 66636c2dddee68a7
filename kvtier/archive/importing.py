"""Import: copy the chunks of an archive into a cache that no engine uses.

Each chunk is written before its row in the index, as in an engine. So an engine can open the
cache even if the import was killed. A repeated import copies only the chunks that the cache
lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvtier.archive.buffers import threads_for
from kvtier.archive.part import PartHeader
from kvtier.archive.reading import Archive, Damage, PartReader
from kvtier.archive.target import Target, open_target
from kvtier.keys import ChunkKey
from kvtier.os.block_io import IOV_MAX
from kvtier.os.ordered_calls import run_in_order
from kvtier.slot_ranges import consecutive_ranges
from kvtier.tiers.slab.slots import SlotFile

__all__ = ["Imported", "import_chunks"]


@dataclass(slots=True)
class Imported:
    """Result of an import.

    Attributes:
        directory: Directory of the namespace.
        chunks: Number of copied chunks.
        present: Number of chunks that the cache had already.
        left_out: Number of chunks that do not fit into the cache: those with the least recent
            uses.
        damaged: Damaged parts and records of the archive.
    """

    directory: Path
    chunks: int = 0
    present: int = 0
    left_out: int = 0
    damaged: list[Damage] = field(default_factory=list)


class _Assigned(NamedTuple):
    """A record of a part, and the slot that receives this record."""

    record: int
    slot: int


class _Loaded(NamedTuple):
    """Result of copying one part."""

    records: int
    rows: list[tuple[int, ChunkKey, int, int]]
    """Index rows of the written chunks: slot, key, checksum, last use."""
    damaged: list[Damage]


def import_chunks(
    archive: Archive,
    directory: Path,
    *,
    capacity_bytes: int | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Imported:
    """Copy the chunks of ``archive`` into the cache at ``directory``. This call blocks.

    Args:
        archive: The archive.
        directory: The ``path`` of a tier, or the archive's namespace there. The parent of this
            directory must exist.
        capacity_bytes: Largest size in bytes of this model's slots. If None, an existing cache
            keeps its size, and a new cache is as large as the archive.
        on_progress: Called with the number of chunks finished since the last call.

    Raises:
        ConfigError: The directory has another cache, is in use, or cannot be written. The
            message includes a remedy.
        IndexDamagedError: The cache's index cannot be used.
        OSError: The medium of the archive or of the cache failed.
        sqlite3.Error: The index cannot be written.
    """
    with open_target(archive.manifest, directory, capacity_bytes) as target:
        found = Imported(target.directory)
        _Import(archive, target, found).run(on_progress)
        target.finish()
    return found


class _Import:
    """One import. Only the caller's thread changes its state."""

    def __init__(self, archive: Archive, target: Target, found: Imported) -> None:
        self._archive = archive
        self._target = target
        self._found = found
        self._free = target.free_slots()
        slot_nbytes = archive.manifest.layout.slot_nbytes
        self._threads = threads_for(slot_nbytes, buffers=2)
        self._reader = PartReader(archive.location, self._threads)

    def run(self, on_progress: Callable[[int], None]) -> None:
        least_use = self._least_use()
        calls = self._calls(least_use, on_progress)
        for loaded in run_in_order(calls, threads=self._threads, name="kvtier-import"):
            self._target.commit(loaded.rows)
            self._found.chunks += len(loaded.rows)
            self._found.damaged += loaded.damaged
            on_progress(loaded.records)

    def _least_use(self) -> int:
        """Return the earliest last use (a logical time) of the chunks to import.

        The chunks that were used then or later fit into the cache. If all chunks fit, the time
        is 0.
        """
        room = self._target.free_count
        if self._archive.manifest.chunks <= room:
            return 0
        uses = sorted(
            record.last_use
            for header in self._archive.headers()
            if isinstance(header, PartHeader)
            for record in header.records
            if not self._target.has(record.key)
        )
        if len(uses) <= room:
            return 0
        return uses[-room] if room else uses[-1] + 1

    def _calls(
        self, least_use: int, on_progress: Callable[[int], None]
    ) -> Iterator[Callable[[], _Loaded]]:
        for header in self._archive.headers():
            if isinstance(header, Damage):
                self._found.damaged.append(header)
                on_progress(header.chunks)
                continue
            assigned = self._assign(header, least_use)
            on_progress(len(header.records) - len(assigned))
            if assigned:
                yield partial(_load, self._reader, self._target.file, header, assigned)

    def _assign(self, header: PartHeader, least_use: int) -> list[_Assigned]:
        """Return the records to import from a part, each with a free slot."""
        assigned = list[_Assigned]()
        for number, record in enumerate(header.records):
            if self._target.has(record.key):
                self._found.present += 1
                continue
            slot = next(self._free, None) if record.last_use >= least_use else None
            if slot is None:
                self._found.left_out += 1
                continue
            self._target.claim(record.key)
            assigned.append(_Assigned(number, slot))
        return assigned


def _load(
    reader: PartReader, file: SlotFile, header: PartHeader, assigned: Sequence[_Assigned]
) -> _Loaded:
    """Copy records of a part into their slots. Several threads may call this at once."""
    with reader.opened(header) as slots:
        good = [each for each in assigned if not slots.problems[each.record]]
        for group in consecutive_ranges([each.slot for each in good], IOV_MAX):
            some = good[group]
            file.write(some[0].slot, [slots.views[each.record] for each in some])
        damaged = slots.damages(header, [each.record for each in assigned])
    rows = []
    for number, slot in good:
        record = header.records[number]
        rows.append((slot, record.key, record.checksum, record.last_use))
    return _Loaded(len(assigned), rows, damaged)
