"""The connector's worker half: carries out what the scheduler half decided, in one rank.

Calls of one step, all on the engine's thread:

1. :meth:`~ConnectorWorker.handle_preemptions`, before the forward pass. Stores deferred in the
   step before are submitted; those in ``jobs_to_flush`` are waited for, because their blocks
   are about to be overwritten. Nothing else is ever waited for, a disk least of all: a store
   is done when its bytes are in RAM.
2. The forward pass.
3. :meth:`~ConnectorWorker.start_load`, for requests that wait outside the batch.
4. :meth:`~ConnectorWorker.defer_stores`. What this forward pass computed is stored from the
   next step on: tokens are sampled and sent first.
5. :meth:`~ConnectorWorker.get_finished` and :meth:`~ConnectorWorker.take_output`.

A step without a forward pass makes the same calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.connector.device import DeviceEngine, DeviceResult, blocks_not_loaded
from kvtier.connector.metadata import (
    ConnectorMetadata,
    FailedLoad,
    RequestId,
    TransferJob,
    WorkerOutput,
)
from kvtier.connector.stats import ConnectorStats
from kvtier.errors import KvtierError, UnsupportedError
from kvtier.logs import get_logger
from kvtier.memory.kv_layout import blocks_of_layers, blocks_of_one_tensor
from kvtier.memory.slot_layout import RankShare, shard_of
from kvtier.types import JobId, Why

if TYPE_CHECKING:
    from kvtier.memory import HostRegion
    from kvtier.memory.copy import BlockCopyPlan, KVBlocks
    from kvtier.memory.kv_layout import KVTensor

__all__ = ["ConnectorWorker", "WorkerOptions"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How the engine keeps KV in one rank.

    Attributes:
        rank: This rank.
        blocks: Blocks of its KV memory.
        blocks_per_chunk: Blocks of a chunk.
        groups: The layers of each KV cache group, in the order in which they are stored.
        share: Which part of every slot is the rank's; None for a shard of its own.
        close_timeout_s: Longest that each part of :meth:`ConnectorWorker.shutdown` may take.
    """

    rank: int
    blocks: int
    blocks_per_chunk: int
    groups: Sequence[Sequence[str]]
    share: RankShare | None = None
    close_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A submitted job: whose it is and what it copies."""

    request_id: RequestId
    plan: BlockCopyPlan


class ConnectorWorker:
    """Copies one rank's blocks to and from RAM slots as the scheduler half says.

    Not thread-safe. No method waits but :meth:`handle_preemptions`, as said above, and
    :meth:`shutdown`.

    Args:
        region: The RAM tier; closed with the worker.
        options: How the engine keeps KV.
    """

    def __init__(self, region: HostRegion, options: WorkerOptions) -> None:
        self._region = region
        self._options = options
        self._device: DeviceEngine | None = None
        self._deferred: dict[JobId, TransferJob] = {}
        self._flushed: AbstractSet[JobId] = frozenset()
        self._running: dict[JobId, _Transfer] = {}
        self._stores: dict[RequestId, set[JobId]] = {}
        self._ended: set[RequestId] = set()
        self._completed: set[JobId] = set()
        self._failed: dict[JobId, FailedLoad] = {}
        self._stats = ConnectorStats()

    # -- the KV memory -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        """Take the engine's KV memory, one tensor for each layer; once, before any step.

        Args:
            kv_caches: Tensors of shape (blocks, ...) or (2, blocks, ...) by layer.

        Raises:
            UnsupportedError: kvtier does not know such memory, or it does not fit the slots.
        """
        self._open(
            blocks_of_layers(kv_caches, self._options.groups, blocks=self._options.blocks)
        )

    def register_cross_layers_kv_cache(self, kv_cache: KVTensor) -> None:
        """Take KV memory that keeps all layers of a block together; once, before any step.

        Args:
            kv_cache: A tensor of shape (blocks, ...).

        Raises:
            UnsupportedError: kvtier does not know such memory, or it does not fit the slots.
        """
        groups = len(self._options.groups)
        self._open(blocks_of_one_tensor(kv_cache, groups=groups, blocks=self._options.blocks))

    # -- steps ---------------------------------------------------------------------------------

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        """Submit deferred stores and wait for those whose blocks are about to be overwritten.

        One that does not end in time never counts as whole.
        """
        flush = metadata.jobs_to_flush
        self._flushed = flush & metadata.store_jobs.keys()
        for job_id in sorted(self._flushed):
            self._defer(job_id, metadata.store_jobs[job_id])
        self._submit_deferred()
        if flush:
            self._opened.wait(flush)

    def start_load(self, metadata: ConnectorMetadata) -> None:
        """Start loading, behind the stores that were deferred."""
        self._submit_deferred()
        for job_id, job in metadata.load_jobs.items():
            self._submit(job_id, job, Why.LOAD)

    def defer_stores(self, metadata: ConnectorMetadata) -> None:
        """Note what is to be stored from the next step on."""
        for job_id, job in metadata.store_jobs.items():
            if job_id not in self._flushed:
                self._defer(job_id, job)
        self._flushed = frozenset()

    def get_finished(
        self, finished_req_ids: AbstractSet[RequestId]
    ) -> tuple[set[RequestId], set[RequestId]]:
        """Collect what ended.

        Args:
            finished_req_ids: Requests that ended since the last call.

        Returns:
            Requests that ended and whose stores have all ended, in this call or before; each
            once, and only if it had stores. And requests whose load ended, whether it worked or
            not; :meth:`take_output` tells.
        """
        loaded = {
            request_id for result in self._opened.poll() for request_id in self._note(result)
        }
        self._ended |= finished_req_ids & self._stores.keys()
        stored = {request_id for request_id in self._ended if not self._stores[request_id]}
        self._ended -= stored
        for request_id in stored:
            del self._stores[request_id]
        return stored, loaded

    def take_output(self) -> WorkerOutput:
        """Return what happened since the last call."""
        output = WorkerOutput(
            # Those planned first come first: heads of prefixes are to be published before
            # their tails, whichever thread was quicker.
            completed_jobs=dict.fromkeys(sorted(self._completed), 1),
            failed_loads=self._failed,
            stats=self._stats.clone_and_reset().to_dict(),
        )
        self._completed = set()
        self._failed = {}
        return output

    def shutdown(self) -> None:
        """Let running copies end and release the memory. Idempotent."""
        self._deferred.clear()
        if self._device is None:
            self._region.close()
        else:
            self._device.close()

    # -- internals -----------------------------------------------------------------------------

    @property
    def _opened(self) -> DeviceEngine:
        if self._device is None:
            raise KvtierError("no KV caches were registered with the connector's worker half")
        return self._device

    def _open(self, kv: KVBlocks) -> None:
        if self._device is not None:
            raise KvtierError("the connector's worker half has its KV caches already")
        options = self._options
        self._device = DeviceEngine(
            kv,
            self._region,
            rank=options.rank,
            share=options.share or shard_of(options.rank),
            blocks_per_chunk=options.blocks_per_chunk,
            close_timeout_s=options.close_timeout_s,
        )

    def _defer(self, job_id: JobId, job: TransferJob) -> None:
        self._deferred[job_id] = job
        self._stores.setdefault(job.request_id, set()).add(job_id)

    def _submit_deferred(self) -> None:
        deferred, self._deferred = self._deferred, {}
        for job_id, job in deferred.items():
            self._submit(job_id, job, Why.STORE)

    def _submit(self, job_id: JobId, job: TransferJob, why: Why) -> None:
        if job.slots.tier != "ram":
            raise UnsupportedError(
                f"job {job_id} moves chunks of tier {job.slots.tier}; workers know ram only"
            )
        device, blocks, slots = self._opened, job.blocks, job.slots
        plan = device.plan(
            blocks.block_ids, blocks.group_sizes, blocks.first_blocks, slots.slots
        )
        self._running[job_id] = _Transfer(job.request_id, plan)
        if why is Why.STORE:
            device.store(job_id, plan, slots.generations)
        else:
            device.load(job_id, plan, slots.generations, wait_s=slots.wait_s)

    def _note(self, result: DeviceResult) -> Sequence[RequestId]:
        """Note how a job ended; return the request if it was a load."""
        job = self._running.pop(result.job_id)
        self._completed.add(result.job_id)
        if result.why is Why.STORE:
            self._stats.record_transfer(result.nbytes, result.seconds, ("gpu", "ram"))
            self._stores[job.request_id].discard(result.job_id)
            return ()
        self._stats.record_transfer(result.nbytes, result.seconds, ("ram", "gpu"))
        if not result.is_whole:
            blocks = blocks_not_loaded(job.plan, result.outcomes)
            self._failed[result.job_id] = FailedLoad(job.request_id, blocks, result.error)
            logger.warning("request %s: not loaded: %s", job.request_id, result.error)
        return (job.request_id,)
