"""kvtier's numbers in vLLM's metrics.

vLLM carries a connector's statistics as plain data from the engine to its front ends, which
build Prometheus metrics from them. Names, kinds and meanings come from
:mod:`kvtier.connector.metrics`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.connector.metrics import (
    METRICS,
    Changes,
    Kind,
    Metric,
    Series,
)
from kvtier.connector.report.reporter import Reporter, StatisticsSource

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

__all__ = ["KVTierPromMetrics", "KVTierStats", "StatsReporter"]

_Row = tuple[str, tuple[str, ...], Any]
"""A metric's name, the values of its labels, and what changed: a number, or observations."""


class KVTierStats(KVConnectorStats):
    """What changed in one engine since the last report."""

    @property
    def rows(self) -> list[_Row]:
        """The changes."""
        rows: list[_Row] = self.data.setdefault("rows", [])
        return rows

    def add(self, series: Series, value: float | list[float]) -> None:
        """Add what a counter grew by, what a gauge is, or observations of a histogram."""
        self.rows.append((series.metric.name, series.labels, value))

    @override
    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    @override
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add later changes of the same engine, or those of another one."""
        if isinstance(other, KVTierStats):
            self.rows.extend(other.rows)
        return self

    @override
    def reduce(self) -> dict[str, int | float]:
        """Return what the counters grew by, for vLLM's log line; nothing that did not."""
        grown: dict[str, float] = {}
        for name, labels, value in self.rows:
            if METRICS[name].kind is Kind.COUNTER and value:
                key = f"{name}{{{','.join(labels)}}}" if labels else name
                grown[key] = grown.get(key, 0) + value
        return {key: round(value, 3) for key, value in grown.items()}

    @override
    def is_empty(self) -> bool:
        """Return whether nothing changed."""
        return not self.rows


class StatsReporter:
    """Reports what changed since the last report.

    Args:
        source: Whose figures they are.

    Attributes:
        is_due: Returns whether it is time for :meth:`report`.
    """

    def __init__(self, source: StatisticsSource) -> None:
        self._reporter = Reporter(source)
        self.is_due = self._reporter.is_due
        self._changes: Changes | None = None

    def report(self) -> KVTierStats | None:
        """Return the changes; None when there are none or it is too early to look."""
        report = self._reporter.take()
        if report is None:
            return None
        if self._changes is None:
            self._changes = Changes(report.now)
        stats = KVTierStats()
        for series, value in self._changes.take(report.now):
            stats.add(series, value)
        for series, observed in report.observations():
            if observed:
                stats.add(series, list(observed))
        for series, growth in report.moved():
            stats.add(series, growth)
        return None if stats.is_empty() else stats


class KVTierPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of all engines that one front end serves.

    With ``--api-server-count`` vLLM sends each report to one front end. Gauges therefore export
    the latest value of all, in place of one value for each front end.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds: dict[Any, Any] = dict(metric_types)
        makers: dict[Kind, Any] = {
            Kind.COUNTER: kinds[Counter],
            Kind.GAUGE: partial(kinds[Gauge], multiprocess_mode="mostrecent"),
            Kind.HISTOGRAM: kinds[Histogram],
        }
        self._engine_labels = per_engine_labelvalues
        self._metrics: dict[str, Any] = {
            name: _declare(makers[metric.kind], metric, labelnames)
            for name, metric in METRICS.items()
        }
        self._children: dict[tuple[int, str, tuple[str, ...]], Any] = {}

    @override
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the report of one engine."""
        for name, labels, value in transfer_stats_data.get("rows", ()):
            child = self._child(engine_idx, name, tuple(labels))
            kind = METRICS[name].kind
            if kind is Kind.COUNTER:
                child.inc(value)
            elif kind is Kind.GAUGE:
                child.set(value)
            else:
                for observation in value:
                    child.observe(observation)

    def _child(self, engine: int, name: str, labels: tuple[str, ...]) -> Any:  # noqa: ANN401
        key = (engine, name, labels)
        if key not in self._children:
            values = [*self._engine_labels[engine], *labels]
            self._children[key] = self._metrics[name].labels(*values)
        return self._children[key]


def _declare(make: Any, metric: Metric, labelnames: list[str]) -> Any:  # noqa: ANN401
    buckets = {"buckets": metric.buckets} if metric.buckets else {}
    return make(
        name=metric.name,
        documentation=metric.help,
        labelnames=[*labelnames, *metric.labels],
        **buckets,
    )
