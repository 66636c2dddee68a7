"""Stores that are told to end when it is too late.

Before vLLM writes to blocks that a step gives away, it asks its workers to end the stores that
read them, and its first model runner does so. Model Runner V2 asks when it has cleared these
blocks, and has copied into some, where a model has states or KV of several precisions; and
when it has moved a request's state from its last block into the one the step gives it. From
then on a store copies zeros, or another request's KV, under a valid key. Which blocks are
written to follows from the step, so the scheduler half says which stores come too late, and
the workers let these fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvtier.vllm.connector_contract import OffloadingConnectorMetadata

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["LateFlushes", "overwritten_stores"]


@dataclass
class _LateMetadata(OffloadingConnectorMetadata):
    """What workers are to do in a step, and which stores of ``jobs_to_flush`` come too late."""

    overwritten: frozenset[int] = frozenset()


def overwritten_stores(metadata: KVConnectorMetadata) -> frozenset[int]:
    """Return the stores whose blocks hold something else by now."""
    found: frozenset[int] = getattr(metadata, "overwritten", frozenset())
    return found


class LateFlushes:
    """Finds them, for workers that write to blocks first.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
        moving: The KV cache groups whose states move from block to block, and the tokens of a
            block of each.
    """

    def __init__(self, half: Any, moving: Mapping[int, int]) -> None:  # noqa: ANN401 - vLLM's
        self._half = half
        self._moving = moving

    def told(self, metadata: Any, output: SchedulerOutput) -> Any:  # noqa: ANN401 - vLLM's
        """Return ``metadata`` of a step with the stores that come too late in it."""
        if not metadata.jobs_to_flush:
            return metadata
        written = {copy.dst_block_id for copy in output.kv_cache_block_copies or ()}
        written.update(output.new_block_ids_to_zero or ())
        written.update(self._moved_into(output))
        overwritten = frozenset(
            job_id
            for job_id in metadata.jobs_to_flush
            if not written.isdisjoint(self._blocks_of(job_id))
        )
        if not overwritten:
            return metadata
        return _LateMetadata(
            load_jobs=metadata.load_jobs,
            store_jobs=metadata.store_jobs,
            jobs_to_flush=metadata.jobs_to_flush,
            overwritten=overwritten,
        )

    def _moved_into(self, output: SchedulerOutput) -> Iterator[int]:
        """Yield the blocks that a step gives to requests for their states, hits excepted."""
        for group, tokens_per_block in self._moving.items():
            for new in output.scheduled_new_reqs:
                yield from new.block_ids[group][new.num_computed_tokens // tokens_per_block :]
            for given in output.scheduled_cached_reqs.new_block_ids:
                yield from () if given is None else given[group]

    def _blocks_of(self, job_id: int) -> chain[int]:
        """Return the blocks that a store reads; none of one of before a reset."""
        job = self._half._jobs.get(job_id)  # noqa: SLF001
        kept = getattr(job, "deferred_fence_block_ids", None)
        passing = getattr(job, "fenced_block_ids", None)
        return chain(kept or (), passing or ())
