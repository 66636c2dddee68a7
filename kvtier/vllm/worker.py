"""The worker half: copies blocks between the device and RAM slots.

vLLM's half of the worker asserts that every job worked, and the engine dies if one did not. So
every job is acknowledged as a success and the truth is left in the control block. Of a load
somebody must be told more, because a request waits for its bytes: the connector is, which
reports it to vLLM. Behind the offloading spec there is nobody to tell, and a load that did not
work is the one job that is not acknowledged: serving those bytes would be a wrong token, and no
later message could undo it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from kvtier.connector.device import DeviceEngine, DeviceResult, blocks_not_loaded
from kvtier.errors import KvtierError, UnsupportedError
from kvtier.logs import get_logger
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

__all__ = ["KVTierWorker", "wait_for_stores_here"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """How a load ended.

    Attributes:
        is_whole: Whether every byte is where it should be.
        lost_blocks: Blocks whose content must not be used; None if that is all of the load's.
        error: What went wrong, for a log line.
    """

    is_whole: bool
    lost_blocks: frozenset[int] | None
    error: str


class KVTierWorker(OffloadingWorker):
    """One rank's copies.

    Args:
        kv_caches: The rank's KV memory.
        region: The RAM tier; closed with the worker.
        rank: This rank.
        share: Which part of every slot is the rank's.
        blocks_per_chunk: Blocks of a chunk.
        close_timeout_s: Longest that each part of :meth:`shutdown` may take.
        reports_failed_loads: Whether somebody asks :meth:`take_ended_loads`.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each part
        self,
        kv_caches: CanonicalKVCaches,
        region: HostRegion,
        *,
        rank: int,
        share: RankShare,
        blocks_per_chunk: int,
        close_timeout_s: float,
        reports_failed_loads: bool,
    ) -> None:
        self._device = DeviceEngine(
            _kv_blocks(kv_caches),
            region,
            rank=rank,
            share=share,
            blocks_per_chunk=blocks_per_chunk,
            close_timeout_s=close_timeout_s,
        )
        self._reports_failed_loads = reports_failed_loads
        self._plans: dict[int, BlockCopyPlan] = {}
        self._ended_loads: dict[int, EndedLoad] = {}
        self._spoiled: set[int] = set()
        self._not_begun: list[int] = []
        self._submitted = 0
        _workers_here.add(self)

    @override
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start copying blocks to RAM slots."""
        self._submitted += 1
        chunks = _slots(dst_spec)
        if job_id in self._spoiled:
            self._spoiled.discard(job_id)
            error = KvtierError("its blocks do not hold what its keys say")
            self._device.fail(job_id, Why.STORE, chunks.slots, chunks.generations, error)
            return True
        try:
            self._device.store(job_id, self._plan(src_spec, chunks), chunks.generations)
        except Exception as failure:  # noqa: BLE001 - told as a job that failed
            _tell_not_started(f"store {job_id}", failure)
            self._device.fail(job_id, Why.STORE, chunks.slots, chunks.generations, failure)
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
        self._submitted += 1
        chunks = _slots(src_spec)
        try:
            plan = self._plan(dst_spec, chunks)
            self._plans[job_id] = plan
            if chunks.in_step:
                self._device.load_in_step(job_id, plan, chunks.generations)
            else:
                self._device.load(job_id, plan, chunks.generations, wait_s=chunks.wait_s)
        except Exception as error:  # noqa: BLE001 - told as a job that failed
            _tell_not_started(f"load {job_id}", error)
            if chunks.in_step:
                self._not_begun.append(job_id)
            self._device.fail(job_id, Why.LOAD, chunks.slots, chunks.generations, error)
        return True

    # -- loads within a forward pass -----------------------------------------------------------

    def open_steps(self, layers: Sequence[str], *, timeout_s: float) -> None:
        """Prepare for loads within the forward pass; see :meth:`DeviceEngine.open_steps`."""
        if not self._device.open_steps(layers, timeout_s=timeout_s):
            logger.warning(
                "load_mode: layerwise copies all layers before the forward pass here, for this "
                "engine keeps them together"
            )

    def start_step(self) -> None:
        """Start the step's loads; the forward pass follows."""
        self._device.start_step()

    def wait_for_layer(self, layer: str) -> None:
        """Block until the model may read ``layer``, or waited for it in vain."""
        self._device.wait_for_layer(layer)

    def end_step(self) -> list[int]:
        """Settle the step's loads after the forward pass; returns those that failed."""
        not_begun, self._not_begun = self._not_begun, []
        return [*not_begun, *self._device.end_step()]

    def spoil(self, job_ids: Iterable[int]) -> None:
        """Make stores fail that are not submitted yet: what they would copy is wrong."""
        self._spoiled.update(job_ids)

    def give_up(self, job_ids: AbstractSet[int]) -> None:
        """Make stores fail, those that are under way as well: their blocks hold other KV.

        To be followed by the submission of those that are not, and by :meth:`wait` for all.
        """
        self._spoiled |= job_ids - self._device.retract(job_ids)

    # -- results -------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether :meth:`get_finished` has returned every job that was submitted."""
        return not self._submitted

    @override
    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call."""
        finished = [self._acknowledgement(result) for result in self._device.poll()]
        self._submitted -= len(finished)
        return finished

    def take_ended_loads(self) -> dict[int, EndedLoad]:
        """Return, by job, the loads that :meth:`get_finished` named since the last call."""
        ended, self._ended_loads = self._ended_loads, {}
        return ended

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Block until ``job_ids`` ended; their blocks are about to be overwritten."""
        self._spoiled -= job_ids  # all were submitted, now or long ago
        self._device.wait(job_ids)

    def wait_for_stores(self) -> None:
        """Block until no store reads blocks any more."""
        self._device.wait_for_stores()

    @override
    def shutdown(self) -> None:
        """Let running copies end and release the memory. Idempotent."""
        _workers_here.discard(self)
        self._device.close()

    def _acknowledgement(self, result: DeviceResult) -> TransferResult:
        lost = result.why is Why.LOAD and not result.is_whole
        plan = self._plans.pop(result.job_id, None)
        if result.why is Why.LOAD and self._reports_failed_loads:
            # What could not be started names its blocks nowhere else than in vLLM's own job.
            blocks = None if plan is None else blocks_not_loaded(plan, result.outcomes)
            self._ended_loads[result.job_id] = EndedLoad(not lost, blocks, result.error)
        elif lost:
            logger.critical(
                "refusing to let a request continue on KV that was not loaded: %s", result.error
            )
        return TransferResult(
            job_id=result.job_id,
            success=self._reports_failed_loads or not lost,
            transfer_size=result.nbytes,
            transfer_time=result.seconds,
        )

    def _plan(self, blocks: GPULoadStoreSpec, chunks: SlotLoadStoreSpec) -> BlockCopyPlan:
        return self._device.plan(
            blocks.block_ids, blocks.group_sizes, blocks.block_indices, chunks.slots
        )


_workers_here: weakref.WeakSet[KVTierWorker] = weakref.WeakSet()


def wait_for_stores_here() -> None:
    """Block until no worker in this process reads blocks.

    An engine in the process of its ``LLM`` sleeps without waiting for its connector, and takes
    the memory of the KV cache away. To be called on the engine's thread, which is the workers'.
    """
    for worker in list(_workers_here):
        worker.wait_for_stores()


def _tell_not_started(job: str, error: Exception) -> None:
    """Log why a job was not started: with a traceback only what nobody expects."""
    if isinstance(error, UnsupportedError):
        logger.warning("%s was not started: %s", job, error)
    else:
        logger.error("%s was not started", job, exc_info=error)


def _slots(spec: LoadStoreSpec) -> SlotLoadStoreSpec:
    if not isinstance(spec, SlotLoadStoreSpec):
        raise UnsupportedError(f"{type(spec).__name__} is not a spec of kvtier's")
    return spec


def _kv_blocks(kv_caches: CanonicalKVCaches) -> KVBlocks:
    groups: list[Sequence[tuple[int, int]]] = [
        [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
        for refs in kv_caches.group_data_refs
    ]
    return KVBlocks([block.tensor for block in kv_caches.tensors], groups)
