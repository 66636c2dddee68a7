"""Where vLLM's scheduler half would store, or tell, what is not so.

* **Last stores.** Of a request that ended, unless it was aborted, the half offers its whole
  prompt, as far as it has blocks. One that ended with an error amid its prefill filled the last
  of them in part; one that ended after it was preempted has none, and the half does not know
  yet. Both would be stored under keys of what was never computed. So the half is told how far
  the request got.
* **Late stores.** With windows, where groups have chunks of different lengths, the half offers
  some chunks that it had passed over when it knows where the request ended. Their blocks it
  looked at when it passed them, and not again: windows may have left them behind since, and
  others have got them. So blocks that the request does not hold when it ends, and those that
  are given away before the half offers, are struck out.
* **Blocks told twice.** A request whose prompt comes in parts (vLLM's streaming inputs) is told
  as a new one with each of them, with all of its blocks, and the half appends these to those it
  knows. What it offers from then on would be stored from the wrong blocks. So it forgets the
  blocks of whatever comes as new.
* **Parts that go astray.** Such a request goes on without the last token it generated. vLLM
  does not take back what a state made of that token, where the next step was under way; nor
  tokens that were guessed and accepted behind the last, where it was not. So nothing of the
  later parts is stored there.
* **Blocks that others load into.** Where another connector loads a request's KV ahead, the half
  hears of its blocks only when the request is scheduled. Until then a store could go on that
  reads them. So it is told in the step that gives them away.
* **Blocks that are cleared for nobody.** With priorities a request may lose its blocks in the
  step that gave it some. These are cleared all the same, where a model needs that, and the half
  does not hear of them. So it is told.
* **Ends of states.** What a request says of how much of it may be stored is asserted, and not
  looked at, where the half is handed the state at the end of a prompt. So it is not handed that
  state.
* **States that are gone.** Where several guessed tokens are accepted at once under async
  scheduling, vLLM hands a state over in a step that has freed its block before, and may have
  given it away. Such a state is not handed over either.
* **Resets that follow each other.** The half asserts that the jobs of before the last reset
  were told to end, which happens in a step. So they are kept from it meanwhile.
* **Events of a reset.** The half forgets what it knows of each chunk before it hears that the
  chunks are gone, so of a chunk of several blocks only the last would be called removed. So it
  is asked for its events at once, while it is made to know.

All reach into state that is nobody's interface. Where a release does not have it, vLLM's half
is left alone; but an engine of which late stores are to be expected is refused then.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvtier.errors import UnsupportedError
from kvtier.vllm import compat

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["Corrections", "late_stores_refused"]


def late_stores_refused(*, otherwise: str = "") -> UnsupportedError:
    """Return what to raise where late stores are to be expected and are not corrected.

    Args:
        otherwise: What else than another configuration of vLLM helps.
    """
    return UnsupportedError(
        "prefix_cache_retention_interval is None, and this model's sliding windows have "
        "shorter blocks than the rest: when a request ends, vLLM's half would store chunks "
        "from blocks that another request may have got; start vLLM with "
        f"--prefix-cache-retention-interval 0, its default{otherwise}"
    )


class Corrections:
    """Corrects one scheduler half.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
        parts_go_astray: Whether vLLM may compute the later parts of a prompt from what is not
            theirs.

    Attributes:
        knows_tables: Whether :meth:`forget_told` can do what it is to do.
    """

    def __init__(
        self,
        half: Any,  # noqa: ANN401 - vLLM's
        *,
        parts_go_astray: bool,
    ) -> None:
        self._half = half
        self._parts_go_astray = parts_go_astray
        self._bounds = compat.offers_can_be_bounded(half)
        self._windows: list[tuple[int, int]] = []
        """Of each group with a window, its place in the half's lists and its own index."""
        self.knows_tables = compat.blocks_can_be_struck_out(half)
        self._allocated: dict[str, KVCacheBlocks] = {}
        """Blocks of requests that began in the step that is being scheduled, but for loads."""
        if self.knows_tables:
            self._windows = [
                (place, group.group_idx)
                for place, group in enumerate(half.config.kv_group_configs)
                if group.sliding_window_size_in_chunks is not None
            ]
        self._ending: list[Any] = []
        self._untold: list[KVCacheEvent] = []

    @property
    def is_idle(self) -> bool:
        """Whether no request began since the last step without being in it, and none ended."""
        return not (self._allocated or self._ending)

    def note_blocks(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Note all blocks of a request that begins in this step and that the half loads not.

        Args:
            request: The request: it is scheduled now, or another connector loads it.
            blocks: Its blocks.
        """
        if self.knows_tables:
            self._allocated[request.request_id] = blocks

    def completed(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return a step as the half is to see it, which has not seen it yet."""
        if self._allocated:
            self._tell_allocated(output)
        cleared = getattr(output, "new_block_ids_to_zero", None)
        if cleared and self.knows_tables:
            self._half._current_batch_allocated_block_ids.update(cleared)  # noqa: SLF001
        blocks = getattr(output, "kv_connector_block_state", None)
        if getattr(blocks, "boundary_state_offloads", None):
            return self._without_unwanted(output)
        return output

    def _tell_allocated(self, output: SchedulerOutput) -> None:
        """Tell the half of blocks whose requests are not scheduled: others load into them."""
        allocated, self._allocated = self._allocated, {}
        for req_id, blocks in allocated.items():
            if req_id not in output.num_scheduled_tokens:
                self._half._current_batch_allocated_block_ids.update(  # noqa: SLF001
                    block.block_id
                    for block in chain.from_iterable(blocks.blocks)
                    if not block.is_null
                )

    def _without_unwanted(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return a step without states that are gone or that requests want not to be stored."""
        shown = copy.copy(output)
        shown.kv_connector_block_state = state = copy.copy(output.kv_connector_block_state)
        given = self._given(output)
        wanted = {
            req_id: [
                entry
                for entry in entries
                if entry[2] <= self._limit_of(req_id)
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
        homes = [pair.src_block_id for pair in _copies(output) if pair.dst_block_id == block]
        return {block, *homes}.isdisjoint(tables[group][: -(-tokens // size)])

    def _limit_of(self, req_id: str) -> float:
        """Return how many tokens of a request may be stored."""
        status = self._half._req_status.get(req_id) if self._bounds else None  # noqa: SLF001
        limit: int | None = None if status is None else status.max_offload_tokens
        return math.inf if limit is None else limit

    def bound_last_stores(self, request: Request) -> None:
        """Let the half offer no more of a request that ends than was computed.

        Under async scheduling that counts a step which is still computing; it is over before a
        store of the next one begins.
        """
        status = self._half._req_status.get(request.request_id) if self._bounds else None  # noqa: SLF001
        if status is not None:
            limit, computed = status.max_offload_tokens, request.num_computed_tokens
            status.max_offload_tokens = computed if limit is None else min(limit, computed)

    def forget_told(self, output: SchedulerOutput) -> None:
        """Let the half take over the blocks of requests that a step has as new ones.

        Args:
            output: The step, which the half has not seen yet.
        """
        if not self.knows_tables:
            return
        for new in output.scheduled_new_reqs:
            status = self._half._req_status.get(new.req_id)  # noqa: SLF001
            if status is None:
                continue
            if self._parts_go_astray and any(state.block_ids for state in status.group_states):
                status.max_offload_tokens = 0
            for state in status.group_states:
                state.block_ids.clear()

    def strike_out_lost(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Let the half offer nothing late from blocks that a request lost before it ended.

        Args:
            request: The request, which ends.
            block_ids: What it holds, per KV cache group.
        """
        status = self._half._req_status.get(request.request_id) if self._windows else None  # noqa: SLF001
        if status is None:
            return
        self._ending.append(status)
        for place, group in self._windows:
            self._strike_out(status.group_states[place], block_ids[group])

    def strike_out_given(self, output: SchedulerOutput) -> None:
        """Let the half offer nothing late from blocks that a step gives to others.

        Args:
            output: The step, which the half has not seen yet.
        """
        ending, self._ending = self._ending, []
        if not ending:
            return
        given = self._given(output)
        for status in ending:
            for place, _ in self._windows:
                state = status.group_states[place]
                held = [0 if block in given else block for block in state.block_ids]
                self._strike_out(state, held)

    def _given(self, output: SchedulerOutput) -> set[int]:
        """Return the blocks that a step gives to requests, which the half has not seen yet."""
        return {
            *getattr(self._half, "_current_batch_allocated_block_ids", ()),
            *_new_blocks(output),
            *(pair.dst_block_id for pair in _copies(output)),
        }

    def _strike_out(self, state: Any, held: Sequence[int]) -> None:  # noqa: ANN401 - vLLM's
        """Strike out the blocks of chunks that were passed, but those that are ``held``."""
        table = state.block_ids
        passed = state.next_stored_chunk_idx * self._half.config.blocks_per_chunk
        for at, block in enumerate(table[:passed]):
            if at >= len(held) or held[at] != block:
                table[at] = 0

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


def _copies(output: SchedulerOutput) -> Sequence[Any]:
    """Return which blocks a step copies into others."""
    return getattr(output, "kv_cache_block_copies", None) or ()


def _new_blocks(output: SchedulerOutput) -> Iterator[int]:
    """Yield the blocks that a step gives to requests."""
    tables = chain(
        (new.block_ids for new in output.scheduled_new_reqs),
        filter(None, output.scheduled_cached_reqs.new_block_ids),
    )
    return chain.from_iterable(chain.from_iterable(tables))
