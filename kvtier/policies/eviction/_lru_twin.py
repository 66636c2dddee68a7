"""What LRU would have had: the expert that an adaptive policy is measured against."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvtier.keys import ChunkKey

__all__ = ["LruTwin"]

_STAKE: Final = 0.0003
"""Share of the uses that LRU may have hit more often before it is followed; a change back takes
a turn of the tier to have its effect, and costs more than this."""
_FADE: Final = 0.99
"""What the score against LRU keeps of itself each time the table is renewed."""


class LruTwin:
    """The keys LRU would hold, and how many hits we have more than it.

    Args:
        capacity: Slots of the tier.
    """

    __slots__ = ("_capacity", "_keys", "_lead", "_uses")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[ChunkKey, None] = OrderedDict()
        self._lead = 0.0
        self._uses = 0.0

    @property
    def ahead(self) -> bool:
        """Whether LRU is ahead by as much as may be risked."""
        return self._lead < -_STAKE * self._uses

    def use(self, key: ChunkKey, *, hits: int) -> None:
        """Note a use of ``key`` that had ``hits``, one or none, here."""
        keys = self._keys
        self._uses += 1
        if key in keys:
            keys.move_to_end(key)
            self._lead += hits - 1
            return
        self._lead += hits
        keys[key] = None
        if len(keys) > self._capacity:
            keys.popitem(last=False)

    def renew(self, key: ChunkKey) -> None:
        """Make ``key`` the most recent if it is held: chunks come in from the wrong end."""
        if key in self._keys:
            self._keys.move_to_end(key)

    def forget(self, key: ChunkKey) -> None:
        """Let ``key`` go: it is nowhere else remembered."""
        self._keys.pop(key, None)

    def fade(self) -> None:
        """Let what was count a little less."""
        self._lead *= _FADE
        self._uses *= _FADE
