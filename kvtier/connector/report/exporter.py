"""kvtier's numbers over HTTP for Prometheus, where no engine exports them.

Two threads meet here. The one that drives the cache calls :meth:`MetricsExporter.refresh` at
every step; it alone may read the cache, and what it read is a value that replaces the one
before. The server's thread answers scrapes from the latest value. Neither waits for the other
for longer than it takes to copy some histograms.
"""

from __future__ import annotations

import bisect
import errno
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from kvtier.connector.metrics import METRICS, Kind, Metric, Series, SeriesReader
from kvtier.connector.report.reporter import Report, Reporter, StatisticsSource
from kvtier.errors import ConfigError

__all__ = ["MetricsExporter"]

_LOCALHOST: Final = "127.0.0.1"
_REASONS: Final = {
    errno.EADDRINUSE: "somebody listens there: choose another port, or 0 for any free one",
    errno.EACCES: "that is not allowed: choose a port above 1023",
    errno.EADDRNOTAVAIL: "this machine has no such address: choose one it has",
}
_FAMILIES: Final = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}

Key = tuple[str, tuple[str, ...]]
"""A metric's name and the values of its labels."""


class _Distribution:
    """Observations of one histogram series."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, values: Iterable[float]) -> None:
        for value in values:
            self._counts[bisect.bisect_left(self._bounds, value)] += 1
            self._total += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative counts by upper bound, and the sum."""
        counted = 0
        buckets: list[tuple[str, float]] = []
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for name, count in zip(names, self._counts, strict=True):
            counted += count
            buckets.append((name, counted))
        return buckets, self._total


class _Board(Collector):
    """What the driver last read; collected by the server's threads."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names, self._values = tuple(labels), tuple(labels.values())
        self._lock = threading.Lock()
        self._reader: SeriesReader | None = None
        self._current: dict[Key, float] = {}
        self._transfers: dict[Key, float] = {}
        self._distributions: dict[Key, _Distribution] = {}

    def put(self, report: Report) -> None:
        """Take a reading in."""
        if self._reader is None:
            self._reader = SeriesReader(report.now)
        groups = zip(self._reader.series, self._reader.read(report.now), strict=True)
        current = {
            (series.metric.name, series.labels): value
            for group, values in groups
            for series, value in zip(group, values, strict=True)
        }
        with self._lock:
            self._current = current
            for series, observed in report.observations():
                self._observe(series, observed)
            for series, growth in report.moved():
                self._add(series, growth)

    @override
    def collect(self) -> Iterator[Family]:
        """Yield every declared metric, with the series there are."""
        with self._lock:
            values = self._current | self._transfers
            distributions = {key: each.buckets() for key, each in self._distributions.items()}
        numbers = {
            name: _FAMILIES[metric.kind](name, metric.help, labels=self._labels(metric))
            for name, metric in METRICS.items()
            if metric.kind is not Kind.HISTOGRAM
        }
        histograms = {
            name: HistogramMetricFamily(name, metric.help, labels=self._labels(metric))
            for name, metric in METRICS.items()
            if metric.kind is Kind.HISTOGRAM
        }
        for (name, labels), value in values.items():
            numbers[name].add_metric((*self._values, *labels), value)
        for (name, labels), (buckets, total) in distributions.items():
            histograms[name].add_metric((*self._values, *labels), buckets, total)
        yield from numbers.values()
        yield from histograms.values()

    def _labels(self, metric: Metric) -> Sequence[str]:
        return *self._names, *metric.labels

    def _observe(self, series: Series, values: Iterable[float]) -> None:
        key = series.metric.name, series.labels
        if key not in self._distributions:
            self._distributions[key] = _Distribution(series.metric.buckets)
        self._distributions[key].observe(values)

    def _add(self, series: Series, value: float) -> None:
        key = series.metric.name, series.labels
        self._transfers[key] = self._transfers.get(key, 0) + value


class MetricsExporter:
    """Serves ``/metrics`` until it is closed; a context manager.

    Args:
        source: Whose figures they are; read by :meth:`refresh` only. Of an engine that kvtier's
            own scheduler half drives, that half, which alone knows what workers copied.
        port: TCP port; 0 for any that is free.
        host: Address to listen at; by default this machine alone can ask.
        labels: Put on every series, such as ``{"job": "warm-up"}``.

    Attributes:
        port: The port it listens at.

    Raises:
        ConfigError: It cannot listen there.
    """

    def __init__(
        self,
        source: StatisticsSource,
        port: int,
        *,
        host: str = _LOCALHOST,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._reporter = Reporter(source)
        self._board = _Board(labels or {})
        self.refresh()
        registry = CollectorRegistry()
        registry.register(self._board)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            number = error.errno if isinstance(error, OSError) else None
            reason = _REASONS.get(number or 0, str(error))
            raise ConfigError(f"metrics cannot be served at {host}:{port}: {reason}") from error
        self.port = self._server.server_port

    def refresh(self) -> None:
        """Read the source if it is time to; cheap otherwise.

        To be called at every step, by the thread that drives the source. What a scrape sees is
        as old as the last call, and 250 ms at most before that.
        """
        report = self._reporter.take()
        if report is not None:
            self._board.put(report)

    def close(self) -> None:
        """Stop serving and give the port back. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
