"""The trail: why chunks left, for the operator who asks where one has gone.

A log in the index, bounded in bytes. Each row has one reason and the hashes of all keys that
left for it in one commit, so evicting a thousand chunks writes one row of 8 KB. The number of
a row is the length in bytes of all rows ever written up to its end; so "everything but the
newest N bytes" is a range of numbers, and trimming needs no scan.

Hashes instead of keys: 8 bytes instead of some 40. Two keys with one hash, one chance in 2^44
with a full trail, would share their history and nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["TRAIL_NBYTES", "TRAIL_SCHEMA", "KeyHashes", "Reason", "find_hash", "make_rows"]

KeyHashes = npt.NDArray[np.uint64]

TRAIL_NBYTES: Final = 8 << 20
"""What the trail holds, about a million departures, besides the one row that reaches beyond.

That row stays, or the first eviction after a reset of a large cache would wipe out what is
known of the reset. So on disk it is less than twice as much.
"""

TRAIL_SCHEMA: Final = """
CREATE TABLE departures(
    end INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    key_hashes BLOB NOT NULL
);
"""

_ROW_NBYTES: Final = 32  # what a row takes besides its hashes, about
_MOST_HASHES: Final = (TRAIL_NBYTES - _ROW_NBYTES) // 8

Row = tuple[int, int, str, bytes]
"""End, seconds since the epoch, reason, hashes as little-endian 64-bit numbers."""


class Reason(enum.Enum):
    """Why a chunk left the tier. The value is what the index holds."""

    EVICTED = "evicted"
    """Another chunk was written into its slot."""
    CORRUPT = "corrupt"
    """Its bytes were not the bytes stored."""
    BEYOND = "beyond"
    """Its slot is past the end of the slot file: the tier was made smaller."""
    DROPPED = "dropped"
    """An operator removed it."""
    RESET = "reset"
    """The cache was reset."""
    DOUBTED = "doubted"
    """Without checksums, nothing proved that its bytes were still whole."""
    DAMAGED = "damaged"
    """The index could not be read; which chunks it held is not known, so no hash is."""


def make_rows(
    departures: Mapping[Reason, Sequence[KeyHashes]], *, end: int, at: int
) -> list[Row]:
    """Return the rows to append for ``departures``.

    Args:
        departures: What left, by reason.
        end: Number of the last row so far.
        at: Seconds since the epoch.
    """
    rows: list[Row] = []
    for reason, batches in departures.items():
        packed = np.concatenate(batches)[-_MOST_HASHES:].astype("<u8").tobytes()
        end += _ROW_NBYTES + len(packed)
        rows.append((end, at, reason.value, packed))
    return rows


def find_hash(rows: Iterable[tuple[int, str, bytes]], key_hash: int) -> tuple[int, str] | None:
    """Return time and reason of the newest departure of ``key_hash``.

    Args:
        rows: Time, reason and hashes; newest first.
        key_hash: See :func:`kvtier.tiers.slab.checksum.hash_key`.
    """
    for at, reason, packed in rows:
        if (np.frombuffer(packed, dtype="<u8") == key_hash).any():
            return at, reason
    return None
