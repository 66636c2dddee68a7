"""Runs jobs on an asyncio loop of its own, and never makes its caller wait.

The engine's scheduler and the model runner are synchronous and must not block, so every
engine has a thread with a loop. ``submit`` and ``poll`` only touch queues. Everything else
follows from five rules:

* **One settled result per job.** Whatever happens, refusal and shutdown included, each
  submitted job ends in exactly one settled :class:`~kvtier.types.TransferResult`.
* **Deadlines free the waiter, not the buffer.** When a job's deadline passes while a thread is
  inside a system call, an unsettled result is posted at once, so that no request waits any
  longer; the slots stay the job's until the call returned and the settled result says so.
* **Urgent first.** A queue ordered by :class:`~kvtier.types.Why`; running bytes per channel are
  bounded, so that little that is not urgent is ever ahead of a load.
* **A tier's fault is a job's failure.** Whatever a tier raises, or returns in place of one
  outcome per chunk, ends the one job. A thread that dies all the same answers every job first.
* **A sick tier is left alone.** After some consecutive failures a channel's breaker opens: jobs
  are refused at once for a back-off time, then one job is let through to probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from kvtier.errors import ClosedError
from kvtier.tiers.base import SlotOutcomes
from kvtier.transfer.breaker import Breaker
from kvtier.transfer.channel import Channel, ChannelStatistics, EngineLimits
from kvtier.transfer.routes import Route
from kvtier.types import Job, JobId, Outcome, TransferResult

__all__ = ["TransferEngine"]

logger = logging.getLogger(__name__)

_LEAST_CLOSING_S: Final = 1.0
"""What the tiers have to close in, also where the jobs took all of the time."""

Pair = tuple[str, str]


@dataclass(slots=True)
class _Pending:
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

    def __lt__(self, other: _Pending) -> bool:
        return self.order < other.order


class TransferEngine:
    """Moves chunks between tiers on its own thread.

    Args:
        name: Names the thread and log lines.
        routes: How to move chunks, by (source tier, destination tier).
        chunk_nbytes: Bytes of one chunk, for the bounds.
        limits: The bounds.
        openers: Awaited in order on the engine's loop before anything else is; one that fails
            is logged.
        closers: Awaited in order on the engine's loop once everything is settled at close.

    Raises:
        ClosedError: The thread could not start its loop.
    """

    def __init__(
        self,
        name: str,
        routes: Mapping[Pair, Route],
        *,
        chunk_nbytes: int,
        limits: EngineLimits,
        openers: Sequence[Callable[[], Awaitable[None]]] = (),
        closers: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        self._name = name
        self._chunk_nbytes = chunk_nbytes
        self._limits = limits
        self._openers = openers
        self._closers = closers
        self._channels = {
            pair: Channel(
                route,
                Breaker(failures=limits.breaker_failures, backoff_s=limits.breaker_backoff_s),
            )
            for pair, route in routes.items()
        }
        self._inbox: deque[_Pending] = deque()
        self._cancels: deque[JobId] = deque()
        self._results: deque[TransferResult] = deque()
        self._sequence = itertools.count()
        self._settled = threading.Condition()
        self._unsettled: set[JobId] = set()
        self._heap: list[_Pending] = []
        self._queued: dict[JobId, _Pending] = {}
        self._running: dict[JobId, _Pending] = {}
        self._pauses = 0
        self._poked = False
        self._closing = False
        self._death: BaseException | None = None
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._changed: asyncio.Event
        self._tasks: asyncio.TaskGroup
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._death is not None:
            raise ClosedError(f"transfer engine {name} cannot start") from self._death

    # -- called from any one thread; none of these blocks -------------------------------------

    def out_of_service(self) -> list[Pair]:
        """Return the channels whose breaker is open: their jobs are refused for now."""
        now = time.monotonic()
        return [pair for pair, each in self._channels.items() if each.breaker.is_open(now)]

    def submit(self, *jobs: Job) -> None:
        """Queue ``jobs``; their outcomes arrive through :meth:`poll`, also when one is refused.

        Jobs that are known together are best submitted together: the engine's thread wakes up
        once, and a caller that computes gets its interpreter back once.

        Raises:
            ClosedError: The engine is closing, or its thread died; none is queued.
            KeyError: No route leads from a job's source to its destination; none is queued.
        """
        channels = [self._channels[job.source, job.destination] for job in jobs]
        now = time.monotonic()
        with self._settled:
            if self._closing:
                raise ClosedError(f"transfer engine {self._name} is closed")
            for job, channel in zip(jobs, channels, strict=True):
                self._enqueue(job, channel, now)
        if self._inbox:
            self._poke()

    def _enqueue(self, job: Job, channel: Channel, now: float) -> None:
        """Put a job where the engine's thread finds it, or refuse it."""
        nbytes = len(job.source_slots) * self._chunk_nbytes
        pending = _Pending(job, channel, nbytes, now)
        pending.order = (int(job.why), next(self._sequence))
        self._unsettled.add(job.job_id)
        fits = channel.queued_bytes + nbytes <= self._limits.queued_bytes
        alone = not channel.queued_bytes
        channel.queued_bytes += nbytes
        if fits or alone:
            self._inbox.append(pending)
            return
        channel.refused += 1
        self._finish(pending, Outcome.REFUSED, error="the queue is full")

    def cancel(self, job_id: JobId) -> None:
        """Drop a job that has not started; one that has runs on."""
        self._cancels.append(job_id)
        self._poke()

    @property
    def idle(self) -> bool:
        """Whether every submitted job is settled."""
        return not self._unsettled

    def poll(self) -> list[TransferResult]:
        """Return the results since the last call, in the order they came."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def statistics(self) -> dict[Pair, ChannelStatistics]:
        """Return a snapshot of every channel."""
        now = time.monotonic()
        return {pair: channel.statistics(now) for pair, channel in self._channels.items()}

    # -- called from any one thread; these block, with a deadline ------------------------------

    def wait(self, job_ids: Collection[JobId], *, timeout_s: float) -> bool:
        """Block until ``job_ids`` are settled; unknown and settled ids count as settled.

        Returns:
            Whether all are settled; False when ``timeout_s`` passed first.
        """
        wanted = set(job_ids)
        with self._settled:
            return self._settled.wait_for(
                lambda: wanted.isdisjoint(self._unsettled), timeout=timeout_s
            )

    def wait_any(self, *, timeout_s: float) -> bool:
        """Block until :meth:`poll` has something to return, or nothing is submitted.

        Returns:
            False when ``timeout_s`` passed first.
        """
        with self._settled:
            return self._settled.wait_for(
                lambda: bool(self._results) or not self._unsettled, timeout=timeout_s
            )

    def exclusively(self, action: Callable[[], Awaitable[None]], *, timeout_s: float) -> bool:
        """Cancel what is queued, let what runs finish, then await ``action`` before all else.

        Jobs submitted meanwhile wait until it is over. Whoever waits for chunks of jobs that
        run is told at once not to.

        Returns:
            Whether it is over; False when ``timeout_s`` passed first, and it still goes on.

        Raises:
            ClosedError: The engine's thread died.
        """
        if self._death is not None:
            raise ClosedError(f"transfer engine {self._name} is closed") from self._death
        future = asyncio.run_coroutine_threadsafe(self._exclusively(action), self._loop)
        try:
            future.result(timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self, *, timeout_s: float) -> bool:
        """Run what is queued, then stop; what does not finish in time is cancelled. Idempotent.

        Returns:
            Whether everything settled and the thread ended. False means that a system call is
            stuck; the thread is a daemon and dies with the process.
        """
        if self._closing:
            return not (self._unsettled or self._thread.is_alive())
        deadline = time.monotonic() + timeout_s
        with self._settled:
            drained = self._settled.wait_for(lambda: not self._unsettled, timeout=timeout_s)
        self._closing = True
        self._poke()
        self._thread.join(max(deadline - time.monotonic(), _LEAST_CLOSING_S))
        if self._thread.is_alive():
            logger.error(
                "transfer engine %s: jobs %s are stuck in the operating system",
                self._name,
                sorted(self._running),
            )
            return False
        return drained

    # -- on the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            logger.critical("transfer engine %s: its thread died", self._name, exc_info=error)
            with self._settled:  # so that no job is submitted that nobody answers
                self._death = error
                self._closing = True
            self._answer_all("the transfer engine's thread died")
        finally:
            self._started.set()

    def _answer_all(self, error: str) -> None:
        """Answer whoever waits for a job of a thread that died.

        Jobs that ran are not settled: other threads may still write into their slots.
        """
        for pending in self._running.values():
            self._answer_early(pending, error)
        for pending in (*self._inbox, *self._queued.values()):
            self._finish(pending, Outcome.FAILED, error=error)

    def _answer_early(self, pending: _Pending, error: str) -> None:
        """Answer whoever waits for a job whose slots are still in use."""
        job = pending.job
        pending.channel.route.abandon(job)
        outcomes = [Outcome.EXPIRED] * len(job.source_slots)
        with self._settled:
            self._results.append(
                TransferResult(job.job_id, outcomes, settled=False, error=error)
            )
            self._settled.notify_all()

    def _poke(self) -> None:
        """Wake the engine's thread, unless it is about to look anyway."""
        if not self._poked:
            self._poked = True
            with contextlib.suppress(RuntimeError):  # the thread died, and answered all jobs
                self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        """Take what was submitted and start what may start.

        Not a task: each hand-over between tasks is a turn of the loop, and beside a thread that
        computes in Python a turn waits 5 ms for the interpreter.
        """
        self._poked = False  # before the look: what comes after it wakes this thread again
        self._admit()
        if self._closing:
            self._cancel_queued("the engine is closing")
        elif not self._pauses:
            self._start()
        if self._closing or self._pauses:
            self._changed.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        await self._await_each(self._openers, "opening")
        async with asyncio.TaskGroup() as self._tasks:
            self._started.set()
            while not (self._closing and not self._running):
                await self._changed.wait()
                self._changed.clear()
        await self._await_each(self._closers, "closing")

    async def _await_each(
        self, actions: Sequence[Callable[[], Awaitable[None]]], what: str
    ) -> None:
        for action in actions:
            try:
                await action()
            except (Exception, asyncio.CancelledError):
                logger.exception("transfer engine %s: %s", self._name, what)

    def _admit(self) -> None:
        """Move submitted jobs into the queue and honour cancellations."""
        while self._inbox:
            pending = self._inbox.popleft()
            job = pending.job
            self._queued[job.job_id] = pending
            heapq.heappush(self._heap, pending)
            left_s = pending.submitted_s + job.timeout_s - time.monotonic()
            pending.alarm = self._loop.call_later(max(left_s, 0.0), self._expire, pending)
        while self._cancels:
            cancelled = self._queued.get(self._cancels.popleft())
            if cancelled is not None:
                self._finish(cancelled, Outcome.CANCELLED, error="nobody needs it any more")

    def _start(self) -> None:
        """Start queued jobs, most urgent first, while their channels have room."""
        blocked: list[_Pending] = []
        while self._heap:
            pending = heapq.heappop(self._heap)
            if pending.done:
                continue
            channel = pending.channel
            if channel.breaker.is_open(time.monotonic()):
                self._refuse(pending)
                continue
            room = self._limits.running_bytes - channel.running_bytes
            if channel.running_bytes and pending.nbytes > room:
                blocked.append(pending)
                continue
            if not channel.breaker.allow(time.monotonic()):
                self._refuse(pending)
                continue
            del self._queued[pending.job.job_id]
            self._running[pending.job.job_id] = pending
            channel.running_bytes += pending.nbytes
            pending.began_s = time.monotonic()
            self._tasks.create_task(self._execute(pending, self._begin(pending)))
        for pending in blocked:
            heapq.heappush(self._heap, pending)

    def _refuse(self, pending: _Pending) -> None:
        pending.channel.refused += 1
        self._finish(pending, Outcome.REFUSED, error="the tier is out of service")

    def _begin(self, pending: _Pending) -> Coroutine[Any, Any, SlotOutcomes]:
        """Begin to move a job's chunks at once; never raises."""
        try:
            return pending.channel.route.run(pending.job)
        except Exception as raised:  # noqa: BLE001 - raised again where the job ends
            pending.channel.route.abandon(pending.job)
            return _raise(raised)

    async def _execute(
        self, pending: _Pending, moving: Coroutine[Any, Any, SlotOutcomes]
    ) -> None:
        """See one job to its settled result; the top of its task, so nothing escapes."""
        job, channel = pending.job, pending.channel
        began_s = pending.began_s
        outcomes, error = await self._outcomes(job, moving)
        ended_s = time.monotonic()
        channel.running_bytes -= pending.nbytes
        del self._running[job.job_id]
        failed = Outcome.FAILED in outcomes
        if pending.late:
            channel.late -= 1
        else:
            self._record(pending, failed=failed, now=ended_s)
        if failed:
            logger.warning(
                "job %d, %s -> %s: %s", job.job_id, job.source, job.destination, error
            )
        done = sum(outcome is Outcome.DONE for outcome in outcomes)
        channel.seconds += ended_s - began_s
        channel.queued_s += began_s - pending.submitted_s
        self._settle(
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

    async def _outcomes(
        self, job: Job, moving: Coroutine[Any, Any, SlotOutcomes]
    ) -> tuple[Sequence[Outcome], str]:
        """Return what became of each chunk; a tier that breaks its word is one that failed."""
        chunks = len(job.source_slots)
        try:
            moved = await moving
            _require_outcomes(moved.outcomes, chunks)
        # Nobody cancels a job's task: a cancellation is that of something the tier waited for.
        except (Exception, asyncio.CancelledError, SystemExit) as raised:
            logger.exception("job %d, %s -> %s", job.job_id, job.source, job.destination)
            return [Outcome.FAILED] * chunks, f"{type(raised).__name__}: {raised}"
        return moved.outcomes, moved.error

    def _expire(self, pending: _Pending) -> None:
        """Answer whoever waits for a job whose deadline passed."""
        if pending.done:
            return
        channel, job = pending.channel, pending.job
        channel.expired += 1
        now = time.monotonic()
        if job.job_id in self._queued:
            if channel.late:
                # It waited behind a call that hangs: that, too, is the medium not answering.
                self._record(pending, failed=True, now=now)
            self._finish(pending, Outcome.EXPIRED, error="the deadline passed in the queue")
            return
        pending.late = True
        channel.late += 1
        self._record(pending, failed=True, now=now)
        logger.warning(
            "job %d, %s -> %s: no answer after %.1f s",
            job.job_id,
            job.source,
            job.destination,
            job.timeout_s,
        )
        self._answer_early(pending, f"no answer after {job.timeout_s:.1f} s")

    def _record(self, pending: _Pending, *, failed: bool, now: float) -> None:
        """Tell a channel's breaker how a job ended, and the operator when that opened it."""
        if pending.channel.breaker.record(failed=failed, now=now):
            logger.warning(
                "%s -> %s is out of service for %.1f s after repeated failures",
                pending.job.source,
                pending.job.destination,
                self._limits.breaker_backoff_s,
            )

    def _cancel_queued(self, reason: str) -> None:
        for pending in list(self._queued.values()):
            self._finish(pending, Outcome.CANCELLED, error=reason)

    async def _exclusively(self, action: Callable[[], Awaitable[None]]) -> None:
        self._pauses += 1
        try:
            self._admit()
            self._cancel_queued("the cache was reset")
            for pending in self._running.values():
                pending.channel.route.abandon(pending.job)
            while self._running:
                self._changed.clear()
                await self._changed.wait()
            await action()
        finally:
            self._pauses -= 1
            self._turn()

    def _finish(self, pending: _Pending, outcome: Outcome, *, error: str) -> None:
        """Settle a job that never ran."""
        self._queued.pop(pending.job.job_id, None)
        pending.channel.route.abandon(pending.job)
        outcomes = [outcome] * len(pending.job.source_slots)
        self._settle(pending, TransferResult(pending.job.job_id, outcomes, error=error))

    def _settle(self, pending: _Pending, result: TransferResult) -> None:
        """Post a job's one settled result."""
        pending.done = True
        if pending.alarm is not None:
            pending.alarm.cancel()
        channel = pending.channel
        with self._settled:
            channel.jobs += 1
            channel.nbytes += result.nbytes
            channel.queued_bytes -= pending.nbytes
            self._results.append(result)
            self._unsettled.discard(pending.job.job_id)
            self._settled.notify_all()


def _require_outcomes(outcomes: Sequence[Outcome], chunks: int) -> None:
    if len(outcomes) != chunks or not {*map(type, outcomes)} <= {Outcome}:
        raise TypeError(f"not one outcome per chunk, but {outcomes!r:.80}")


async def _raise(error: Exception) -> NoReturn:
    raise error
