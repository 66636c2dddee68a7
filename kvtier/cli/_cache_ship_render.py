"""Formats the results of ``kvtier cache export``, ``import``, ``merge`` and ``verify``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from kvtier.archive import Archive, Damage, Exported, Imported, Location, Merged
from kvtier.cli._render import count_chunks
from kvtier.keys import short_key
from kvtier.printable import printable
from kvtier.tiers.slab.inspect import StoredNamespace
from kvtier.tiers.slab.namespace import Layout
from kvtier.units import approximate_duration, approximate_rate, approximate_size

__all__ = ["Report", "report_export", "report_import", "report_merge", "report_verify"]


class Report(NamedTuple):
    """The result of a command.

    Attributes:
        document: The result for JSON.
        lines: The result as text.
        is_bad: Whether the command exits with 1, for example because a chunk is bad.
    """

    document: dict[str, Any]
    lines: list[str]
    is_bad: bool


def report_export(
    location: Location,
    space: StoredNamespace,
    found: Exported,
    missing: Sequence[str],
    seconds: float,
    limit: int,
) -> Report:
    """Return the result of ``export`` with up to ``limit`` bad chunks, or all if 0.

    ``missing`` are the given keys that the cache lacks.
    """
    shown = found.bad[: limit or None]
    document = {
        "archive": str(location),
        "namespace": space.name,
        **_moved_document(found.chunks, space.layout, seconds),
        "present": found.present,
        "changed": found.changed,
        "missing_keys": list(missing),
        "bad": len(found.bad),
        "bad_chunks": [
            {"key": entry.key.hex(), "slot": entry.slot, "problem": problem}
            for entry, problem in shown
        ],
        **_whole_document(found),
    }
    bad = (
        f"{short_key(entry.key)} in slot {entry.slot:,}: {problem}" for entry, problem in shown
    )
    finds_nothing = bool(missing) and not (found.chunks or found.present or found.changed)
    absent = ["none of the given keys is in the cache: write them as `ls` shows them"]
    if not finds_nothing:
        absent = _counted(len(missing), "of the given keys are not in the cache")
    lines = [
        _moved("exported", found.chunks, space.layout, seconds),
        *_counted(found.present, "the archive had already"),
        *_counted(found.changed, "an engine replaced meanwhile"),
        *absent,
        *_listed("bad", bad, len(found.bad) - len(shown)),
        _whole(location, found.archive_chunks, found.archive_nbytes),
    ]
    return Report(document, lines, bool(found.bad) or finds_nothing)


def report_import(archive: Archive, found: Imported, seconds: float, limit: int) -> Report:
    """Return the result of ``import`` with up to ``limit`` bad parts or records; 0: all."""
    layout = archive.manifest.layout
    document = {
        "archive": str(archive.location),
        "directory": str(found.directory),
        **_moved_document(found.chunks, layout, seconds),
        "present": found.present,
        "left_out": found.left_out,
        **_damage_document(found.damaged, limit),
    }
    lines = [
        _moved("imported", found.chunks, layout, seconds),
        *_counted(found.present, "the cache had already"),
        *_counted(found.left_out, "have no room; --capacity gives more"),
        *_damages(found.damaged, limit),
        f"into {printable(str(found.directory))}",
    ]
    return Report(document, lines, bool(found.damaged))


def report_merge(
    location: Location, layout: Layout, found: Merged, seconds: float, limit: int
) -> Report:
    """Return the result of ``merge`` with up to ``limit`` bad parts or records; 0: all."""
    document = {
        "archive": str(location),
        **_moved_document(found.chunks, layout, seconds),
        "present": found.present,
        **_damage_document(found.damaged, limit),
        **_whole_document(found),
    }
    lines = [
        _moved("copied", found.chunks, layout, seconds),
        *_counted(found.present, "the archive had already"),
        *_damages(found.damaged, limit),
        _whole(location, found.archive_chunks, found.archive_nbytes),
    ]
    return Report(document, lines, bool(found.damaged))


def report_verify(
    archive: Archive, damaged: Sequence[Damage], seconds: float, limit: int
) -> Report:
    """Return the result of ``verify`` with up to ``limit`` bad parts or records; 0: all."""
    chunks, nbytes = archive.manifest.chunks, archive.manifest.nbytes
    document = {
        "archive": str(archive.location),
        "chunks": chunks,
        "nbytes": nbytes,
        "seconds": round(seconds, 6),
        **_damage_document(damaged, limit),
    }
    read = f"read in {approximate_duration(seconds)}, {approximate_rate(nbytes / seconds)}"
    lines = [f"{_whole(archive.location, chunks, nbytes)}, {read}", *_damages(damaged, limit)]
    return Report(document, lines, bool(damaged))


def _moved(what: str, chunks: int, layout: Layout, seconds: float) -> str:
    nbytes = chunks * layout.slot_nbytes
    size, time = approximate_size(nbytes), approximate_duration(seconds)
    rate = approximate_rate(nbytes / seconds)
    return f"{what} {count_chunks(chunks)} ({size}) in {time}, {rate}"


def _moved_document(chunks: int, layout: Layout, seconds: float) -> dict[str, Any]:
    nbytes = chunks * layout.slot_nbytes
    return {"chunks": chunks, "nbytes": nbytes, "seconds": round(seconds, 6)}


def _damage_document(damaged: Sequence[Damage], limit: int) -> dict[str, Any]:
    return {
        "damaged": sum(each.chunks for each in damaged),
        "damages": [asdict(each) for each in damaged[: limit or None]],
    }


def _whole_document(found: Exported | Merged) -> dict[str, Any]:
    return {"archive_chunks": found.archive_chunks, "archive_nbytes": found.archive_nbytes}


def _counted(chunks: int, what: str) -> list[str]:
    return [f"{count_chunks(chunks)} {what}"] if chunks else []


def _damages(damaged: Sequence[Damage], limit: int) -> list[str]:
    shown = damaged[: limit or None]
    return _listed("damaged", map(str, shown), len(damaged) - len(shown))


def _listed(what: str, shown: Iterable[str], hidden: int) -> list[str]:
    lines = [f"{what}: {line}" for line in shown]
    return [*lines, f"and {hidden:,} more; --limit 0 lists all"] if hidden else lines


def _whole(location: Location, chunks: int, nbytes: int) -> str:
    return f"{location} has {count_chunks(chunks)} ({approximate_size(nbytes)})"
