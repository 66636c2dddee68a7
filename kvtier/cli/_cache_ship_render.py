"""Formats the results of ``kvtier cache export``, ``import`` and ``merge``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvtier.archive import Damage, Exported, Imported, Merged
from kvtier.archive.manifest import Manifest
from kvtier.cli._render import count_chunks
from kvtier.keys import short_key
from kvtier.printable import printable
from kvtier.tiers.slab.inspect import StoredNamespace
from kvtier.tiers.slab.namespace import Layout
from kvtier.units import approximate_duration, approximate_rate, approximate_size

__all__ = ["ExportReport", "ImportReport", "MergeReport", "VerifyReport"]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of ``export``."""

    location: str
    space: StoredNamespace
    found: Exported
    missing: Sequence[str]
    seconds: float

    @property
    def is_bad(self) -> bool:
        """Whether the cache has bad chunks, or has none of the given keys."""
        return bool(self.found.bad) or self._finds_nothing

    @property
    def _finds_nothing(self) -> bool:
        found = self.found
        return bool(self.missing) and not (found.chunks or found.present or found.changed)

    def as_dict(self, limit: int) -> dict[str, Any]:
        """Return the result as a dict for JSON."""
        found = self.found
        bad = [
            {"key": entry.key.hex(), "slot": entry.slot, "problem": problem}
            for entry, problem in found.bad[: limit or None]
        ]
        return {
            "archive": self.location,
            "namespace": self.space.name,
            **_moved_document(found.chunks, self.space.layout, self.seconds),
            "present": found.present,
            "changed": found.changed,
            "missing_keys": list(self.missing),
            "bad": len(found.bad),
            "bad_chunks": bad,
            "archive_chunks": found.archive_chunks,
            "archive_nbytes": found.archive_nbytes,
        }

    def lines(self, limit: int) -> list[str]:
        """Return the result as lines of text."""
        found = self.found
        bad = [
            f"{short_key(entry.key)} in slot {entry.slot:,}: {problem}"
            for entry, problem in found.bad
        ]
        return [
            _moved("exported", found.chunks, self.space.layout, self.seconds),
            *_counted(found.present, "the archive had already"),
            *_counted(found.changed, "an engine replaced meanwhile"),
            *self._missing_lines(),
            *_listed("bad", bad, limit),
            _whole(self.location, found.archive_chunks, found.archive_nbytes),
        ]

    def _missing_lines(self) -> list[str]:
        if self._finds_nothing:
            return ["none of the given keys is in the cache: write them as `ls` shows them"]
        return list(_counted(len(self.missing), "of the given keys are not in the cache"))


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of ``import``."""

    archive: str
    layout: Layout
    found: Imported
    seconds: float

    @property
    def is_bad(self) -> bool:
        """Whether the archive is damaged."""
        return bool(self.found.damaged)

    def as_dict(self, limit: int) -> dict[str, Any]:
        """Return the result as a dict for JSON."""
        return {
            "archive": self.archive,
            "directory": str(self.found.directory),
            **_moved_document(self.found.chunks, self.layout, self.seconds),
            "present": self.found.present,
            "left_out": self.found.left_out,
            **_damage_document(self.found.damaged, limit),
        }

    def lines(self, limit: int) -> list[str]:
        """Return the result as lines of text."""
        found = self.found
        return [
            _moved("imported", found.chunks, self.layout, self.seconds),
            *_counted(found.present, "the cache had already"),
            *_counted(found.left_out, "have no room; --capacity gives more"),
            *_listed("damaged", list(map(str, found.damaged)), limit),
            f"into {printable(str(found.directory))}",
        ]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The result of ``merge``."""

    location: str
    layout: Layout
    found: Merged
    seconds: float

    @property
    def is_bad(self) -> bool:
        """Whether one of the merged archives is damaged."""
        return bool(self.found.damaged)

    def as_dict(self, limit: int) -> dict[str, Any]:
        """Return the result as a dict for JSON."""
        return {
            "archive": self.location,
            **_moved_document(self.found.chunks, self.layout, self.seconds),
            "present": self.found.present,
            **_damage_document(self.found.damaged, limit),
            "archive_chunks": self.found.archive_chunks,
            "archive_nbytes": self.found.archive_nbytes,
        }

    def lines(self, limit: int) -> list[str]:
        """Return the result as lines of text."""
        found = self.found
        return [
            _moved("copied", found.chunks, self.layout, self.seconds),
            *_counted(found.present, "the archive had already"),
            *_listed("damaged", list(map(str, found.damaged)), limit),
            _whole(self.location, found.archive_chunks, found.archive_nbytes),
        ]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of ``verify`` for an archive."""

    location: str
    manifest: Manifest
    damaged: Sequence[Damage]
    seconds: float

    @property
    def is_bad(self) -> bool:
        """Whether the archive is damaged."""
        return bool(self.damaged)

    def as_dict(self, limit: int) -> dict[str, Any]:
        """Return the result as a dict for JSON."""
        return {
            "archive": self.location,
            "chunks": self.manifest.chunks,
            "nbytes": self.manifest.nbytes,
            "seconds": round(self.seconds, 6),
            **_damage_document(self.damaged, limit),
        }

    def lines(self, limit: int) -> list[str]:
        """Return the result as lines of text."""
        rate = approximate_rate(self.manifest.nbytes / self.seconds)
        whole = _whole(self.location, self.manifest.chunks, self.manifest.nbytes)
        return [
            f"{whole}, read in {approximate_duration(self.seconds)}, {rate}",
            *_listed("damaged", list(map(str, self.damaged)), limit),
        ]


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


def _counted(chunks: int, what: str) -> list[str]:
    return [f"{count_chunks(chunks)} {what}"] if chunks else []


def _listed(what: str, lines: Sequence[str], limit: int) -> list[str]:
    shown = [f"{what}: {line}" for line in lines[: limit or None]]
    if hidden := len(lines) - len(shown):
        shown.append(f"and {hidden:,} more; --limit 0 lists all")
    return shown


def _whole(location: str, chunks: int, nbytes: int) -> str:
    return f"{location} has {count_chunks(chunks)} ({approximate_size(nbytes)})"
