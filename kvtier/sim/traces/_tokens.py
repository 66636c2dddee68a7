"""How many tokens an id stands for, judged by the lengths of the requests.

A request of ``length`` tokens and ``n`` ids of ``tokens`` tokens each has
``n = ceil(length / tokens)`` where the last, partial chunk has an id, and
``n = floor(length / tokens)`` where it has none. Either equation gives a range of numbers per
request, and the number that lies in the most ranges fits the most requests.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvtier.sim.traces._trace import IdArray

__all__ = ["count_misfits", "estimate_tokens_per_id"]

_MAJORITY: Final = 0.5
_LONGEST: Final = 1 << 40


def estimate_tokens_per_id(lengths: IdArray, ids: IdArray, *, default: int) -> tuple[int, str]:
    """Return the tokens per id, and in words where the number comes from.

    Args:
        lengths: Prompt length of each request, in tokens.
        ids: Number of ids of each request.
        default: The format's number; kept where no other fits more requests.
    """
    known = (lengths > 0) & (ids > 0)
    lengths, ids = lengths[known], ids[known]
    if not len(ids):
        return default, "the format's default; the records do not say"
    most = np.where(ids > 1, (lengths - 1) // np.maximum(ids - 1, 1), _LONGEST)
    rounded_up = _common_range(-(-lengths // ids), most)
    rounded_down = _common_range(lengths // (ids + 1) + 1, lengths // ids)
    count, low, high = max(rounded_up, rounded_down)
    for other, lowest, highest in (rounded_up, rounded_down):
        if other == count and lowest <= default <= highest:
            return default, "the format's default; the records agree"
    if count > _MAJORITY * len(ids):
        return _roundest(low, high), "derived from input_length and hash_ids"
    mean = max(1, round(int(lengths.sum()) / int(ids.sum())))
    return mean, "the mean of the records"


def count_misfits(lengths: IdArray, ids: IdArray, tokens_per_id: int) -> tuple[int, int]:
    """Return how many requests have too few or too many ids, and the place of the first."""
    misfits = np.flatnonzero(np.abs(lengths - ids * tokens_per_id) >= tokens_per_id)
    return len(misfits), int(misfits[0]) if len(misfits) else 0


def _common_range(lows: IdArray, highs: IdArray) -> tuple[int, int, int]:
    """Return how many of the ranges share numbers, and the first and last of these.

    The ranges include both ends; one whose end is below its start is empty.
    """
    some = lows <= highs
    edges, places = np.unique(
        np.concatenate((lows[some], highs[some] + 1)), return_inverse=True
    )
    if not len(edges):
        return 0, 0, 0
    steps = np.repeat((1, -1), int(some.sum()))
    depth = np.cumsum(np.bincount(places, weights=steps).astype(np.int64))
    best = int(np.argmax(depth))
    return int(depth[best]), int(edges[best]), int(edges[best + 1]) - 1


def _roundest(low: int, high: int) -> int:
    """Return the number from ``low`` to ``high`` that the largest power of two divides.

    >>> _roundest(300, 599), _roundest(33, 35)
    (512, 34)
    """
    power = 1
    while high // (2 * power) * 2 * power >= low:
        power *= 2
    return high // power * power
