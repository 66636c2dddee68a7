"""Runs jobs on its own event loop, without blocking its callers.

vLLM's scheduler and model runner are synchronous and must not block. So every transfer engine
has a *transfer thread* with an event loop, and ``submit`` and ``poll`` only touch queues. Five
rules hold:

* **One settled result per job.** Every submitted job ends in exactly one settled
  :class:`~kvtier.types.TransferResult`, even if the job is refused or the engine shuts down.
* **Deadlines free the waiter, not the buffer.** If a job's deadline passes during a system
  call, an unsettled result is posted at once, and requests stop waiting. The job keeps its
  slots until the call returns and the settled result is posted.
* **Urgent first.** The queue is ordered by :class:`~kvtier.types.Purpose`. A channel has a
  limit of running bytes, so a load waits only briefly for less urgent jobs.
* **A tier's fault is a job's failure.** If a tier raises, or does not return one outcome per
  chunk, only that job fails. If the transfer thread dies, every job gets an answer first.
* **A failing tier gets a pause.** After some consecutive failures a channel's breaker opens:
  jobs are refused for a back-off time, then one job is admitted as a probe.

This module has the public interface and the thread. :mod:`~kvtier.transfer.runner` runs the
jobs on that thread, and :mod:`~kvtier.transfer.jobs` carries their results back.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from kvtier.errors import ClosedError
from kvtier.logs import get_logger
from kvtier.os.iopool import start_thread
from kvtier.transfer.channel import Breaker, Channel, ChannelStatistics, EngineLimits
from kvtier.transfer.jobs import JobResults, Pair
from kvtier.transfer.routes import Route
from kvtier.transfer.runner import Action, Runner
from kvtier.types import Job, JobId, TransferResult

__all__ = ["TransferEngine"]

logger = get_logger(__name__)

_START_TIMEOUT_S: Final = 60.0
"""Longest wait in seconds for the thread to start. Every tier is ready for its first call in
less time."""

_DRAINING_SHARE: Final = 0.75
"""Fraction of the time for closing. Queued jobs may run until this fraction has passed."""


class TransferEngine:
    """Moves chunks between tiers on its own thread.

    Args:
        name: Name for the thread and for log lines.
        routes: The route that moves chunks, by (source tier, destination tier).
        chunk_nbytes: Bytes of one chunk.
        limits: The engine's limits.
        openers: Functions to await on the engine's loop, in order, before the first job.
            Failures are logged.
        closers: Functions to await on the engine's loop, in order, after the last job.

    Attributes:
        posted: The results for the next :meth:`poll`; an empty one needs no call.

    Raises:
        ClosedError: The thread could not start its loop, or a tier could not be prepared.
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
        self._openers = openers
        self._closers = closers
        self._channels = {
            pair: Channel(
                route,
                Breaker(failures=limits.breaker_failures, backoff_s=limits.breaker_backoff_s),
            )
            for pair, route in routes.items()
        }
        self._results = JobResults()
        self.posted: Final = self._results.posted
        self._runner = Runner(
            name, self._results, self._channels, chunk_nbytes=chunk_nbytes, limits=limits
        )
        self._closing = False
        self._death: BaseException | None = None
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)
        start_thread(self._thread)
        if not self._started.wait(_START_TIMEOUT_S):
            self._closing = True
            self._runner.close()  # takes effect as soon as it runs
            raise ClosedError(
                f"transfer engine {name} has not started within {_START_TIMEOUT_S:g} s: one of "
                "its tiers did not get ready; look for disk errors in the kernel's log"
            )
        if self._death is not None:
            raise ClosedError(
                f"transfer engine {name} cannot start: {self._death}"
            ) from self._death

    # -- called from any one thread; none of these blocks -------------------------------------

    def out_of_service(self) -> list[Pair]:
        """Return the channels that refuse jobs because their breaker is open.

        If the transfer thread has died, all channels refuse jobs for good.
        """
        if self._death is not None:
            return list(self._channels)
        now = time.monotonic()
        return [
            pair
            for pair, each in self._channels.items()
            if each.breaker.tripped and each.is_out_of_service(now)
        ]

    def submit(self, *jobs: Job) -> None:
        """Queue ``jobs``. :meth:`poll` returns a result for each job, even a refused one.

        Submit jobs together where possible: the transfer thread then wakes up once. That thread
        does everything else, because the caller has less time. A job without a route fails; the
        others run.

        Raises:
            ClosedError: The engine is closing, or its thread died. No job was queued. Call
                :meth:`abandon` to release workers that wait for the jobs' chunks.
        """
        now = time.monotonic()
        with self._results.lock:
            if self._closing:
                raise ClosedError(f"transfer engine {self._name} is closed")
            self._results.expect(jobs)
            if jobs:
                self._runner.enqueue(jobs, now)

    def abandon(self, *jobs: Job) -> None:
        """Release the workers that wait for chunks of ``jobs`` that :meth:`submit` refused."""
        for job in jobs:
            channel = self._channels.get((job.source, job.destination))
            if channel is not None:
                channel.route.abandon(job)

    def cancel(self, job_id: JobId) -> None:
        """Drop a job that has not started. A running job continues."""
        self._runner.cancel(job_id)

    @property
    def idle(self) -> bool:
        """Whether every submitted job is settled."""
        return self._results.complete

    def poll(self) -> list[TransferResult]:
        """Return the results since the last call, oldest first."""
        results = []
        while self.posted:
            results.append(self.posted.popleft())
        return results

    def statistics(self) -> dict[Pair, ChannelStatistics]:
        """Return a snapshot of every channel."""
        now = time.monotonic()
        figures = {pair: channel.statistics(now) for pair, channel in self._channels.items()}
        if self._death is None:
            return figures
        return {pair: each._replace(out_of_service=True) for pair, each in figures.items()}

    # -- called from any one thread; these block, with a deadline ------------------------------

    def wait(self, job_ids: Collection[JobId], *, timeout_s: float) -> bool:
        """Block until the jobs ``job_ids`` are settled; unknown ids count as settled.

        Returns:
            Whether all are settled; False if ``timeout_s`` passed first.
        """
        return self._results.wait(job_ids, timeout_s=timeout_s)

    def wait_any(self, *, timeout_s: float) -> bool:
        """Block until :meth:`poll` has a result to return, or every job is settled.

        Returns:
            True, or False if ``timeout_s`` passed first.
        """
        return self._results.wait_any(timeout_s=timeout_s)

    def exclusively_each(self, actions: Mapping[str, Action], *, timeout_s: float) -> bool:
        """Run one action per tier; no job reads or writes a tier during the tier's action.

        Jobs queued for the tier are cancelled, running jobs are awaited, and newly submitted
        jobs wait. Workers that wait for chunks of running jobs are released at once. A hanging
        tier does not delay the others.

        Args:
            actions: The action of each tier, by the tier's name.
            timeout_s: Longest time that this call blocks, in seconds.

        Returns:
            Whether all actions ended; False if ``timeout_s`` passed first. In that case the
            remaining actions continue, and new jobs of a tier wait until the tier's action
            ends.

        Raises:
            ClosedError: The engine was closed, or its thread died.
            ExceptionGroup: The errors of the actions, after all have ended.
        """
        acting = self._runner.exclusively_each(actions)
        try:
            future = asyncio.run_coroutine_threadsafe(acting, self._loop)
        except RuntimeError as error:  # the loop has ended
            acting.close()
            cause = self._death or error
            raise ClosedError(f"transfer engine {self._name} is closed") from cause
        try:
            future.result(timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self, *, timeout_s: float) -> bool:
        """Run the queued jobs, cancel jobs that cannot start in time, and stop the thread.

        Calling the method again has no effect.

        A quarter of the time is reserved for running jobs to end and for tiers to close.

        Returns:
            Whether every job is settled and the thread ended. If not, a system call is stuck or
            a tier is still closing. The thread is a daemon and ends with the process.
        """
        if self._closing:
            return self._results.complete and not self._thread.is_alive()
        deadline = time.monotonic() + timeout_s
        drained = self._results.wait_all(timeout_s=_DRAINING_SHARE * timeout_s)
        self._closing = True
        self._runner.close()
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

    # -- on the transfer thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            logger.critical("transfer engine %s: its thread died", self._name, exc_info=error)
            with self._results.changed:  # no job may be submitted after the answers below
                self._death = error
                self._closing = True
            self._runner.answer_all("the transfer thread died")
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
