"""One deadline for all parts of a shutdown."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """One timeout for all parts of an operation.

    Args:
        timeout_s: Seconds from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self._at_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds that are left, never negative."""
        return max(self._at_s - time.monotonic(), 0.0)

    def share_s(self, reserve_s: float) -> float:
        """Return the seconds that the next part may take if later parts need ``reserve_s``.

        Args:
            reserve_s: Seconds for the later parts. They get at most a quarter of the remaining
                time.
        """
        left_s = self.left_s()
        return left_s - min(reserve_s, left_s / 4)
