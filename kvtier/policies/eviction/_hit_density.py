"""Estimates the hits that a slot earns, by class and age; :mod:`.lhd` explains both."""

from __future__ import annotations

from array import array
from operator import mul
from typing import Final

__all__ = ["AFTER", "KINDS", "TAIL", "HitDensity", "kind_of_new"]

TAIL: Final = 0
"""The class of the last new chunk of a prompt."""
_NEW: Final = 1
_LENGTHS: Final = 5
_USED: Final = _NEW + _LENGTHS
_MOST_USES: Final = 4
KINDS: Final = _USED + _MOST_USES
"""Number of classes."""
AFTER: Final = [max(_USED, min(kind + 1, KINDS - 1)) for kind in range(KINDS)]
"""The class of a chunk after a use, by its class before."""
_BELOW: Final = [
    [],
    *([TAIL] for _ in range(_NEW, _USED)),
    list(range(_USED)),
    *([kind - 1] for kind in range(_USED + 1, KINDS)),
]
"""For each class, the classes whose density is a lower bound; bounds are transitive."""

_PRIOR: Final = 16.0
_FIRST: Final = 4
"""Ages with at most this number of bits share the first octave."""
_TURNS: Final = 4
"""Age in the last octave but one, in turns: a turn is one use per slot of the tier."""
_RENEWALS_PER_TURN: Final = 2
_MIN_INTERVAL: Final = 256
"""Least number of uses between two renewals of the densities."""
_HALF_LIFE: Final = 32
"""Turns after which a count weighs half."""
_BITS: Final = 64
_PARTS: Final = 64
"""Parts of a turn; chunks used last in the same part have the same age."""


def kind_of_new(length: int) -> int:
    """Return the class of new chunks, except the last, of a prompt with ``length`` chunks."""
    return _NEW + min(length.bit_length() // 2, _LENGTHS - 1)


class HitDensity:
    """Counts uses by class and age, and keeps a table of hit densities.

    The keys are also counted by the part of the time in which they were used last. LRU would
    hold the keys of the newest parts, as many as the tier has slots.

    Args:
        capacity: Slots of the tier.

    Attributes:
        table: Hit density by class and bit length of the age, as of the last renewal.
        due: Number of the use at which the next renewal is due.
        reach: LRU would hold the chunks used since this number of uses.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._interval = max(capacity // _RENEWALS_PER_TURN, _MIN_INTERVAL)
        self._keep = 0.5 ** (1 / (_RENEWALS_PER_TURN * _HALF_LIFE))
        octaves = max((_TURNS * capacity).bit_length() - _FIRST, 0) + 2
        bounds = [0, *(1 << (_FIRST + octave) for octave in range(octaves))]
        self._starts = array("q", bounds[:-1])
        self._octaves = bytes(min(max(bits - _FIRST, 0), octaves - 1) for bits in range(_BITS))
        self._widths = array("q", map(int.__sub__, bounds[1:], bounds))
        self._uses, self._reached = (
            [array("d", bytes(8 * octaves)) for _ in range(KINDS)] for _ in range(2)
        )
        self._width = max(capacity // _PARTS, 1)
        self._parts = (bounds[-1] + 2 * self._interval) // self._width + 4
        self._ring = array("q", bytes(8 * KINDS * self._parts))  # chunks by part and class
        self._looked = self._held = 0
        self._cleared = -1  # the newest part that the ring forgot
        self.due = self.reach = 0
        self.table: list[array[float]] = []
        self.renew(0)

    def add(self, kind: int, since: int, count: int, *, to_lru: bool) -> None:
        """Add ``count`` chunks, which LRU may not hold, to class ``kind`` as of ``since``."""
        self._ring[since // self._width % self._parts * KINDS + kind] += count
        if not to_lru:
            return
        self._held += count
        while self.reach + self._width <= since:
            left = self._held - sum(self._counts(self.reach // self._width))
            if left < self._capacity:
                break
            self._held = left
            self.reach += self._width

    def remove(self, kind: int, since: int, count: int) -> None:
        """Remove ``count`` chunks that entered class ``kind`` at ``since``."""
        part = since // self._width
        if part > self._cleared:
            self._ring[part % self._parts * KINDS + kind] -= count

    def lose(self, kind: int, since: int) -> None:
        """Remove a chunk that LRU would have lost too."""
        self.remove(kind, since, 1)
        self._held -= since >= self.reach

    def record_uses(self, kind: int, since: int, now: int, count: int) -> None:
        """Count the use, at ``now``, of ``count`` chunks that leave the class they were in."""
        self.remove(kind, since, count)
        octave = self._octaves[(now - since).bit_length()]
        self._uses[kind][octave] += count
        # The next renewal would have counted the octaves reached since the last.
        age = self._looked - since
        seen = self._octaves[age.bit_length()] + 1 if age > 0 else 0
        for each in range(seen, octave + 1):
            self._reached[kind][each] += count

    def renew(self, now: int) -> None:
        """Recompute the table and reduce the weight of past counts."""
        self._advance(now)
        self.due = now + self._interval
        weights = [_PRIOR * width for width in self._widths]
        times = [self._exposures(kind) for kind in range(KINDS)]
        mean = [
            (sum(uses) + _PRIOR * width / (start + width)) / (sum(spent) + _PRIOR * width)
            for uses, spent, start, width in zip(
                zip(*self._uses, strict=True),
                zip(*times, strict=True),
                self._starts,
                self._widths,
                strict=True,
            )
        ]
        prior = list(map(mul, weights, mean))
        self.table = []
        for uses, spent, lower in zip(self._uses, times, _BELOW, strict=True):
            gains = list(map(float.__add__, uses, prior))
            row = _densities(gains, list(map(float.__add__, spent, weights)))
            row = [row[octave] for octave in self._octaves]
            for kind in lower:
                row = list(map(max, row, self.table[kind]))
            self.table.append(array("d", row))
        for counts in (*self._uses, *self._reached):
            counts[:] = array("d", [self._keep * count for count in counts])

    def _counts(self, part: int) -> array[int]:
        """Return the number of chunks of ``part`` for each class."""
        place = part % self._parts * KINDS
        return self._ring[place : place + KINDS]

    def _advance(self, now: int) -> None:
        """Count the unused chunks that reached an octave since the last call."""
        width, looked = self._width, self._looked
        for octave, start in enumerate(self._starts):
            for part in range(max((looked - start) // width, 0), (now - start) // width):
                for kind, count in enumerate(self._counts(part)):
                    if count:
                        self._reached[kind][octave] += count
        # The parts until the next call take the place of the oldest parts.
        last = now // width + self._interval // width + 2 - self._parts
        for part in range(self._cleared + 1, last + 1):
            if part * width >= self.reach:
                self._held -= sum(self._counts(part))
                self.reach = (part + 1) * width
            place = part % self._parts * KINDS
            self._ring[place : place + KINDS] = array("q", bytes(8 * KINDS))
        self._looked, self._cleared = now, max(self._cleared, last)

    def _exposures(self, kind: int) -> list[float]:
        """Return, for each octave, the chunks that lived there times its length."""
        counts = zip(self._reached[kind], self._uses[kind], self._widths, strict=True)
        return [max(reached - 0.5 * uses, 0.0) * width for reached, uses, width in counts]


def _densities(gains: list[float], times: list[float]) -> list[float]:
    """Return, for each octave, the largest ratio of gain to time of a range from there on."""
    densities = []
    for octave in range(len(gains)):
        best = gained = spent = 0.0
        for gain, time in zip(gains[octave:], times[octave:], strict=True):
            gained += gain
            spent += time
            best = max(best, gained / spent)
        densities.append(best)
    return densities
