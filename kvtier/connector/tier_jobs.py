"""Passes the manager's jobs to the transfer engine, and the results to the manager."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from kvtier.connector.storage import Storage
from kvtier.connector.transfers import Transfers
from kvtier.errors import ClosedError
from kvtier.logs import get_logger
from kvtier.types import Job, Outcome, TransferResult

__all__ = ["TierJobs"]

logger = get_logger(__name__)

_RESET_TIMEOUT_S: Final = 10.0


class TierJobs:
    """Passes the manager's jobs to the transfer engine, and the results to the manager.

    Only :meth:`drain` and :meth:`reset_tiers` wait.

    Args:
        storage: The engine's tiers.
        report_error: Called after an unexpected error, with the name of the failed call and the
            error.

    Attributes:
        transfers: Ended transfers between tiers.
    """

    def __init__(
        self, storage: Storage, report_error: Callable[[str, Exception], None]
    ) -> None:
        self._manager = storage.manager
        self._engine = storage.engine
        self._tiers = storage.tiers
        self._report_error = report_error
        self._numbers = {tier.name: at for at, tier in enumerate(storage.tiers, start=1)}
        self._out_of_service: frozenset[int] = frozenset()
        self.transfers = Transfers()

    def take_results(self) -> None:
        """Report the results of ended jobs to the manager."""
        for result in self._engine.poll():
            if result.nbytes:
                self.transfers.record(
                    result.source,
                    result.destination,
                    nbytes=result.nbytes,
                    seconds=result.seconds,
                )
            self._apply(result)

    def submit(self) -> list[Job]:
        """Submit the jobs planned since the last call; return the submitted jobs."""
        self.forget_corrupt()  # first, because the jobs may reuse the slots of corrupt chunks
        jobs = self._manager.take_jobs()
        try:
            if jobs:
                self._engine.submit(*jobs)
        except ClosedError as error:  # no job was queued; after other errors some may run
            self._report_error("submit", error)
            self._fail(jobs)
            return []
        for job_id in self._manager.take_cancels():
            self._engine.cancel(job_id)
        return jobs

    def forget_corrupt(self) -> None:
        """Make the tiers forget corrupt chunks, so that no restart recovers them."""
        for tier, slot in self._manager.take_corrupt():
            try:
                self._tiers[tier - 1].forget((slot,))
            except Exception as error:  # noqa: BLE001 - loads wait for the jobs after this
                self._report_error("forget_corrupt", error)

    def update_service(self) -> None:
        """Report to the manager which tiers cannot be read for now."""
        pairs = self._engine.out_of_service()
        if not pairs and not self._out_of_service:
            return
        suspended = frozenset(
            self._numbers[source]
            for source, destination in pairs
            if source in self._numbers
            and (destination not in self._numbers or destination == source)
        )
        if suspended != self._out_of_service:
            self._out_of_service = suspended
            self._manager.set_out_of_service(suspended)

    def reset_tiers(self) -> bool:
        """Empty the slower tiers durably; return whether this succeeded in all tiers."""
        try:
            resets = {tier.name: tier.reset for tier in self._tiers}
            done = self._engine.exclusively_each(resets, timeout_s=_RESET_TIMEOUT_S)
        except Exception:
            logger.exception("the tiers could not be reset")
            done = False
        if not done:
            logger.error(
                "A tier was not reset durably. This engine serves no old chunks, but a restart "
                "may: reset again, or remove the cache directory before the restart."
            )
        return done

    def drain(self, *, timeout_s: float) -> None:
        """Demote chunks until no chunk is dirty, or until ``timeout_s`` seconds have passed."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._manager.flush()
            if not self.submit() and self._engine.idle:
                return
            self._engine.wait_any(timeout_s=left_s)
            self.take_results()
        self.forget_corrupt()

    def _apply(self, result: TransferResult) -> None:
        try:
            self._manager.apply(result)
        except Exception as error:  # noqa: BLE001 - the other results must not be lost
            self._report_error("apply", error)

    def _fail(self, jobs: Sequence[Job]) -> None:
        """Report to the manager and to waiting workers that the unsubmitted ``jobs`` failed."""
        for job in jobs:
            try:
                # Release the workers first, because afterwards the manager reuses the slots.
                self._engine.abandon(job)
            except Exception as error:  # noqa: BLE001 - the other jobs must fail as well
                self._report_error("abandon", error)
            self._apply(TransferResult(job.job_id, [Outcome.FAILED] * len(job.keys)))
