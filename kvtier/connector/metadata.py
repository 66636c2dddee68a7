"""The messages that the connector's two sides exchange once per engine step.

The scheduler side sends :class:`ConnectorMetadata`: the jobs to start, and the stores to flush
before the next forward pass. The worker side sends :class:`WorkerOutput`: the jobs that ended.
Each rank sends one output, and the engine aggregates the outputs. Both messages cross process
boundaries, so they hold plain values.

Every rank acknowledges every job, even a failed job. Only after that can the job's blocks and
slots be reused. The control block records for each rank whether a store is whole.
``failed_loads`` names the loads that failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvtier.connector.transfers import Transfers
from kvtier.types import GdsReads, JobId, Outcome

__all__ = [
    "BlockSpec",
    "ConnectorMetadata",
    "FailedLoad",
    "RequestId",
    "SlotSpec",
    "TransferJob",
    "WorkerOutput",
]

RequestId = str

_WORST_FIRST: Final = (Outcome.CORRUPT, *Outcome)
"""Which of two ranks' outcomes a chunk gets: CORRUPT, or else the one declared first."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The engine blocks that a job copies, one KV cache group after another.

    Attributes:
        block_ids: Block numbers in the engine's memory.
        group_sizes: Number of blocks of each KV cache group.
        first_blocks: For each group, the index within the request of the first block. If an
            index is not a multiple of the blocks per chunk, the group's first chunk is partial.
            The last chunk of a group may be partial too.
    """

    block_ids: tuple[int, ...]
    group_sizes: tuple[int, ...]
    first_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """The RAM slots of a job's chunks, group after group.

    Attributes:
        slots: The RAM slot of each chunk.
        generations: The generation of each slot. A store sets this generation; a load requires
            it.
        wait_s: Longest time in seconds that a load waits for these generations and for GDS
            reads.
        gds: The chunks of a load that each rank reads from an NVMe tier; they have no RAM slot.
    """

    slots: tuple[int, ...]
    generations: tuple[int, ...]
    wait_s: float = 0.0
    gds: GdsReads | None = None


@dataclass(frozen=True, slots=True)
class TransferJob:
    """A job that loads or stores chunks of one request.

    Attributes:
        request_id: The request.
        blocks: The chunks' blocks in the engine.
        slots: The chunks' slots in RAM.
    """

    request_id: RequestId
    blocks: BlockSpec
    slots: SlotSpec


@dataclass(frozen=True, slots=True)
class ConnectorMetadata:
    """The workers' jobs of one step; the same for every rank.

    Attributes:
        load_jobs: Jobs that copy slots to blocks; they start in this step.
        store_jobs: Jobs that copy blocks to slots; they start at the next step.
        jobs_to_flush: Stores to finish before the forward pass overwrites their blocks.
        lost_stores: Subset of ``jobs_to_flush`` that must fail, because workers overwrite the
            blocks before they flush the stores.
    """

    load_jobs: Mapping[JobId, TransferJob] = field(default_factory=dict)
    store_jobs: Mapping[JobId, TransferJob] = field(default_factory=dict)
    jobs_to_flush: frozenset[JobId] = frozenset()
    lost_stores: frozenset[JobId] = frozenset()


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """A load that failed for some chunks.

    Attributes:
        request_id: The request that waits for the load.
        block_ids: Blocks with invalid content. If all layers have full attention, the request
            can continue from the first of these blocks. With a window or a state, the request
            also needs KV from before that block.
        error: The error, for a log line.
        failed_reads: Outcome of each failed GDS read, by the chunk's position in the load.
    """

    request_id: RequestId
    block_ids: frozenset[int]
    error: str = ""
    failed_reads: Mapping[int, Outcome] = field(default_factory=dict)

    def united(self, other: FailedLoad) -> FailedLoad:
        """Return this failure merged with ``other``, another rank's failure in the same job."""
        # Keep the smaller message, so that the order of the ranks does not matter.
        errors = [error for error in (self.error, other.error) if error]
        reads = dict(self.failed_reads)
        for at, outcome in other.failed_reads.items():
            reads[at] = min(outcome, reads.get(at, outcome), key=_WORST_FIRST.index)
        block_ids = self.block_ids | other.block_ids
        return FailedLoad(self.request_id, block_ids, min(errors, default=""), reads)


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """The jobs that ended since the last step, in one rank or in several.

    Attributes:
        completed_jobs: Number of ranks that report the end of each job, by job id.
        failed_loads: The completed loads that failed in any rank.
        transfers: Number of bytes and seconds of each copy.
    """

    completed_jobs: Mapping[JobId, int] = field(default_factory=dict)
    failed_loads: Mapping[JobId, FailedLoad] = field(default_factory=dict)
    transfers: Transfers = field(default_factory=Transfers)

    @property
    def failed_requests(self) -> frozenset[RequestId]:
        """The requests that wait for a failed load."""
        return frozenset(load.request_id for load in self.failed_loads.values())

    @property
    def invalid_block_ids(self) -> frozenset[int]:
        """The blocks with invalid content."""
        return frozenset().union(*(load.block_ids for load in self.failed_loads.values()))

    def aggregate(self, other: WorkerOutput) -> WorkerOutput:
        """Return ``self`` and ``other`` merged; the order matters only for ``transfers``."""
        completed = dict(self.completed_jobs)
        for job_id, ranks in other.completed_jobs.items():
            completed[job_id] = completed.get(job_id, 0) + ranks
        failed = dict(self.failed_loads)
        for job_id, load in other.failed_loads.items():
            failed[job_id] = failed[job_id].united(load) if job_id in failed else load
        transfers = Transfers()
        transfers.add(self.transfers)
        transfers.add(other.transfers)
        return WorkerOutput(completed, failed, transfers)
