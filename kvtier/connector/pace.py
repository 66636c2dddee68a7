"""How long the engine takes for a step, seen from its scheduler.

A step begins when it was scheduled or, where the engine schedules ahead, when the one before it
is over; it ends when its output is there. Idle time is in neither.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["StepClock"]

_MOST_AHEAD: Final = 8


class StepClock:
    """Puts scheduled steps and their outputs together. Time is passed in, in seconds."""

    def __init__(self) -> None:
        # An engine that drops a step never reports its end; the oldest is then forgotten.
        self._ahead: deque[tuple[int, float]] = deque(maxlen=_MOST_AHEAD)
        self._ended_s = float("-inf")

    def scheduled(self, tokens: int, now: float) -> None:
        """Note that a step which computes ``tokens`` prompt tokens was scheduled."""
        self._ahead.append((tokens, now))

    def ended(self, now: float) -> tuple[int, float] | None:
        """Note that the oldest scheduled step is over.

        Returns:
            Its prompt tokens, and how long it took; None if no step was scheduled.
        """
        if not self._ahead:
            return None
        tokens, scheduled_s = self._ahead.popleft()
        seconds = now - max(scheduled_s, self._ended_s)
        self._ended_s = now
        return tokens, seconds
