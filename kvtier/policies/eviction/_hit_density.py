"""How many hits a slot earns with a chunk of some class and age, learned from every use.

The age of a chunk is the number of uses of any chunk since its own last one, so it needs no
clock and means the same at any load. Ages are counted in octaves. For every class and octave
two things are counted: the uses that came at that age, and the chunks that passed through it
unused. Their ratio is the hazard. What an eviction wants to know is the *hit density*: the
hits to be had per slot and unit of time, if the chunk is kept until the best moment to give it
up. It is the largest mean hazard over any stretch of ages from the present one on, which for
a chunk whose time has not come yet looks ahead to it. The idea and the name are LHD's
(Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI
2018), which takes the mean over the whole rest of life instead.

Classes are ordered: a prefix is used whenever what continues it is, so the class that a prefix
can be in must never be worth less than one its continuations can be in, or noise would strand
these. Estimates that say otherwise are raised to the lower class's.

Where little was seen a prior speaks. It falls with one over the age, which makes recency the
best guess, with the weight of :data:`_PRIOR` observations; classes with little data are drawn
to the mean of all in the same way.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["HitDensity"]

FloatArray: TypeAlias = NDArray[np.float64]

_PRIOR: Final = 8.0
_FIRST: Final = 4
"""Bits of the ages that share the first octave."""
_YOUNG: Final = 1 << _FIRST
_TURNS: Final = 4
"""Longest age that is told apart, in turns of the tier."""
_BITS: Final = 64
_PARTS: Final = 16
"""Parts of an interval that are told apart by age."""
_SLACK: Final = 48
"""Parts that an interval may be longer than it should."""


def _octave_of(age: int) -> int:
    """Return the octave of ``age``, in uses; a table may be shorter than that."""
    return max(age.bit_length() - _FIRST, 0)


class HitDensity:
    """Learns from uses; answers with a table.

    Args:
        capacity: Slots of the tier.
        below: For each class the lower classes it must not be worth less than.
        keep: What a count keeps of itself each time the table is renewed.
        interval: Uses between two times that it is renewed, or little more.

    Attributes:
        octaves: Octaves of the table.
        table: Hit density by class and bits of the age; as it was at the last :meth:`learn`.
            Ages beyond the last octave count as the last.
        lowest: The least of it by class.
    """

    def __init__(
        self, capacity: int, below: Sequence[Sequence[int]], keep: float, interval: int
    ) -> None:
        self._below = below
        self._keep = keep
        self.octaves = _octave_of(_TURNS * capacity) + 2
        bounds = [0] + [1 << (_FIRST + octave) - 1 for octave in range(1, self.octaves + 1)]
        self._starts = np.array(bounds[:-1])
        # Chunks by part of the time in which they came to their class, and by class: a ring.
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
        # What is added to the time of a stretch that ends before the octave after its first.
        ends = np.arange(self.octaves + 1)
        least = np.minimum(ends[:-1, None] + 2, self.octaves)
        self._too_short = np.where(ends < least, np.inf, 0.0)
        # Counted in plain arrays, which is fast one by one, and renewed through numpy's views.
        counts = [array("d", bytes(8 * self.octaves * len(below))) for _ in range(2)]
        self._uses, self._entered = counts
        self._uses_seen, self._entered_seen = (
            np.frombuffer(count).reshape(len(below), self.octaves) for count in counts
        )
        self.table: list[array[float]] = []
        self.lowest: list[float] = []
        self.learn()

    def came(self, kind: int, now: int, count: int) -> None:
        """Note that ``count`` chunks are of class ``kind`` since ``now``."""
        self._waiting[now // self._width % self._parts * self._classes + kind] += count

    def went(self, kind: int, since: int, count: int) -> None:
        """Note that ``count`` chunks of class ``kind`` since ``since`` are so no more."""
        if since > self._past:
            self._waiting[since // self._width % self._parts * self._classes + kind] -= count

    def used(self, kind: int, since: int, age: int, count: int) -> None:
        """Note that ``count`` chunks that were of class ``kind`` since ``since`` were used.

        Args:
            kind: The class they had.
            since: When they came to it.
            age: How long ago that is.
            count: How many.
        """
        self.went(kind, since, count)
        place = kind * self.octaves
        if age < _YOUNG:
            # Those that are used that soon are not there to be counted when they grow older.
            self._entered[place] += count
        else:
            octave = age.bit_length() - _FIRST
            place += octave if octave < self.octaves else self.octaves - 1
        self._uses[place] += count

    def grow_older(self, now: int) -> None:
        """Note which chunks came to another octave unused since the last time."""
        part = now // self._width
        parts = np.arange(part - self._parts + 1, part + 1)
        ages = np.array((self._looked, now))[:, None] - (parts + 1) * self._width
        then, today = ages[:, :, None] >= self._starts
        crossed = today & ~then & (parts >= 0)[:, None]
        crossed[:, 0] = crossed[:, 1]
        waiting = self._waiting_seen
        self._entered_seen += waiting[parts % self._parts].T @ crossed
        # Room for the parts until the next time, which must be sooner than they take.
        ahead = np.arange(part + 1, part + 1 + self._ahead)
        waiting[ahead % self._parts] = 0.0
        self._past = (part - self._parts + self._ahead + 1) * self._width - 1
        self._looked = now

    def learn(self) -> None:
        """Bring the table up to date and let what was seen count a little less."""
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
        """Return, for each octave, the best mean hazard over it, the next and any more.

        Args:
            uses: By class and octave, shape (classes, octaves).
            spent: Slots times time, above zero, of the same shape.
        """
        sums, times = self._sums, self._times
        uses.cumsum(1, out=sums[:, 1:])
        spent.cumsum(1, out=times[:, 1:])
        gained = sums[:, None, :] - sums[:, :-1, None]
        gained /= times[:, None, :] - times[:, :-1, None] + self._too_short
        best: FloatArray = gained.max(2)
        return best
