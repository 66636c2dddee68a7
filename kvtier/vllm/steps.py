"""Converts vLLM's ``SchedulerOutput`` to a ``Step`` of the connector's scheduler side.

**Reused blocks.** A store must end before another request writes to the blocks that the store
reads. So a step lists all blocks that requests got since the previous step: those of scheduled
requests, those of requests that wait for a load of this or another connector, cleared blocks,
and targets of block copies. vLLM has no single list of these blocks.

**Writes before the flush.** Model Runner V2 clears and copies blocks, and moves recurrent
states between blocks, before it calls ``handle_preemptions``. A store that reads an overwritten
block copies wrong KV. So a step also lists these blocks as ``overwritten``, and stores that
read them fail.

**Boundary states.** If a model keeps recurrent states, vLLM lists the states at block
boundaries that a step computes, each with its block. With several speculative tokens and async
scheduling, vLLM may free such a block in the same step. Then the state is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvtier.connector.protocols import BoundaryState, Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["StepReader"]


class StepReader:
    """Converts each ``SchedulerOutput`` of one vLLM engine into a :class:`Step`.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: The engine's KV cache groups.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._moving = _moving_states(kv_cache_config)
        self._writes_first = bool(
            kv_cache_config.needs_kv_cache_zeroing and vllm_config.use_v2_model_runner
        )
        self._waiting: set[int] = set()

    def note_allocation(self, blocks: KVCacheBlocks) -> None:
        """Record the blocks that a request got; the next :meth:`read` reports them."""
        self._waiting.update(
            block.block_id for block in chain.from_iterable(blocks.blocks) if not block.is_null
        )

    def only_generates(self, output: SchedulerOutput) -> bool:
        """Return whether the step does nothing but generate one token per request.

        In such a step no request starts or is preempted, and no block is allocated, cleared or
        copied. Most steps of a busy engine are of this kind.
        """
        scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        return not (
            len(scheduled) != output.total_num_scheduled_tokens
            or not scheduled
            or output.scheduled_new_reqs
            or cached.resumed_req_ids
            or any(cached.new_block_ids)
            or output.preempted_req_ids
            or output.new_block_ids_to_zero
            or output.kv_cache_block_copies
            or self._waiting
            or self._moving
        )

    def read(self, output: SchedulerOutput, tables: KVCacheManager) -> Step:
        """Return the step that ``output`` describes.

        Args:
            output: vLLM's decisions.
            tables: vLLM's block tables after these decisions.
        """
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        copies = output.kv_cache_block_copies or ()
        written = {copy.dst_block_id for copy in copies}
        written.update(output.new_block_ids_to_zero or ())
        allocated, self._waiting = self._waiting, set()
        for request in new:
            allocated.update(chain.from_iterable(request.block_ids))
        for blocks in filter(None, cached.new_block_ids):
            allocated.update(chain.from_iterable(blocks))
        if written:
            allocated |= written
        allocated.discard(0)
        overwritten: set[int] = set()
        if self._writes_first:
            overwritten = written | set(self._moved_into(output))
        started = [request.req_id for request in new]
        return Step(
            output.num_scheduled_tokens,
            started=[*started, *cached.resumed_req_ids],
            preempted=output.preempted_req_ids or (),
            allocated=allocated,
            overwritten=overwritten,
            states=self._states(output, tables, copies) if self._moving else {},
        )

    def _moved_into(self, output: SchedulerOutput) -> Iterator[int]:
        """Yield the blocks that a step allocates for moved recurrent states."""
        for group, tokens_per_block in self._moving.items():
            for new in output.scheduled_new_reqs:
                yield from new.block_ids[group][new.num_computed_tokens // tokens_per_block :]
            for given in output.scheduled_cached_reqs.new_block_ids:
                yield from () if given is None else given[group]

    def _states(
        self,
        output: SchedulerOutput,
        tables: KVCacheManager,
        copies: Any,  # noqa: ANN401 - vLLM's block copies
    ) -> Mapping[str, list[BoundaryState]]:
        """Return the offered recurrent states whose block still belongs to the same request."""
        state = output.kv_connector_block_state
        if state is None or not state.boundary_state_offloads:
            return {}
        sources = {copy.dst_block_id: copy.src_block_id for copy in copies}
        found: dict[str, list[BoundaryState]] = {}
        for req_id, entries in state.boundary_state_offloads.items():
            blocks = tables.get_blocks(req_id).blocks
            for group, block_id, tokens in entries:
                if group not in self._moving or not block_id:
                    continue
                last = -(-tokens // self._moving[group])
                held = {block.block_id for block in blocks[group][:last]}
                if block_id in held or sources.get(block_id) in held:
                    found.setdefault(req_id, []).append(BoundaryState(group, block_id, tokens))
        return found


def _moving_states(kv_cache_config: KVCacheConfig) -> dict[int, int]:
    """Return the number of tokens per block, for groups that move states between blocks."""
    specs: Iterator[tuple[int, Any]] = (
        (number, group.kv_cache_spec)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    return {
        number: int(spec.block_size)
        for number, spec in specs
        if getattr(spec, "mamba_cache_mode", None) == "align"
    }
