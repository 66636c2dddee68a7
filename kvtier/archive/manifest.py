"""The manifest of an archive: its layout, and the list of its parts.

The manifest is written after all parts, so an archive without a manifest is incomplete. A
part's name verifies only this part. The manifest shows whether a part is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import xxhash

from kvtier.tiers.slab.namespace import Layout
from kvtier.types import LayoutFingerprint

__all__ = ["MANIFEST", "Manifest", "ManifestError", "PartEntry", "differences"]

MANIFEST: Final = "manifest.json"
_FORMAT: Final = "kvtier archive"
_VERSION: Final = 1


class ManifestError(ValueError):
    """The text is not a manifest of this version; the message says why."""


class PartEntry(NamedTuple):
    """A part of an archive.

    Attributes:
        name: The part's name.
        nbytes: Size in bytes of the part.
        chunks: Number of chunks in the part.
    """

    name: str
    nbytes: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of a manifest.

    Attributes:
        layout: Describes the bytes of a slot.
        parts: The parts, in the order of their export.
    """

    layout: Layout
    parts: Sequence[PartEntry]

    @property
    def chunks(self) -> int:
        """Number of chunks of all parts."""
        return sum(part.chunks for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Size in bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def to_json(self) -> bytes:
        """Return the manifest and its checksum as JSON."""
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.layout.model,
            "slot_nbytes": self.layout.slot_nbytes,
            "fingerprint": dict(self.layout.fingerprint.fields),
            "groups": [dict(group) for group in self.layout.fingerprint.groups],
            "parts": [part._asdict() for part in self.parts],
        }
        return _dump({**document, "checksum": _checksum(document)})

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Parse and verify the text of a manifest.

        Raises:
            ManifestError: The text is damaged or of another version.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"it is not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ManifestError("it does not describe an archive of kvtier")
        if document.get("version") != _VERSION:
            version = document.get("version")
            raise ManifestError(f"it has version {version}, and this kvtier reads {_VERSION}")
        checksum = document.pop("checksum", None)
        # The manifest is written again and compared, because a changed blank is damage too.
        whole = _dump({**document, "checksum": checksum})
        if checksum != _checksum(document) or whole != text:
            raise ManifestError("its checksum is wrong")
        fingerprint = LayoutFingerprint(
            document["fingerprint"], document["model"], tuple(document.get("groups", ()))
        )
        layout = Layout(fingerprint, document["slot_nbytes"])
        return cls(layout, [PartEntry(**part) for part in document["parts"]])


def differences(theirs: Layout, ours: Layout) -> list[str]:
    """Describe each setting that differs between two caches.

    >>> fields = {"model": "a", "ranks": 1}
    >>> theirs = Layout(LayoutFingerprint(fields), 4096)
    >>> differences(theirs, Layout(LayoutFingerprint({"model": "b", "ranks": 1}), 8192))
    ["model is 'a' there and 'b' here", 'slot_nbytes is 4096 there and 8192 here']
    """
    one, other = _settings(theirs), _settings(ours)
    return [
        f"{name} is {one.get(name)!r} there and {other.get(name)!r} here"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def _settings(layout: Layout) -> Mapping[str, object]:
    return {**layout.fingerprint.fields, "slot_nbytes": layout.slot_nbytes}


def _checksum(document: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(_dump(document))


def _dump(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode() + b"\n"
