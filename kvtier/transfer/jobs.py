"""Jobs of a transfer engine: the queue, and the results of settled jobs."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from kvtier.logs import get_logger
from kvtier.transfer.channel import Channel
from kvtier.transfer.routes import Route
from kvtier.types import Job, JobId, Outcome, TransferResult

__all__ = ["JobQueue", "JobResults", "Pair", "Pending", "abandon"]

logger = get_logger(__name__)

Pair: TypeAlias = tuple[str, str]
"""Source and destination tier."""


@dataclass(slots=True)
class Pending:
    """A job between submission and its settled result."""

    job: Job
    channel: Channel
    nbytes: int
    submitted_s: float
    began_s: float = 0.0
    alarm: asyncio.TimerHandle | None = None
    late: bool = False
    done: bool = False
    order: tuple[int, int] = field(default=(0, 0))

    def __lt__(self, other: Pending) -> bool:
        return self.order < other.order

    @property
    def pair(self) -> Pair:
        """Source tier and destination tier of the job."""
        return self.job.source, self.job.destination


class JobQueue:
    """The jobs that wait for their channels, ordered by urgency and then by age."""

    def __init__(self) -> None:
        self._heap: list[Pending] = []
        self._queued: dict[JobId, Pending] = {}

    def __contains__(self, pending: Pending) -> bool:
        return pending.job.job_id in self._queued

    def __iter__(self) -> Iterator[Pending]:
        """Yield the queued jobs in any order. The caller may remove jobs while iterating."""
        return iter(list(self._queued.values()))

    def get(self, job_id: JobId) -> Pending | None:
        """Return the queued job ``job_id``; None if it is not queued."""
        return self._queued.get(job_id)

    def add(self, pending: Pending) -> None:
        """Queue a job."""
        self._queued[pending.job.job_id] = pending
        heapq.heappush(self._heap, pending)

    def remove(self, pending: Pending) -> None:
        """Remove a job from the queue."""
        del self._queued[pending.job.job_id]

    def in_order(self) -> Iterator[Pending]:
        """Yield the queued jobs, most urgent first. The caller may remove jobs meanwhile."""
        kept: list[Pending] = []
        queued = self._queued
        try:
            while self._heap:
                pending = heapq.heappop(self._heap)
                if pending.job.job_id in queued:
                    kept.append(pending)
                    yield pending
        finally:
            for pending in kept:
                if pending.job.job_id in queued:
                    heapq.heappush(self._heap, pending)


class JobResults:
    """Passes results from the transfer thread to the threads that submit jobs.

    Attributes:
        lock: The lock of ``changed``. It is held while jobs are submitted.
        changed: A condition variable, notified when a result is posted.
        posted: The results that nobody has taken yet, oldest first.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.posted: deque[TransferResult] = deque()
        self._unsettled: set[JobId] = set()

    @property
    def complete(self) -> bool:
        """Whether every job is settled."""
        return not self._unsettled

    def expect(self, jobs: Iterable[Job]) -> None:
        """Record that jobs were submitted."""
        for job in jobs:
            self._unsettled.add(job.job_id)

    def wait(self, job_ids: Collection[JobId], *, timeout_s: float) -> bool:
        """Block until ``job_ids`` are settled; return False on a timeout."""
        wanted = set(job_ids)
        with self.changed:
            return self.changed.wait_for(
                lambda: wanted.isdisjoint(self._unsettled), timeout=timeout_s
            )

    def wait_any(self, *, timeout_s: float) -> bool:
        """Block until there is a result or every job is settled; return False on a timeout."""
        with self.changed:
            return self.changed.wait_for(
                lambda: bool(self.posted) or self.complete, timeout=timeout_s
            )

    def wait_all(self, *, timeout_s: float) -> bool:
        """Block until every job is settled; return False on a timeout."""
        with self.changed:
            return self.changed.wait_for(lambda: self.complete, timeout=timeout_s)

    def post_expired(self, pending: Pending, error: str) -> None:
        """Post an unsettled result of an expired job, because its slots are still in use."""
        job = pending.job
        abandon(pending.channel.route, job)
        outcomes = [Outcome.EXPIRED] * len(job.source_slots)
        with self.changed:
            self.posted.append(TransferResult(job.job_id, outcomes, settled=False, error=error))
            self.changed.notify_all()

    def drop(self, pending: Pending, outcome: Outcome, *, error: str) -> None:
        """Settle a job that never ran; count it as refused if ``outcome`` is REFUSED."""
        abandon(pending.channel.route, pending.job)
        if outcome is Outcome.REFUSED:
            with self.changed:
                pending.channel.refused += 1
        outcomes = [outcome] * len(pending.job.source_slots)
        self.settle(pending, TransferResult(pending.job.job_id, outcomes, error=error))

    def fail(self, job: Job, *, error: str) -> None:
        """Settle a job that was never queued; all its chunks get the outcome FAILED."""
        outcomes = [Outcome.FAILED] * len(job.source_slots)
        with self.changed:
            self.posted.append(TransferResult(job.job_id, outcomes, error=error))
            self._unsettled.discard(job.job_id)
            self.changed.notify_all()

    def settle(self, pending: Pending, result: TransferResult) -> None:
        """Post the final result of a job, and count the job as settled."""
        pending.done = True
        if pending.alarm is not None:
            pending.alarm.cancel()
        channel = pending.channel
        with self.changed:
            channel.jobs += 1
            channel.nbytes += result.nbytes
            channel.queued_bytes -= pending.nbytes
            self.posted.append(result)
            self._unsettled.discard(pending.job.job_id)
            self.changed.notify_all()


def abandon(route: Route, job: Job) -> None:
    """Release the workers that wait for the chunks of ``job``, which will not run.

    An error of the route is logged, because the job and those after it need a result.
    """
    try:
        route.abandon(job)
    except Exception:
        logger.exception("a route cannot release the workers of job %d", job.job_id)
