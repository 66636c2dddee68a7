"""Reuse gaps: how soon evicted chunks are looked up again.

A hit ratio cannot distinguish a tier that is too small from traffic that does not repeat. The
time from a chunk's eviction to its next lookup can: many gaps of a minute mean that a tier
which kept chunks a minute longer would have hit. Only keys of recently evicted chunks are kept.
In a large tier they are a sample, selected by the key, so that a chunk is in it always or never
(spatially hashed sampling: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST
2015). The distribution is the same.

A lookup ends at the first chunk that is in no tier, but the request needs the later chunks too:
the engine computes them and offers them for storing. So an offer counts as a lookup. A gap ends
at the first lookup or offer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

from kvtier.keys import GROUP_NBYTES, ChunkKey

__all__ = ["SAMPLING_BYTE", "ReuseGaps"]

_MAX_KEYS: Final = 1 << 14
_SAMPLED_CHUNKS: Final = 1 << 8
"""Number of chunks to track per tier: a distribution needs hundreds of gaps."""
SAMPLING_BYTE: Final = -1 - GROUP_NBYTES
"""Position in a key of the last byte of its hash, which is as random as any other."""


class ReuseGaps:
    """The reuse gaps of one tier.

    Args:
        capacity: Slots of the tier.

    Attributes:
        is_changed: Whether :meth:`end_step` has anything to do.
        mask: Bits of a key's :data:`SAMPLING_BYTE` that are 0 in the sample.
    """

    def __init__(self, capacity: int) -> None:
        shift = min((capacity // _SAMPLED_CHUNKS).bit_length(), 8)
        self.mask = (1 << shift) - 1
        self.is_changed = False
        self._evicted: list[ChunkKey] = []
        self._wanted_s: list[float] = []
        self._gaps: list[float] = []
        # Two generations: dropping the older one at once is cheaper than the oldest key each
        # time.
        self._recent: dict[ChunkKey, float] = {}
        self._older: dict[ChunkKey, float] = {}
        # The keys of both: a set is the fastest to search for every new chunk.
        self._keys: set[ChunkKey] = set()

    def record_evicted(self, keys: Sequence[ChunkKey]) -> int:
        """Record that ``keys`` were evicted in this step.

        Returns:
            The number of ``keys`` in the sample.
        """
        self.is_changed = True
        mask = self.mask
        sample = [key for key in keys if not key[SAMPLING_BYTE] & mask] if mask else keys
        self._evicted += sample
        return len(sample)

    def record_wanted(self, key: ChunkKey) -> None:
        """Record that ``key``, which is not in the tier, was looked up in this step."""
        evicted_s = self._recent.pop(key, None)
        if evicted_s is None:
            evicted_s = self._older.pop(key, None)
        if evicted_s is not None:
            self._keys.discard(key)
            self._wanted_s.append(evicted_s)
            self.is_changed = True

    def recently_evicted(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Return the ``keys`` that are in the sample and were recently evicted."""
        return self._keys.intersection(keys) if self._keys else set()

    def end_step(self, now: float) -> None:
        """Close a step that ends ``now``, in seconds on a monotonic clock."""
        self.is_changed = False
        if self._wanted_s:
            self._gaps += [now - evicted_s for evicted_s in self._wanted_s]
            self._wanted_s.clear()
            del self._gaps[2 * _MAX_KEYS :]  # in case nobody takes them
        if not self._evicted:
            return
        self._recent.update(zip(self._evicted, repeat(now)))
        self._keys.update(self._evicted)
        self._evicted.clear()
        if len(self._recent) > _MAX_KEYS:
            self._older, self._recent = self._recent, {}
            self._keys = set(self._older)

    def clear(self) -> None:
        """Forget evicted chunks: after a reset a larger tier would not have kept them."""
        self._evicted.clear()
        self._wanted_s.clear()
        self._recent.clear()
        self._older.clear()
        self._keys.clear()

    def take(self) -> list[float]:
        """Return the gaps since the last call, in seconds."""
        gaps, self._gaps = self._gaps, []
        return gaps
