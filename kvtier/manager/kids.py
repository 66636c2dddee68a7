"""Children of the copies of a tier whose policy evicts leaves only.

Such a policy strands nothing: it picks a chunk only when none that continues it is here. It
reads ``copy.child_count`` for that, which is kept here. A child may arrive before its parent,
and stay when its parent was dropped, so children of absent chunks are counted too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.keys import ChunkKey
from kvtier.policies import ChunkCopy, Evictable, Eviction, PolicyContext
from kvtier.policies.leaves import is_unpinned_leaf

__all__ = ["Kids", "is_idle_leaf"]


def is_idle_leaf(copy: ChunkCopy) -> bool:
    """Return whether nothing needs ``copy`` and no resident chunk continues it."""
    return is_unpinned_leaf(copy) and not copy.dirty


class Kids:
    """Counts the children of every chunk that are in the eviction order.

    Args:
        copies: The tier's copies, by key.
    """

    __slots__ = ("_copies", "_of_absent")

    def __init__(self, copies: Mapping[ChunkKey, ChunkCopy]) -> None:
        self._copies = copies
        self._of_absent: dict[ChunkKey, int] = {}

    def arrive(self, copies: Sequence[ChunkCopy]) -> None:
        """Count ``copies``, which become members of the order, and find their children."""
        for copy in copies:
            copy.child_count += self._of_absent.pop(copy.key, 0)
            self.enter(copy)

    def enter(self, copy: ChunkCopy) -> None:
        """Count ``copy`` as a child."""
        self._count(copy, 1)

    def leave(self, copy: ChunkCopy) -> None:
        """Count ``copy``, which was picked or removed, no longer as a child."""
        self._count(copy, -1)

    def orphan(self, copy: ChunkCopy) -> None:
        """Remember the children that ``copy``, which is gone, leaves behind."""
        if copy.child_count:
            self._count_of_absent(copy.key, copy.child_count)
            copy.child_count = 0

    def pick_many(
        self, eviction: Eviction, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        """Pick leaf by leaf: a parent becomes a candidate when its last child was picked."""
        victims: list[ChunkCopy] = []
        while len(victims) < count:
            victim = eviction.pick(evictable, ctx)
            if victim is None:
                break
            self.leave(victim)
            victims.append(victim)
        return victims

    def _count(self, copy: ChunkCopy, change: int) -> None:
        if copy.parent is None:
            return
        parent = self._copies.get(copy.parent)
        if parent is not None:
            parent.child_count += change
        else:
            self._count_of_absent(copy.parent, change)

    def _count_of_absent(self, key: ChunkKey, change: int) -> None:
        kids = self._of_absent.pop(key, 0) + change
        if kids:
            self._of_absent[key] = kids
