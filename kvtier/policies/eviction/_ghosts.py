"""Keys of chunks that left: what a policy learns from when they come back."""

from __future__ import annotations

from collections import OrderedDict

from kvtier.keys import ChunkKey

__all__ = ["Ghosts"]


class Ghosts:
    """The newest keys that left, first in, first out.

    Args:
        limit: Most keys to hold.
    """

    __slots__ = ("_keys", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: OrderedDict[ChunkKey, None] = OrderedDict()

    def add(self, key: ChunkKey) -> None:
        """Hold ``key`` as the newest, and let the oldest go when there are too many."""
        keys = self._keys
        keys[key] = None
        if len(keys) > self._limit:
            keys.popitem(last=False)

    def take(self, key: ChunkKey) -> bool:
        """Let ``key`` go and return whether it was held."""
        if key in self._keys:
            del self._keys[key]
            return True
        return False
