"""Which of one worker's loads failed, and what vLLM is to be told of it.

With one KV cache group of full attention vLLM is told the blocks that hold nothing. Of several
it is told the request, because a block's number does not say whose it is; and so it is of
windows and states, for what the first bad block follows was not loaded, and vLLM would go on
from there. A load that fails within the forward pass also *spoils* its request: what the pass
computed for it is wrong and must not be stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.logs import get_logger
from kvtier.vllm.worker import KVTierWorker

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

    from kvtier.vllm.contract import GPULoadStoreSpec

__all__ = ["WorkerLoads"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that a worker was told to do: whose, into what, and when."""

    req_id: str
    blocks: frozenset[int]
    in_step: bool


class WorkerLoads:
    """The loads that one worker was told to do.

    Args:
        names_blocks: Whether vLLM is told of blocks that were not loaded, not of requests.
        recomputes: Whether vLLM computes what was not loaded; else it fails the request.
    """

    def __init__(self, *, names_blocks: bool, recomputes: bool) -> None:
        self._names_blocks = names_blocks
        self._recomputes = recomputes
        self._loading: dict[int, _Load] = {}
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._spoiled: set[str] = set()

    def begin(self, metadata: KVConnectorMetadata) -> None:
        """Note the loads of a step."""
        for job_id, job in metadata.load_jobs.items():
            blocks: GPULoadStoreSpec = job.dst_spec
            self._loading[job_id] = _Load(
                job.req_id, frozenset(map(int, blocks.block_ids)), job.src_spec.in_step
            )

    def end(self, worker: KVTierWorker) -> set[str]:
        """Note which loads failed of those that ``worker`` just reported.

        Returns:
            The requests of those within the step: they are in the batch already, so nobody
            waits for them.
        """
        in_step: set[str] = set()
        for job_id, ended in worker.take_ended_loads().items():
            load = self._loading.pop(job_id)
            if load.in_step:
                in_step.add(load.req_id)
            if ended.is_whole:
                continue
            logger.warning("the load of request %s failed: %s", load.req_id, ended.error)
            if not self._names_blocks:
                self._failed_requests.add(load.req_id)
            else:
                lost = load.blocks if ended.lost_blocks is None else ended.lost_blocks
                self._failed_blocks |= lost
        return in_step

    def take_failed(self, received: AbstractSet[str]) -> set[str]:
        """Return those of the ``received`` requests whose load failed, once."""
        failed = self._failed_requests & received
        self._failed_requests -= failed
        return failed

    def take_lost_blocks(self) -> set[int]:
        """Return the blocks whose content must not be used, once."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    # -- what a forward pass computed from nothing ---------------------------------------------

    def spoil(self, job_ids: Iterable[int]) -> None:
        """Note that these loads failed within a forward pass that went on without them."""
        self._spoiled.update(self._loading[job_id].req_id for job_id in job_ids)

    def spoil_stores(self, metadata: KVConnectorMetadata, worker: KVTierWorker) -> None:
        """Keep what was computed from KV that did not arrive from being stored."""
        if self._spoiled:
            jobs = metadata.store_jobs.items()
            worker.spoil(job_id for job_id, job in jobs if job.req_id in self._spoiled)

    def forget_spoiled(self, finished: AbstractSet[str]) -> None:
        """Trust requests again when a step is over.

        They are computed again from the next one on; or else they end, and what they have is
        offered once more in the step that says so.

        Args:
            finished: Requests that had ended when the step began.
        """
        if self._spoiled:
            self._spoiled -= set(self._spoiled) if self._recomputes else finished
