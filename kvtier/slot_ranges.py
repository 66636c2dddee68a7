"""Ranges of consecutive slots, because a medium moves such slots in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["consecutive_ranges"]


def consecutive_ranges(slots: Sequence[int], most: int | None = None) -> Iterator[slice]:
    """Yield slices that split ``slots`` into ranges of up to ``most`` consecutive slots.

    >>> list(consecutive_ranges([3, 4, 5, 9], most=2))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    start = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or end - start == most or slots[end] != slots[end - 1] + 1:
            yield slice(start, end)
            start = end
