"""The removal log: why chunks are gone, for the operator who asks.

It is a table in the index with a limit in bytes. A row has a reason and the marks of all keys
that one commit removed for this reason, so evicting a thousand chunks writes one row of 8 KB. A
row's number, ``end``, is the total size of all rows written so far, including this row. So "all
but the newest N bytes" is a range of numbers, and trimming needs no scan.

A mark identifies a key with 8 bytes instead of some 36. It is the key's first 8 bytes, whose
first 4 are exclusive-ored with the group. Unlike a hash, a mark can be computed from the short
form of a key that people see, ``f5b165224a58b791/0``. The group distinguishes the chunks of one
block hash. The group is in the first half of the mark. So the first 8 digits of a key are
enough to decode the group and the short form from a mark.

Block hashes are uniform, so two keys have equal marks with probability 2^-64. A key that was
never stored matches a mark in a full log with probability 2^-44. Such a collision makes one
answer to the operator wrong, and nothing else: no lookup of chunks uses marks.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.keys import GROUP_NBYTES, ChunkKey, group_of
from kvtier.tiers.slab.schema import REMOVAL_LOG_NBYTES, Removal

__all__ = [
    "LIKELY_GROUPS",
    "MARKED_NBYTES",
    "KeyMarks",
    "MarkPattern",
    "RemovalReason",
    "find_marks",
    "make_rows",
    "mark_keys",
]

KeyMarks = npt.NDArray[np.uint64]

LIKELY_GROUPS: Final = 64
"""A pattern without a group matches groups below this; an engine has at most a dozen groups."""

MARKED_NBYTES: Final = 8
"""How many of a key's first bytes are in its mark."""

_ROW_NBYTES: Final = 32  # of a row besides its marks, about
_MOST_MARKS: Final = (REMOVAL_LOG_NBYTES - _ROW_NBYTES) // 8
_MARK_DIGITS: Final = 2 * MARKED_NBYTES
_GROUP_SHIFT: Final = 32
_BEHIND_GROUP: Final = np.uint64((1 << _GROUP_SHIFT) - 1)

Row = tuple[int, int, str, bytes]
"""End, seconds since the epoch, reason, marks as little-endian 64-bit numbers."""


class RemovalReason(enum.Enum):
    """Why a chunk was removed from the tier; the index stores the value."""

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
    """A chunk stored after a reset, perhaps from other weights than the next engine loads."""
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

    def matches(self, marks: KeyMarks) -> npt.NDArray[np.bool_]:
        """Return a mask that is True for each of ``marks`` that matches."""
        digits = self.digits[:_MARK_DIGITS]
        unknown_bits = np.uint64(4 * (_MARK_DIGITS - len(digits)))
        difference = marks ^ np.uint64(self._begin())
        groups = difference >> np.uint64(_GROUP_SHIFT)
        same_digits = (difference & _BEHIND_GROUP) >> unknown_bits == 0
        same_group = groups < LIKELY_GROUPS if self.group is None else groups == self.group
        found: npt.NDArray[np.bool_] = same_digits & same_group
        return found

    def short_of(self, mark: int) -> str:
        """Return the short form of a key from ``mark``; the mark must match this pattern."""
        group = (mark ^ self._begin()) >> _GROUP_SHIFT
        return f"{mark ^ group << _GROUP_SHIFT:016x}/{group}"

    def _begin(self) -> int:
        return int(self.digits[:_MARK_DIGITS].ljust(_MARK_DIGITS, "0"), 16)


def mark_keys(keys: Sequence[ChunkKey]) -> KeyMarks:
    """Return the 64-bit marks that identify ``keys`` in the log; short keys are padded."""
    lengths = set(map(len, keys))
    if len(lengths) != 1 or min(lengths) < MARKED_NBYTES:
        return np.fromiter(map(_mark, keys), dtype=np.uint64, count=len(keys))
    # One engine's keys all have one length: a million of them take some 0.1 s.
    table = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)
    begins = np.ascontiguousarray(table[:, :MARKED_NBYTES]).view(">u8")
    groups = np.ascontiguousarray(table[:, -GROUP_NBYTES:]).view(">u4").astype(np.uint64)
    marks: KeyMarks = begins.astype(np.uint64) ^ groups << np.uint64(_GROUP_SHIFT)
    return marks.ravel()


def _mark(key: ChunkKey) -> int:
    begin = int.from_bytes(key[:MARKED_NBYTES].ljust(MARKED_NBYTES, b"\0"), "big")
    return begin ^ group_of(key) << _GROUP_SHIFT


def make_rows(
    removals: Mapping[RemovalReason, Sequence[KeyMarks]], *, end: int, at: int
) -> list[Row]:
    """Return the rows to append for ``removals``.

    Args:
        removals: Marks of the removed keys, by reason.
        end: Number of the last row so far.
        at: Seconds since the epoch.
    """
    rows: list[Row] = []
    for reason, batches in removals.items():
        packed = np.concatenate(batches)[-_MOST_MARKS:].astype("<u8").tobytes()
        end += _ROW_NBYTES + len(packed)
        rows.append((end, at, reason.value, packed))
    return rows


def find_marks(rows: Iterable[Removal], pattern: MarkPattern) -> dict[int, Removal]:
    """Return the newest removal of each mark that matches ``pattern``.

    Args:
        rows: The removal log, newest first.
        pattern: The keys to look for.
    """
    found: dict[int, Removal] = {}
    for row in rows:
        marks = np.frombuffer(row.key_marks, dtype="<u8")
        for mark in marks[pattern.matches(marks)].tolist():
            found.setdefault(mark, row)
    return found
