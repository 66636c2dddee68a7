"""Jobs between their submission and their settled results, and the queue of those that wait."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from kvtier.transfer.channel import Channel
from kvtier.types import Job, JobId

__all__ = ["JobQueue", "Pair", "Pending"]

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
        """Where the job's chunks come from and where they go."""
        return self.job.source, self.job.destination


class JobQueue:
    """Jobs that wait for room on their channels, by urgency and then by age."""

    def __init__(self) -> None:
        self._heap: list[Pending] = []
        self._queued: dict[JobId, Pending] = {}

    def __contains__(self, pending: Pending) -> bool:
        return pending.job.job_id in self._queued

    def __iter__(self) -> Iterator[Pending]:
        """Yield what waits now, in no order; each may be removed meanwhile."""
        return iter(list(self._queued.values()))

    def get(self, job_id: JobId) -> Pending | None:
        """Return a job if it waits."""
        return self._queued.get(job_id)

    def add(self, pending: Pending) -> None:
        """Let a job wait."""
        self._queued[pending.job.job_id] = pending
        heapq.heappush(self._heap, pending)

    def remove(self, pending: Pending) -> None:
        """Let a job wait no longer."""
        del self._queued[pending.job.job_id]

    def in_order(self) -> Iterator[Pending]:
        """Yield what waits, most urgent first; what is not removed meanwhile waits on."""
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
