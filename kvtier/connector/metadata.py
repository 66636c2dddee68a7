"""What the connector's two sides send each other, once per engine step.

To the workers, :class:`ConnectorMetadata`: the jobs to start and the stores to flush before the
next forward pass. To the scheduler, :class:`WorkerOutput`: the jobs that ended, in one rank or,
aggregated, in all. Both cross process boundaries, so they hold plain numbers and strings only.

A job is acknowledged by every rank whether it worked or not, because its blocks and slots are
free for other use only then. For a store that is all: which ranks' bytes are whole is written
in the control block. A load that did not work is named in ``failed_loads`` as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.connector.stats import ConnectorStats, OperationMetrics
from kvtier.types import JobId

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


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The engine's blocks of a job, group after group.

    Attributes:
        block_ids: Block numbers in the engine's memory.
        group_sizes: How many of them belong to each KV cache group, 0 for none.
        first_blocks: Index within the request of each group's first block. Where it is no
            multiple of the blocks per chunk, the group's first chunk is partial; its last
            may be too.
    """

    block_ids: tuple[int, ...]
    group_sizes: tuple[int, ...]
    first_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """The RAM slots of a job's chunks, group after group.

    Attributes:
        slots: One per chunk.
        generations: Stamp per slot: what a store leaves, what a load insists on.
        wait_s: How long the slots of a load may take to bear their stamps.
    """

    slots: tuple[int, ...]
    generations: tuple[int, ...]
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One request's chunks in one direction.

    Attributes:
        request_id: Whose they are.
        blocks: Where they are in the engine.
        slots: Where they are in the tier.
    """

    request_id: RequestId
    blocks: BlockSpec
    slots: SlotSpec


@dataclass(frozen=True, slots=True)
class ConnectorMetadata:
    """What the workers are to do in one step; the same for every rank.

    Attributes:
        load_jobs: Slots to blocks, started in this step.
        store_jobs: Blocks to slots, started at the next step.
        jobs_to_flush: Stores whose blocks are about to be overwritten, of this step or earlier.
        lost_stores: Those of them whose blocks were overwritten already: they must fail.
    """

    load_jobs: Mapping[JobId, TransferJob] = field(default_factory=dict)
    store_jobs: Mapping[JobId, TransferJob] = field(default_factory=dict)
    jobs_to_flush: frozenset[JobId] = frozenset()
    lost_stores: frozenset[JobId] = frozenset()


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """A load that did not bring all of its bytes.

    Attributes:
        request_id: Who waits for it.
        block_ids: The blocks whose content must not be used. Only where all attention is full
            can the request go on from the first of them; of windows and states, what that
            needs from before it was not loaded.
        error: What went wrong, for a log line.
    """

    request_id: RequestId
    block_ids: frozenset[int]
    error: str = ""

    def united(self, other: FailedLoad) -> FailedLoad:
        """Return the failure of two ranks in the same job."""
        # The smaller message: which rank's comes first must not matter.
        errors = [error for error in (self.error, other.error) if error]
        return FailedLoad(
            self.request_id, self.block_ids | other.block_ids, min(errors, default="")
        )


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """What happened since the last step, in one rank or in several.

    Attributes:
        completed_jobs: Jobs that ended, and how many ranks say so.
        failed_loads: Which of them failed, in any rank.
        stats: What was copied: a :class:`~kvtier.connector.stats.ConnectorStats` as plain
            values.
    """

    completed_jobs: Mapping[JobId, int] = field(default_factory=dict)
    failed_loads: Mapping[JobId, FailedLoad] = field(default_factory=dict)
    stats: Mapping[str, Sequence[OperationMetrics]] = field(default_factory=dict)

    @property
    def failed_requests(self) -> frozenset[RequestId]:
        """Requests that wait for a load which failed."""
        return frozenset(load.request_id for load in self.failed_loads.values())

    @property
    def invalid_block_ids(self) -> frozenset[int]:
        """Blocks whose content must not be used."""
        return frozenset().union(*(load.block_ids for load in self.failed_loads.values()))

    def aggregate(self, other: WorkerOutput) -> WorkerOutput:
        """Return what both say together; the order of the two matters only in ``stats``."""
        completed = dict(self.completed_jobs)
        for job_id, ranks in other.completed_jobs.items():
            completed[job_id] = completed.get(job_id, 0) + ranks
        failed = dict(self.failed_loads)
        for job_id, load in other.failed_loads.items():
            failed[job_id] = failed[job_id].united(load) if job_id in failed else load
        stats = ConnectorStats(self.stats).aggregate(ConnectorStats(other.stats)).to_dict()
        return WorkerOutput(completed, failed, stats)
