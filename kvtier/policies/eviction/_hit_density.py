"""Estimates the hit density of each class and age; :mod:`.lhd` defines these terms."""

from __future__ import annotations

from array import array
from operator import add
from typing import Final

__all__ = ["AFTER", "KINDS", "NEW_KINDS", "RECOVERED", "TAIL", "USED", "HitDensity"]

RECOVERED: Final = 0
"""The class of chunks of an earlier engine. Their ages are unknown, so their density is 0."""
TAIL: Final = 1
"""The class of the last new chunk of a prompt."""
_NEW: Final = 2
_LENGTHS: Final = 5
USED: Final = _NEW + _LENGTHS
"""The class of chunks that were used once more. Higher classes were used more often."""
_MOST_USES: Final = 4
KINDS: Final = USED + _MOST_USES
"""Number of classes."""
NEW_KINDS: Final = [_NEW + min(bits // 2, _LENGTHS - 1) for bits in range(64)]
"""The class of new chunks, except the last, by the bit length of the prompt's chunks."""
AFTER: Final = [max(USED, min(kind + 1, KINDS - 1)) for kind in range(KINDS)]
"""The class of a chunk after a use, by its class before."""
_BELOW: Final = [
    [],
    *([TAIL] for _ in range(_NEW, USED)),
    list(range(USED)),
    *([kind - 1] for kind in range(USED + 1, KINDS)),
]
"""For each class from ``TAIL`` on, the classes whose density is a lower bound; bounds are
transitive."""

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


class HitDensity:
    """Counts uses by class and age, and computes a table of hit densities.

    All known chunks are also counted by the part of the time in which they were used last. LRU
    would hold the chunks of the newest parts, as many as the tier has slots.

    Args:
        capacity: Slots of the tier.

    Attributes:
        table: Hit density by class and bit length of the age, as of the last renewal.
        renewed: Number of the use at which the table was renewed last.
        due: Number of the use at which the next renewal is due.
        reach: Number of a use; LRU would hold the chunks used since then.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._interval = max(capacity // _RENEWALS_PER_TURN, _MIN_INTERVAL)
        octaves = max((_TURNS * capacity).bit_length() - _FIRST, 0) + 2
        self._starts = [0, *(1 << (_FIRST + octave) for octave in range(octaves - 1))]
        self._lengths = [max(start, 1 << _FIRST) for start in self._starts]
        self._octaves = bytes(min(max(bits - _FIRST, 0), octaves - 1) for bits in range(_BITS))
        # Uses by class and octave, and the time that chunks spent there.
        self._uses = [array("d", bytes(8 * octaves)) for _ in range(KINDS)]
        self._times = [array("d", bytes(8 * octaves)) for _ in range(KINDS)]
        self._width = max(capacity // _PARTS, 1)
        self._parts = 2 * (self._starts[-1] + self._interval) // self._width + 4
        self._ring = array("q", bytes(8 * KINDS * self._parts))  # chunks by part and class
        self._held = 0
        self._cleared = -1  # the newest part that the ring forgot
        self.renewed = self.due = self.reach = 0
        self.table: list[array[float]] = []
        self.renew(0)

    def add(self, kind: int, since: int, count: int) -> None:
        """Add ``count`` chunks, last used at ``since``, to class ``kind``."""
        self._ring[since // self._width % self._parts * KINDS + kind] += count
        if since >= self.reach:
            self._held += count
        while self._held > self._capacity and self.reach + self._width <= since:
            left = self._held - sum(self._counts(self.reach // self._width))
            if left < self._capacity:
                break
            self._held = left
            self.reach += self._width

    def remove(self, kind: int, since: int, count: int) -> None:
        """Remove ``count`` chunks, last used at ``since``, from class ``kind``."""
        part = since // self._width
        if part > self._cleared:
            self._ring[part % self._parts * KINDS + kind] -= count
            if since >= self.reach:
                self._held -= count

    def record_uses(self, kind: int, since: int, now: int, count: int) -> None:
        """Count a use of ``count`` chunks at ``now``; remove the chunks from class ``kind``."""
        self.remove(kind, since, count)
        octave = self._octaves[(now - since).bit_length()]
        self._uses[kind][octave] += count
        # The next renewal would have counted the octaves reached since the last.
        age = self.renewed - (since // self._width + 1) * self._width
        seen = self._octaves[age.bit_length()] + 1 if age >= 0 else 0
        for each in range(seen, octave + 1):
            self._times[kind][each] += count * self._lengths[each]
        self._times[kind][octave] -= 0.5 * count * self._lengths[octave]

    def renew(self, now: int) -> None:
        """Recompute the table and reduce the weight of past counts."""
        self._count_survivors(now)
        self.due = now + self._interval
        prior_times = [_PRIOR * length for length in self._lengths]
        prior_uses = [
            time * (sum(uses) + time / (start + length)) / (max(sum(times), 0.0) + time)
            for time, uses, times, start, length in zip(
                prior_times,
                zip(*self._uses[TAIL:], strict=True),
                zip(*self._times[TAIL:], strict=True),
                self._starts,
                self._lengths,
                strict=True,
            )
        ]
        self.table = [array("d", bytes(8 * _BITS))]
        known = zip(self._uses[TAIL:], self._times[TAIL:], _BELOW, strict=True)
        for all_uses, all_times, below in known:
            gains = list(map(add, all_uses, prior_uses))
            row = _densities(gains, list(map(add, all_times, prior_times)))
            row = [row[octave] for octave in self._octaves]
            for kind in below:
                row = list(map(max, row, self.table[kind]))
            self.table.append(array("d", row))
        keep = 0.5 ** (1 / (_RENEWALS_PER_TURN * _HALF_LIFE))
        for counts in (*self._uses, *self._times):
            counts[:] = array("d", [keep * count for count in counts])

    def _counts(self, part: int) -> array[int]:
        """Return, for each class, the number of chunks that were last used in ``part``."""
        place = part % self._parts * KINDS
        return self._ring[place : place + KINDS]

    def _count_survivors(self, now: int) -> None:
        """Count, for each octave, the unused chunks that reached it since the last call."""
        width, looked = self._width, self.renewed
        for octave, start in enumerate(self._starts):
            for part in range(max((looked - start) // width, 0), (now - start) // width):
                for kind, count in enumerate(self._counts(part)):
                    if count:
                        self._times[kind][octave] += count * self._lengths[octave]
        # The parts until the next call take the place of the oldest parts.
        last = now // width + self._interval // width + 2 - self._parts
        for part in range(self._cleared + 1, last + 1):
            if part * width >= self.reach:
                self._held -= sum(self._counts(part))
                self.reach = (part + 1) * width
            place = part % self._parts * KINDS
            self._ring[place : place + KINDS] = array("q", bytes(8 * KINDS))
        self.renewed, self._cleared = now, max(self._cleared, last)


def _densities(gains: list[float], times: list[float]) -> list[float]:
    """Return, for each octave, the largest gain per time of all ranges that start there."""
    densities = []
    for octave in range(len(gains)):
        best = gained = spent = 0.0
        for gain, time in zip(gains[octave:], times[octave:], strict=True):
            gained += gain
            spent += time
            best = max(best, gained / spent)
        densities.append(best)
    return densities
