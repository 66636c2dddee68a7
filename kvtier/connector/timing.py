"""Measures durations on the scheduler side: engine steps, and waits for loads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["LoadWaits", "StepClock"]

_MAX_STEPS_AHEAD: Final = 8
_MAX_WAITS: Final = 4096


class StepClock:
    """Measures how long engine steps take, in the scheduler's process.

    A step begins when it is scheduled. If the engine schedules ahead, the step begins when the
    previous step ends. A step ends when its output arrives. Idle time is excluded.

    Only steps with prompt tokens are reported; most steps have none. The end of a step without
    prompt tokens is recorded only if it is the beginning of a step that is already scheduled.

    Args:
        clock: Returns seconds; monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # An engine that drops a step never reports its end: the oldest step is then forgotten.
        self._ahead: deque[tuple[int, float]] = deque(maxlen=_MAX_STEPS_AHEAD)
        self._ended_s = float("-inf")

    def scheduled(self, tokens: int) -> None:
        """Record that a step with ``tokens`` prompt tokens was scheduled."""
        self._ahead.append((tokens, self._clock() if tokens else 0.0))

    def ended(self) -> tuple[int, float] | None:
        """Record that the oldest scheduled step ended.

        Returns:
            The step's number of prompt tokens and its duration in seconds. None if the step had
            no prompt tokens, or no step was scheduled.
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


class LoadWaits:
    """Measures how long each request waits for its chunks to be loaded.

    Args:
        clock: Returns seconds; monotonic.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: dict[str, float] = {}
        self._ended: deque[float] = deque(maxlen=_MAX_WAITS)

    def __bool__(self) -> bool:
        return bool(self._began_s)

    def begin(self, req_id: str) -> None:
        """Start the wait of a request, unless it waits already."""
        if req_id not in self._began_s:
            self._began_s[req_id] = self._clock()

    def end(self, req_id: str) -> None:
        """End the wait of a request, if it waits."""
        began_s = self._began_s.pop(req_id, None)
        if began_s is not None:
            self._ended.append(self._clock() - began_s)

    def forget(self, req_id: str) -> None:
        """Forget a request that ended while it waited."""
        self._began_s.pop(req_id, None)

    def take(self) -> list[float]:
        """Return the most recent waits that ended since the last call, in seconds."""
        taken = list(self._ended)
        self._ended.clear()
        return taken
