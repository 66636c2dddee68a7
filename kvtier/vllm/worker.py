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

from kvtier.connector.device import DeviceEngine, DeviceResult
from kvtier.errors import UnsupportedError
from kvtier.memory.copy import BlockCopyPlan, KVBlocks
from kvtier.memory.slot_layout import RankShare
from kvtier.types import Why
from kvtier.vllm.contract import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from kvtier.vllm.specs import SlotLoadStoreSpec

if TYPE_CHECKING:
    from kvtier.memory import HostRegion

__all__ = ["KVTierWorker"]

logger = logging.getLogger(f"vllm.{__name__}")  # below the one logger vLLM configures


class KVTierWorker(OffloadingWorker):
    """One rank's copies.

    Args:
        kv_caches: The rank's KV memory.
        region: The RAM tier; closed with the worker.
        rank: This rank.
        share: Which part of every slot is the rank's.
        blocks_per_chunk: Blocks of a chunk.
        close_timeout_s: Longest :meth:`shutdown`.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        region: HostRegion,
        *,
        rank: int,
        share: RankShare,
        blocks_per_chunk: int,
        close_timeout_s: float,
    ) -> None:
        self._device = DeviceEngine(
            _kv_blocks(kv_caches),
            region,
            rank=rank,
            share=share,
            blocks_per_chunk=blocks_per_chunk,
            close_timeout_s=close_timeout_s,
        )

    @override
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start copying blocks to RAM slots."""
        chunks = _slots(dst_spec)
        self._device.store(job_id, self._plan(src_spec, chunks), chunks.generations)
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
        chunks = _slots(src_spec)
        self._device.load(job_id, self._plan(dst_spec, chunks), chunks.generations)
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call."""
        return [_acknowledgement(result) for result in self._device.poll()]

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Block until ``job_ids`` ended; their blocks are about to be overwritten."""
        self._device.wait(job_ids)

    @override
    def shutdown(self) -> None:
        """Let running copies end and release the memory. Idempotent."""
        self._device.close()

    def _plan(self, blocks: GPULoadStoreSpec, chunks: SlotLoadStoreSpec) -> BlockCopyPlan:
        return self._device.plan(
            blocks.block_ids, blocks.group_sizes, blocks.block_indices, chunks.slots
        )


def _slots(spec: LoadStoreSpec) -> SlotLoadStoreSpec:
    if not isinstance(spec, SlotLoadStoreSpec):
        raise UnsupportedError(f"{type(spec).__name__} is not a spec of kvtier's")
    return spec


def _acknowledgement(result: DeviceResult) -> TransferResult:
    lost = result.why is Why.LOAD and not result.is_whole
    if lost:
        logger.critical(
            "refusing to let a request continue on KV that was not loaded: %s", result.error
        )
    return TransferResult(
        job_id=result.job_id,
        success=not lost,
        transfer_size=result.nbytes,
        transfer_time=result.seconds,
    )


def _kv_blocks(kv_caches: CanonicalKVCaches) -> KVBlocks:
    groups: list[Sequence[tuple[int, int]]] = [
        [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
        for refs in kv_caches.group_data_refs
    ]
    return KVBlocks([block.tensor for block in kv_caches.tensors], groups)
