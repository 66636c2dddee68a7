"""Prompts that come in parts: stored from their own blocks, or not at all.

* **Blocks told twice.** A request whose prompt comes in parts (vLLM's streaming inputs) is told
  as a new one with each of them, with all of its blocks, and vLLM's half appends these to those
  it knows. What it offers from then on would be stored from the wrong blocks. So it forgets the
  blocks of whatever comes as new.
* **Parts that go astray.** Such a request goes on without the last token it generated. vLLM
  does not take back what a state made of that token, where the next step was under way; nor
  tokens that were guessed and accepted behind the last, where it was not. So nothing of the
  later parts is stored there (:func:`kvtier.vllm.compat.parts_go_astray`).

In every release since 0.25, whose half keeps its tables under other names and is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["PromptParts"]


class PromptParts:
    """Lets one scheduler half take each part of a prompt for what it is.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``, whose block tables are known.
        go_astray: Whether vLLM may compute the later parts of a prompt from what is not theirs.
    """

    def __init__(
        self,
        half: Any,  # noqa: ANN401 - vLLM's
        *,
        go_astray: bool,
    ) -> None:
        self._half = half
        self._go_astray = go_astray

    def forget_told(self, output: SchedulerOutput) -> None:
        """Let the half take over the blocks of requests that a step has as new ones.

        Args:
            output: The step, which the half has not seen yet.
        """
        for new in output.scheduled_new_reqs:
            status = self._half._req_status.get(new.req_id)  # noqa: SLF001
            if status is None:
                continue
            if self._go_astray and any(state.block_ids for state in status.group_states):
                status.max_offload_tokens = 0
            for state in status.group_states:
                state.block_ids.clear()
