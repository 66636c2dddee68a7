"""Tells the operator, not too often, that a tier does not keep up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

__all__ = ["PressureLog"]

logger = logging.getLogger(f"vllm.{__name__}")  # below the one logger vLLM configures

_QUIET_S: Final = 60.0


class PressureLog:
    """Warns when chunks are dropped, at once and then at most once a minute. Time is passed in.

    Args:
        tiers: The tiers' names.
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
                "tier %s does not keep up: %d new chunks (%.1f GB) were not copied to it and "
                "will not outlive RAM; a faster disk, more RAM or placement.write: evict helps",
                self._tiers[index],
                new,
                new * self._slot_nbytes / 1e9,
            )
