"""Estimates the number of recent uses of each key with little memory.

All counts are halved after ten uses per slot of the tier, so that old uses lose weight. The
sketch is a count-min sketch (Cormode and Muthukrishnan, J. Algorithms 55, 2005): four rows of
one-byte counters, and a key's estimate is the smallest of its four counters. A use increments
only the key's smallest counters. So two keys that share a counter inflate each other's estimate
less (Estan and Varghese, SIGCOMM 2002). The sketch takes 16 to 32 bytes per slot and does not
keep keys.
"""

from __future__ import annotations

import xxhash

from kvtier.keys import ChunkKey

__all__ = ["SketchFrequency"]

_SAMPLE_PER_SLOT = 10
_ROWS = 4
_MOST = 255
_HALVED = bytes(count // 2 for count in range(256))


class SketchFrequency:
    """A count-min sketch of recent uses, with conservative update.

    Args:
        capacity: Number of slots of the tier.
    """

    __slots__ = ("_cells", "_mask", "_sample", "_uses", "_width")

    def __init__(self, capacity: int) -> None:
        self._sample = _SAMPLE_PER_SLOT * capacity
        self._uses = 0
        self._width = 1 << (_ROWS * max(capacity, 1) - 1).bit_length()
        self._mask = self._width - 1
        self._cells = bytearray(_ROWS * self._width)

    def count(self, key: ChunkKey) -> None:
        """Count one use of ``key``."""
        cells, places = self._cells, self._places(key)
        least = min([cells[place] for place in places])
        if least < _MOST:
            for place in places:
                if cells[place] == least:
                    cells[place] = least + 1
        self._uses += 1
        if self._uses == self._sample:
            self._uses //= 2
            self._cells = cells.translate(_HALVED)

    def of(self, key: ChunkKey) -> int:
        """Estimate how often ``key`` was recently used. A result below 255 is never too low."""
        cells = self._cells
        return min([cells[place] for place in self._places(key)])

    def _places(self, key: ChunkKey) -> tuple[int, int, int, int]:
        """Return the index of the counter of ``key`` in each row, by double hashing."""
        digest = xxhash.xxh3_64_intdigest(key)
        mask, width, step = self._mask, self._width, (digest >> 32) | 1
        return (
            digest & mask,
            width + (digest + step & mask),
            2 * width + (digest + 2 * step & mask),
            3 * width + (digest + 3 * step & mask),
        )
