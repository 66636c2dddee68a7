"""The trail: why chunks left, for the operator who asks where one has gone.

A log in the index, bounded in bytes. Each row has one reason and a mark of each key that left
for it in one commit, so evicting a thousand chunks writes one row of 8 KB. The number of a row
is the length in bytes of all rows ever written up to its end; so "everything but the newest N
bytes" is a range of numbers, and trimming needs no scan.

A mark is 8 bytes instead of the 36 or so of a key: the key's first 8 bytes, of which the first
4 are exclusive-ored with its group. It follows from what people see of a key,
``f5b165224a58b791/0``, as a hash of the whole key would not; nobody has the whole key of a
chunk that is gone. The group tells the chunks of one block hash apart, and because it is in the
first half, whoever knows the first 8 digits of a key gets group and short form from its mark.

Block hashes are cryptographic or as evenly spread, so of all pairs of keys one in 2^64 shares
a mark. A key that was never here then shares one with some key of a full trail once in 2^44,
and is said to have left; asked for by fewer than 16 digits, it is more often, and the answer
shows whose mark it was. That is all a collision does: marks answer people's questions, and
nothing is looked up, kept or dropped by them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.keys import GROUP_NBYTES, ChunkKey, group_of

__all__ = [
    "LIKELY_GROUPS",
    "MARKED_NBYTES",
    "TRAIL_NBYTES",
    "TRAIL_SCHEMA_2",
    "TRAIL_SCHEMA_3",
    "Departure",
    "KeyMarks",
    "MarkPattern",
    "Reason",
    "find_hash",
    "find_marks",
    "make_rows",
    "mark_keys",
]

KeyMarks = npt.NDArray[np.uint64]

LIKELY_GROUPS: Final = 64
"""Groups below this are looked for when none is given; an engine has a dozen at most."""

MARKED_NBYTES: Final = 8
"""How many bytes of a key's beginning its mark is made of."""

TRAIL_NBYTES: Final = 8 << 20
"""What the trail holds, about a million departures, besides the one row that reaches beyond.

That row stays, or the first eviction after a reset of a large cache would wipe out what is
known of the reset. So on disk it is less than twice as much.
"""

TRAIL_SCHEMA_2: Final = """
CREATE TABLE departures(
    end INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    key_hashes BLOB NOT NULL
);
"""
TRAIL_SCHEMA_3: Final = """
ALTER TABLE departures ADD COLUMN marked INTEGER NOT NULL DEFAULT 0;
"""
"""Where ``marked`` is 0, a row is of version 2 and has hashes of whole keys in place of marks.

``key_hashes`` keeps its name: somebody may be reading while an engine brings the index up.
"""

_ROW_NBYTES: Final = 32  # what a row takes besides its marks, about
_MOST_MARKS: Final = (TRAIL_NBYTES - _ROW_NBYTES) // 8
_MARK_DIGITS: Final = 2 * MARKED_NBYTES
_GROUP_SHIFT: Final = 32
_BEHIND_GROUP: Final = np.uint64((1 << _GROUP_SHIFT) - 1)

Row = tuple[int, int, str, bytes, int]
"""End, seconds since the epoch, reason, marks as little-endian 64-bit numbers, and 1."""


class Reason(enum.Enum):
    """Why a chunk left the tier. The value is what the index holds."""

    EVICTED = "evicted"
    """Another chunk was written into its slot."""
    CORRUPT = "corrupt"
    """Its bytes were not the bytes stored."""
    BEYOND = "beyond"
    """Its slot is past the end of the slot file: the tier was made smaller, or the file cut."""
    DROPPED = "dropped"
    """An operator removed it."""
    RESET = "reset"
    """The cache was reset."""
    DOUBTED = "doubted"
    """Without checksums, nothing proved that its bytes were still whole."""
    AFTER_RESET = "after-reset"
    """It was stored after a reset, perhaps by other weights than those the next engine had."""
    DAMAGED = "damaged"
    """The index could not be read; which chunks it held is not known, so no mark is."""


@dataclass(frozen=True, slots=True)
class Departure:
    """One row of the trail.

    Attributes:
        at: Seconds since the epoch.
        reason: A value of :class:`Reason`, or one of a later version.
        key_marks: Marks as little-endian 64-bit numbers; empty if they are not known.
        marked: False where they are hashes of whole keys, as an older version wrote them.
    """

    at: int
    reason: str
    key_marks: bytes
    marked: bool

    def numbers(self) -> KeyMarks:
        """Return the marks, or hashes, as numbers."""
        return np.frombuffer(self.key_marks, dtype="<u8")


@dataclass(frozen=True, slots=True)
class MarkPattern:
    """Which marks are meant by a key of which people know the beginning.

    Attributes:
        digits: How the key begins, 8 hex digits or more; those after 16 are not looked at.
        group: Its KV cache group; None for any.
    """

    digits: str
    group: int | None

    def matches(self, marks: KeyMarks) -> npt.NDArray[np.bool_]:
        """Return which of ``marks`` are meant."""
        digits = self.digits[:_MARK_DIGITS]
        unknown_bits = np.uint64(4 * (_MARK_DIGITS - len(digits)))
        apart = marks ^ np.uint64(self._begin())
        groups = apart >> np.uint64(_GROUP_SHIFT)
        alike = (apart & _BEHIND_GROUP) >> unknown_bits == 0
        right = groups < LIKELY_GROUPS if self.group is None else groups == self.group
        found: npt.NDArray[np.bool_] = alike & right
        return found

    def short_of(self, mark: int) -> str:
        """Return the key that left ``mark``, which is meant, as people see keys."""
        group = (mark ^ self._begin()) >> _GROUP_SHIFT
        return f"{mark ^ group << _GROUP_SHIFT:016x}/{group}"

    def _begin(self) -> int:
        return int(self.digits[:_MARK_DIGITS].ljust(_MARK_DIGITS, "0"), 16)


def mark_keys(keys: Sequence[ChunkKey]) -> KeyMarks:
    """Return the mark of each of ``keys``; to one of fewer than 8 bytes zeros are added."""
    lengths = set(map(len, keys))
    if len(lengths) != 1 or min(lengths) < MARKED_NBYTES:
        return np.fromiter(map(_mark, keys), dtype=np.uint64, count=len(keys))
    # One engine's keys are all of one length: a million of them in some 0.1 s.
    table = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)
    begins = np.ascontiguousarray(table[:, :MARKED_NBYTES]).view(">u8")
    groups = np.ascontiguousarray(table[:, -GROUP_NBYTES:]).view(">u4").astype(np.uint64)
    marks: KeyMarks = begins.astype(np.uint64) ^ groups << np.uint64(_GROUP_SHIFT)
    return marks.ravel()


def _mark(key: ChunkKey) -> int:
    begin = int.from_bytes(key[:MARKED_NBYTES].ljust(MARKED_NBYTES, b"\0"), "big")
    return begin ^ group_of(key) << _GROUP_SHIFT


def make_rows(
    departures: Mapping[Reason, Sequence[KeyMarks]], *, end: int, at: int
) -> list[Row]:
    """Return the rows to append for ``departures``.

    Args:
        departures: What left, by reason.
        end: Number of the last row so far.
        at: Seconds since the epoch.
    """
    rows: list[Row] = []
    for reason, batches in departures.items():
        packed = np.concatenate(batches)[-_MOST_MARKS:].astype("<u8").tobytes()
        end += _ROW_NBYTES + len(packed)
        rows.append((end, at, reason.value, packed, 1))
    return rows


def find_marks(rows: Iterable[Departure], pattern: MarkPattern) -> dict[int, Departure]:
    """Return the newest departure of each mark that ``pattern`` means.

    Args:
        rows: The trail, newest first.
        pattern: What to look for.
    """
    found: dict[int, Departure] = {}
    for row in rows:
        if row.marked:
            marks = row.numbers()
            for mark in marks[pattern.matches(marks)].tolist():
                found.setdefault(mark, row)
    return found


def find_hash(rows: Iterable[Departure], key_hash: int) -> Departure | None:
    """Return the newest departure of ``key_hash`` in what an older version wrote.

    Args:
        rows: The trail, newest first.
        key_hash: See :func:`kvtier.tiers.slab.checksum.hash_key`.
    """
    for row in rows:
        if not row.marked and (row.numbers() == key_hash).any():
            return row
    return None
