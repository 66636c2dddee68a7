"""What a transfer engine keeps about each pair of tiers it moves chunks between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtier.transfer.breaker import Breaker
from kvtier.transfer.routes import Route

__all__ = ["Channel", "ChannelStatistics", "EngineLimits"]

_QUIET_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of one engine.

    Attributes:
        queued_bytes: Bytes that may be queued or running per channel; more is refused.
        running_bytes: Bytes that may be running per channel; one job always may.
        breaker_failures: Consecutive failed jobs that open a channel's breaker.
        breaker_backoff_s: Seconds until an open breaker lets one job probe.
    """

    queued_bytes: int
    running_bytes: int
    breaker_failures: int = 5
    breaker_backoff_s: float = 5.0


class ChannelStatistics(NamedTuple):
    """One channel since the engine started; a snapshot.

    Attributes:
        jobs: Settled jobs.
        nbytes: Bytes that reached their destination.
        seconds: Summed run time of the jobs.
        queued_s: Summed queueing time of the jobs.
        queued_bytes: Bytes queued or running now.
        refused: Jobs refused because the queue was full or the breaker open.
        expired: Jobs whose deadline passed.
        out_of_service: Whether jobs are refused now because the last ones failed.
    """

    jobs: int
    nbytes: int
    seconds: float
    queued_s: float
    queued_bytes: int
    refused: int
    expired: int
    out_of_service: bool


@dataclass(slots=True)
class Channel:
    """The route and the accounts of one (source, destination) pair."""

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
    """Jobs whose deadline passed while a system call of theirs goes on."""
    pauses: int = 0
    """Exclusive actions under way, for which jobs wait."""
    quiet_until_s: float = 0.0
    """Until when failures are not logged, while jobs are refused because of failures."""

    def is_out_of_service(self, now: float) -> bool:
        """Return whether jobs are refused at ``now``, a probe aside.

        During an exclusive action nothing runs, so nothing can probe either.
        """
        return self.breaker.is_open(now) or (self.pauses > 0 and self.breaker.tripped)

    def is_news(self, now: float) -> bool:
        """Return whether the operator is to be told of a job that fails at ``now``.

        Of each, until they take the channel out of service, and then once a minute: probes and
        those that were running go on failing. To be asked before the breaker is told.
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
