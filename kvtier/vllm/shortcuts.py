"""What vLLM's offloading half need not be asked, because nothing would come of it.

vLLM's half looks at every running request in every step, and calls its worker half four times
whether there are jobs or not. Most steps bring most requests nothing: a request that generates
fills a block in one step out of sixteen or more. The look is not free, for its code is cold
after each forward pass.

* **Requests.** A running request means something to the scheduler half in a step that gives it
  blocks, or whose tokens fill a chunk that was not offered yet. In any other the half would
  only bring the list of its keys up to date, which it does as well when the request means
  something next, before it uses the list. So it is shown the step without that request. What
  was offered never gets less but by a load or a reset, and after these a request is shown until
  the half has looked at it again. A request whose prompt may grow is always shown.
* **Steps.** Where few requests generate, nobody means anything in most steps. After the first
  of these the least number of tokens that any request lacks says for how long that is so, and
  the next ones are not looked at request by request.
* **Calls.** Without jobs in a step, deferred or in flight, the worker half has nothing to
  submit, to wait for or to report.

That is how the half works, not what it promises. So it holds for those releases whose source
was read (:func:`kvtier.vllm.compat.source_was_read`); any other is asked everything.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtier.vllm.connector_contract import OffloadingConnectorMetadata
from kvtier.vllm.contract import ScheduleEndContext

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["BusyRequests"]


class BusyRequests:
    """Shows vLLM's scheduler half the requests of a step that mean something to it.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``, of a release that was read.
    """

    def __init__(self, half: Any) -> None:  # noqa: ANN401 - vLLM's
        self._half = half
        self._groups = half.config.kv_group_configs
        self._prompt_only = half.config.offload_prompt_only
        self._nothing = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        self._idle: dict[str, tuple[Request, float]] = {}
        """Requests that mean nothing until they have so many tokens."""
        self._spare_tokens = 0.0
        """How many tokens each may get after the last step before one means anything."""

    def is_quiet(self, output: SchedulerOutput) -> bool:
        """Return whether a step surely means nothing, without looking at each request.

        To be asked once, and only if nothing is to do but what the half has to: where it does,
        neither the half nor its manager is told of the step. Where it does not, :meth:`of` has
        to be asked.
        """
        tokens = output.num_scheduled_tokens
        most = max(tokens.values(), default=0)
        if (
            most > self._spare_tokens
            or not tokens.keys() <= self._idle.keys()
            or not self._is_empty(output)
        ):
            return False
        self._spare_tokens -= most
        return True

    def of(self, output: SchedulerOutput) -> SchedulerOutput | None:
        """Return ``output`` without the requests that mean nothing in this step.

        Returns:
            None if all of the step means nothing: there is no job in it, and nothing to wait
            for.
        """
        self._spare_tokens = 0.0
        idle = self._idle
        filling: dict[str, int] = {}
        for req_id, tokens in output.num_scheduled_tokens.items():
            known = idle.get(req_id)
            if known is None or known[0].num_computed_tokens + tokens >= known[1]:
                filling[req_id] = tokens
        if not filling and self._is_empty(output):
            self._look_ahead(output)
            return None
        if len(filling) == len(output.num_scheduled_tokens):
            return output
        shown = copy.copy(output)
        shown.num_scheduled_tokens = filling
        shown.scheduled_cached_reqs = _only(output.scheduled_cached_reqs, filling)
        return shown

    def pass_over(self) -> KVConnectorMetadata:
        """End a step that means nothing to the half, and return that there is nothing to do."""
        self._half.manager.on_schedule_end(self._nothing)
        return self.nothing()

    def nothing(self) -> KVConnectorMetadata:
        """Return that there is nothing to do."""
        return OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set())

    def looked_at(self, output: SchedulerOutput) -> None:
        """Note that the half was shown ``output``, as :meth:`of` returned it."""
        for req_id in output.num_scheduled_tokens:
            self._note(req_id)
        for req_id in output.finished_req_ids:
            self._idle.pop(req_id, None)

    def forget(self, req_id: str) -> None:
        """Show a request again that got blocks: what was offered of it may be less."""
        self._idle.pop(req_id, None)

    def clear(self) -> None:
        """Show all requests again, for a reset."""
        self._idle.clear()

    def _is_empty(self, output: SchedulerOutput) -> bool:
        """Return whether only requests that fill no chunk may be in ``output``."""
        half, cached = self._half, output.scheduled_cached_reqs
        blocks = output.kv_connector_block_state
        return not (
            any(cached.new_block_ids)
            or cached.resumed_req_ids
            or output.scheduled_new_reqs
            or output.finished_req_ids
            or output.preempted_req_ids
            or output.kv_cache_block_copies
            or output.new_block_ids_to_zero
            or (blocks is not None and blocks.boundary_state_offloads)
            # What vLLM gathered since the last step: loads, resets, blocks given away.
            or half._current_batch_load_jobs  # noqa: SLF001
            or half._current_batch_jobs_to_flush  # noqa: SLF001
            or half._current_batch_allocated_block_ids  # noqa: SLF001
        )

    def _look_ahead(self, output: SchedulerOutput) -> None:
        """Work out for how long nobody means anything after a step."""
        tokens = output.num_scheduled_tokens
        self._spare_tokens = min(
            (
                means_at - request.num_computed_tokens - tokens.get(req_id, 0) - 1
                for req_id, (request, means_at) in self._idle.items()
            ),
            default=0.0,
        )

    def _note(self, req_id: str) -> None:
        status = self._half._req_status.get(req_id)  # noqa: SLF001
        if status is None or status.req.resumable:
            return
        pairs = zip(self._groups, status.group_states, strict=True)
        tokens: float = min(
            (state.next_stored_chunk_idx + 1) * group.tokens_per_chunk for group, state in pairs
        )
        ends = [math.inf if status.max_offload_tokens is None else status.max_offload_tokens]
        if self._prompt_only:
            ends.append(status.req.num_prompt_tokens)
        self._idle[req_id] = status.req, tokens if tokens <= min(ends) else math.inf


def _only(cached: CachedRequestData, filling: Mapping[str, int]) -> CachedRequestData:
    """Return those of ``cached`` that got blocks or are in ``filling``."""
    places: list[int] = []
    if filling or cached.resumed_req_ids or any(cached.new_block_ids):
        places = [
            place
            for place, (req_id, blocks) in enumerate(
                zip(cached.req_ids, cached.new_block_ids, strict=True)
            )
            if blocks or req_id in filling or req_id in cached.resumed_req_ids
        ]
    shown = copy.copy(cached)
    shown.req_ids = [cached.req_ids[place] for place in places]
    shown.new_block_ids = [cached.new_block_ids[place] for place in places]
    return shown
