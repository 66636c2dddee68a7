"""How long requests wait for their chunks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["LoadWaits"]

_MOST_UNTOLD: Final = 4096


class LoadWaits:
    """Measures from when a request begins to wait for chunks until it can be computed.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: dict[str, float] = {}
        self._ended: deque[float] = deque(maxlen=_MOST_UNTOLD)

    def begin(self, req_id: str) -> None:
        """Note that a request waits from now on, if it does not yet."""
        if req_id not in self._began_s:
            self._began_s[req_id] = self._clock()

    def end(self, req_id: str) -> None:
        """Note that a request need not wait any longer, if it did."""
        began_s = self._began_s.pop(req_id, None)
        if began_s is not None:
            self._ended.append(self._clock() - began_s)

    def forget(self, req_id: str) -> None:
        """Forget a request that ended while it waited."""
        self._began_s.pop(req_id, None)

    @property
    def any_waits(self) -> bool:
        """Whether a request waits."""
        return bool(self._began_s)

    def take(self) -> list[float]:
        """Return the seconds of waits that ended since the last call, the latest thousands."""
        taken = list(self._ended)
        self._ended.clear()
        return taken
