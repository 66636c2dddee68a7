"""A part of an archive: a header that describes some chunks, then their bytes.

::

    0         8         12              16       24                         header_nbytes
    +---------+---------+---------------+--------+-------------------------+---------
    | magic   | version | header_nbytes | digest | JSON, blanks to a page  | records
    +---------+---------+---------------+--------+-------------------------+---------

Numbers are little-endian. The digest is the XXH3 of all other bytes of the header. The digest
is also the part's name, so different parts have different names. Like a cache's index, the
header has the checksum of each record's slot. So the name verifies every byte of the part.

A record is the content of one chunk's slot, either unchanged or compressed. There is no padding
between records.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple, Self

import xxhash

from kvtier.keys import ChunkKey
from kvtier.os.block_io import PAGE_NBYTES
from kvtier.tiers.slab.namespace import Layout
from kvtier.types import LayoutFingerprint

__all__ = ["PART_SUFFIX", "PREFIX_NBYTES", "PartDamagedError", "PartHeader", "Record"]

PART_SUFFIX: Final = ".kvtier"
PREFIX_NBYTES: Final = 24
_MAGIC: Final = b"kvtpart\n"
_VERSION: Final = 1
_PREFIX: Final = struct.Struct("<8sIIQ")
_DIGEST_AT: Final = 16
_COLUMNS: Final = ("keys", "checksums", "last_use", "nbytes")


class PartDamagedError(ValueError):
    """The header of a part cannot be used; the message has the reason."""


class Record(NamedTuple):
    """One chunk of a part.

    Attributes:
        key: The chunk's key.
        checksum: Unsigned checksum of the chunk's slot, the same as in a cache's index.
        last_use: Logical time of the chunk's last use; larger is more recent.
        nbytes: Size in bytes of the record.
    """

    key: ChunkKey
    checksum: int
    last_use: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PartHeader:
    """The header of a part.

    Attributes:
        layout: Describes the bytes of a slot.
        compression: ``none`` or ``zstd``.
        records: The chunks, in the order of their records.
        header_nbytes: Size in bytes of the header, a multiple of the page size.
        digest: The part's digest.
    """

    layout: Layout
    compression: str
    records: Sequence[Record]
    header_nbytes: int
    digest: int

    @property
    def name(self) -> str:
        """The part's name in the archive."""
        return f"{self.digest:016x}{PART_SUFFIX}"

    @property
    def nbytes(self) -> int:
        """Size in bytes of the whole part."""
        return self.header_nbytes + sum(self.sizes())

    def sizes(self) -> list[int]:
        """Return the number of bytes of each record."""
        return [record.nbytes for record in self.records]

    def offsets(self) -> list[int]:
        """Return the offset of each record, followed by the end of the part."""
        return list(accumulate(self.sizes(), initial=self.header_nbytes))

    @classmethod
    def write(
        cls, into: memoryview, layout: Layout, compression: str, records: Sequence[Record]
    ) -> Self:
        """Write the header of ``records`` to the pages ``into``, and return the header.

        Raises:
            ValueError: The header is longer than ``into``.
        """
        text = _to_json(layout, compression, records)
        if PREFIX_NBYTES + len(text) > len(into):
            raise ValueError(f"a header of {len(text)} bytes does not fit {len(into)}")
        into[PREFIX_NBYTES:] = text.ljust(len(into) - PREFIX_NBYTES)
        _PREFIX.pack_into(into, 0, _MAGIC, _VERSION, len(into), 0)
        digest = _digest(into)
        _PREFIX.pack_into(into, 0, _MAGIC, _VERSION, len(into), digest)
        return cls(layout, compression, records, len(into), digest)

    @classmethod
    def room_nbytes(cls, layout: Layout, compression: str, records: Sequence[Record]) -> int:
        """Return the header's size in bytes for ``records``, rounded up to whole pages."""
        nbytes = PREFIX_NBYTES + len(_to_json(layout, compression, records))
        return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES

    @staticmethod
    def header_nbytes_of(prefix: bytes | memoryview) -> int:
        """Return the size of the header from the first :data:`PREFIX_NBYTES` bytes of a part.

        Raises:
            PartDamagedError: ``prefix`` is not the beginning of a part of this version.
        """
        if len(prefix) < PREFIX_NBYTES:
            raise PartDamagedError(f"it ends at byte {len(prefix)}, within its header")
        magic, version, header_nbytes, _ = _PREFIX.unpack_from(prefix)
        if magic != _MAGIC:
            raise PartDamagedError("it does not begin as a part of an archive")
        if version != _VERSION:
            raise PartDamagedError(
                f"it has version {version}, and this kvtier reads {_VERSION}"
            )
        if not header_nbytes or header_nbytes % PAGE_NBYTES:
            raise PartDamagedError(f"its header cannot have {header_nbytes} bytes")
        return int(header_nbytes)

    @classmethod
    def parse(cls, header: bytes | memoryview, name: str) -> Self:
        """Parse and verify the header of the part ``name``.

        Raises:
            PartDamagedError: The header is damaged, or belongs to another part.
        """
        header_nbytes = cls.header_nbytes_of(header[:PREFIX_NBYTES])
        if len(header) < header_nbytes:
            raise PartDamagedError(f"it ends at byte {len(header)}, within its header")
        *_, digest = _PREFIX.unpack_from(header)
        if _digest(header) != digest or name != f"{digest:016x}{PART_SUFFIX}":
            raise PartDamagedError("its header's checksum is wrong")
        document = json.loads(bytes(header[PREFIX_NBYTES:]))
        records = [
            Record(bytes.fromhex(key), *numbers)
            for key, *numbers in zip(*(document[name] for name in _COLUMNS), strict=True)
        ]
        fingerprint = LayoutFingerprint(document["fingerprint"], document["model"])
        layout = Layout(fingerprint, document["slot_nbytes"])
        return cls(layout, document["compression"], records, header_nbytes, digest)


def _digest(header: bytes | memoryview) -> int:
    state = xxhash.xxh3_64(header[:_DIGEST_AT])
    state.update(header[PREFIX_NBYTES:])
    return state.intdigest()


def _to_json(layout: Layout, compression: str, records: Sequence[Record]) -> bytes:
    document: dict[str, Any] = {
        "model": layout.model,
        "slot_nbytes": layout.slot_nbytes,
        "fingerprint": dict(layout.fingerprint.fields),
        "compression": compression,
        "keys": [record.key.hex() for record in records],
        "checksums": [record.checksum for record in records],
        "last_use": [record.last_use for record in records],
        "nbytes": [record.nbytes for record in records],
    }
    return json.dumps(document, separators=(",", ":")).encode()
