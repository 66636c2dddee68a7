"""A simulated tier for tests of eviction policies, and streams of accesses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from kvtier.keys import ChunkKey
from kvtier.policies import ChunkCopy, CopyState, Eviction, PolicyContext

__all__ = ["PINNED", "STREAMS", "ModelTier", "Stream"]


class ModelTier:
    """A simulated tier with pinned chunks, which checks the victims of an eviction policy.

    Args:
        eviction: The policy. The tier has the policy's capacity.
        one_by_one: Whether the tier calls the policy for single chunks instead of batches.

    Attributes:
        eviction: The policy.
        ctx: The policy's context.
        members: The resident copies by key.
        pinned: Keys of chunks that must not be evicted.
        hits: Number of accesses that found their chunk.
        asked: Number of times that the policy asked whether a copy is evictable.
    """

    def __init__(self, eviction: Eviction, *, one_by_one: bool = False) -> None:
        self.eviction = eviction
        self.ctx = PolicyContext()
        self.members: dict[ChunkKey, ChunkCopy] = {}
        self._batches = Eviction if one_by_one else type(eviction)
        self.pinned: set[ChunkKey] = set()
        self.hits = 0
        self.asked = 0

    def access(self, key: ChunkKey) -> bool:
        """Access ``key``. Insert an absent key if a slot is free or can be freed.

        Returns:
            Whether ``key`` is resident afterwards.
        """
        copy = self.members.get(key)
        if copy is not None:
            self.hits += 1
            copy.hits += 1
            self.eviction.on_hit(copy, self.ctx)
            return True
        self.eviction.on_miss(key, self.ctx)
        is_full = len(self.members) >= self.eviction.capacity
        if is_full and self.evict() is None:
            return False
        self.eviction.on_insert(self._enter(key), self.ctx)
        return True

    def evict(self) -> ChunkCopy | None:
        """Evict and return one victim; None if no copy is evictable."""
        victim = self.eviction.pick(self._may_go, self.ctx)
        if victim is not None:
            self._forget(victim)
        return victim

    def evict_many(self, count: int) -> list[ChunkCopy]:
        """Evict and return up to ``count`` victims in one call, as the manager does."""
        victims = self._batches.pick_many(self.eviction, count, self._may_go, self.ctx)
        for victim in victims:
            self._forget(victim)
        return victims

    def use_many(self, keys: Sequence[ChunkKey]) -> None:
        """Record hits on the resident ``keys`` in one call."""
        self.hits += len(keys)
        copies = iter([self.members[key] for key in keys])
        self._batches.on_hit_many(self.eviction, copies, self.ctx)

    def insert_many(self, keys: Sequence[ChunkKey]) -> None:
        """Insert the absent ``keys`` into free slots in one call, as chunks without parents."""
        for key in keys:
            self.eviction.on_miss(key, self.ctx)
        copies = [self._enter(key) for key in keys]
        self._batches.on_insert_many(self.eviction, copies, self.ctx)

    def remove(self, key: ChunkKey) -> None:
        """Remove ``key`` for a reason other than eviction."""
        copy = self.members.pop(key)
        copy.state = CopyState.GONE
        self.eviction.on_remove(copy)

    def may_go(self) -> set[ChunkKey]:
        """Return the keys of evictable chunks."""
        return {key for key, copy in self.members.items() if self._is_evictable(copy)}

    def _enter(self, key: ChunkKey) -> ChunkCopy:
        """Make ``key`` a member and return its copy."""
        copy = self.members[key] = ChunkCopy(key, 0)
        copy.state = CopyState.RESIDENT
        return copy

    def _forget(self, victim: ChunkCopy) -> None:
        """Remove a victim from the members."""
        if self.members.get(victim.key) is not victim:
            raise AssertionError(f"{victim} was picked and is not in the tier")
        victim.state = CopyState.GONE
        del self.members[victim.key]

    def _may_go(self, copy: ChunkCopy) -> bool:
        self.asked += 1
        return self._is_evictable(copy)

    def _is_evictable(self, copy: ChunkCopy) -> bool:
        return copy.key not in self.pinned


Stream = Callable[[int, int, random.Random], Iterator[int]]
"""Yields chunk numbers, given a tier's capacity, the number of accesses and a random generator.

When the stream starts, the tier has the chunks 0 to ``capacity - 1``.
"""


def _scan(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """Yield new chunks, each once."""
    yield from range(capacity, capacity + accesses)


def _loop(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """Yield the same chunks in a loop; their number slightly exceeds the tier's capacity."""
    for number in range(accesses):
        yield number % (capacity + capacity // 8)


def _skewed(capacity: int, accesses: int, rng: random.Random) -> Iterator[int]:
    """Yield few chunks often and most chunks rarely."""
    for _ in range(accesses):
        yield int(4 * capacity * rng.random() ** 3)


def _two_in_turn(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """Yield two chunks alternately."""
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
"""Names of streams for which the tests pin the older half of the tier."""
