"""A route that does what a test says, jobs for it, and how they ended."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvtier.tiers.base import SlotOutcomes
from kvtier.transfer import EngineLimits, Route, TransferEngine
from kvtier.types import Job, Outcome, Purpose, TransferResult

CHUNK_NBYTES = 4096
UP, DOWN = ("nvme", "ram"), ("ram", "nvme")
IDS = itertools.count()

MakeEngine = Callable[..., TransferEngine]
Seen = dict[int, tuple[list[Outcome], bool]]


class Scripted(Route):
    """Does what the test says: waits at a gate, answers with given outcomes, or raises."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.gates: dict[int, threading.Event] = {}
        self.entered: dict[int, threading.Event] = {}
        self.answers: dict[int, Outcome | list[Outcome] | Exception] = {}
        self.abandoned: list[int] = []

    def abandon(self, job: Job) -> None:
        self.abandoned.append(job.job_id)

    def hold(self, job: Job) -> threading.Event:
        self.entered[job.job_id] = threading.Event()
        return self.gates.setdefault(job.job_id, threading.Event())

    async def run(self, job: Job) -> SlotOutcomes:
        self.began.append(job.job_id)
        if job.job_id in self.entered:
            self.entered[job.job_id].set()
        gate = self.gates.get(job.job_id)
        if gate is not None:
            await asyncio.get_running_loop().run_in_executor(None, gate.wait)
        answer = self.answers.get(job.job_id, Outcome.DONE)
        if isinstance(answer, Exception):
            raise answer
        error = "" if answer is Outcome.DONE else "scripted"
        each = answer if isinstance(answer, list) else [answer] * len(job.keys)
        return SlotOutcomes(each, error)


def job(purpose: Purpose = Purpose.PROMOTE, *, chunks: int = 1, timeout_s: float = 30.0) -> Job:
    source, destination = ("ram", "nvme") if purpose is Purpose.DEMOTE else ("nvme", "ram")
    slots = list(range(chunks))
    keys = [bytes([slot]) for slot in slots]
    return Job(next(IDS), purpose, source, destination, keys, slots, slots, timeout_s)


def outcomes(results: Iterable[TransferResult]) -> Seen:
    return {result.job_id: (list(result.outcomes), result.settled) for result in results}


def wait_for(engine: TransferEngine, *jobs: Job) -> Seen:
    assert engine.wait([job.job_id for job in jobs], timeout_s=10)
    return outcomes(engine.poll())


def engine_of(
    route: Route,
    *ways: tuple[str, str],
    limits: Mapping[str, Any] | None = None,
    **options: Any,
) -> TransferEngine:
    """Return an engine that sends all jobs along ``route``: those up, or of all ``ways``."""
    few = {"queued_bytes": 1 << 20, "running_bytes": CHUNK_NBYTES}
    return TransferEngine(
        "test",
        dict.fromkeys(ways or [UP], route),
        chunk_nbytes=CHUNK_NBYTES,
        limits=EngineLimits(**{**few, **(limits or {})}),
        **options,
    )


async def cancelled() -> None:
    """Wait for what was cancelled, which a tier should not."""
    inner = asyncio.get_running_loop().create_future()
    inner.cancel()
    await inner
