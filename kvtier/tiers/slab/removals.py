"""The removal log, which shows the operator why chunks were removed.

The removal log is a table in the index with a limit in bytes. A row has a reason and the marks
of all keys that one commit removed for this reason, so evicting a thousand chunks writes one
row of 8 KB. A row's number, ``end``, is the total size of all rows written so far, including
this row. So all rows before the newest N bytes have numbers below a bound, and can be deleted
without a scan.

A mark identifies a key with 8 bytes instead of some 36. To make a mark, take the key's first 8
bytes, and exclusive-or the first 4 bytes with the group. Unlike a hash, a mark can be computed
from the short form of a key that people see, ``f5b165224a58b791/0``. The group distinguishes
the chunks with the same block hash. The group is in the first half of the mark. So the first 8
digits of a key suffice to decode the group and the short form from a mark.

Block hashes are uniform, so two keys have equal marks with probability 2^-64. A key that was
never stored matches a mark in a full log with probability 2^-44. Such a collision can only make
an answer to the operator wrong: lookups of chunks do not use marks.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.keys import ChunkKey, group_of
from kvtier.tiers.slab.schema import REMOVAL_LOG_NBYTES, Removal

__all__ = [
    "GROUP_SHIFT",
    "LIKELY_GROUPS",
    "MARKED_NBYTES",
    "MarkPattern",
    "PackedMarks",
    "RemovalReason",
    "find_marks",
    "make_rows",
    "pack_marks",
]

PackedMarks = bytes
"""Marks as little-endian 64-bit numbers."""

LIKELY_GROUPS: Final = 64
"""A pattern without a group matches groups below this number; an engine has some dozen groups
at most."""

MARKED_NBYTES: Final = 8
"""Number of bytes from the beginning of a key that are in the key's mark."""

GROUP_SHIFT: Final = 32
"""Position of the group in a mark, in bits."""

_ROW_NBYTES: Final = 32  # of a row besides its marks, about
_MOST_MARKS: Final = (REMOVAL_LOG_NBYTES - _ROW_NBYTES) // 8
_MARK_DIGITS: Final = 2 * MARKED_NBYTES
_BEHIND_GROUP: Final = (1 << GROUP_SHIFT) - 1

Row = tuple[int, int, str, bytes]
"""End, seconds since the epoch, reason, marks as little-endian 64-bit numbers."""


class RemovalReason(enum.Enum):
    """Why a chunk was removed from the tier. The index stores the value."""

    EVICTED = "evicted"
    """Another chunk was written into the chunk's slot."""
    CORRUPT = "corrupt"
    """The chunk's bytes did not match their checksum."""
    BEYOND = "beyond"
    """The slot is past the end of the slot file: the tier shrank, or the file was truncated."""
    DROPPED = "dropped"
    """An operator removed the chunk."""
    RESET = "reset"
    """The cache was reset."""
    AFTER_RESET = "after-reset"
    """The chunk was stored after a reset, perhaps with other weights than the next engine's."""
    DAMAGED = "damaged"
    """The index could not be read; the keys are unknown, so the row has no marks."""


@dataclass(frozen=True, slots=True)
class MarkPattern:
    """Matches marks by the beginning of a key.

    Attributes:
        digits: First 8 or more hex digits of the key; digits after 16 are ignored.
        group: The key's KV cache group; None for any group.
    """

    digits: str
    group: int | None

    def matching(self, marks: Iterable[int]) -> list[int]:
        """Return the matching marks among ``marks``."""
        digits = self.digits[:_MARK_DIGITS]
        unknown_bits = 4 * (_MARK_DIGITS - len(digits))
        begin = self._begin()
        known = (begin & _BEHIND_GROUP) >> unknown_bits
        # Compare the digits after the group first, because they differ for almost all marks.
        likely = [mark for mark in marks if (mark & _BEHIND_GROUP) >> unknown_bits == known]
        return [mark for mark in likely if self._is_group((mark ^ begin) >> GROUP_SHIFT)]

    def _is_group(self, group: int) -> bool:
        return group < LIKELY_GROUPS if self.group is None else group == self.group

    def short_of(self, mark: int) -> str:
        """Return the short form of a key from its mark; ``mark`` must match this pattern."""
        group = (mark ^ self._begin()) >> GROUP_SHIFT
        return f"{mark ^ group << GROUP_SHIFT:016x}/{group}"

    def _begin(self) -> int:
        return int(self.digits[:_MARK_DIGITS].ljust(_MARK_DIGITS, "0"), 16)


def pack_marks(keys: Sequence[ChunkKey]) -> PackedMarks:
    """Return the marks that identify ``keys`` in the log; short keys are padded."""
    return struct.pack(f"<{len(keys)}Q", *map(_mark, keys))


def _mark(key: ChunkKey) -> int:
    begin = int.from_bytes(key[:MARKED_NBYTES].ljust(MARKED_NBYTES, b"\0"), "big")
    return begin ^ group_of(key) << GROUP_SHIFT


def make_rows(
    removals: Mapping[RemovalReason, Sequence[PackedMarks]], *, end: int, at: int
) -> list[Row]:
    """Return new log rows for ``removals``; the log's last position is ``end``.

    ``at`` is the time of the removals, in seconds since the epoch.
    """
    rows: list[Row] = []
    for reason, batches in removals.items():
        packed = b"".join(batches)[-8 * _MOST_MARKS :]
        end += _ROW_NBYTES + len(packed)
        rows.append((end, at, reason.value, packed))
    return rows


def find_marks(rows: Iterable[Removal], pattern: MarkPattern) -> dict[int, Removal]:
    """Return the newest removal of each matching mark; ``rows`` must be newest first."""
    found: dict[int, Removal] = {}
    for row in rows:
        marks = struct.unpack(f"<{len(row.key_marks) // 8}Q", row.key_marks)
        for mark in pattern.matching(marks):
            found.setdefault(mark, row)
    return found
