"""What an engine's callers are told of their jobs, and wait for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection

from kvtier.transfer.jobs import Pending
from kvtier.types import Job, JobId, Outcome, TransferResult

__all__ = ["Answers"]


class Answers:
    """Takes results from the thread that runs jobs to those that submit them.

    Attributes:
        changed: Held while jobs are submitted, notified when a result is there.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._results: deque[TransferResult] = deque()
        self._unsettled: set[JobId] = set()

    @property
    def complete(self) -> bool:
        """Whether every job has its settled result."""
        return not self._unsettled

    def expect(self, pending: Pending) -> None:
        """Note that a job was submitted."""
        self._unsettled.add(pending.job.job_id)

    def poll(self) -> list[TransferResult]:
        """Return the results since the last call, in the order they came."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def wait(self, job_ids: Collection[JobId], *, timeout_s: float) -> bool:
        """Block until ``job_ids`` are settled; returns whether they are."""
        wanted = set(job_ids)
        with self.changed:
            return self.changed.wait_for(
                lambda: wanted.isdisjoint(self._unsettled), timeout=timeout_s
            )

    def wait_any(self, *, timeout_s: float) -> bool:
        """Block until there is a result or no job; returns whether that is so."""
        with self.changed:
            return self.changed.wait_for(
                lambda: bool(self._results) or self.complete, timeout=timeout_s
            )

    def wait_all(self, *, timeout_s: float) -> bool:
        """Block until every job is settled; returns whether they are."""
        with self.changed:
            return self.changed.wait_for(lambda: self.complete, timeout=timeout_s)

    def answer_early(self, pending: Pending, error: str) -> None:
        """Answer whoever waits for a job whose slots are still in use."""
        job = pending.job
        pending.channel.route.abandon(job)
        outcomes = [Outcome.EXPIRED] * len(job.source_slots)
        with self.changed:
            self._results.append(
                TransferResult(job.job_id, outcomes, settled=False, error=error)
            )
            self.changed.notify_all()

    def finish(self, pending: Pending, outcome: Outcome, *, error: str) -> None:
        """Settle a job that never ran."""
        pending.channel.route.abandon(pending.job)
        outcomes = [outcome] * len(pending.job.source_slots)
        self.settle(pending, TransferResult(pending.job.job_id, outcomes, error=error))

    def fail(self, job: Job, *, error: str) -> None:
        """Settle a job that nothing could have run."""
        outcomes = [Outcome.FAILED] * len(job.source_slots)
        with self.changed:
            self._results.append(TransferResult(job.job_id, outcomes, error=error))
            self.changed.notify_all()

    def settle(self, pending: Pending, result: TransferResult) -> None:
        """Post a job's one settled result."""
        pending.done = True
        if pending.alarm is not None:
            pending.alarm.cancel()
        channel = pending.channel
        with self.changed:
            channel.jobs += 1
            channel.nbytes += result.nbytes
            channel.queued_bytes -= pending.nbytes
            self._results.append(result)
            self._unsettled.discard(pending.job.job_id)
            self.changed.notify_all()
