"""The worker half: copies blocks between the device and RAM slots.

vLLM kills the engine when a worker reports a failure, so every store is acknowledged as a
success and the truth is left in the control block. A load that found another stamp than it
was promised is the one exception: serving those bytes would be a wrong token, and no later
message could undo it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtier.errors import UnsupportedError
from kvtier.iopool import IoPool
from kvtier.memory.copy import BlockCopier, KVBlocks, plan_copy
from kvtier.transfer import EngineLimits, TransferEngine
from kvtier.transfer.device import DeviceLoad, DevicePayload, DeviceStore
from kvtier.types import Job, Outcome, Why
from kvtier.vllm.specs import SlotLoadStoreSpec

if TYPE_CHECKING:
    from kvtier.memory import HostRegion

__all__ = ["KVTierWorker"]

logger = logging.getLogger(f"vllm.{__name__}")  # below the one logger vLLM configures

_COPY_TIMEOUT_S = 60.0
"""A copy between device and RAM takes milliseconds; one that takes this long has failed."""
_UNBOUNDED = 1 << 62
"""vLLM has no answer to a refused job, so the device engine's queue refuses nothing."""


class KVTierWorker(OffloadingWorker):
    """One rank's copies.

    Args:
        kv_caches: The rank's KV memory.
        region: The RAM tier; closed with the worker.
        rank: This rank.
        blocks_per_chunk: Blocks of a chunk.
        close_timeout_s: Longest :meth:`shutdown`.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        region: HostRegion,
        *,
        rank: int,
        blocks_per_chunk: int,
        close_timeout_s: float,
    ) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._close_timeout_s = close_timeout_s
        self._copier = BlockCopier(
            _kv_blocks(kv_caches), region, rank=rank, blocks_per_chunk=blocks_per_chunk
        )
        # One thread: copies share a link, and a block stored and loaded again keeps its order.
        self._pool = IoPool(1, name=f"kvtier-copy-{rank}")
        control = region.control
        self._store = DeviceStore(self._copier, control, rank=rank, pool=self._pool)
        self._engine = TransferEngine(
            f"device-{rank}",
            {
                ("gpu", "ram"): self._store,
                ("ram", "gpu"): DeviceLoad(self._copier, control, rank=rank, pool=self._pool),
            },
            chunk_nbytes=region.geometry.shard_nbytes,
            limits=EngineLimits(
                queued_bytes=_UNBOUNDED,
                running_bytes=_UNBOUNDED,
                breaker_failures=_UNBOUNDED,
            ),
        )
        self._loads: set[int] = set()

    @override
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start copying blocks to RAM slots."""
        self._submit(job_id, Why.STORE, src_spec, dst_spec)
        return True

    @override
    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Start copying RAM slots to blocks."""
        self._loads.add(job_id)
        self._submit(job_id, Why.LOAD, dst_spec, src_spec)
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call."""
        finished: list[TransferResult] = []
        for result in self._engine.poll():
            if not result.settled:
                continue
            whole = all(outcome is Outcome.DONE for outcome in result.outcomes)
            is_load = result.job_id in self._loads
            self._loads.discard(result.job_id)
            if is_load and not whole:
                logger.critical(
                    "refusing to let a request continue on KV that was not loaded: %s",
                    result.error,
                )
            finished.append(
                TransferResult(
                    job_id=result.job_id,
                    success=whole or not is_load,
                    transfer_size=result.nbytes,
                    transfer_time=result.seconds,
                )
            )
        return finished

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Block until ``job_ids`` ended; their blocks are about to be overwritten."""
        if self._engine.wait(job_ids, timeout_s=_COPY_TIMEOUT_S):
            return
        logger.error("stores %s did not end in %.0f s", sorted(job_ids), _COPY_TIMEOUT_S)
        for job_id in job_ids:
            self._store.revoke(job_id)

    @override
    def shutdown(self) -> None:
        """Let running copies end and release the memory. Idempotent."""
        self._engine.close(timeout_s=self._close_timeout_s)
        self._pool.close(timeout_s=self._close_timeout_s)
        self._copier.close()
        self._region.close()

    def _submit(
        self, job_id: int, why: Why, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec
    ) -> None:
        if not isinstance(chunks, SlotLoadStoreSpec):
            raise UnsupportedError(f"{type(chunks).__name__} is not a spec of kvtier's")
        plan = plan_copy(
            blocks.block_ids,
            blocks.group_sizes,
            blocks.block_indices,
            chunks.slots,
            blocks_per_chunk=self._blocks_per_chunk,
        )
        source, destination = ("gpu", "ram") if why is Why.STORE else ("ram", "gpu")
        self._engine.submit(
            Job(
                job_id=job_id,
                why=why,
                source=source,
                destination=destination,
                keys=(),
                source_slots=plan.slots,
                destination_slots=plan.slots,
                timeout_s=_COPY_TIMEOUT_S,
                payload=DevicePayload(plan, self._copier.mark(), chunks.generations),
            )
        )


def _kv_blocks(kv_caches: CanonicalKVCaches) -> KVBlocks:
    groups: list[Sequence[tuple[int, int]]] = [
        [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
        for refs in kv_caches.group_data_refs
    ]
    return KVBlocks([block.tensor for block in kv_caches.tensors], groups)
