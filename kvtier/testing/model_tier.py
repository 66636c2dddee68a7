"""A tier that is nothing but its eviction policy: to run a policy on a stream of keys."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.keys import ChunkKey
from kvtier.policies import NEVER, ChunkCopy, CopyState, Eviction, PolicyContext

__all__ = ["ModelTier"]


class ModelTier:
    """Calls a policy as :class:`~kvtier.policies.Eviction` says a driver does.

    Args:
        eviction: The policy; its capacity is the tier's.
        one_by_one: Whether batches are broken up into calls for one chunk each.

    Attributes:
        members: The resident copies by key.
        pinned: Keys that must stay.
        hits: Accesses that found their chunk.
        asked: How often the policy asked whether a copy may go.
    """

    def __init__(self, eviction: Eviction, *, one_by_one: bool = False) -> None:
        self.eviction = eviction
        self._batches = Eviction if one_by_one else type(eviction)
        self.members: dict[ChunkKey, ChunkCopy] = {}
        self.pinned: set[ChunkKey] = set()
        self.hits = 0
        self.asked = 0
        self._ctx = PolicyContext()
        self._kids: dict[ChunkKey, int] = {}

    def access(
        self, key: ChunkKey, *, parent: ChunkKey | None = None, next_use: int = NEVER
    ) -> bool:
        """Use ``key``, and let it in if it is absent and there is or can be made room.

        Args:
            key: The chunk.
            parent: The chunk before it.
            next_use: When it is accessed next.

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
        """Let one victim go and return it; None when nobody may go."""
        victim = self.eviction.pick(self._may_go, self._ctx)
        if victim is not None:
            self._let_go(victim)
        return victim

    def evict_many(self, count: int) -> list[ChunkCopy]:
        """Let up to ``count`` victims go at once and return them, as the manager does.

        Where children must go before their parents that is one after the other.
        """
        if self.eviction.leaf_only:
            one_each = (self.evict() for _ in range(count))
            return [victim for victim in one_each if victim is not None]
        victims = self._batches.pick_many(self.eviction, count, self._may_go, self._ctx)
        for victim in victims:
            self._let_go(victim)
        return victims

    def use_many(self, keys: Sequence[ChunkKey]) -> None:
        """Use ``keys``, all of them resident, at once."""
        self.hits += len(keys)
        copies = iter([self.members[key] for key in keys])
        self._batches.on_hit_many(self.eviction, copies, self._ctx)

    def insert_many(self, keys: Sequence[ChunkKey]) -> None:
        """Let ``keys``, all of them absent and without parents, into free slots at once."""
        for key in keys:
            self.eviction.on_miss(key, self._ctx)
        copies = [self._enter(key, None) for key in keys]
        self._batches.on_insert_many(self.eviction, copies, self._ctx)

    def remove(self, key: ChunkKey) -> None:
        """Take ``key`` out for another reason than to make room."""
        copy = self.members[key]
        copy.state = CopyState.GONE
        self.eviction.on_remove(copy)
        self._forget(copy)

    def may_go(self) -> set[ChunkKey]:
        """Return the keys of those a policy may pick now."""
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
        copy.child_count = self._kids.get(key, 0)
        self.members[key] = copy
        self._count_kid(parent, 1)
        return copy

    def _let_go(self, victim: ChunkCopy) -> None:
        if self.members.get(victim.key) is not victim:
            raise AssertionError(f"{victim} was picked and is not in the tier")
        victim.state = CopyState.GONE
        self._forget(victim)

    def _forget(self, copy: ChunkCopy) -> None:
        del self.members[copy.key]
        self._count_kid(copy.parent, -1)

    def _count_kid(self, parent: ChunkKey | None, change: int) -> None:
        if parent is None:
            return
        self._kids[parent] = self._kids.get(parent, 0) + change
        if parent in self.members:
            self.members[parent].child_count += change
