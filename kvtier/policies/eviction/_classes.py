"""Classes of chunks that differ in how likely they come back, as a cache can see them.

A chunk that was used twice comes back more often than one that was used once, the tail of a
prompt hardly ever, a short prompt more often than a long one. So the classes are

- by number of uses, for chunks that were used before. The count survives an eviction while the
  key is remembered, as in ARC (Megiddo and Modha, FAST 2003), or a chunk that comes back late
  would start anew each time;
- by length of the prompt, in steps of four, for chunks that are new;
- the last new chunk of a prompt, for itself: the next turn continues in the middle of it.

No rule about parents and children is needed. A prefix is used whenever its continuation is,
hence it was used as recently and as often; its class is never worth less (:data:`BELOW`), and
among equals the deepest chunk of a prompt stands first. So a prefix outlives what continues it.
"""

from __future__ import annotations

from typing import Final

__all__ = ["AFTER", "BELOW", "KINDS", "NOWHERE", "TAIL", "kind_of_new"]

NOWHERE: Final = -1
"""The class of what is not in the tier."""
TAIL: Final = 0
"""The class of the last new chunk of a prompt."""
_NEW: Final = 1
_LENGTHS: Final = 5
_USED: Final = _NEW + _LENGTHS
_MOST_USES: Final = 4
KINDS: Final = _USED + _MOST_USES
"""How many classes there are."""

AFTER: Final = [max(_USED, min(kind + 1, KINDS - 1)) for kind in range(KINDS)]
"""The class that a use makes of each."""
BELOW: Final = [
    [],
    *([TAIL] for _ in range(_NEW, _USED)),
    list(range(_USED)),
    *([kind - 1] for kind in range(_USED + 1, KINDS)),
]
"""What a continuation of a chunk of each class can be, unless a class between says so."""


def kind_of_new(length: int) -> int:
    """Return the class of the chunks of a new prompt of ``length`` chunks, but for its last."""
    return _NEW + min(length.bit_length() // 2, _LENGTHS - 1)
