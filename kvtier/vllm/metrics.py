"""kvtier's numbers in vLLM's metrics.

vLLM's front end asserts that every name it is sent was declared, and dies otherwise, so
definitions and values both come from :mod:`kvtier.connector.metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from prometheus_client import Gauge
from typing_extensions import override

from kvtier.connector.metrics import (
    METRICS,
    TRANSFER_BYTES,
    TRANSFER_SIZE,
    TRANSFER_TIME,
    Changes,
    Kind,
    Metric,
)
from kvtier.connector.report.reporter import Reporter, StatisticsSource
from kvtier.vllm.contract import (
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

__all__ = [
    "LoggedStats",
    "StatsReporter",
    "add_device_transfers",
    "latest_of_front_ends",
    "metric_definitions",
]

_DEVICE_TRANSFERS: Final = {"load": "ram_to_gpu", "store": "gpu_to_ram"}
"""vLLM's word for what workers copy, and kvtier's."""


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return every metric kvtier may report, for vLLM's front end."""
    return {name: _definition(metric) for name, metric in METRICS.items()}


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    match metric.kind:
        case Kind.COUNTER:
            return OffloadingCounterMetadata(metric.help, metric.labels)
        case Kind.GAUGE:
            return OffloadingGaugeMetadata(metric.help, metric.labels)
        case Kind.HISTOGRAM:
            return OffloadingHistogramMetadata(metric.help, metric.labels, metric.buckets)


def latest_of_front_ends(metric_types: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return vLLM's classes of metrics with one of gauges that have one value, the latest.

    With ``--api-server-count`` vLLM tells each reading to one front end. Unless they are told
    otherwise, all would go on exporting the gauge that each was told last.

    Args:
        metric_types: vLLM's classes, by those of prometheus-client.
    """
    gauge = partial(metric_types[Gauge], multiprocess_mode="mostrecent")
    return {**metric_types, Gauge: gauge}


def add_device_transfers(stats: OffloadingConnectorStats) -> None:
    """Report what vLLM's workers copied under kvtier's names by transfer type, too."""
    reported = dict(stats.data.get("data", {}))
    for word, transfer_type in _DEVICE_TRANSFERS.items():
        labels = (transfer_type,)
        for name, suffix in ((TRANSFER_BYTES.name, "bytes"), (TRANSFER_TIME.name, "time")):
            for value in reported.get(f"vllm:kv_offload_{word}_{suffix}", {}).values():
                stats.increase_counter(name, value, labels)
        for sizes in reported.get(f"vllm:kv_offload_{word}_size", {}).values():
            for size in sizes:
                stats.observe_histogram(TRANSFER_SIZE.name, size, labels)


class LoggedStats(OffloadingConnectorStats):
    """Statistics as vLLM's front end logs them: without zeros.

    The first report has every series, so that Prometheus has those that stand at 0.
    """

    @override
    def reduce(self) -> dict[str, int | float]:
        return {name: value for name, value in super().reduce().items() if value}

    @override
    def is_empty(self) -> bool:
        return not self.reduce()


class StatsReporter:
    """Tells vLLM what changed since it was told last.

    Args:
        source: Whose figures they are.

    Attributes:
        is_due: Returns whether it is time for :meth:`report`.
    """

    def __init__(self, source: StatisticsSource) -> None:
        self._reporter = Reporter(source)
        self.is_due = self._reporter.is_due
        self._changes: Changes | None = None

    def report(self) -> OffloadingConnectorStats | None:
        """Return the changes; None when there are none or it is too early to look."""
        report = self._reporter.take()
        if report is None:
            return None
        if self._changes is None:
            self._changes = Changes(report.now)
        stats = OffloadingConnectorStats()
        for (metric, labels), value in self._changes.take(report.now):
            if metric.kind is Kind.COUNTER:
                stats.increase_counter(metric.name, value, labels)
            else:
                stats.set_gauge(metric.name, value, labels)
        for (metric, labels), observed in report.observations():
            for value in observed:
                stats.observe_histogram(metric.name, value, labels)
        for (metric, labels), growth in report.moved():
            stats.increase_counter(metric.name, growth, labels)
        return None if stats.is_empty() else stats
