"""What a commit changes in the index, and the statements that do it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

from kvtier.keys import ChunkKey
from kvtier.tiers.slab.trail import KeyMarks, Reason

__all__ = ["Change", "Notes", "Row", "Statement", "statements_of"]

_ROWS_PER_STATEMENT: Final = 4096  # five variables each, of the 32766 a statement may have
_NEW_ROW: Final = "(?,?,?,?,?,?1,?1,0)"  # an unnumbered variable follows the largest so far
_FIRST_NEW_ROW: Final = "(?2,?3,?4,?5,?6,?1,?1,0)"
_TOUCH: Final = """
UPDATE chunks SET last_use = max(chunks.last_use, uses.last_use),
                  used_at = ?, hits = chunks.hits + uses.hits
FROM (SELECT json_extract(value, '$[0]') AS slot, json_extract(value, '$[1]') AS last_use,
             json_extract(value, '$[2]') AS hits
      FROM json_each(?)) AS uses
WHERE chunks.slot = uses.slot
"""
_DELETE: Final = "DELETE FROM chunks WHERE slot IN (SELECT value FROM json_each(?))"

Row = tuple[int, ChunkKey, int, int, int]
"""Slot, key, checksum as signed 64 bits, generation, last use."""

Statement = tuple[str, Sequence[object]]
"""SQL and its parameters."""


@dataclass(slots=True)
class Notes:
    """What is worth keeping and may be lost in a crash.

    Attributes:
        uses: Last use of each slot that was touched.
        hits: How often each of them was.
        departures: Marks of the keys that left, by reason.
    """

    uses: dict[int, int] = field(default_factory=dict)
    hits: Counter[int] = field(default_factory=Counter)
    departures: dict[Reason, list[KeyMarks]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.uses or self.departures)

    def use(self, slots: Sequence[int], first_tick: int) -> None:
        """Note one use of each of ``slots``, in this order."""
        self.uses.update(zip(slots, range(first_tick, first_tick + len(slots)), strict=True))
        self.hits.update(slots)

    def unuse(self, slots: Iterable[int]) -> None:
        """Drop the uses of ``slots``: they were another chunk's."""
        if self.uses:
            for slot in slots:
                self.uses.pop(slot, None)
                self.hits.pop(slot, None)

    def depart(self, reason: Reason, key_marks: KeyMarks) -> None:
        """Note that the chunks of these keys left."""
        if key_marks.size or reason is Reason.DAMAGED:
            self.departures.setdefault(reason, []).append(key_marks)


@dataclass(slots=True)
class Change:
    """What the next transaction does, in this order: clear, then rows, then notes.

    Attributes:
        clear: Whether everything older is deleted, durably.
        doubt: Whether ``clear`` also notes that what comes after it is not to be served by
            another engine.
        rows: New row of each slot; None deletes the slot's row.
        notes: Uses and departures.
    """

    clear: bool = False
    doubt: bool = False
    rows: dict[int, Row | None] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)


def statements_of(change: Change, now: int) -> Iterator[Statement]:
    """Return what changes rows: at most three statements for any usual change.

    Args:
        change: What to do.
        now: Seconds since the epoch.
    """
    gone = [slot for slot, row in change.rows.items() if row is None]
    if gone:
        yield _DELETE, (json.dumps(gone),)
    rows = iter([row for row in change.rows.values() if row is not None])
    while batch := list(islice(rows, _ROWS_PER_STATEMENT)):
        marks = ",".join([_FIRST_NEW_ROW, *[_NEW_ROW] * (len(batch) - 1)])
        yield f"INSERT OR REPLACE INTO chunks VALUES {marks}", [now, *chain(*batch)]
    uses, hits = change.notes.uses, change.notes.hits
    if uses:
        listed = list(zip(uses, uses.values(), map(hits.__getitem__, uses), strict=True))
        yield _TOUCH, (now, json.dumps(listed))
