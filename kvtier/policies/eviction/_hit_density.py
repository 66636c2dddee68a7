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
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final

from kvtier.policies.eviction._runs import Run

__all__ = ["HitDensity"]

_PRIOR: Final = 8.0
_FIRST: Final = 4
"""Bits of the ages that share the first octave."""
_TURNS: Final = 4
"""Longest age that is told apart, in turns of the tier."""


def _octave_of(age: int) -> int:
    """Return the octave of ``age``, in uses; a table may be shorter than that."""
    return max(age.bit_length() - _FIRST, 0)


class HitDensity:
    """Learns from uses; answers with a table.

    Args:
        capacity: Slots of the tier.
        below: For each class the lower classes it must not be worth less than.
        keep: What a count keeps of itself each time the table is renewed.

    Attributes:
        octaves: Octaves of the table.
        table: Hit density by class and octave; as it was at the last :meth:`learn`. Ages beyond
            the last octave count as the last.
    """

    def __init__(self, capacity: int, below: Sequence[Sequence[int]], keep: float) -> None:
        self._below = below
        self._keep = keep
        self.octaves = _octave_of(_TURNS * capacity) + 2
        bounds = [0] + [1 << (_FIRST + octave) - 1 for octave in range(1, self.octaves + 1)]
        self._starts = bounds[:-1]
        self._widths = [end - start for start, end in pairwise(bounds)]
        self._uses = [array("d", bytes(8 * self.octaves)) for _ in below]
        self._entered = [array("d", bytes(8 * self.octaves)) for _ in below]
        self.table: list[array[float]] = []
        self.learn()

    def used(self, kind: int, age: int, count: int) -> None:
        """Note that ``count`` chunks of class ``kind`` were used at ``age``."""
        octave = min(_octave_of(age), self.octaves - 1)
        self._uses[kind][octave] += count
        if not octave:
            # Those that are used that soon are not there to be counted when they grow older.
            self._entered[kind][0] += count

    def grow_older(self, runs: Iterable[Run], now: int) -> None:
        """Note which keys of ``runs``, oldest first, came to another octave unused."""
        last = self.octaves - 1
        for run in runs:
            octave = (now - run.since).bit_length() - _FIRST
            if octave > run.octave:
                entered, keys = self._entered[run.kind], run.keys
                if not run.octave:
                    entered[0] += keys
                for passed in range(run.octave + 1, min(octave, last) + 1):
                    entered[passed] += keys
                run.octave = octave
            elif octave <= 0:
                break

    def of(self, kind: int, age: int) -> float:
        """Return the hit density of chunks of class ``kind`` at ``age``."""
        octave = age.bit_length() - _FIRST
        row = self.table[kind]
        return row[octave if 0 < octave < self.octaves else -(octave > 0)]

    def learn(self) -> None:
        """Bring the table up to date and let what was seen count a little less."""
        weights = [_PRIOR * width for width in self._widths]
        spent = [
            [
                max(entered - used / 2, 0.0) * width
                for entered, used, width in zip(*rows, self._widths, strict=True)
            ]
            for rows in zip(self._entered, self._uses, strict=True)
        ]
        hazards = [
            (sum(uses) + weight / (start + width)) / (sum(times) + weight)
            for uses, times, weight, start, width in zip(
                zip(*self._uses, strict=True),
                zip(*spent, strict=True),
                weights,
                self._starts,
                self._widths,
                strict=True,
            )
        ]
        table = [
            _densities(
                [used + w * h for used, w, h in zip(uses, weights, hazards, strict=True)],
                [time + w for time, w in zip(times, weights, strict=True)],
            )
            for uses, times in zip(self._uses, spent, strict=True)
        ]
        for kind, lower in enumerate(self._below):
            rows = [table[kind], *(table[other] for other in lower)]
            table[kind] = array("d", map(max, zip(*rows, strict=True)))
        self.table = table
        self._fade()

    def _fade(self) -> None:
        for rows in (self._uses, self._entered):
            rows[:] = [array("d", (count * self._keep for count in row)) for row in rows]


def _densities(uses: list[float], spent: list[float]) -> array[float]:
    """Return, for each octave, the best mean hazard over it, the next and any more."""
    octaves = range(len(uses))
    sums = list(accumulate(uses, initial=0.0))
    times = list(accumulate(spent, initial=0.0))
    best = (
        max(
            (sums[end] - sums[octave]) / (times[end] - times[octave])
            for end in range(min(octave + 2, len(uses)), len(uses) + 1)
        )
        for octave in octaves
    )
    return array("d", best)
