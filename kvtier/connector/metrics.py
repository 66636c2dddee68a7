"""Exports kvtier's figures as Prometheus metrics.

Names come from the table in :mod:`kvtier.connector.figures`. vLLM's ``/metrics`` and the manual
use these names.

Reading all figures takes some hundred microseconds after a forward pass, and vLLM's front end
must then process the figures. A step of a small model takes only a few milliseconds. So figures
are read at most once a second while the engine is active. While the engine is idle, figures are
read at every step: any step may be the last, and the final figures must be right. The tiers of
an engine are constant, so values are read in a fixed order, and a tier without changes costs
one comparison.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from kvtier import __version__
from kvtier.connector.figures import (
    EngineStatistics,
    Figure,
    Kind,
    ShadowPolicyFigures,
    TierFigures,
    figures_of,
)
from kvtier.connector.transfers import Transfers

__all__ = [
    "METRICS",
    "Kind",
    "Metric",
    "MetricChange",
    "Publisher",
    "Reporter",
    "StatisticsSource",
]

_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Metric:
    """One Prometheus metric: a single series, or one series per combination of label values.

    Attributes:
        name: The metric's name; Prometheus adds ``_total`` to the name of a counter.
        kind: How the metric changes.
        help: Meaning of the metric in one sentence.
        labels: Names of the metric's labels.
        buckets: Upper bounds of a histogram's buckets, without the infinite one.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class MetricChange(NamedTuple):
    """What one time series adds to a report, as plain values.

    Attributes:
        name: The metric's name.
        labels: Values of the metric's labels.
        value: Growth of a counter, value of a gauge, observations of a histogram.
    """

    name: str
    labels: tuple[str, ...]
    value: Any


class _SourcedMetric(NamedTuple):
    """A metric whose value is an attribute of a tier, a shadow policy or the engine."""

    metric: Metric
    field: str
    labels: tuple[str, ...]
    """Values of further labels, after the labels that name the tier or the shadow policy."""


_FAILED: Final = Metric(
    "kvtier_failed_chunks",
    Kind.COUNTER,
    "Chunks whose transfer failed, by tier and by cause.",
    ("tier", "cause"),
)


def _row(prefix: str, labels: tuple[str, ...], field: str, figure: Figure) -> _SourcedMetric:
    if figure.cause:
        return _SourcedMetric(_FAILED, field, (figure.cause,))
    return _SourcedMetric(
        Metric(f"kvtier_{prefix}{field}", figure.kind, figure.help, labels), field, ()
    )


def _rows(owner: type[Any], prefix: str, labels: tuple[str, ...]) -> tuple[_SourcedMetric, ...]:
    return tuple(_row(prefix, labels, *each) for each in figures_of(owner))


_TIER: Final = _rows(TierFigures, "", ("tier",))
_SHADOW: Final = _rows(ShadowPolicyFigures, "shadow_", ("tier", "policy"))
_ENGINE: Final = _rows(EngineStatistics, "", ())
_INFO: Final = Metric(
    "kvtier_info",
    Kind.GAUGE,
    "Always 1: kvtier's version, and each tier's kind, namespace and directory.",
    ("version", "tier", "kind", "namespace", "path"),
)
_LOAD_WAIT: Final = Metric(
    "kvtier_load_wait_seconds",
    Kind.HISTOGRAM,
    "Time that a request waited for chunks before it could be computed.",
    (),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
_REUSE_GAP: Final = Metric(
    "kvtier_evict_reuse_gap_seconds",
    Kind.HISTOGRAM,
    "Time between evicting a chunk from the tier and looking for it, or computing it, again.",
    ("tier",),
    (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400),
)
_TRANSFER_BYTES: Final = Metric(
    "kvtier_kv_offload_total_bytes",
    Kind.COUNTER,
    "Bytes moved, by source and destination.",
    ("transfer_type",),
)
_TRANSFER_TIME: Final = Metric(
    "kvtier_kv_offload_total_time",
    Kind.COUNTER,
    "Seconds of transfers, queueing excluded.",
    ("transfer_type",),
)
_TRANSFER_SIZE: Final = Metric(
    "kvtier_kv_offload_size",
    Kind.HISTOGRAM,
    "Bytes of one transfer.",
    ("transfer_type",),
    (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6),
)

METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        *(row.metric for row in (*_TIER, *_ENGINE, *_SHADOW)),
        _INFO,
        _LOAD_WAIT,
        _REUSE_GAP,
        _TRANSFER_BYTES,
        _TRANSFER_TIME,
        _TRANSFER_SIZE,
    )
}
"""Every metric by its name."""


class StatisticsSource(Protocol):
    """The figures that a :class:`Reporter` reads.

    Only one object may read it, because each ``take`` method removes the returned values.
    """

    @property
    def is_active(self) -> bool:
        """Whether the engine will run another step."""

    def statistics(self) -> EngineStatistics:
        """Return all current figures of the engine."""

    def take_load_waits(self) -> Sequence[float]:
        """Return the duration in seconds of each load wait that ended since the last call."""

    def take_reuse_gaps(self) -> Sequence[Sequence[float]]:
        """Return the seconds between each chunk's eviction and next lookup, per tier."""

    def take_transfers(self) -> Transfers:
        """Return the transfers that ended since the last call."""


class Reporter:
    """Reports how the figures of a source changed.

    While the source is active, this object reads it at most once a second, otherwise at every
    call. Only the source's thread may call the methods.

    Args:
        source: The source.
        clock: Returns seconds; monotonic.
    """

    def __init__(
        self, source: StatisticsSource, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._clock = clock
        self._due_s = float("-inf")
        self._last: dict[tuple[str, ...], tuple[float, ...]] = {}

    def is_due(self, *, steps_follow: bool = False) -> bool:
        """Return whether :meth:`take` would read the source now. This call is cheap.

        Args:
            steps_follow: Whether the caller knows that the source is active.
        """
        return self._clock() >= self._due_s or not (steps_follow or self._source.is_active)

    def take(self) -> list[MetricChange]:
        """Return the changes since the last read; empty if that read is too recent.

        The first report includes every counter and gauge, even at 0. If a series appeared
        later, alerts would miss its first growth.
        """
        if not self.is_due():
            return []
        self._due_s = self._clock() + _EVERY_S
        now = self._source.statistics()
        return [*self._changes(now), *self._observations(now)]

    def _changes(self, now: EngineStatistics) -> Iterator[MetricChange]:
        for tier in now.tiers:
            yield from self._grown(_TIER, _read_tier(tier), tier.name)
        yield from self._grown(_ENGINE, _read_engine(now))
        for shadow in now.shadows:
            yield from self._grown(_SHADOW, _read_shadow(shadow), shadow.tier, shadow.policy)
        for store in now.stores:
            if store not in self._last:
                self._last[store] = (1.0,)
                yield MetricChange(_INFO.name, (__version__, *store), 1.0)

    def _grown(
        self, rows: Sequence[_SourcedMetric], after: tuple[float, ...], *owner: str
    ) -> Iterator[MetricChange]:
        before = self._last.get(owner)
        if before == after:
            return
        self._last[owner] = after
        for number, (row, value) in enumerate(zip(rows, after, strict=True)):
            change = value
            if before is not None:
                if value == before[number]:
                    continue
                if row.metric.kind is Kind.COUNTER:
                    change = value - before[number]
            yield MetricChange(row.metric.name, (*owner, *row.labels), change)

    def _observations(self, now: EngineStatistics) -> Iterator[MetricChange]:
        source = self._source
        gaps = zip(now.tiers, source.take_reuse_gaps(), strict=True)
        observed: list[tuple[Metric, tuple[str, ...], Sequence[float]]] = [
            (_LOAD_WAIT, (), source.take_load_waits()),
            *((_REUSE_GAP, (tier.name,), seconds) for tier, seconds in gaps),
        ]
        transfers = source.take_transfers()
        for transfer_type, (nbytes, seconds) in transfers.totals().items():
            yield MetricChange(_TRANSFER_BYTES.name, (transfer_type,), nbytes)
            yield MetricChange(_TRANSFER_TIME.name, (transfer_type,), seconds)
        for transfer_type, records in transfers.by_type.items():
            observed.append((_TRANSFER_SIZE, (transfer_type,), [size for size, _ in records]))
        for metric, labels, values in observed:
            if values:
                yield MetricChange(metric.name, labels, list(values))


def _reader(rows: Sequence[_SourcedMetric]) -> Callable[[object], tuple[float, ...]]:
    """Return a function that reads the fields of all ``rows`` (two or more) at once."""
    read: Callable[[Any], tuple[float, ...]] = operator.attrgetter(*(row.field for row in rows))
    return read


_read_tier: Final = _reader(_TIER)
_read_engine: Final = _reader(_ENGINE)
_read_shadow: Final = _reader(_SHADOW)


class Publisher:
    """Creates kvtier's Prometheus metrics and applies changes to them.

    Args:
        make: For each kind, a class of ``prometheus_client``, or a function with the same
            arguments.
        labels: Names of the labels that come before each metric's own labels.
    """

    def __init__(self, make: Mapping[Kind, Callable[..., Any]], labels: Sequence[str]) -> None:
        self._metrics = {
            name: make[metric.kind](
                name=name,
                documentation=metric.help,
                labelnames=[*labels, *metric.labels],
                **({"buckets": metric.buckets} if metric.buckets else {}),
            )
            for name, metric in METRICS.items()
        }
        self._series: dict[tuple[str, tuple[object, ...]], Any] = {}

    def publish(
        self,
        changes: Iterable[tuple[str, Sequence[str], Any]],
        label_values: Sequence[object] = (),
    ) -> None:
        """Apply changes to the Prometheus metrics.

        Args:
            changes: The changes; each is a :class:`MetricChange` or a sequence of the same
                values.
            label_values: Values of the labels that come before each metric's own labels.
        """
        for name, labels, value in changes:
            key = name, (*label_values, *labels)
            if key not in self._series:
                metric = self._metrics[name]
                self._series[key] = metric.labels(*key[1]) if key[1] else metric
            series = self._series[key]
            match METRICS[name].kind:
                case Kind.COUNTER:
                    series.inc(value)
                case Kind.GAUGE:
                    series.set(value)
                case Kind.HISTOGRAM:
                    for observation in value:
                        series.observe(observation)
