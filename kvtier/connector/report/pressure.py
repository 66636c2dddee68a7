"""Tells the operator, not too often, that a tier does not keep up.

It shows in two places. Where new chunks go down at once, those that a slow tier cannot take are
dropped on the way to it. Where chunks go down when they are evicted, RAM fills with chunks that
cannot leave, and new ones are refused there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtier.logs import get_logger
from kvtier.units import approximate_size

__all__ = ["PressureLog"]

logger = get_logger(__name__)

_QUIET_S: Final = 60.0
_NOT_SENT: Final = (
    "tier %s does not keep up: %d new chunks (%s) were not copied to it and will not "
    "outlive RAM; a faster disk, more RAM or placement.write: evict helps"
)
_NOT_STORED: Final = (
    "tier %s is full of chunks that wait for a slower tier, which does not keep up: %d new "
    "chunks (%s) were not stored at all; a faster disk or more RAM helps"
)


class PressureLog:
    """Warns when chunks are dropped, at once and then at most once a minute. Time is passed in.

    Args:
        tiers: The tiers' names, RAM first.
        slot_nbytes: Bytes of one chunk.
    """

    def __init__(self, tiers: Sequence[str], slot_nbytes: int) -> None:
        self._tiers = tiers
        self._slot_nbytes = slot_nbytes
        self._reported = [0] * len(tiers)
        self._due_s = [float("-inf")] * len(tiers)

    def note(self, dropped: Sequence[int], now: float) -> None:
        """Take the chunks dropped so far, tier by tier, as of ``now`` in seconds."""
        for index, total in enumerate(dropped):
            new = total - self._reported[index]
            if not new or now < self._due_s[index]:
                continue
            self._reported[index] = total
            self._due_s[index] = now + _QUIET_S
            logger.warning(
                _NOT_SENT if index else _NOT_STORED,
                self._tiers[index],
                new,
                approximate_size(new * self._slot_nbytes),
            )
