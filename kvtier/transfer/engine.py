"""Runs jobs on an asyncio loop of its own, and never makes its caller wait.

The engine's scheduler and the model runner are synchronous and must not block, so every
engine has a thread with a loop. ``submit`` and ``poll`` only touch queues. Everything else
follows from five rules:

* **One settled result per job.** Whatever happens, refusal and shutdown included, each
  submitted job ends in exactly one settled :class:`~kvtier.types.TransferResult`.
* **Deadlines free the waiter, not the buffer.** When a job's deadline passes while a thread is
  inside a system call, an unsettled result is posted at once, so that no request waits any
  longer; the slots stay the job's until the call returned and the settled result says so.
* **Urgent first.** A queue ordered by :class:`~kvtier.types.Purpose`; running bytes per channel
  are bounded, so that little that is not urgent is ever ahead of a load.
* **A tier's fault is a job's failure.** Whatever a tier raises, or returns in place of one
  outcome per chunk, ends the one job. A thread that dies all the same answers every job first.
* **A sick tier is left alone.** After some consecutive failures a channel's breaker opens: jobs
  are refused at once for a back-off time, then one job is let through to probe.

Here is what callers see, and the thread; :mod:`~kvtier.transfer.runner` is what goes on in it,
and :mod:`~kvtier.transfer.answers` how what became of the jobs comes back.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from kvtier.errors import ClosedError
from kvtier.logs import get_logger
from kvtier.os.iopool import start_thread
from kvtier.transfer.answers import Answers
from kvtier.transfer.breaker import Breaker
from kvtier.transfer.channel import Channel, ChannelStatistics, EngineLimits
from kvtier.transfer.jobs import Pair, Pending
from kvtier.transfer.routes import Route
from kvtier.transfer.runner import Action, Runner
from kvtier.types import Job, JobId, Outcome, TransferResult

__all__ = ["TransferEngine"]

logger = get_logger(__name__)

_START_TIMEOUT_S: Final = 60.0
"""Longer than any tier takes to get ready for its first call: it is open already."""

_DRAINING_SHARE: Final = 0.75
"""Of the time that closing may take, for the jobs that are queued."""


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
        ClosedError: The thread could not start its loop, or a tier does not get ready.
    """

    def __init__(
        self,
        name: str,
        routes: Mapping[Pair, Route],
        *,
        chunk_nbytes: int,
        limits: EngineLimits,
        openers: Sequence[Action] = (),
        closers: Sequence[Action] = (),
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
        self._answers = Answers()
        self._runner = Runner(
            self._answers, self._channels, chunk_nbytes=chunk_nbytes, limits=limits
        )
        self._sequence = itertools.count()
        self._unrouted: set[Pair] = set()
        self._closing = False
        self._death: BaseException | None = None
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)
        start_thread(self._thread)
        if not self._started.wait(_START_TIMEOUT_S):
            self._closing = True
            self._runner.close()  # as soon as it runs
            raise ClosedError(
                f"transfer engine {name} has not started within {_START_TIMEOUT_S:g} s: one of "
                "its tiers does not get ready; look for errors of its disk in the kernel's log"
            )
        if self._death is not None:
            raise ClosedError(f"transfer engine {name} cannot start") from self._death

    # -- called from any one thread; none of these blocks -------------------------------------

    def out_of_service(self) -> list[Pair]:
        """Return the channels whose jobs are refused for now: their breaker is open.

        All are, and for good, once the engine's thread died.
        """
        if self._death is not None:
            return list(self._channels)
        now = time.monotonic()
        return [pair for pair, each in self._channels.items() if each.is_out_of_service(now)]

    def submit(self, *jobs: Job) -> None:
        """Queue ``jobs``; their outcomes arrive through :meth:`poll`, also when one is refused.

        Jobs that are known together are best submitted together: the engine's thread wakes up
        once, and a caller that computes gets its interpreter back once. A job without a route
        has failed; the others run.

        Raises:
            ClosedError: The engine is closing, or its thread died; none is queued. Whoever may
                wait for their chunks is told by :meth:`abandon`.
        """
        now = time.monotonic()
        with self._answers.changed:
            if self._closing:
                raise ClosedError(f"transfer engine {self._name} is closed")
            given = [self._enqueue(job, now) for job in jobs]
        if any(given):
            self._runner.poke()

    def abandon(self, *jobs: Job) -> None:
        """Tell whoever waits for chunks of ``jobs``, which could not be submitted, not to."""
        for job in jobs:
            channel = self._channels.get((job.source, job.destination))
            if channel is not None:  # or nobody can wait for what would come this way
                channel.route.abandon(job)

    def _enqueue(self, job: Job, now: float) -> bool:
        """Give a job to the engine's thread, or refuse it; returns whether it was given."""
        channel = self._channels.get((job.source, job.destination))
        if channel is None:
            self._fail_unrouted(job)
            return False
        nbytes = len(job.source_slots) * self._chunk_nbytes
        order = (int(job.purpose), next(self._sequence))
        pending = Pending(job, channel, nbytes, now, order=order)
        self._answers.expect(pending)
        fits = channel.queued_bytes + nbytes <= self._limits.queued_bytes
        alone = not channel.queued_bytes
        channel.queued_bytes += nbytes
        if fits or alone:
            self._runner.give(pending)
            return True
        channel.refused += 1
        self._answers.finish(pending, Outcome.REFUSED, error="the queue is full")
        return False

    def _fail_unrouted(self, job: Job) -> None:
        pair = job.source, job.destination
        error = f"no route leads from {job.source} to {job.destination}"
        if pair not in self._unrouted:
            self._unrouted.add(pair)
            logger.error("transfer engine %s: %s (said once)", self._name, error)
        self._answers.fail(job, error=error)

    def cancel(self, job_id: JobId) -> None:
        """Drop a job that has not started; one that has runs on."""
        self._runner.cancel(job_id)
        self._runner.poke()

    @property
    def idle(self) -> bool:
        """Whether every submitted job is settled."""
        return self._answers.complete

    def poll(self) -> list[TransferResult]:
        """Return the results since the last call, in the order they came."""
        return self._answers.poll()

    def statistics(self) -> dict[Pair, ChannelStatistics]:
        """Return a snapshot of every channel."""
        now = time.monotonic()
        figures = {pair: channel.statistics(now) for pair, channel in self._channels.items()}
        if self._death is None:
            return figures
        return {pair: each._replace(out_of_service=True) for pair, each in figures.items()}

    # -- called from any one thread; these block, with a deadline ------------------------------

    def wait(self, job_ids: Collection[JobId], *, timeout_s: float) -> bool:
        """Block until ``job_ids`` are settled; unknown and settled ids count as settled.

        Returns:
            Whether all are settled; False when ``timeout_s`` passed first.
        """
        return self._answers.wait(job_ids, timeout_s=timeout_s)

    def wait_any(self, *, timeout_s: float) -> bool:
        """Block until :meth:`poll` has something to return, or nothing is submitted.

        Returns:
            False when ``timeout_s`` passed first.
        """
        return self._answers.wait_any(timeout_s=timeout_s)

    def exclusively_each(self, actions: Mapping[str, Action], *, timeout_s: float) -> bool:
        """Do something to each tier while no job runs from or to it.

        What is queued for it is cancelled, what runs is waited for, and what is submitted
        meanwhile waits. Whoever waits for chunks of jobs that run is told at once not to. A
        tier that hangs holds up no other.

        Args:
            actions: What to await, by the name of the tier it is for.
            timeout_s: Longest this blocks.

        Returns:
            Whether all are over; False when ``timeout_s`` passed first, and some still go on.

        Raises:
            ClosedError: The engine was closed, or its thread died.
            ExceptionGroup: What went wrong; all are over.
        """
        acting = self._runner.exclusively_each(actions)
        try:
            future = asyncio.run_coroutine_threadsafe(acting, self._loop)
        except RuntimeError as error:  # its loop has ended
            acting.close()
            cause = self._death or error
            raise ClosedError(f"transfer engine {self._name} is closed") from cause
        try:
            future.result(timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self, *, timeout_s: float) -> bool:
        """Run what is queued, then stop; what does not finish in time is cancelled. Idempotent.

        A quarter of the time is kept for the tiers, which then end what runs and close.

        Returns:
            Whether everything settled and the thread ended. False means that a system call is
            stuck, or a tier not closed yet; that goes on in the thread, which is a daemon and
            dies with the process.
        """
        if self._closing:
            return self._answers.complete and not self._thread.is_alive()
        deadline = time.monotonic() + timeout_s
        drained = self._answers.wait_all(timeout_s=_DRAINING_SHARE * timeout_s)
        self._closing = True
        self._runner.close()
        self._runner.poke()
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            stuck = self._runner.running
            logger.error(
                "transfer engine %s: not closed within %.1f s: %s",
                self._name,
                timeout_s,
                f"jobs {stuck} are stuck in the operating system"
                if stuck
                else "its tiers take longer",
            )
            return False
        return drained

    # -- on the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            logger.critical("transfer engine %s: its thread died", self._name, exc_info=error)
            with self._answers.changed:  # so that no job is submitted that nobody answers
                self._death = error
                self._closing = True
            self._runner.answer_all("the transfer engine's thread died")
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._runner.bind()
        await self._await_each(self._openers, "opening")
        await self._runner.run(self._started.set)
        await self._await_each(self._closers, "closing")

    async def _await_each(self, actions: Sequence[Action], what: str) -> None:
        for action in actions:
            try:
                await action()
            except (Exception, asyncio.CancelledError):
                logger.exception("transfer engine %s: %s", self._name, what)
