"""Groups chunks in classes, and estimates how many hits a slot earns by class and by age.

**Classes.** A chunk that was used twice is used again more often than a chunk used once. The
tail of a prompt is hardly ever used again. A short prompt is used again more often than a long
one. So the class of a used chunk depends on its number of uses. This number survives an
eviction while the key is remembered (as in ARC: Megiddo and Modha, FAST 2003). The class of a
new chunk depends on the length of its prompt, in powers of four. The last new chunk of a prompt
has a separate class, because the next turn continues in the middle of that chunk.

A prefix is used whenever its continuation is used. So the class of a prefix never earns less
than the class of its continuations (:data:`BELOW`). Among equals the deepest chunk of a prompt
is evicted first, so a prefix outlives its continuations.

**Density.** The age of a chunk counts the uses of all chunks since its last use. So ages need
no clock and do not depend on the load. An *octave* is a range of ages from one power of two to
the next. Two counts are kept for every class and octave: the uses at these ages, and the chunks
that passed through the octave unused. The ratio of the counts is the hazard. The *hit density*
is the largest mean hazard over any range of ages that starts at the present age. It is the
number of hits per slot and unit of time if the chunk is kept until the best moment. The idea
and the name come from LHD (Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by
Maximizing Hit Density", NSDI 2018), which averages over all later ages instead.

A prior decides until there is data. The prior is inversely proportional to the age, like LRU,
and weighs as much as :data:`_PRIOR` observations. The mean of all classes is, with the same
weight, the prior of each class.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["AFTER", "BELOW", "KINDS", "NOWHERE", "TAIL", "HitDensity", "kind_of_new"]

NOWHERE: Final = -1
"""The class of chunks that are not in the tier."""
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
BELOW: Final = [
    [],
    *([TAIL] for _ in range(_NEW, _USED)),
    list(range(_USED)),
    *([kind - 1] for kind in range(_USED + 1, KINDS)),
]
"""For each class, the classes whose density is a lower bound; bounds are transitive."""

FloatArray: TypeAlias = NDArray[np.float64]

_PRIOR: Final = 8.0
_FIRST: Final = 4
"""Ages with at most this number of bits share the first octave."""
_YOUNG: Final = 1 << _FIRST
_TURNS: Final = 4
"""Longest age with an octave of its own, in turns: a turn is one use per slot of the tier."""
_BITS: Final = 64
_PARTS: Final = 16
"""Parts of an interval; chunks that enter in the same part have the same age."""
_SLACK: Final = 48
"""Parts by which an interval may be longer than planned."""


def _octave_of(age: int) -> int:
    """Return the octave of ``age``; the octave may be beyond the last octave of a table."""
    return max(age.bit_length() - _FIRST, 0)


class HitDensity:
    """Counts uses by class and age, and keeps a table of hit densities.

    Args:
        capacity: Slots of the tier.
        below: For each class, the classes whose hit density is a lower bound of its own.
        keep: Share of a count that survives a renewal.
        interval: Approximate number of uses between two renewals.

    Attributes:
        octaves: Octaves of the table.
        table: Hit density by class and bit length of the age, as of the last :meth:`renew`.
            Ages beyond the last octave count as the last.
        lowest: The lowest density by class.
    """

    def __init__(
        self, capacity: int, below: Sequence[Sequence[int]], keep: float, interval: int
    ) -> None:
        self._below = below
        self._keep = keep
        self.octaves = _octave_of(_TURNS * capacity) + 2
        bounds = [0] + [1 << (_FIRST + octave) - 1 for octave in range(1, self.octaves + 1)]
        self._starts = np.array(bounds[:-1])
        # Number of chunks by time interval of their entry into a class, and by class: a ring.
        self._classes = len(below)
        self._width = max(interval // _PARTS, 1)
        self._ahead = -(-interval // self._width) + _SLACK
        self._parts = bounds[-2] // self._width + self._ahead + 2
        self._waiting = array("d", bytes(8 * self._parts * self._classes))
        self._waiting_seen = np.frombuffer(self._waiting).reshape(self._parts, self._classes)
        self._past = -1
        self._looked = 0
        self._widths = np.diff(bounds)
        self._weights = _PRIOR * self._widths
        self._prior = self._weights / bounds[1:]
        self._octave_of_bits = np.clip(np.arange(_BITS) - _FIRST, 0, self.octaves - 1)
        self._sums, self._times = np.zeros((2, len(below), self.octaves + 1))
        # Time added to a range: infinite if the range is shorter than two octaves.
        ends = np.arange(self.octaves + 1)
        least = np.minimum(ends[:-1, None] + 2, self.octaves)
        self._too_short = np.where(ends < least, np.inf, 0.0)
        # Plain arrays are fast for single counts; renewals use numpy views of them.
        counts = [array("d", bytes(8 * self.octaves * len(below))) for _ in range(2)]
        self._uses, self._entered = counts
        self._uses_seen, self._entered_seen = (
            np.frombuffer(count).reshape(len(below), self.octaves) for count in counts
        )
        self.table: list[array[float]] = []
        self.lowest: list[float] = []
        self.renew()

    def add(self, kind: int, now: int, count: int) -> None:
        """Add ``count`` chunks that enter class ``kind`` at ``now``."""
        self._waiting[now // self._width % self._parts * self._classes + kind] += count

    def remove(self, kind: int, since: int, count: int) -> None:
        """Remove ``count`` chunks that entered class ``kind`` at ``since``."""
        if since > self._past:
            self._waiting[since // self._width % self._parts * self._classes + kind] -= count

    def record_uses(self, kind: int, since: int, age: int, count: int) -> None:
        """Count the uses of ``count`` chunks, and remove these chunks from their class.

        Args:
            kind: The chunks' class before the use.
            since: Number of the use at which the chunks entered that class.
            age: Uses since then.
            count: Number of chunks.
        """
        self.remove(kind, since, count)
        place = kind * self.octaves
        if age < _YOUNG:
            # Chunks used so soon leave their class before a higher age counts them.
            self._entered[place] += count
        else:
            octave = age.bit_length() - _FIRST
            place += octave if octave < self.octaves else self.octaves - 1
        self._uses[place] += count

    def advance(self, now: int) -> None:
        """Count the unused chunks whose age reached another octave since the last call."""
        part = now // self._width
        parts = np.arange(part - self._parts + 1, part + 1)
        ages = np.array((self._looked, now))[:, None] - (parts + 1) * self._width
        then, today = ages[:, :, None] >= self._starts
        crossed = today & ~then & (parts >= 0)[:, None]
        crossed[:, 0] = crossed[:, 1]
        waiting = self._waiting_seen
        self._entered_seen += waiting[parts % self._parts].T @ crossed
        # Entries of the ring until the next call, which comes before the ring is full.
        ahead = np.arange(part + 1, part + 1 + self._ahead)
        waiting[ahead % self._parts] = 0.0
        self._past = (part - self._parts + self._ahead + 1) * self._width - 1
        self._looked = now

    def renew(self) -> None:
        """Recompute the table and reduce the weight of past counts."""
        uses, entered, weights = self._uses_seen, self._entered_seen, self._weights
        spent = np.maximum(entered - 0.5 * uses, 0.0) * self._widths
        hazards = (uses.sum(0) + self._prior) / (spent.sum(0) + weights)
        table = self._densities(uses + weights * hazards, spent + weights)
        for kind, lower in enumerate(self._below):
            if lower:
                np.maximum(table[kind], table[lower].max(0), out=table[kind])
        self.table = [array("d", row) for row in table[:, self._octave_of_bits]]
        self.lowest = table.min(1).tolist()
        uses *= self._keep
        entered *= self._keep

    def _densities(self, uses: FloatArray, spent: FloatArray) -> FloatArray:
        """Return the hit density for each class and octave.

        The hit density of an octave is the largest mean hazard over a range of two or more
        octaves that starts with the octave.

        Args:
            uses: By class and octave, shape (classes, octaves).
            spent: Slots times time, above zero, shape (classes, octaves).
        """
        sums, times = self._sums, self._times
        uses.cumsum(1, out=sums[:, 1:])
        spent.cumsum(1, out=times[:, 1:])
        gained = sums[:, None, :] - sums[:, :-1, None]
        gained /= times[:, None, :] - times[:, :-1, None] + self._too_short
        best: FloatArray = gained.max(2)
        return best


def kind_of_new(length: int) -> int:
    """Return the class of new chunks, except the last, of a prompt with ``length`` chunks."""
    return _NEW + min(length.bit_length() // 2, _LENGTHS - 1)
