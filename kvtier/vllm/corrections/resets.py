"""Resets: what the half has to tell of before is told.

* **Resets that follow each other.** vLLM's half asserts that the jobs of before the last reset
  were told to end, which happens in a step. So they are kept from it meanwhile.
* **Events of a reset.** The half forgets what it knows of each chunk before it hears that the
  chunks are gone, so of a chunk of several blocks only the last would be called removed. So it
  is asked for its events at once, while it is made to know.

In every release since 0.25.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvtier.vllm import compat

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

__all__ = ["Resets"]


class Resets:
    """Resets one scheduler half.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.

    Attributes:
        untold: Events of before a reset that nobody took yet.
    """

    def __init__(self, half: Any) -> None:  # noqa: ANN401 - vLLM's
        self._half = half
        self.untold: list[KVCacheEvent] = []

    def reset(self, reset: Callable[[], bool | None]) -> bool | None:
        """Reset the half, and keep what it has to tell of before.

        Args:
            reset: Resets it.
        """
        payloads = compat.event_payloads(self._half)
        kept = {} if payloads is None else dict(payloads)
        flushed: set[int] = getattr(self._half, "_current_batch_jobs_to_flush", set())
        owed = set(flushed)
        flushed.clear()
        try:
            answer = reset()
        finally:
            flushed.update(owed)
        if payloads is not None and kept:
            payloads.update(kept)
            self.untold.extend(self._half.take_events())
            # Or a removal of before would take with it what is stored again after.
            payloads.clear()
        return answer

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the events of before a reset, once."""
        untold, self.untold = self.untold, []
        return untold
