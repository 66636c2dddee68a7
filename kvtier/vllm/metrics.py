"""Exports kvtier's figures in vLLM's ``/metrics``.

vLLM carries a connector's statistics as plain data from the engine to its front ends, which
convert them to Prometheus metrics. Names, kinds and meanings come from
:mod:`kvtier.connector.metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.connector.metrics import METRICS, Kind, MetricChange, Publisher

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

__all__ = ["KVTierPromMetrics", "KVTierStats"]


class KVTierStats(KVConnectorStats):
    """The changes of an engine's metrics since the last report."""

    @classmethod
    def of(cls, changes: Sequence[MetricChange]) -> KVTierStats:
        """Return the statistics with ``changes``."""
        return cls(data={"changes": list(changes)})

    @property
    def changes(self) -> list[MetricChange]:
        """The changes. In a serialised report, each change is a plain sequence."""
        changes: list[MetricChange] = self.data.setdefault("changes", [])
        return changes

    @override
    def reset(self) -> None:
        """Forget the changes."""
        self.data.clear()

    @override
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Append the changes in ``other``, which are later or of another engine."""
        if isinstance(other, KVTierStats):
            self.changes.extend(other.changes)
        return self

    @override
    def reduce(self) -> dict[str, int | float]:
        """Return the growth of the counters that changed, for vLLM's log line."""
        grown: dict[str, float] = {}
        for name, labels, value in self.changes:
            if METRICS[name].kind is Kind.COUNTER and value:
                key = f"{name}{{{','.join(labels)}}}" if labels else name
                grown[key] = grown.get(key, 0) + value
        return {key: round(value, 3) for key, value in grown.items()}

    @override
    def is_empty(self) -> bool:
        """Return whether there are no changes."""
        return not self.changes


class KVTierPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of all engines that one front end serves.

    With ``--api-server-count`` vLLM sends each report to one front end. A gauge therefore
    exports the latest value of all front ends, not one value for each.
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
        self._engines = per_engine_labelvalues
        self._publisher = Publisher(makers, labelnames)

    @override
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Apply the metric changes in one engine's report."""
        changes = transfer_stats_data.get("changes", ())
        self._publisher.publish(changes, self._engines[engine_idx])
