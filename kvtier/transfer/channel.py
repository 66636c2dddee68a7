"""Channels of a transfer engine: the state of each (source, destination) pair of tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtier.transfer.routes import Route

__all__ = ["Breaker", "Channel", "ChannelStatistics", "EngineLimits"]

_QUIET_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one transfer engine.

    Attributes:
        queued_bytes: Largest number of bytes in queued and running jobs per channel; further
            jobs are refused.
        running_bytes: Largest number of bytes in running jobs per channel; a single job may
            exceed this.
        breaker_failures: Number of consecutive failed jobs that opens a channel's breaker.
        breaker_backoff_s: Seconds until an open breaker admits one job as a probe.
    """

    queued_bytes: int
    running_bytes: int
    breaker_failures: int = 5
    breaker_backoff_s: float = 5.0


class ChannelStatistics(NamedTuple):
    """Snapshot of one channel's counters since the engine started.

    Attributes:
        jobs: Number of settled jobs.
        nbytes: Bytes that reached their destination.
        seconds: Total run time of the jobs, in seconds.
        queued_s: Total time that jobs spent in the queue, in seconds.
        queued_bytes: Bytes queued or running now.
        refused: Number of jobs refused because the queue was full or the breaker open.
        expired: Number of jobs whose deadline passed.
        out_of_service: Whether the channel refuses jobs now because recent jobs failed.
    """

    jobs: int
    nbytes: int
    seconds: float
    queued_s: float
    queued_bytes: int
    refused: int
    expired: int
    out_of_service: bool


class Breaker:
    """A circuit breaker, which takes a failing channel out of service for some time.

    The breaker is normally closed, and opens after some consecutive failures. After a back-off
    it is half open, and a single probe decides (Nygard, "Release It!", 2007). Callers pass the
    current time.

    Args:
        failures: Number of consecutive failures that opens the breaker.
        backoff_s: Seconds that the breaker stays open before it admits a probe.

    Attributes:
        tripped: Whether the breaker is open or half open: only a probe may start.
    """

    def __init__(self, *, failures: int, backoff_s: float) -> None:
        self._limit = failures
        self._backoff_s = backoff_s
        self._failures = 0
        self._closed_again_s = 0.0
        self._probing = False
        self.tripped = False

    def is_open(self, now: float) -> bool:
        """Return whether the breaker refuses every job at ``now``, probes included."""
        return self.tripped and (self._probing or now < self._closed_again_s)

    def allow(self, now: float) -> bool:
        """Return whether a job may start at ``now``; a tripped breaker allows only a probe.

        An allowed probe counts as running until its end is recorded.
        """
        if not self.tripped:
            return True
        if self._probing or now < self._closed_again_s:
            return False
        self._probing = True
        return True

    def record(self, *, failed: bool, now: float) -> None:
        """Record whether an allowed job failed."""
        self._probing = False
        self._failures = self._failures + 1 if failed else 0
        self.tripped = self._failures >= self._limit
        if failed:
            self._closed_again_s = now + self._backoff_s

    def discount(self) -> None:
        """Record that an allowed job ended without showing whether the tier works.

        If the job was the probe, the next job becomes the probe.
        """
        self._probing = False


@dataclass(slots=True)
class Channel:
    """Route, breaker and counters of one (source, destination) pair."""

    route: Route
    breaker: Breaker
    queued_bytes: int = 0
    running_bytes: int = 0
    jobs: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    queued_s: float = 0.0
    refused: int = 0
    expired: int = 0
    late: int = 0
    """Number of jobs that still run a system call after their deadline."""
    pauses: int = 0
    """Number of exclusive actions in progress. Jobs wait until these actions end."""
    quiet_until_s: float = 0.0
    """Time before which failures are not logged, if the breaker is tripped."""

    def is_out_of_service(self, now: float) -> bool:
        """Return whether the channel refuses every job at ``now``, probes included.

        During an exclusive action a channel with a tripped breaker admits no probe.
        """
        return self.breaker.is_open(now) or (self.pauses > 0 and self.breaker.tripped)

    def should_log_failure(self, now: float) -> bool:
        """Return whether to log a failure at ``now``.

        Call this method before recording the failure in the breaker. Every failure is logged
        until the breaker opens; afterwards, one per minute.
        """
        if self.breaker.tripped and now < self.quiet_until_s:
            return False
        self.quiet_until_s = now + _QUIET_S
        return True

    def statistics(self, now: float) -> ChannelStatistics:
        """Return a snapshot at ``now``."""
        return ChannelStatistics(
            jobs=self.jobs,
            nbytes=self.nbytes,
            seconds=self.seconds,
            queued_s=self.queued_s,
            queued_bytes=self.queued_bytes,
            refused=self.refused,
            expired=self.expired,
            out_of_service=self.is_out_of_service(now),
        )
