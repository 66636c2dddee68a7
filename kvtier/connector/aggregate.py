"""Makes one answer of what all ranks say.

A rank acknowledges a job when it is done with it, each at its own time, some steps apart. The
job is finished when all of them did, and only then is it told that one of them failed: until
then the others still write to the request's blocks, so nobody may do anything with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.connector.metadata import FailedLoad, WorkerOutput
from kvtier.connector.stats import OperationMetrics
from kvtier.errors import KvtierError
from kvtier.types import JobId

__all__ = ["OutputAggregator"]

_MOST_LATE: Final = 4096
"""Jobs that are over and whose late words are told from those about new ones. Far more than are
ever in flight: a rank that lives acknowledges each."""


@dataclass(slots=True)
class _Pending:
    """A job in flight.

    Attributes:
        awaited: Ranks that have to acknowledge it still.
        left: Ranks that were given it and left before they did.
        failed: What those say that did and that failed.
    """

    awaited: set[int]
    left: set[int]
    failed: FailedLoad | None = None


class OutputAggregator:
    """Adds up outputs of ranks over any number of steps. Not thread-safe.

    How many ranks acknowledge a job may change at any time. When more do, that is for jobs that
    begin later: the new ranks never hear of the others. When fewer do, it is for every job: the
    last ranks left and say nothing any more, and if one does after all, nobody listens.

    Args:
        ranks: How many acknowledge a job.

    Raises:
        KvtierError: ``ranks`` is not positive.
    """

    def __init__(self, ranks: int) -> None:
        _require_positive(ranks)
        self._ranks = self._most_ranks = ranks
        self._pending: dict[JobId, _Pending] = {}
        self._late: dict[JobId, set[int]] = {}

    @property
    def ranks(self) -> int:
        """How many ranks acknowledge a job that begins now."""
        return self._ranks

    @property
    def pending(self) -> Mapping[JobId, int]:
        """Jobs in flight, and how many ranks still have to acknowledge each."""
        return {job_id: len(job.awaited) for job_id, job in self._pending.items()}

    def begin(self, job_ids: Iterable[JobId]) -> None:
        """Note jobs that begin now; others count from their first acknowledgement."""
        for job_id in job_ids:
            self._late.pop(job_id, None)
            self._job(job_id)

    def expect(self, ranks: int) -> WorkerOutput:
        """Change how many ranks acknowledge a job.

        Returns:
            What that finished.

        Raises:
            KvtierError: ``ranks`` is not positive.
        """
        _require_positive(ranks)
        return self.aggregate([WorkerOutput(expected_ranks=ranks)])

    def aggregate(self, outputs: Sequence[WorkerOutput | None]) -> WorkerOutput:
        """Add what the ranks said in one step.

        Args:
            outputs: One per rank, in their order; None of a rank that had nothing to say.

        Returns:
            The jobs that are finished now, each with a number of ranks that satisfies whoever
            waits for as many as there ever were; their failures, each united over the ranks;
            the statistics of all ranks; and the number of ranks if one of them changed it.
        """
        said = [(rank, output) for rank, output in enumerate(outputs) if output is not None]
        together = WorkerOutput()
        for _, output in said:
            together = together.aggregate(output)
        if together.expected_ranks:
            self._change_ranks(together.expected_ranks)
        for rank, output in said:
            for job_id in output.completed_jobs:
                self._acknowledge(job_id, rank, output.failed_loads.get(job_id))
        return self._finish(together.stats, together.expected_ranks)

    def forget(self, job_ids: Iterable[JobId]) -> None:
        """Stop waiting for ranks to acknowledge these jobs, and listening when they do.

        Unknown ones are no error: ranks may have been given them and not have said so yet.
        """
        for job_id in job_ids:
            job = self._pending.pop(job_id, None)
            if job is not None:
                self._ignore(job_id, job.awaited | job.left)
            elif job_id not in self._late:
                self._ignore(job_id, set(range(self._ranks)))

    def _job(self, job_id: JobId) -> _Pending:
        if job_id not in self._pending:
            self._pending[job_id] = _Pending(set(range(self._ranks)), set())
        return self._pending[job_id]

    def _ignore(self, job_id: JobId, ranks: set[int]) -> None:
        """Take no notice of what ``ranks`` will still say about a job that is over."""
        if not ranks:
            return
        self._late[job_id] = ranks
        if len(self._late) > _MOST_LATE:
            del self._late[next(iter(self._late))]  # of a rank that is gone and says nothing

    def _change_ranks(self, ranks: int) -> None:
        self._ranks = ranks
        self._most_ranks = max(self._most_ranks, ranks)
        for job in self._pending.values():
            gone = {rank for rank in job.awaited if rank >= ranks}
            job.left |= gone
            job.awaited -= gone

    def _acknowledge(self, job_id: JobId, rank: int, failed: FailedLoad | None) -> None:
        late = self._late.get(job_id)
        if late is not None:
            late.discard(rank)
            if not late:
                del self._late[job_id]
            return
        job = self._job(job_id)
        if rank in job.left:
            job.left.discard(rank)
            return
        job.awaited.discard(rank)
        if failed is not None:
            job.failed = job.failed.united(failed) if job.failed else failed

    def _finish(
        self, stats: Mapping[str, Sequence[OperationMetrics]], expected_ranks: int
    ) -> WorkerOutput:
        finished = {id_: job for id_, job in self._pending.items() if not job.awaited}
        for job_id, job in finished.items():
            del self._pending[job_id]
            self._ignore(job_id, job.left)
        return WorkerOutput(
            completed_jobs=dict.fromkeys(finished, self._most_ranks),
            failed_loads={id_: job.failed for id_, job in finished.items() if job.failed},
            stats=stats,
            expected_ranks=expected_ranks,
        )


def _require_positive(ranks: int) -> None:
    if ranks < 1:
        raise KvtierError(f"a job is acknowledged by at least one rank, not {ranks}")
