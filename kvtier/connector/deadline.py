"""A deadline that all parts of a shutdown share."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """A deadline that all parts of an operation share.

    Args:
        timeout_s: Seconds from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self._at_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the number of seconds left; 0 after the deadline."""
        return max(self._at_s - time.monotonic(), 0.0)

    def share_s(self, reserve_s: float) -> float:
        """Return how many seconds the next part may take if later parts need ``reserve_s``.

        Args:
            reserve_s: Seconds for the later parts. The later parts get at most a quarter of the
                remaining time.
        """
        left_s = self.left_s()
        return left_s - min(reserve_s, left_s / 4)
