"""The connector's worker side: carries out the jobs of the scheduler side in one rank.

Calls of one step, all on the model thread:

1. :meth:`~ConnectorWorker.handle_preemptions`. It waits only for the stores in
   ``jobs_to_flush``, because their blocks are about to be overwritten. A store ends when its
   bytes are in RAM.
2. The forward pass.
3. :meth:`~ConnectorWorker.start_load`. The requests of these loads wait outside the batch.
4. :meth:`~ConnectorWorker.defer_stores`. It starts the stores of the step before. The stores of
   the KV from this forward pass start in the next step, so that tokens are sampled and sent
   first.
5. :meth:`~ConnectorWorker.get_finished` and :meth:`~ConnectorWorker.take_output`.

A step without a forward pass makes the same calls.

Every job is acknowledged, even a failed job. Only after that can the job's blocks and slots be
reused. The control block records whether a store is whole. :attr:`WorkerOutput.failed_loads`
names failed loads, with the blocks that have invalid content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvtier.connector.device import DeviceEngine, blocks_not_loaded
from kvtier.connector.metadata import (
    ConnectorMetadata,
    FailedLoad,
    RequestId,
    TransferJob,
    WorkerOutput,
)
from kvtier.connector.transfers import Transfers
from kvtier.errors import KvtierError
from kvtier.logs import get_logger
from kvtier.types import JobId, Outcome, Purpose, TransferResult

if TYPE_CHECKING:
    from kvtier.memory.copy_plan import BlockCopyPlan

__all__ = ["ConnectorWorker"]

logger = get_logger(__name__)

_FIRST_GDS_NUMBER: Final = -2
"""Number in a plan for the first chunk of a GDS read; -1 stands for a chunk without a slot."""


class ConnectorWorker:
    """Copies one rank's blocks to and from RAM slots.

    Not thread-safe. Only :meth:`handle_preemptions`, :meth:`wait_for_stores` and
    :meth:`shutdown` wait.

    Args:
        device: Runs the copies of this rank; closed with the worker.
        ram_name: Name of the RAM tier, for the records of transfers.
    """

    def __init__(self, device: DeviceEngine, *, ram_name: str) -> None:
        self._device = device
        self._ram_name = ram_name
        self._loads: dict[JobId, tuple[TransferJob, BlockCopyPlan | None]] = {}
        self._submitted = 0
        self._completed: set[JobId] = set()
        self._failed: dict[JobId, FailedLoad] = {}
        self._transfers = Transfers()

    # -- steps ---------------------------------------------------------------------------------

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        """Wait for stores whose blocks will be overwritten.

        A store that is in ``lost_stores``, or that ends too late, never counts as whole.
        """
        flush = metadata.jobs_to_flush
        if not flush:
            return
        for job_id in sorted(flush & metadata.store_jobs.keys()):
            self._submit(job_id, metadata.store_jobs[job_id], Purpose.STORE, self._start_store)
        self._device.retract(metadata.lost_stores)
        self._device.wait(flush)

    def start_load(self, metadata: ConnectorMetadata) -> None:
        """Start the loads of this step."""
        for job_id, job in metadata.load_jobs.items():
            self._loads[job_id] = (job, None)
            self._submit(job_id, job, Purpose.LOAD, self._start_load)

    def defer_stores(self, metadata: ConnectorMetadata) -> None:
        """Start the stores of the last step; queue the stores of this step."""
        self._device.begin_stores()
        for job_id, job in metadata.store_jobs.items():
            if job_id not in metadata.jobs_to_flush:
                self._submit(job_id, job, Purpose.STORE, self._start_store)

    def get_finished(self) -> set[RequestId]:
        """Return the requests whose loads have ended or failed since the last call."""
        if not self._submitted:
            return set()
        return {
            request_id for result in self._device.poll() for request_id in self._record(result)
        }

    def take_output(self) -> WorkerOutput | None:
        """Return the jobs that ended since the last call, or None if no job ended."""
        if not self._completed:
            return None
        output = WorkerOutput(
            # In the order of planning: the head of a prefix is published before its tail.
            completed_jobs=dict.fromkeys(sorted(self._completed), 1),
            failed_loads=self._failed,
            transfers=self._transfers.take(),
        )
        self._completed = set()
        self._failed = {}
        return output

    def wait_for_stores(self) -> bool:
        """Wait until no store reads blocks, or until the time limit.

        Returns:
            Whether the blocks may be freed. If not, a store may still read them.
        """
        return self._device.wait_for_stores()

    def shutdown(self) -> None:
        """Let running copies end and release the memory. Idempotent."""
        self._device.close()

    # -- internals -----------------------------------------------------------------------------

    def _submit(
        self,
        job_id: JobId,
        job: TransferJob,
        purpose: Purpose,
        start: Callable[[JobId, TransferJob], None],
    ) -> None:
        """Start a job; if it cannot start, report it as failed."""
        self._submitted += 1
        try:
            start(job_id, job)
        except Exception as error:  # noqa: BLE001 - reported as failed
            log = logger.warning if isinstance(error, KvtierError) else logger.exception
            log("%s %d was not started: %s", purpose.name.lower(), job_id, error)
            self._device.fail(job_id, purpose, job.slots.slots, job.slots.generations, error)

    def _start_store(self, job_id: JobId, job: TransferJob) -> None:
        self._device.store(job_id, self._plan(job), job.slots.generations)

    def _start_load(self, job_id: JobId, job: TransferJob) -> None:
        plan = self._plan(job)
        self._loads[job_id] = (job, plan)
        slots = job.slots
        self._device.load(job_id, plan, slots.generations, wait_s=slots.wait_s, gds=slots.gds)

    def _plan(self, job: TransferJob) -> BlockCopyPlan:
        blocks, slots = job.blocks, list(job.slots.slots)
        if job.slots.gds is not None:
            for at, position in enumerate(job.slots.gds.positions):
                slots[position] = _FIRST_GDS_NUMBER - at
        return self._device.plan(
            blocks.block_ids, blocks.group_sizes, blocks.first_blocks, slots
        )

    def _record(self, result: TransferResult) -> tuple[RequestId, ...]:
        """Record how a job ended; return the request id if the job was a load."""
        self._submitted -= 1
        self._completed.add(result.job_id)
        if result.job_id not in self._loads:
            self._record_copy("gpu", self._ram_name, result.nbytes, result)
            return ()
        job, plan = self._loads.pop(result.job_id)
        gds = job.slots.gds
        gds_nbytes = 0
        if gds is not None:
            done = sum(result.outcomes[at] is Outcome.DONE for at in gds.positions)
            gds_nbytes = result.nbytes * done // max(result.outcomes.count(Outcome.DONE), 1)
            self._record_copy(gds.file.tier, "gpu", gds_nbytes, result)
        if gds is None or result.nbytes > gds_nbytes:
            self._record_copy(self._ram_name, "gpu", result.nbytes - gds_nbytes, result)
        if not result.is_whole:
            missing = (
                frozenset(job.blocks.block_ids)
                if plan is None
                else blocks_not_loaded(plan, result.outcomes)
            )
            reads = {} if gds is None else {at: result.outcomes[at] for at in gds.positions}
            failed = {at: what for at, what in reads.items() if what is not Outcome.DONE}
            self._failed[result.job_id] = FailedLoad(
                job.request_id, missing, result.error, failed
            )
            logger.warning("request %s: not loaded: %s", job.request_id, result.error)
        return (job.request_id,)

    def _record_copy(
        self, source: str, destination: str, nbytes: int, result: TransferResult
    ) -> None:
        self._transfers.record(source, destination, nbytes=nbytes, seconds=result.seconds)
