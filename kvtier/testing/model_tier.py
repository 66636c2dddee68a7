"""A simulated tier for tests of eviction policies, and streams of accesses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies import ChunkCopy, CopyState, Eviction
from kvtier.policies.simulated_tier import SimulatedTier

__all__ = ["PINNED", "STREAMS", "ModelTier", "Stream"]


class ModelTier(SimulatedTier):
    """A simulated tier with pins that checks its policy's victims.

    Args:
        eviction: The policy; its capacity is the tier's.
        one_by_one: Whether batches are split into calls for single chunks.

    Attributes:
        pinned: Keys of chunks that must not be evicted.
        hits: Accesses that found their chunk.
        asked: How often the policy asked whether a copy is evictable.
    """

    def __init__(self, eviction: Eviction, *, one_by_one: bool = False) -> None:
        super().__init__(eviction)
        self._batches = Eviction if one_by_one else type(eviction)
        self.pinned: set[ChunkKey] = set()
        self.hits = 0
        self.asked = 0

    def access(self, key: ChunkKey) -> bool:
        """Access ``key``; insert it if it is absent and a slot is free or can be freed.

        Returns:
            Whether ``key`` is resident afterwards.
        """
        copy = self.members.get(key)
        if copy is None:
            return self.admit(key)
        self.hits += 1
        self.use(copy)
        return True

    @override
    def evict(self) -> ChunkCopy | None:
        """Evict and return one victim; None when nothing is evictable."""
        victim = super().evict()
        if victim is not None:
            victim.state = CopyState.GONE
        return victim

    def evict_many(self, count: int) -> list[ChunkCopy]:
        """Evict and return up to ``count`` victims at once, as the manager does."""
        victims = self._batches.pick_many(self.eviction, count, self._may_go, self.ctx)
        for victim in victims:
            self._check_member(victim)
            victim.state = CopyState.GONE
            del self.members[victim.key]
        return victims

    def use_many(self, keys: Sequence[ChunkKey]) -> None:
        """Record hits on the resident ``keys`` in one call."""
        self.hits += len(keys)
        copies = iter([self.members[key] for key in keys])
        self._batches.on_hit_many(self.eviction, copies, self.ctx)

    def insert_many(self, keys: Sequence[ChunkKey]) -> None:
        """Insert absent ``keys`` without parents into free slots in one call."""
        for key in keys:
            self.eviction.on_miss(key, self.ctx)
        copies = [self._enter(key, None, 0, None) for key in keys]
        self._batches.on_insert_many(self.eviction, copies, self.ctx)

    def remove(self, key: ChunkKey) -> None:
        """Remove ``key`` for a reason other than eviction."""
        copy = self.members.pop(key)
        copy.state = CopyState.GONE
        self.eviction.on_remove(copy)

    def may_go(self) -> set[ChunkKey]:
        """Return the keys that the policy may evict now."""
        return {key for key, copy in self.members.items() if self._is_evictable(copy)}

    @override
    def _pick(self) -> ChunkCopy | None:
        victim = self.eviction.pick(self._may_go, self.ctx)
        if victim is not None:
            self._check_member(victim)
        return victim

    def _check_member(self, victim: ChunkCopy) -> None:
        if self.members.get(victim.key) is not victim:
            raise AssertionError(f"{victim} was picked and is not in the tier")

    def _may_go(self, copy: ChunkCopy) -> bool:
        self.asked += 1
        return self._is_evictable(copy)

    def _is_evictable(self, copy: ChunkCopy) -> bool:
        return copy.key not in self.pinned


Stream = Callable[[int, int, random.Random], Iterator[int]]
"""Yields chunk numbers, given a tier's capacity, the number of accesses and a generator.

The tier holds the chunks 0 to ``capacity - 1`` at first.
"""


def _scan(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """Yield every chunk once."""
    yield from range(capacity, capacity + accesses)


def _loop(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """Yield a loop over slightly more chunks than fit, repeatedly."""
    for number in range(accesses):
        yield number % (capacity + capacity // 8)


def _skewed(capacity: int, accesses: int, rng: random.Random) -> Iterator[int]:
    """Yield few chunks often and most chunks rarely."""
    for _ in range(accesses):
        yield int(4 * capacity * rng.random() ** 3)


def _two_in_turn(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """Yield two chunks in turn."""
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
"""Names of the streams during which the older half of the tier is pinned."""
