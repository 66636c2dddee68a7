"""A tier reduced to its eviction policy, and streams of keys to run it on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from kvtier.keys import ChunkKey
from kvtier.policies import NEVER, ChunkCopy, CopyState, Eviction, PolicyContext

__all__ = ["PINNED", "STREAMS", "ModelTier", "Stream"]


class ModelTier:
    """Drives an eviction policy by the rules of :class:`~kvtier.policies.Eviction`.

    Args:
        eviction: The policy; its capacity is the tier's.
        one_by_one: Whether batches are split into calls for single chunks.

    Attributes:
        members: The resident copies by key.
        pinned: Keys that must stay.
        hits: Accesses that found their chunk.
        asked: How often the policy asked whether a copy is evictable.
    """

    def __init__(self, eviction: Eviction, *, one_by_one: bool = False) -> None:
        self.eviction = eviction
        self._batches = Eviction if one_by_one else type(eviction)
        self.members: dict[ChunkKey, ChunkCopy] = {}
        self.pinned: set[ChunkKey] = set()
        self.hits = 0
        self.asked = 0
        self._ctx = PolicyContext()
        self._child_counts: dict[ChunkKey, int] = {}

    def access(
        self, key: ChunkKey, *, parent: ChunkKey | None = None, next_use: int = NEVER
    ) -> bool:
        """Use ``key``; if it is absent, insert it where there is room or a victim.

        Args:
            key: The chunk.
            parent: The chunk before it.
            next_use: Time of its next access.

        Returns:
            Whether it is resident now.
        """
        self._ctx.next_use = next_use
        copy = self.members.get(key)
        if copy is not None:
            self.hits += 1
            self.eviction.on_hit(copy, self._ctx)
            while self.eviction.surplus and self.evict() is not None:
                pass
            return True
        self.eviction.on_miss(key, self._ctx)
        if self.eviction.insert_first:
            self._insert(key, parent)
            over = len(self.members) > self.eviction.capacity
            return not over or self.evict() is not None
        if len(self.members) >= self.eviction.capacity and self.evict() is None:
            return False
        self._insert(key, parent)
        return True

    def evict(self) -> ChunkCopy | None:
        """Evict and return one victim; None when nothing is evictable."""
        victim = self.eviction.pick(self._may_go, self._ctx)
        if victim is not None:
            self._remove_victim(victim)
        return victim

    def evict_many(self, count: int) -> list[ChunkCopy]:
        """Evict and return up to ``count`` victims at once, as the manager does.

        Policies that evict leaves only pick them one at a time.
        """
        if self.eviction.leaf_only:
            one_each = (self.evict() for _ in range(count))
            return [victim for victim in one_each if victim is not None]
        victims = self._batches.pick_many(self.eviction, count, self._may_go, self._ctx)
        for victim in victims:
            self._remove_victim(victim)
        return victims

    def use_many(self, keys: Sequence[ChunkKey]) -> None:
        """Use resident ``keys`` at once."""
        self.hits += len(keys)
        copies = iter([self.members[key] for key in keys])
        self._batches.on_hit_many(self.eviction, copies, self._ctx)

    def insert_many(self, keys: Sequence[ChunkKey]) -> None:
        """Insert absent ``keys`` without parents into free slots at once."""
        for key in keys:
            self.eviction.on_miss(key, self._ctx)
        copies = [self._enter(key, None) for key in keys]
        self._batches.on_insert_many(self.eviction, copies, self._ctx)

    def remove(self, key: ChunkKey) -> None:
        """Remove ``key`` for another reason than to make room."""
        copy = self.members[key]
        copy.state = CopyState.GONE
        self.eviction.on_remove(copy)
        self._forget(copy)

    def may_go(self) -> set[ChunkKey]:
        """Return the keys that the policy may pick now."""
        return {key for key, copy in self.members.items() if self._allowed(copy)}

    def _may_go(self, copy: ChunkCopy) -> bool:
        self.asked += 1
        return self._allowed(copy)

    def _allowed(self, copy: ChunkCopy) -> bool:
        if copy.key in self.pinned:
            return False
        return not self.eviction.leaf_only or not copy.child_count

    def _insert(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        self.eviction.on_insert(self._enter(key, parent), self._ctx)

    def _enter(self, key: ChunkKey, parent: ChunkKey | None) -> ChunkCopy:
        copy = ChunkCopy(key, len(self.members), parent)
        copy.state = CopyState.RESIDENT
        copy.child_count = self._child_counts.get(key, 0)
        self.members[key] = copy
        self._count_child(parent, 1)
        return copy

    def _remove_victim(self, victim: ChunkCopy) -> None:
        if self.members.get(victim.key) is not victim:
            raise AssertionError(f"{victim} was picked and is not in the tier")
        victim.state = CopyState.GONE
        self._forget(victim)

    def _forget(self, copy: ChunkCopy) -> None:
        del self.members[copy.key]
        self._count_child(copy.parent, -1)

    def _count_child(self, parent: ChunkKey | None, change: int) -> None:
        if parent is None:
            return
        self._child_counts[parent] = self._child_counts.get(parent, 0) + change
        if parent in self.members:
            self.members[parent].child_count += change


Stream = Callable[[int, int, random.Random], Iterator[int]]
"""Yields chunk numbers, given a tier's capacity, the number of accesses and a generator.

The tier holds the chunks 0 to ``capacity - 1`` at first.
"""


def _scan(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """Never repeats a chunk."""
    yield from range(capacity, capacity + accesses)


def _loop(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """Repeats a loop slightly larger than the tier."""
    for number in range(accesses):
        yield number % (capacity + capacity // 8)


def _skewed(capacity: int, accesses: int, rng: random.Random) -> Iterator[int]:
    """Uses few chunks often and most rarely."""
    for _ in range(accesses):
        yield int(4 * capacity * rng.random() ** 3)


def _two_in_turn(capacity: int, accesses: int, _: random.Random) -> Iterator[int]:
    """Alternates between two chunks."""
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
