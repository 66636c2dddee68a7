"""Runs an engine's jobs on the engine's loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from kvtier.errors import TierUnavailableError
from kvtier.logs import get_logger
from kvtier.tiers.base import SlotOutcomes
from kvtier.transfer.answers import Answers
from kvtier.transfer.channel import Channel, EngineLimits
from kvtier.transfer.jobs import JobQueue, Pair, Pending
from kvtier.transfer.moving import begin, outcomes_of, tell_of_losses
from kvtier.types import JobId, Outcome, TransferResult

__all__ = ["Action", "Runner"]

logger = get_logger(__name__)

Action = Callable[[], Awaitable[None]]


class Runner:
    """Starts jobs, most urgent first, and sees each to its settled result.

    Its own thread's, but for :meth:`give`, :meth:`cancel`, :meth:`close` and :meth:`poke`, and
    for :meth:`answer_all` once that thread is dead.

    Args:
        answers: Where results go.
        channels: What jobs run on.
        chunk_nbytes: Bytes of one chunk.
        limits: The bounds.
    """

    def __init__(
        self,
        answers: Answers,
        channels: Mapping[Pair, Channel],
        *,
        chunk_nbytes: int,
        limits: EngineLimits,
    ) -> None:
        self._answers = answers
        self._channels = channels
        self._chunk_nbytes = chunk_nbytes
        self._limits = limits
        self._inbox: deque[Pending] = deque()
        self._cancels: deque[JobId] = deque()
        self._queue = JobQueue()
        self._running: dict[JobId, Pending] = {}
        self._poked = False
        self._closing = False
        self._loop: asyncio.AbstractEventLoop
        self._changed: asyncio.Event
        self._tasks: asyncio.TaskGroup

    # -- called from any thread ----------------------------------------------------------------

    @property
    def running(self) -> list[JobId]:
        """The jobs that run now."""
        return sorted(self._running)

    def give(self, pending: Pending) -> None:
        """Hand over a job; :meth:`poke` follows."""
        self._inbox.append(pending)

    def cancel(self, job_id: JobId) -> None:
        """Drop a job that has not started; :meth:`poke` follows."""
        self._cancels.append(job_id)

    def close(self) -> None:
        """Start no further job; :meth:`poke` follows."""
        self._closing = True

    def poke(self) -> None:
        """Wake the loop's thread, unless it is about to look anyway."""
        if not self._poked:
            self._poked = True
            with contextlib.suppress(RuntimeError):  # the thread died, and answered all jobs
                self._loop.call_soon_threadsafe(self._turn)

    def answer_all(self, error: str) -> None:
        """Answer whoever waits for a job of a thread that died.

        Jobs that ran are not settled: other threads may still write into their slots.
        """
        for pending in self._running.values():
            self._answers.answer_early(pending, error)
        for pending in (*self._inbox, *self._queue):
            self._answers.finish(pending, Outcome.FAILED, error=error)

    # -- on the loop ---------------------------------------------------------------------------

    def bind(self) -> None:
        """Belong to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    async def run(self, started: Callable[[], None]) -> None:
        """Run jobs until it is closed and the last has ended.

        Args:
            started: Called when jobs can run.
        """
        async with asyncio.TaskGroup() as self._tasks:
            started()
            while not (self._closing and not self._running):
                await self._changed.wait()
                self._changed.clear()

    async def exclusively_each(self, actions: Mapping[str, Action]) -> None:
        """Await each action while nothing runs from or to the tier it is for.

        Raises:
            ExceptionGroup: What went wrong, once all are over.
        """
        errors: list[Exception] = []

        async def attempt(tier: str, action: Action, pairs: Collection[Pair]) -> None:
            try:
                await self._act(action, pairs)
            except Exception as error:  # noqa: BLE001 - raised below, after the other tiers
                errors.append(error)
            except asyncio.CancelledError:  # of something that the tier waited for
                errors.append(TierUnavailableError(tier, "it gave up an exclusive action"))

        async with asyncio.TaskGroup() as attempts:
            for tier, action in actions.items():
                pairs = [pair for pair in self._channels if tier in pair]
                self._pause(pairs)
                attempts.create_task(attempt(tier, action, pairs))
        if errors:
            raise ExceptionGroup("tiers that failed", errors)

    def _pause(self, pairs: Collection[Pair]) -> None:
        """Let jobs of ``pairs`` wait, and nobody for those there are."""
        for pair in pairs:
            self._channels[pair].pauses += 1
        self._admit()
        self._cancel_queued("the cache was reset", pairs)
        for pending in self._running_on(pairs):
            pending.channel.route.abandon(pending.job)

    async def _act(self, action: Action, pairs: Collection[Pair]) -> None:
        """Await ``action`` when nothing runs any more on channels that are paused for it."""
        try:
            while self._running_on(pairs):
                self._changed.clear()
                await self._changed.wait()
            await action()
        finally:
            for pair in pairs:
                self._channels[pair].pauses -= 1
            self._turn()

    def _turn(self) -> None:
        """Take what was submitted and start what may start.

        Not a task: each hand-over between tasks is a turn of the loop, and beside a thread that
        computes in Python a turn waits 5 ms for the interpreter.
        """
        self._poked = False  # before the look: what comes after it wakes this thread again
        self._admit()
        if self._closing:
            self._cancel_queued("the engine is closing", self._channels)
        else:
            self._start()
        if self._closing or any(channel.pauses for channel in self._channels.values()):
            self._changed.set()

    def _admit(self) -> None:
        """Move submitted jobs into the queue and honour cancellations."""
        while self._inbox:
            pending = self._inbox.popleft()
            self._queue.add(pending)
            left_s = pending.submitted_s + pending.job.timeout_s - time.monotonic()
            pending.alarm = self._loop.call_later(max(left_s, 0.0), self._expire, pending)
        while self._cancels:
            cancelled = self._queue.get(self._cancels.popleft())
            if cancelled is not None:
                self._drop(cancelled, Outcome.CANCELLED, "nobody needs it any more")

    def _start(self) -> None:
        """Start queued jobs, most urgent first, while their channels have room.

        None is overtaken on its channel by one that needs less room: there may always be some.
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
            self._tasks.create_task(self._execute(pending, begin(pending)))

    def _refuse(self, pending: Pending) -> None:
        pending.channel.refused += 1
        self._drop(pending, Outcome.REFUSED, "the tier is out of service")

    def _drop(self, pending: Pending, outcome: Outcome, error: str) -> None:
        """Settle a job that waits."""
        self._queue.remove(pending)
        self._answers.finish(pending, outcome, error=error)

    async def _execute(
        self, pending: Pending, moving: Coroutine[Any, Any, SlotOutcomes]
    ) -> None:
        """See one job to its settled result; the top of its task, so nothing escapes."""
        job, channel = pending.job, pending.channel
        began_s = pending.began_s
        outcomes, error = await outcomes_of(job, moving)
        ended_s = time.monotonic()
        channel.running_bytes -= pending.nbytes
        del self._running[job.job_id]
        failed = Outcome.FAILED in outcomes
        if not failed or channel.is_news(ended_s):
            tell_of_losses(job, outcomes, error)
        if pending.late:
            channel.late -= 1
        elif {*outcomes} == {Outcome.CANCELLED}:  # for a reset, before it came to anything
            channel.breaker.discount()
        else:
            self._record(pending, failed=failed, now=ended_s)
        done = sum(outcome is Outcome.DONE for outcome in outcomes)
        channel.seconds += ended_s - began_s
        channel.queued_s += began_s - pending.submitted_s
        self._answers.settle(
            pending,
            TransferResult(
                job_id=job.job_id,
                outcomes=outcomes,
                nbytes=done * self._chunk_nbytes,
                seconds=ended_s - began_s,
                queued_s=began_s - pending.submitted_s,
                error=error,
            ),
        )
        self._turn()

    def _expire(self, pending: Pending) -> None:
        """Answer whoever waits for a job whose deadline passed."""
        if pending.done:
            return
        channel, job = pending.channel, pending.job
        channel.expired += 1
        now = time.monotonic()
        if pending in self._queue:
            if channel.late or channel.pauses:
                # It waited behind a call that hangs, or all its time for an exclusive action of
                # this tier, before which the queue was emptied: the medium does not answer.
                self._record(pending, failed=True, now=now)
            self._drop(pending, Outcome.EXPIRED, "the deadline passed in the queue")
            self._turn()  # what waits may be refused now
            return
        pending.late = True
        channel.late += 1
        if channel.is_news(now):
            logger.warning(
                "job %d, %s -> %s: no answer after %.1f s",
                job.job_id,
                job.source,
                job.destination,
                job.timeout_s,
            )
        self._record(pending, failed=True, now=now)
        self._answers.answer_early(pending, f"no answer after {job.timeout_s:.1f} s")

    def _record(self, pending: Pending, *, failed: bool, now: float) -> None:
        """Tell a channel's breaker how a job ended, and the operator when that turned it."""
        breaker = pending.channel.breaker
        was_tripped = breaker.tripped
        breaker.record(failed=failed, now=now)
        if breaker.tripped == was_tripped:
            return
        if was_tripped:
            logger.warning("%s -> %s is in service again", *pending.pair)
        else:
            logger.warning(
                "%s -> %s is out of service after repeated failures, and tried again every "
                "%.1f s",
                *pending.pair,
                self._limits.breaker_backoff_s,
            )

    def _cancel_queued(self, reason: str, pairs: Collection[Pair]) -> None:
        for pending in self._queue:
            if pending.pair in pairs:
                self._drop(pending, Outcome.CANCELLED, reason)

    def _running_on(self, pairs: Collection[Pair]) -> list[Pending]:
        return [pending for pending in self._running.values() if pending.pair in pairs]
