"""Merge: copy the chunks of several archives of one cache into one archive.

A chunk that is in several archives is copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvtier.archive.buffers import threads_for
from kvtier.archive.locations import Location
from kvtier.archive.manifest import differences
from kvtier.archive.part import PartHeader
from kvtier.archive.reading import Archive, Damage, PartReader
from kvtier.archive.writing import ArchiveWriter, WrittenPart
from kvtier.errors import ConfigError
from kvtier.os.ordered_calls import run_in_order

__all__ = ["Merged", "merge_archives"]


@dataclass(slots=True)
class Merged:
    """Result of a merge.

    Attributes:
        chunks: Number of copied chunks.
        present: Number of chunks that the target archive had already.
        damaged: Damaged parts and records of the sources. They were not copied.
        archive_chunks: Number of chunks of the whole target archive.
        archive_nbytes: Size in bytes of the whole target archive.
    """

    chunks: int = 0
    present: int = 0
    damaged: list[Damage] = field(default_factory=list)
    archive_chunks: int = 0
    archive_nbytes: int = 0


def merge_archives(
    sources: Sequence[Archive],
    location: Location,
    *,
    compression: str = "none",
    on_progress: Callable[[int], None] = lambda _: None,
) -> Merged:
    """Copy the chunks of ``sources`` into the archive at ``location``. This call blocks.

    Args:
        sources: The archives, at least one, all with chunks of one cache.
        location: The location of the target archive. A missing archive is created.
        compression: ``none`` or ``zstd``.
        on_progress: Called with the number of chunks finished since the last call.

    Raises:
        ConfigError: The sources and the target do not all have chunks of one cache, or the
            target cannot be written.
        OSError: The medium of an archive failed.
    """
    layout = sources[0].manifest.layout
    for source in sources[1:]:
        if differing := differences(source.manifest.layout, layout):
            raise ConfigError(
                f"{source.location} is of another cache than {sources[0].location}: "
                f"{', '.join(differing)}; merge archives of one cache"
            )
    merge = _Merge(Merged(), on_progress, threads_for(layout.slot_nbytes, buffers=4))
    with ArchiveWriter.open(
        location, layout, compression=compression, threads=merge.threads
    ) as writer:
        for source in sources:
            merge.copy(source, writer)
        manifest = writer.finish()
    found = merge.found
    found.archive_chunks, found.archive_nbytes = manifest.chunks, manifest.nbytes
    return found


class _Copied(NamedTuple):
    """Result of copying one part."""

    written: WrittenPart
    damaged: list[Damage]


class _Merge(NamedTuple):
    """The settings and the state of one merge."""

    found: Merged
    on_progress: Callable[[int], None]
    threads: int

    def copy(self, source: Archive, writer: ArchiveWriter) -> None:
        """Copy the chunks of ``source`` that the target archive lacks."""
        calls = self._calls(source, writer)
        for copied in run_in_order(calls, threads=self.threads, name="kvtier-merge"):
            writer.add(copied.written)
            self.found.chunks += copied.written.problems.count("")
            self.found.damaged += copied.damaged
            self.on_progress(len(copied.written.chunks))

    def _calls(self, source: Archive, writer: ArchiveWriter) -> Iterator[Callable[[], _Copied]]:
        reader = PartReader(source.location, self.threads)
        for header in source.headers():
            if isinstance(header, Damage):
                self.found.damaged.append(header)
                self.on_progress(header.chunks)
                continue
            picked = [
                at for at, record in enumerate(header.records) if writer.claim(record.key)
            ]
            self.found.present += len(header.records) - len(picked)
            self.on_progress(len(header.records) - len(picked))
            if picked:
                yield partial(_copy, reader, writer, header, picked)


def _copy(
    reader: PartReader, writer: ArchiveWriter, header: PartHeader, picked: Sequence[int]
) -> _Copied:
    """Copy the ``picked`` records of a part. Several threads may call this at once."""
    damaged = list[Damage]()

    def fill(views: Sequence[memoryview]) -> list[str]:
        with reader.opened(header) as slots:
            damaged.extend(slots.damages(header, picked))
            for view, at in zip(views, picked, strict=True):
                view[:] = slots.views[at]
            return [slots.problems[at] for at in picked]

    slot_nbytes = header.layout.slot_nbytes
    records = [header.records[at]._replace(nbytes=slot_nbytes) for at in picked]
    return _Copied(writer.write_part(records, fill), damaged)
