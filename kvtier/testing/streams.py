"""Streams of chunk numbers that are hard on an eviction policy in different ways.

Each takes the tier's capacity, the number of accesses and a random number generator. They
follow on a tier filled with the chunks 0 to ``capacity - 1``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

__all__ = ["PINNED", "STREAMS", "Stream"]

Stream = Callable[[int, int, random.Random], Iterator[int]]


def _scan(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """Nothing is ever used again."""
    yield from range(capacity, capacity + accesses)


def _loop(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """A loop that just does not fit."""
    for number in range(accesses):
        yield number % (capacity + capacity // 8)


def _skewed(capacity: int, accesses: int, rng: random.Random) -> Iterator[int]:
    """A few are used much, most are rare."""
    for _ in range(accesses):
        yield int(4 * capacity * rng.random() ** 3)


def _two_in_turn(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """Two chunks are used in turn, again and again."""
    for number in range(accesses):
        yield capacity // 2 + number % 2


STREAMS: dict[str, Stream] = {
    "scan": _scan,
    "loop": _loop,
    "skewed": _skewed,
    "two in turn": _two_in_turn,
    "scan among pins": _scan,
    "loop among pins": _loop,
    "skewed among pins": _skewed,
}
PINNED = frozenset(name for name in STREAMS if name.endswith("among pins"))
"""Streams during which the older half of the tier is pinned."""
