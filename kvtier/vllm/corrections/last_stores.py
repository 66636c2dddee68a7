"""Last stores: no more of a request than it computed.

When a request ends, vLLM's half offers its whole prompt, as far as it has blocks. A request
that ends with an error amid its prefill filled the last of them in part; one that ends after it
was preempted has none, and the half does not know yet. Both would be stored under keys of what
was never computed. So the half is told how far the request got.

Since 0.30 the half bounds an aborted request itself, and stores the tail of each sliding window
before that end. It recognises the end by its distance to the end of the prompt, which a bound
would move as well. So an aborted request gets no bound, unless a load of it is in flight:
nothing is stored from the blocks of a load that may fail.

Since 0.26: in 0.25 it offers nothing of a request that ended.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvtier.vllm import compat

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["LastStores"]


class LastStores:
    """Bounds what one scheduler half offers of requests that end.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
    """

    def __init__(self, half: Any) -> None:  # noqa: ANN401 - vLLM's
        self._half = half
        self._bounds = compat.offers_can_be_bounded(half)
        self._bounds_aborted = not compat.bounds_aborted(half)

    def limit_of(self, req_id: str) -> float:
        """Return how many tokens of a request may be stored."""
        status = self._status_of(req_id)
        if status is None:
            return math.inf
        limit = math.inf if status.max_offload_tokens is None else status.max_offload_tokens
        request = status.req
        return min(limit, request.num_computed_tokens) if request.is_finished() else limit

    def bound(self, request: Request) -> None:
        """Let the half offer no more of a request that ends than was computed.

        Under async scheduling that counts a step which is still computing; it is over before a
        store of the next one begins.
        """
        status = self._status_of(request.request_id)
        if status is not None and not self._is_bounded(request, status):
            limit, computed = status.max_offload_tokens, request.num_computed_tokens
            status.max_offload_tokens = computed if limit is None else min(limit, computed)

    def _is_bounded(self, request: Request, status: Any) -> bool:  # noqa: ANN401 - vLLM's
        """Return whether the half itself offers no more of a request than was computed."""
        if self._bounds_aborted or request.status.name != "FINISHED_ABORTED":
            return False
        jobs = self._half._jobs  # noqa: SLF001
        return all(jobs[job_id].is_store for job_id in status.transfer_jobs)

    def _status_of(self, req_id: str) -> Any:  # noqa: ANN401 - vLLM's
        """Return what the half knows of a request; None if that has no limit."""
        return self._half._req_status.get(req_id) if self._bounds else None  # noqa: SLF001
