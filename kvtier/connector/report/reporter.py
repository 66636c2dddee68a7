"""When to read an engine's figures, and what was observed since they were read last.

Reading every figure costs some hundred microseconds behind a forward pass, and what vLLM does
with them costs its front end more, while a step of a small model takes a few milliseconds.
Nobody looks at metrics more than once a second. So figures are read at most every
``_EVERY_S``, and at every step once the engine has nothing to do: there may be no later step,
and the last figures must be right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvtier.connector.metrics import (
    LOAD_WAIT,
    REUSE_GAP,
    TRANSFER_BYTES,
    TRANSFER_SIZE,
    TRANSFER_TIME,
    Series,
)
from kvtier.connector.report.statistics import EngineStatistics
from kvtier.connector.stats import ConnectorStats

__all__ = ["Report", "Reporter", "StatisticsSource"]

_EVERY_S: Final = 1.0


class StatisticsSource(Protocol):
    """Whoever has figures.

    A :class:`~kvtier.connector.service.CacheService` has those of its tiers, and the
    :class:`~kvtier.connector.scheduler.ConnectorScheduler` that drives it also what workers
    copied. What is taken from a source is gone from it, so it has one reader, and a cache that
    is driven has none but its driver.
    """

    @property
    def is_active(self) -> bool:
        """Whether there will be another step for sure."""

    def statistics(self) -> EngineStatistics:
        """Return all figures now."""

    def take_load_waits(self) -> Sequence[float]:
        """Return the seconds that requests waited for a load, since the last call."""

    def take_reuse_gaps(self) -> Sequence[Sequence[float]]:
        """Return, per tier, seconds from an eviction to being asked for the chunk again."""

    def take_transfers(self) -> ConnectorStats:
        """Return the transfers that ended since the last call."""


@dataclass(frozen=True, slots=True)
class Report:
    """One reading.

    Attributes:
        now: All figures.
        reuse_gaps: Per tier, seconds from an eviction to being asked for the chunk again, since
            the last reading.
        transfers: Transfers that ended since then.
        load_waits: Seconds that requests waited for a load that ended since then.
    """

    now: EngineStatistics
    reuse_gaps: Sequence[Sequence[float]]
    transfers: ConnectorStats
    load_waits: Sequence[float] = ()

    def observations(self) -> Iterator[tuple[Series, Sequence[float]]]:
        """Yield what histograms observe."""
        yield Series(LOAD_WAIT, ()), self.load_waits
        for tier, gaps in zip(self.now.tiers, self.reuse_gaps, strict=True):
            yield Series(REUSE_GAP, (tier.name,)), gaps
        for transfer_type, operations in self.transfers.data.items():
            sizes = [operation["op_size"] for operation in operations]
            yield Series(TRANSFER_SIZE, (transfer_type,)), sizes

    def moved(self) -> Iterator[tuple[Series, float]]:
        """Yield what the counters of transfers grow by."""
        for transfer_type, operations in self.transfers.data.items():
            labels = (transfer_type,)
            yield Series(TRANSFER_BYTES, labels), sum(each["op_size"] for each in operations)
            yield Series(TRANSFER_TIME, labels), sum(each["op_time"] for each in operations)


class Reporter:
    """Reads a source, not too often. One thread calls it: the source's.

    Args:
        source: What to read.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, source: StatisticsSource, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._clock = clock
        self._due_s = float("-inf")

    def is_due(self) -> bool:
        """Return whether :meth:`take` has a reading. To be asked at every step."""
        return self._clock() >= self._due_s or not self._source.is_active

    def take(self) -> Report | None:
        """Return a reading; None when the last one will do."""
        if not self.is_due():
            return None
        self._due_s = self._clock() + _EVERY_S
        source = self._source
        return Report(
            source.statistics(),
            source.take_reuse_gaps(),
            source.take_transfers(),
            source.take_load_waits(),
        )
