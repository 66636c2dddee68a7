"""How long the engine takes for a step, seen from its scheduler.

A step begins when it was scheduled or, where the engine schedules ahead, when the one before it
is over; it ends when its output is there. Idle time is in neither. Nobody asks about steps that
compute no prompt, which most are, so the clock is read for them only where that says when the
next one began.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["StepClock"]

_MOST_AHEAD: Final = 8


class StepClock:
    """Puts scheduled steps and their outputs together.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # An engine that drops a step never reports its end; the oldest is then forgotten.
        self._ahead: deque[tuple[int, float]] = deque(maxlen=_MOST_AHEAD)
        self._ended_s = float("-inf")

    def scheduled(self, tokens: int) -> None:
        """Note that a step which computes ``tokens`` prompt tokens was scheduled."""
        self._ahead.append((tokens, self._clock() if tokens else 0.0))

    def ended(self) -> tuple[int, float] | None:
        """Note that the oldest scheduled step is over.

        Returns:
            Its prompt tokens, and how long it took; None if it had none, or none was scheduled.
        """
        ahead = self._ahead
        if not ahead:
            return None
        tokens, scheduled_s = ahead.popleft()
        if not (tokens or ahead):
            return None
        now = self._clock()
        seconds = now - max(scheduled_s, self._ended_s)
        self._ended_s = now
        return (tokens, seconds) if tokens else None
