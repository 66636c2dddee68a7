"""How many hits a slot earns with a chunk of some class and age, learned from a sample of keys.

The age of a chunk is the number of uses of any chunk since its own last one, so it needs no
clock and means the same at any load. Ages are counted in octaves. For every class and octave
two things are measured: how many uses came at that age, and how many chunks passed through it
unused. Their ratio is the hazard. What an eviction wants to know is the *hit density*: the
hits to be had per slot and unit of time, if the chunk is kept until the best moment to give it
up. It is the largest mean hazard over any stretch of ages from the present one on, which for
items that do not influence each other is the Gittins index of the stopping problem (Gittins,
"Bandit Processes and Dynamic Allocation Indices", JRSS B 1979; Beckmann, Chen and Cidon, "LHD:
Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018, ranks by the mean over the
whole remaining life instead, which undervalues a chunk that is needed soon or never).

What is evicted must still be watched, or the ages beyond the tier's own would look worthless
for ever. Hence the sample: one key in :data:`_ONE_IN` is followed whether it is resident or not
(Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015), which reaches back
that many times the capacity with as many keys as the tier has slots. A chunk under observation
stands in the queue of its octave and moves to the next one when it is old enough, so each costs
one step per octave and nobody is scanned.

Before there is data every class has a hazard of one over the age, which is what makes recency
the best guess, with the weight of :data:`_PRIOR` observations; classes with little data are
drawn to the mean of all in the same way.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from itertools import accumulate
from typing import Final

from kvtier.keys import ChunkKey

__all__ = ["HitDensity", "octave_of"]

_ONE_IN: Final = 8
_PRIOR: Final = 8.0
_FIRST: Final = 4
"""Bits of the ages that share the first octave."""
_MEMORY: Final = 16
"""Turns of the tier after which what was seen counts half."""


def octave_of(age: int) -> int:
    """Return the octave of ``age``, in uses; a table may be shorter than that."""
    return max(age.bit_length() - _FIRST, 0)


class _Watch:
    """One use of a sampled chunk, until the next."""

    __slots__ = ("key", "kind", "since")

    def __init__(self, key: ChunkKey, kind: int, since: int) -> None:
        self.key: ChunkKey | None = key
        self.kind = kind
        self.since = since


class HitDensity:
    """Learns from uses; answers with a table.

    Args:
        capacity: Slots of the tier; at most as many keys are held.
        kinds: Number of classes.

    Attributes:
        table: Hit density by class and octave; as it was at the last :meth:`learn`. Ages beyond
            the last octave count as the last.
    """

    def __init__(self, capacity: int, kinds: int) -> None:
        self._capacity = capacity
        octaves = max(octave_of(_ONE_IN * capacity), 1) + 1
        self._starts = [0] + [1 << (_FIRST + octave) - 1 for octave in range(1, octaves + 1)]
        self._widths = [
            end - start for start, end in zip(self._starts, self._starts[1:], strict=False)
        ]
        self._uses = [array("d", bytes(8 * octaves)) for _ in range(kinds)]
        self._passed = [array("d", bytes(8 * octaves)) for _ in range(kinds)]
        self._watched: dict[ChunkKey, _Watch] = {}
        self._ages: list[deque[_Watch]] = [deque() for _ in range(octaves)]
        self._halve_at = _MEMORY * capacity
        self.table: list[array[float]] = []
        self.learn(0)

    def note(self, key: ChunkKey, kind: int, now: int) -> None:
        """Note that ``key`` is used and of class ``kind`` from now on."""
        if zlib.crc32(key) % _ONE_IN:
            return
        before = self._watched.pop(key, None)
        if before is not None:
            octave = min(octave_of(now - before.since), len(self._widths) - 1)
            self._uses[before.kind][octave] += 1
            before.key = None
        if len(self._watched) < self._capacity:
            watch = self._watched[key] = _Watch(key, kind, now)
            self._ages[0].append(watch)
            self._passed[kind][0] += 1

    def learn(self, now: int) -> None:
        """Bring the table up to date."""
        self._grow_older(now)
        if now >= self._halve_at:
            self._halve_at = now + _MEMORY * self._capacity
            for rows in (self._uses, self._passed):
                rows[:] = [array("d", (count / 2 for count in row)) for row in rows]
        spent = [
            [
                max(passed - used / 2, 0.0) * width
                for passed, used, width in zip(*rows, self._widths, strict=True)
            ]
            for rows in zip(self._passed, self._uses, strict=True)
        ]
        weights = [_PRIOR * width for width in self._widths]
        hazards = [
            (sum(used) + weight / (start + width)) / (sum(time) + weight)
            for used, time, weight, start, width in zip(
                zip(*self._uses, strict=True),
                zip(*spent, strict=True),
                weights,
                self._starts[:-1],
                self._widths,
                strict=True,
            )
        ]
        self.table = [
            _densities(
                [used + w * h for used, w, h in zip(row, weights, hazards, strict=True)],
                [time + w for time, w in zip(times, weights, strict=True)],
            )
            for row, times in zip(self._uses, spent, strict=True)
        ]

    def _grow_older(self, now: int) -> None:
        ages, watched = self._ages, self._watched
        for octave, queue in enumerate(ages):
            born = now - self._starts[octave + 1]
            while queue and queue[0].since <= born:
                watch = queue.popleft()
                if watch.key is None:
                    continue
                if octave + 1 < len(ages):
                    self._passed[watch.kind][octave + 1] += 1
                    ages[octave + 1].append(watch)
                else:
                    del watched[watch.key]


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
