"""Runs a transfer engine's jobs on the engine's event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from itertools import chain
from typing import Any

from kvtier.errors import TierUnavailableError
from kvtier.keys import short_key
from kvtier.logs import get_logger
from kvtier.os.wakeups import LoopWaker
from kvtier.tiers.base import SlotOutcomes, check_outcomes
from kvtier.transfer.channel import Channel, EngineLimits
from kvtier.transfer.jobs import JobQueue, JobResults, Pair, Pending, abandon
from kvtier.transfer.routes import raise_later
from kvtier.types import Job, JobId, Outcome, TransferResult

__all__ = ["Action", "Runner"]

logger = get_logger(__name__)

Action = Callable[[], Awaitable[None]]


class Runner:
    """Starts queued jobs, most urgent first, and posts the final result of each job.

    Only the transfer thread may call the methods, except :meth:`enqueue`, :meth:`cancel`,
    :meth:`close` and :attr:`running`. Call :meth:`answer_all` only after the loop has died.

    Args:
        name: Name of the transfer engine, for log lines.
        results: Gets the results.
        channels: The channels on which jobs run.
        chunk_nbytes: Bytes of one chunk.
        limits: The engine's limits.
    """

    def __init__(
        self,
        name: str,
        results: JobResults,
        channels: Mapping[Pair, Channel],
        *,
        chunk_nbytes: int,
        limits: EngineLimits,
    ) -> None:
        self._name = name
        self._results = results
        self._channels = channels
        self._chunk_nbytes = chunk_nbytes
        self._limits = limits
        self._inbox: deque[tuple[Sequence[Job], float]] = deque()
        self._cancels: deque[JobId] = deque()
        self._queue = JobQueue()
        self._running: dict[JobId, Pending] = {}
        self._sequence = itertools.count()
        self._unrouted: set[Pair] = set()
        self._waker = LoopWaker(self._schedule)
        self._closing = False
        self._loop: asyncio.AbstractEventLoop
        self._changed: asyncio.Event
        self._tasks: asyncio.TaskGroup

    # -- called from any thread ----------------------------------------------------------------

    @property
    def running(self) -> list[JobId]:
        """Ids of the running jobs."""
        return sorted(self._running)

    def enqueue(self, jobs: Sequence[Job], now: float) -> None:
        """Pass jobs, submitted at time ``now``, to the transfer thread."""
        self._inbox.append((jobs, now))
        self._waker.wake()

    def cancel(self, job_id: JobId) -> None:
        """Drop a job that has not started."""
        self._cancels.append(job_id)
        self._waker.wake()

    def close(self) -> None:
        """Start no further job."""
        self._closing = True
        self._waker.wake()

    def answer_all(self, error: str) -> None:
        """Post a result for every job after the transfer thread died.

        Running jobs stay unsettled, because other threads may still write into their slots.
        """
        for pending in self._running.values():
            self._results.post_expired(pending, error)
        for pending in self._queue:
            self._results.drop(pending, Outcome.FAILED, error=error)
        for job in chain.from_iterable(jobs for jobs, _ in self._inbox):
            channel = self._channels.get((job.source, job.destination))
            if channel is not None:
                abandon(channel.route, job)
            self._results.fail(job, error=error)

    # -- on the loop ---------------------------------------------------------------------------

    def bind(self) -> None:
        """Bind the runner to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._waker.attach()

    async def run(self, started: Callable[[], None]) -> None:
        """Run jobs until the runner is closed and the last job has ended.

        Args:
            started: Called when jobs can run.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                started()
                while not (self._closing and not self._running):
                    await self._changed.wait()
                    self._changed.clear()
        finally:
            self._closing = True  # callbacks of a dying loop must not start jobs

    async def exclusively_each(self, actions: Mapping[str, Action]) -> None:
        """Await each action while no job uses the action's tier.

        Raises:
            ExceptionGroup: The errors of the actions, after all have ended.
        """
        errors: list[Exception] = []

        async def attempt(tier: str, action: Action, pairs: Collection[Pair]) -> None:
            try:
                await self._act(action, pairs)
            except Exception as error:  # noqa: BLE001 - raised below, after the other tiers
                errors.append(error)
            except asyncio.CancelledError:  # something that the tier awaited was cancelled
                errors.append(TierUnavailableError(tier, "it gave up an exclusive action"))

        async with asyncio.TaskGroup() as attempts:
            for tier, action in actions.items():
                pairs = [pair for pair in self._channels if tier in pair]
                self._pause(pairs)
                attempts.create_task(attempt(tier, action, pairs))
        if errors:
            raise ExceptionGroup("tiers that failed", errors)

    def _pause(self, pairs: Collection[Pair]) -> None:
        """Pause channels, cancel their queued jobs, and release waiting workers."""
        for pair in pairs:
            self._channels[pair].pauses += 1
        self._admit()
        self._cancel_queued("the cache was reset", pairs)
        for pending in self._running_on(pairs):
            abandon(pending.channel.route, pending.job)

    async def _act(self, action: Action, pairs: Collection[Pair]) -> None:
        """Wait until no job runs on the channels of ``pairs``, then await ``action``."""
        try:
            while self._running_on(pairs):
                self._changed.clear()
                await self._changed.wait()
            await action()
        finally:
            for pair in pairs:
                self._channels[pair].pauses -= 1
            self._schedule()

    def _schedule(self) -> None:
        """Queue submitted jobs, and start queued jobs on channels with room.

        This is a callback and not a task, because each switch between tasks needs another
        iteration of the loop. While another thread runs Python code, an iteration waits 5 ms
        for the interpreter lock.
        """
        self._admit()
        if self._closing:
            self._cancel_queued("the engine is closing", self._channels)
        else:
            self._start()
        if self._closing or any(channel.pauses for channel in self._channels.values()):
            self._changed.set()

    def _admit(self) -> None:
        """Queue submitted jobs and drop cancelled ones."""
        # First, because a job may be submitted and cancelled while the inbox is emptied.
        cancels = [self._cancels.popleft() for _ in range(len(self._cancels))]
        while self._inbox:
            jobs, submitted_s = self._inbox.popleft()
            for job in jobs:
                self._accept(job, submitted_s)
        for job_id in cancels:
            cancelled = self._queue.get(job_id)
            if cancelled is not None:
                self._drop(cancelled, Outcome.CANCELLED, "no longer needed")

    def _accept(self, job: Job, submitted_s: float) -> None:
        """Queue a submitted job; if its channel is full or missing, post its result."""
        channel = self._channels.get((job.source, job.destination))
        if channel is None:
            self._fail_unrouted(job)
            return
        nbytes = 0 if job.moves_nothing else len(job.source_slots) * self._chunk_nbytes
        order = (int(job.purpose), next(self._sequence))
        pending = Pending(job, channel, nbytes, submitted_s, order=order)
        is_full = channel.queued_bytes + nbytes > self._limits.queued_bytes
        is_alone = not channel.queued_bytes
        channel.queued_bytes += nbytes
        if is_full and not is_alone:
            self._results.drop(pending, Outcome.REFUSED, error="the queue is full")
            return
        self._queue.add(pending)
        left_s = submitted_s + job.timeout_s - time.monotonic()
        pending.alarm = self._loop.call_later(max(left_s, 0.0), self._expire, pending)

    def _fail_unrouted(self, job: Job) -> None:
        pair = job.source, job.destination
        error = f"no route leads from {job.source} to {job.destination}"
        if pair not in self._unrouted:
            self._unrouted.add(pair)
            logger.error("transfer engine %s: %s (logged once)", self._name, error)
        self._results.fail(job, error=error)

    def _start(self) -> None:
        """Start queued jobs, most urgent first, while their channels have room.

        A smaller job never overtakes a larger one on its channel; otherwise the larger job
        could wait for ever.
        """
        full: set[Pair] = set()
        for pending in self._queue.in_order():
            channel = pending.channel
            if channel.is_out_of_service(time.monotonic()):
                self._refuse(pending)
                continue
            if channel.pauses or pending.pair in full:
                continue
            room = self._limits.running_bytes - channel.running_bytes
            if channel.running_bytes and pending.nbytes > room:
                full.add(pending.pair)
                continue
            if not channel.breaker.allow(time.monotonic()):
                self._refuse(pending)
                continue
            self._queue.remove(pending)
            self._running[pending.job.job_id] = pending
            channel.running_bytes += pending.nbytes
            pending.began_s = time.monotonic()
            self._tasks.create_task(self._execute(pending, _begin(pending)))

    def _refuse(self, pending: Pending) -> None:
        self._drop(pending, Outcome.REFUSED, "the tier is out of service")

    def _drop(self, pending: Pending, outcome: Outcome, error: str) -> None:
        """Remove a job from the queue and settle it."""
        self._queue.remove(pending)
        self._results.drop(pending, outcome, error=error)

    async def _execute(
        self, pending: Pending, moving: Coroutine[Any, Any, SlotOutcomes]
    ) -> None:
        """Run one job and post its settled result; never raises."""
        job, channel = pending.job, pending.channel
        began_s = pending.began_s
        outcomes, error = await _outcomes_of(job, moving)
        ended_s = time.monotonic()
        channel.running_bytes -= pending.nbytes
        del self._running[job.job_id]
        failed = Outcome.FAILED in outcomes
        quiet = job.moves_nothing and not failed
        if not quiet and (not failed or channel.should_log_failure(ended_s)):
            _log_losses(job, outcomes, error)
        if pending.late:
            channel.late -= 1
        elif outcomes and outcomes.count(Outcome.CANCELLED) == len(outcomes):
            # A reset cancelled it before it did anything.
            channel.breaker.discount()
        else:
            self._record(pending, failed=failed, now=ended_s)
        done = outcomes.count(Outcome.DONE)
        channel.seconds += ended_s - began_s
        channel.queued_s += began_s - pending.submitted_s
        self._results.settle(
            pending,
            TransferResult(
                job_id=job.job_id,
                outcomes=outcomes,
                nbytes=0 if job.moves_nothing else done * self._chunk_nbytes,
                seconds=ended_s - began_s,
                queued_s=began_s - pending.submitted_s,
                error=error,
                source=job.source,
                destination=job.destination,
            ),
        )
        self._schedule()

    def _expire(self, pending: Pending) -> None:
        """Expire a job: drop a queued job, or post an unsettled result of a running job."""
        if pending.done:
            return
        channel, job = pending.channel, pending.job
        channel.expired += 1
        now = time.monotonic()
        if pending in self._queue:
            if channel.late or channel.pauses:
                # It waited behind a hanging call or an exclusive action: the medium is stuck.
                self._record(pending, failed=True, now=now)
            self._drop(pending, Outcome.EXPIRED, "the deadline passed in the queue")
            self._schedule()  # queued jobs may be refused now
            return
        pending.late = True
        channel.late += 1
        if channel.should_log_failure(now):
            logger.warning(
                "job %d, %s -> %s: no answer after %.1f s",
                job.job_id,
                job.source,
                job.destination,
                job.timeout_s,
            )
        self._record(pending, failed=True, now=now)
        self._results.post_expired(pending, f"no answer after {job.timeout_s:.1f} s")

    def _record(self, pending: Pending, *, failed: bool, now: float) -> None:
        """Record a job's end in its channel's breaker; log when the breaker opens or closes."""
        breaker = pending.channel.breaker
        was_tripped = breaker.tripped
        breaker.record(failed=failed, now=now)
        if breaker.tripped == was_tripped:
            return
        if was_tripped:
            logger.warning("%s -> %s is in service again", *pending.pair)
        else:
            logger.warning(
                "%s -> %s is out of service after repeated failures; retrying every %.1f s",
                *pending.pair,
                self._limits.breaker_backoff_s,
            )

    def _cancel_queued(self, reason: str, pairs: Collection[Pair]) -> None:
        for pending in self._queue:
            if pending.pair in pairs:
                self._drop(pending, Outcome.CANCELLED, reason)

    def _running_on(self, pairs: Collection[Pair]) -> list[Pending]:
        return [pending for pending in self._running.values() if pending.pair in pairs]


def _begin(pending: Pending) -> Coroutine[Any, Any, SlotOutcomes]:
    """Start to move a job's chunks now. An error is raised only when the result is awaited."""
    try:
        return pending.channel.route.run(pending.job)
    except Exception as raised:  # noqa: BLE001 - raised again where the job ends
        abandon(pending.channel.route, pending.job)
        return raise_later(raised)


async def _outcomes_of(
    job: Job, moving: Coroutine[Any, Any, SlotOutcomes]
) -> tuple[Sequence[Outcome], str]:
    """Return each chunk's outcome and an error text. All chunks fail if ``moving`` raises."""
    chunks = len(job.source_slots)
    try:
        mover = f"route {job.source} -> {job.destination}"
        moved = check_outcomes(await moving, chunks, mover=mover)
    # Nothing cancels a job's task: a cancellation comes from something the tier awaited.
    except (Exception, asyncio.CancelledError, SystemExit) as raised:
        logger.exception("job %d, %s -> %s", job.job_id, job.source, job.destination)
        return [Outcome.FAILED] * chunks, f"{type(raised).__name__}: {raised}"
    return moved.outcomes, moved.error


def _log_losses(job: Job, outcomes: Sequence[Outcome], error: str) -> None:
    """Log a job's failed, corrupt and overwritten chunks, with the key of one of them.

    Device jobs have no keys; only their failed chunks are logged.
    """
    losses = {Outcome.FAILED, Outcome.CORRUPT, Outcome.OVERWRITTEN}
    lost = [key for key, what in zip(job.keys, outcomes, strict=False) if what in losses]
    if lost or Outcome.FAILED in outcomes:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        logger.warning(
            "job %d, %s -> %s: %s%s",
            job.job_id,
            job.source,
            job.destination,
            f"chunk {short_key(lost[0])}{more} failed: " if lost else "",
            error,
        )
