"""The table of part hashes in the index (:mod:`kvtier.tiers.part_hashes`).

Only engines that use GDS reads create the table; other engines ignore it. A row belongs to the
chunk with the same slot and generation, so a new chunk in the slot makes the row invalid. No
statement deletes old rows, so chunks are written as fast as without the table.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvtier.tiers.part_hashes import StoredPartHashes

__all__ = ["CLEAR", "create", "exists", "keep", "load"]

_SLOTS_PER_STEP: Final = 1 << 16
_DIGITS: Final = 16  # of a hash
_CREATE: Final = """
CREATE TABLE IF NOT EXISTS part_hashes(
    slot INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    hashes TEXT NOT NULL
)
"""
_EXISTS: Final = "SELECT 1 FROM sqlite_master WHERE name = 'part_hashes'"
CLEAR: Final = "DELETE FROM part_hashes"
"""SQL that deletes all rows."""
_KEEP: Final = """
INSERT OR REPLACE INTO part_hashes
SELECT chunks.slot, chunks.generation, json_extract(kept.value, '$[1]')
FROM json_each(?) AS kept CROSS JOIN chunks
WHERE chunks.slot = json_extract(kept.value, '$[0]')
"""
_LOAD: Final = """
SELECT count(*), group_concat(printf('%016x', slot), ''), group_concat(hashes, '')
FROM (SELECT chunks.slot AS slot, hashes
      FROM part_hashes CROSS JOIN chunks
      WHERE part_hashes.slot >= ? AND part_hashes.slot < ? AND length(hashes) = ?
      AND chunks.slot = part_hashes.slot AND chunks.generation = part_hashes.generation)
"""


def create(connection: sqlite3.Connection) -> None:
    """Create the table if it does not exist."""
    connection.execute(_CREATE)


def exists(connection: sqlite3.Connection) -> bool:
    """Return whether the table exists."""
    return connection.execute(_EXISTS).fetchone() is not None


def keep(hashes: Mapping[int, bytes]) -> tuple[str, tuple[str]]:
    """Return an SQL statement that stores the part hashes of each slot with a chunk."""
    rows = [(slot, packed.hex()) for slot, packed in hashes.items()]
    return _KEEP, (json.dumps(rows),)


def load(connection: sqlite3.Connection, capacity_slots: int, parts: int) -> StoredPartHashes:
    """Return the part hashes of the chunks that have ``parts`` hashes each.

    Raises:
        ValueError: A row has no hashes.
    """
    # Commands that read or change an index do not need numpy.
    import numpy as np  # noqa: PLC0415

    from kvtier.tiers.part_hashes import StoredPartHashes  # noqa: PLC0415

    slots = [np.empty(0, np.int64)]
    hashes = [np.empty(0, np.uint64)]
    for first in range(0, capacity_slots, _SLOTS_PER_STEP):
        ends = first, min(first + _SLOTS_PER_STEP, capacity_slots)
        count, numbers, texts = connection.execute(_LOAD, (*ends, _DIGITS * parts)).fetchone()
        if count:
            slots.append(np.frombuffer(bytes.fromhex(numbers), ">i8").astype(np.int64))
            hashes.append(np.frombuffer(bytes.fromhex(texts), "<u8").astype(np.uint64))
    return StoredPartHashes(np.concatenate(slots), np.concatenate(hashes).reshape(-1, parts))
