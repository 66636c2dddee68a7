"""Where vLLM's scheduler half would store, or tell, what is not so.

==============================================  =============================================
:mod:`~kvtier.vllm.corrections.last_stores`     more than a request computed when it ended
:mod:`~kvtier.vllm.corrections.late_stores`     blocks that were given away before it ended
:mod:`~kvtier.vllm.corrections.prompt_parts`    prompts that come in parts
:mod:`~kvtier.vllm.corrections.given_blocks`    blocks given away of which it is not told
:mod:`~kvtier.vllm.corrections.states`          states that are gone, or are not to be stored
:mod:`~kvtier.vllm.corrections.resets`          resets, and what became of chunks before them
==============================================  =============================================

All reach into state that is nobody's interface. Where a release does not have it, vLLM's half
is left alone; but an engine of which late stores are to be expected is refused then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.vllm import compat
from kvtier.vllm.corrections.given_blocks import GivenBlocks
from kvtier.vllm.corrections.last_stores import LastStores
from kvtier.vllm.corrections.late_stores import LateStores, late_stores_refused
from kvtier.vllm.corrections.prompt_parts import PromptParts
from kvtier.vllm.corrections.resets import Resets
from kvtier.vllm.corrections.states import States

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["Corrections", "late_stores_refused"]


class Corrections:
    """Corrects one scheduler half.

    A step that brings nothing to correct is asked about here, and given to none of the others.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
        parts_go_astray: Whether vLLM may compute the later parts of a prompt from what is not
            theirs.

    Attributes:
        knows_tables: Whether the half's block tables are where they are looked for, so that
            :meth:`forget_told` can do what it is to do.
    """

    def __init__(
        self,
        half: Any,  # noqa: ANN401 - vLLM's
        *,
        parts_go_astray: bool,
    ) -> None:
        self.knows_tables = compat.blocks_can_be_struck_out(half)
        self._given = GivenBlocks(half)
        self._parts = PromptParts(half, go_astray=parts_go_astray)
        self._last = LastStores(half)
        self._late = LateStores(half, knows_tables=self.knows_tables)
        self._states = States(half, self._last)
        self._resets = Resets(half)

    @property
    def is_idle(self) -> bool:
        """Whether nothing was noted that the next step is to be corrected for."""
        return not (self._given.noted or self._late.ending)

    def note_blocks(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Note all blocks of a request that begins in this step and that the half loads not.

        Args:
            request: The request: it is scheduled now, or another connector loads it.
            blocks: Its blocks.
        """
        if self.knows_tables:
            self._given.noted[request.request_id] = blocks

    def forget_told(self, output: SchedulerOutput) -> None:
        """Let the half take over the blocks of requests that a step has as new ones.

        Args:
            output: The step, which the half has not seen yet.
        """
        if self.knows_tables and output.scheduled_new_reqs:
            self._parts.forget_told(output)

    def completed(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return a step as the half is to see it, which has not seen it yet."""
        cleared = getattr(output, "new_block_ids_to_zero", None)
        if self.knows_tables and (cleared or self._given.noted):
            self._given.tell(output, cleared or ())
        blocks = getattr(output, "kv_connector_block_state", None)
        if getattr(blocks, "boundary_state_offloads", None):
            return self._states.without_unwanted(output)
        return output

    def strike_out_given(self, output: SchedulerOutput) -> None:
        """Let the half offer nothing late from blocks that a step gives to others.

        Args:
            output: The step, which the half has not seen yet.
        """
        if self._late.ending:
            self._late.strike_out_given(output)

    def bound_last_stores(self, request: Request) -> None:
        """Let the half offer no more of a request that ends than was computed."""
        self._last.bound(request)

    def strike_out_lost(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Let the half offer nothing late from blocks that a request lost before it ended.

        Args:
            request: The request, which ends.
            block_ids: What it holds, per KV cache group.
        """
        self._late.strike_out_lost(request, block_ids)

    def reset(self, reset: Callable[[], bool | None]) -> bool | None:
        """Reset the half, and keep what it has to tell of before.

        Args:
            reset: Resets it.
        """
        return self._resets.reset(reset)

    @property
    def has_events(self) -> bool:
        """Whether there are events of before a reset to take."""
        return bool(self._resets.untold)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the events of before a reset, once."""
        return self._resets.take_events()
