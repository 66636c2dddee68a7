"""States that are handed over: none that is gone, and none that is not to be stored.

Where a model keeps states, vLLM hands the half those that blocks end with, in the step that
computes them.

* **Ends of states.** What a request says of how much of it may be stored is asserted, and not
  looked at, where the half is handed the state at the end of a prompt. So it is not handed that
  state.
* **States that are gone.** Where several guessed tokens are accepted at once under async
  scheduling, vLLM hands a state over in a step that has freed its block before, and may have
  given it away. Such a state is not handed over either.

Since 0.29, whose half is the first that states are handed to.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from kvtier.vllm.corrections.given_blocks import block_copies, given_blocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvtier.vllm.corrections.last_stores import LastStores

__all__ = ["States"]


class States:
    """Decides which states one scheduler half is handed.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
        limits: Knows how much of a request may be stored.
    """

    def __init__(self, half: Any, limits: LastStores) -> None:  # noqa: ANN401 - vLLM's
        self._half = half
        self._limits = limits

    def without_unwanted(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return a step without states that are gone or that requests want not to be stored.

        Args:
            output: The step, which the half has not seen yet, and which hands over some.
        """
        shown = copy.copy(output)
        shown.kv_connector_block_state = state = copy.copy(output.kv_connector_block_state)
        given = given_blocks(self._half, output)
        wanted = {
            req_id: [
                entry
                for entry in entries
                if entry[2] <= self._limits.limit_of(req_id)
                and not (entry[1] in given and self._lost(output, req_id, entry))
            ]
            for req_id, entries in state.boundary_state_offloads.items()
        }
        state.boundary_state_offloads = {key: kept for key, kept in wanted.items() if kept}
        return shown

    def _lost(self, output: SchedulerOutput, req_id: str, entry: tuple[int, int, int]) -> bool:
        """Return whether a state that is handed over is in a block its request has no more.

        Args:
            output: The step.
            req_id: The request.
            entry: The state's KV cache group, its block, and the tokens that it follows.
        """
        group, block, tokens = entry
        tables = output.kv_connector_block_state.get_block_ids(req_id)
        groups = self._half.config.kv_group_configs
        size = next((each.tokens_per_block for each in groups if each.group_idx == group), 0)
        if not (tables and size):
            return True
        # Where the request goes on in the state's own block, a copy of it is handed over.
        homes = [
            pair.src_block_id for pair in block_copies(output) if pair.dst_block_id == block
        ]
        return {block, *homes}.isdisjoint(tables[group][: -(-tokens // size)])
