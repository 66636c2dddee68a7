"""Where vLLM's scheduler half would store, or tell, what is not so.

* **Last stores.** Of a request that ended, unless it was aborted, the half offers its whole
  prompt, as far as it has blocks. One that ended with an error amid its prefill filled the last
  of them in part; one that ended after it was preempted has none, and the half does not know
  yet. Both would be stored under keys of what was never computed. So the half is told how far
  the request got.
* **Events of a reset.** The half forgets what it knows of each chunk before it hears that the
  chunks are gone, so of a chunk of several blocks only the last would be called removed. So it
  is asked for its events at once, while it is made to know.

Both reach into state that is nobody's interface. Where a release does not have it, vLLM's half
is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvtier.vllm import compat

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

__all__ = ["Corrections"]


class Corrections:
    """Corrects one scheduler half.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
    """

    def __init__(self, half: Any) -> None:  # noqa: ANN401 - vLLM's
        self._half = half
        self._bounds = compat.offers_can_be_bounded(half)
        self._untold: list[KVCacheEvent] = []

    def bound_last_stores(self, request: Request) -> None:
        """Let the half offer no more of a request that ends than was computed.

        Under async scheduling that counts a step which is still computing; it is over before a
        store of the next one begins.
        """
        status = self._half._req_status.get(request.request_id) if self._bounds else None  # noqa: SLF001
        if status is not None:
            limit, computed = status.max_offload_tokens, request.num_computed_tokens
            status.max_offload_tokens = computed if limit is None else min(limit, computed)

    def reset(self, reset: Callable[[], bool | None]) -> bool | None:
        """Reset the half, and keep what it has to tell of before.

        Args:
            reset: Resets it.
        """
        payloads = compat.event_payloads(self._half)
        kept = {} if payloads is None else dict(payloads)
        answer = reset()
        if payloads is not None and kept:
            payloads.update(kept)
            self._untold.extend(self._half.take_events())
            # Or a removal of before would take with it what is stored again after.
            payloads.clear()
        return answer

    @property
    def has_events(self) -> bool:
        """Whether there are events of before a reset to take."""
        return bool(self._untold)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the events of before a reset, once."""
        untold, self._untold = self._untold, []
        return untold
