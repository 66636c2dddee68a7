"""Takes a failing tier out of service for a while.

The circuit breaker of Nygard, "Release It!" (2007): closed while all is well, open after some
failures in a row, half open after a back-off, when a single probe decides.
"""

from __future__ import annotations

__all__ = ["Breaker"]


class Breaker:
    """Counts failures of one channel. Time is passed in.

    Args:
        failures: Failures in a row that open it.
        backoff_s: Seconds it stays open before a probe is let through.
    """

    def __init__(self, *, failures: int, backoff_s: float) -> None:
        self._limit = failures
        self._backoff_s = backoff_s
        self._failures = 0
        self._closed_again_s = 0.0
        self._probing = False

    @property
    def tripped(self) -> bool:
        """Whether the last calls failed so often that only a probe may follow."""
        return self._failures >= self._limit

    def is_open(self, now: float) -> bool:
        """Return whether calls are refused at ``now``, a probe aside."""
        return self.tripped and (self._probing or now < self._closed_again_s)

    def allow(self, now: float) -> bool:
        """Return whether a call may be made at ``now``; may make it the probe."""
        if not self.tripped:
            return True
        if self._probing or now < self._closed_again_s:
            return False
        self._probing = True
        return True

    def record(self, *, failed: bool, now: float) -> None:
        """Note how a call that was allowed ended."""
        self._probing = False
        if not failed:
            self._failures = 0
            return
        self._failures += 1
        self._closed_again_s = now + self._backoff_s

    def discount(self) -> None:
        """Note that a call that was allowed ended without a word on whether the tier works.

        If it was the probe, the next call is.
        """
        self._probing = False
