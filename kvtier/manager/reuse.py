"""How soon an evicted chunk is asked for again: what says that a tier is too small.

A hit ratio cannot tell a tier that is too small from traffic that does not repeat. The time
from evicting a chunk to the next request for it can: many gaps of a minute mean that a tier
which held a minute more would have hit. Only the keys of what left lately are kept. In a large
tier that is a sample, chosen by the key, so that a chunk is in it always or never (spatially
hashed sampling: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015); the
distribution is the same.

A lookup ends at the first chunk that is nowhere, but all behind it was wanted as well: it is
computed, and offered to be stored. So what is offered counts as asked for too, once, because
a chunk's gap ends when it is asked for first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

from kvtier.keys import GROUP_NBYTES, ChunkKey

__all__ = ["SAMPLING_BYTE", "ReuseGaps"]

_KEPT: Final = 1 << 14
_RESIDENT: Final = 1 << 8
"""Chunks of a tier that are enough to follow: a distribution needs hundreds of gaps."""
SAMPLING_BYTE: Final = -1 - GROUP_NBYTES
"""The hash's last; it has no byte that is less random than another."""


class ReuseGaps:
    """The gaps of one tier. Time is passed in, once per step.

    Args:
        capacity: Slots of the tier.

    Attributes:
        busy: Whether there is anything for :meth:`end_step` to do.
        mask: Bits of a key's :data:`SAMPLING_BYTE` that are 0 in the sample.
    """

    def __init__(self, capacity: int) -> None:
        shift = min((capacity // _RESIDENT).bit_length(), 8)
        self.mask = (1 << shift) - 1
        self.busy = False
        self._left: list[ChunkKey] = []
        self._asked: list[float] = []
        self._gaps: list[float] = []
        # Two generations, because dropping the older one at once is cheaper than the oldest key
        # each time.
        self._recent: dict[ChunkKey, float] = {}
        self._older: dict[ChunkKey, float] = {}
        # The keys of both: every new chunk is looked for here, and a set is the quickest.
        self._names: set[ChunkKey] = set()

    def evicted(self, keys: Sequence[ChunkKey]) -> int:
        """Note that ``keys`` left the tier to make room in this step.

        Returns:
            How many of them are in the sample.
        """
        self.busy = True
        mask = self.mask
        sample = [key for key in keys if not key[SAMPLING_BYTE] & mask] if mask else keys
        self._left += sample
        return len(sample)

    def asked(self, key: ChunkKey) -> None:
        """Note that ``key`` was asked for in this step and is not in the tier."""
        left_s = self._recent.pop(key, None)
        if left_s is None:
            left_s = self._older.pop(key, None)
        if left_s is not None:
            self._names.discard(key)
            self._asked.append(left_s)
            self.busy = True

    def remembered(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Return those of ``keys`` that left lately, as far as they are in the sample."""
        return self._names.intersection(keys) if self._names else set()

    def end_step(self, now: float) -> None:
        """Close a step that ends ``now``, in seconds on the clock of the steps before."""
        self.busy = False
        if self._asked:
            self._gaps += [now - left_s for left_s in self._asked]
            self._asked.clear()
            del self._gaps[2 * _KEPT :]  # nobody takes them
        if not self._left:
            return
        self._recent.update(zip(self._left, repeat(now)))
        self._names.update(self._left)
        self._left.clear()
        if len(self._recent) > _KEPT:
            self._older, self._recent = self._recent, {}
            self._names = set(self._older)

    def clear(self) -> None:
        """Forget what left: after a reset nothing could have been kept."""
        self._left.clear()
        self._asked.clear()
        self._recent.clear()
        self._older.clear()
        self._names.clear()

    def take(self) -> list[float]:
        """Return the gaps since the last call, in seconds."""
        gaps, self._gaps = self._gaps, []
        return gaps
