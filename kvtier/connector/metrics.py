"""Every number kvtier reports: name, kind, meaning, labels, and where its value comes from.

One table feeds vLLM's ``/metrics``, kvtier's own exporter and the manual, so that none of them
knows a name the others do not. A new number of a tier is a field of
:class:`~kvtier.connector.report.statistics.TierFigures` and a row of ``_TIER`` here.

Values are read in a fixed order of series, because the tiers of an engine do not change while
it lives. What a tier reported last is one tuple, so that a tier where nothing happened costs
one comparison, and names and labels are made once.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvtier import __version__
from kvtier.connector.report.statistics import EngineStatistics

__all__ = [
    "LOAD_WAIT",
    "METRICS",
    "REUSE_GAP",
    "TRANSFER_BYTES",
    "TRANSFER_SIZE",
    "TRANSFER_TIME",
    "Changes",
    "Kind",
    "Metric",
    "Series",
    "SeriesReader",
]

Values = tuple[float, ...]


class Kind(enum.Enum):
    """What a number does."""

    COUNTER = "counter"
    """Only grows while the engine lives."""
    GAUGE = "gauge"
    """Is what it is now."""
    HISTOGRAM = "histogram"
    """Counts observations by size."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, or one per combination of labels.

    Attributes:
        name: Its name; Prometheus adds ``_total`` to that of a counter.
        kind: What it does.
        help: What it means, in one sentence.
        labels: Names of its labels.
        buckets: Upper bounds of a histogram's buckets, without the infinite one.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class Series(NamedTuple):
    """A metric with the values of its labels."""

    metric: Metric
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """One series of whatever has ``field``: a tier, a shadow policy or the engine."""

    metric: Metric
    field: str
    labels: tuple[str, ...] = ()
    """Values of the labels that follow those of the owner."""


_TIER_LABELS: Final = ("tier",)
_SHADOW_LABELS: Final = ("tier", "policy")


def _rows(
    kind: Kind, labels: tuple[str, ...], prefix: str, helps: Mapping[str, str]
) -> list[_Row]:
    return [
        _Row(Metric(f"kvtier_{prefix}{field}", kind, text, labels), field)
        for field, text in helps.items()
    ]


_TIER_COUNTERS: Final = {
    "hit_chunks": (
        "Chunks loaded into the GPU, by the tier their bytes came from; of a load that failed "
        "those before its failure."
    ),
    "hit_tokens": (
        "Prompt tokens not computed, by the tier their KV came from; rounded up to whole "
        "chunks."
    ),
    "miss_chunks": (
        "Chunks asked for and not in the tier: those found in a slower one, and one per "
        "request for the first that was nowhere."
    ),
    "stranded_chunks": (
        "Chunks in the tier that were computed all the same, behind one that no tier had."
    ),
    "skipped_load_chunks": (
        "Chunks not loaded because computing them was to be faster, or they were to be late."
    ),
    "skipped_load_tokens": "Prompt tokens they stand for.",
    "stored_chunks": "Chunks that became resident in the tier.",
    "evicted_chunks": "Chunks that left the tier to make room.",
    "followed_chunks": (
        "Evicted chunks of which kvtier_evict_reuse_gap_seconds tells whether they are asked "
        "for again; of a large tier a sample."
    ),
    "promoted_chunks": "Chunks that came up from the tier to RAM to stay.",
    "demoted_chunks": "Chunks that went down from the tier and arrived in a slower one.",
    "refused_chunks": "Chunks not taken for lack of room or by policy.",
    "lost_chunks": "Chunks that did not reach the slower tier they were meant for.",
    "unretained_chunks": "Chunks asked to be kept that were not, or not as long.",
    "dropped_chunks": (
        "New chunks not taken because a disk did not keep up: not sent to the tier; of RAM, "
        "refused because chunks that wait for a slower tier filled it."
    ),
    "corrupt_chunks": "Chunks dropped because their bytes were not the bytes stored.",
    "read_bytes": "Bytes read from the tier by transfers that completed.",
    "written_bytes": "Bytes written to the tier by transfers that completed.",
    "transfer_seconds": "Time spent in transfers to and from the tier, queueing excluded.",
    "queue_seconds": "Time transfers to and from the tier waited for their turn.",
    "refused_jobs": "Transfers refused: queue full or tier out of service.",
    "expired_jobs": "Transfers whose deadline passed.",
}
_TIER_GAUGES: Final = {
    "capacity_chunks": "Chunks the tier can hold.",
    "used_chunks": "Slots of the tier that are not free.",
    "held_chunks": "Chunks that could not be evicted now.",
    "dirty_chunks": "Chunks that must still reach a slower tier.",
    "queued_bytes": "Bytes queued or running to and from the tier.",
    "recovered_chunks": "Chunks of earlier engines that the tier had when this one started.",
    "load_seconds_per_gb": "What loading a gigabyte is estimated to take; 0 if not measured.",
    "out_of_service": (
        "1 while the tier is not read from, or not written to, after repeated failures."
    ),
}
_FAILED: Final = Metric(
    "kvtier_failed_chunks",
    Kind.COUNTER,
    "Chunks whose transfer failed, by tier and by cause.",
    ("tier", "cause"),
)
_CAUSES: Final = {
    "read": "failed_reads",
    "write": "failed_writes",
    "load": "failed_loads",
    "corrupt": "corrupt_chunks",
    "expired": "expired_chunks",
    "refused": "shut_out_chunks",
}
_ENGINE_GAUGES: Final = {
    "waiting_requests": "Requests that wait for chunks on their way to RAM.",
    "granted_chunks": "RAM slots kept for waiting requests.",
    "retained_chunks": "RAM slots of chunks kept until a deadline.",
    "recompute_seconds_per_token": (
        "What computing a prompt token is estimated to take; 0 if not measured."
    ),
}
_ENGINE_COUNTERS: Final = {
    "internal_errors": (
        "Unexpected errors in kvtier, answered as misses; anything but 0 is a bug."
    ),
    "trace_records": "Records written to the trace.",
    "trace_dropped": "Records of the trace that were not written.",
}
_SHADOW_COUNTERS: Final = {
    "asked_chunks": "Chunks that a shadow policy was asked for.",
    "hit_chunks": "Chunks that a shadow policy would have had.",
}
_SHADOW_GAUGES: Final = {
    "hit_ratio": "Share of chunks that a shadow policy would have had, since the start.",
}

_TIER: Final = (
    *_rows(Kind.COUNTER, _TIER_LABELS, "", _TIER_COUNTERS),
    *_rows(Kind.GAUGE, _TIER_LABELS, "", _TIER_GAUGES),
    *(_Row(_FAILED, field, (cause,)) for cause, field in _CAUSES.items()),
)
_ENGINE: Final = (
    *_rows(Kind.GAUGE, (), "", _ENGINE_GAUGES),
    *_rows(Kind.COUNTER, (), "", _ENGINE_COUNTERS),
)
_SHADOW: Final = (
    *_rows(Kind.COUNTER, _SHADOW_LABELS, "shadow_", _SHADOW_COUNTERS),
    *_rows(Kind.GAUGE, _SHADOW_LABELS, "shadow_", _SHADOW_GAUGES),
)

INFO: Final = Metric(
    "kvtier_info",
    Kind.GAUGE,
    "Always 1: kvtier's version, and each tier's namespace and directory.",
    ("version", "tier", "namespace", "path"),
)
LOAD_WAIT: Final = Metric(
    "kvtier_load_wait_seconds",
    Kind.HISTOGRAM,
    "Time that a request waited for chunks before it could be computed.",
    (),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
REUSE_GAP: Final = Metric(
    "kvtier_evict_reuse_gap_seconds",
    Kind.HISTOGRAM,
    "Time between evicting a chunk from the tier and looking for it, or computing it, again.",
    _TIER_LABELS,
    (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400),
)
TRANSFER_BYTES: Final = Metric(
    "kvtier_kv_offload_total_bytes",
    Kind.COUNTER,
    "Bytes moved, by where from and where to.",
    ("transfer_type",),
)
TRANSFER_TIME: Final = Metric(
    "kvtier_kv_offload_total_time",
    Kind.COUNTER,
    "Seconds spent moving them, queueing excluded.",
    ("transfer_type",),
)
TRANSFER_SIZE: Final = Metric(
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
        INFO,
        LOAD_WAIT,
        REUSE_GAP,
        TRANSFER_BYTES,
        TRANSFER_TIME,
        TRANSFER_SIZE,
    )
}
"""Every metric by its name: all that may ever be reported."""


def _reader(rows: Sequence[_Row]) -> Callable[[object], Values]:
    """Return what reads the fields of ``rows`` at once; there are at least two."""
    read: Callable[[Any], Values] = operator.attrgetter(*(row.field for row in rows))
    return read


_read_tier = _reader(_TIER)
_read_engine = _reader(_ENGINE)
_read_shadow = _reader(_SHADOW)


class SeriesReader:
    """The counters and gauges of one engine, in a fixed order.

    Args:
        now: Any statistics of the engine: its tiers and shadow policies never change.

    Attributes:
        series: What :meth:`read` returns the values of, group by group.
    """

    def __init__(self, now: EngineStatistics) -> None:
        self.series: Sequence[Sequence[Series]] = (
            *(_named(_TIER, tier.name) for tier in now.tiers),
            _named(_ENGINE),
            *(_named(_SHADOW, shadow.tier, shadow.policy) for shadow in now.shadows),
            [Series(INFO, (__version__, *store)) for store in now.stores],
        )

    def read(self, now: EngineStatistics) -> list[Values]:
        """Return the values of all series."""
        return [
            *map(_read_tier, now.tiers),
            _read_engine(now),
            *map(_read_shadow, now.shadows),
            (1.0,) * len(now.stores),
        ]


class Changes:
    """What changed from one reading of an engine to the next.

    Args:
        now: Any statistics of the engine.
    """

    def __init__(self, now: EngineStatistics) -> None:
        self._reader = SeriesReader(now)
        self._last: list[Values | None] = [None] * len(self._reader.series)

    def take(self, now: EngineStatistics) -> Iterator[tuple[Series, float]]:
        """Yield what a counter grew by and what a gauge is, where that changed.

        The first call yields everything: a series that is not there cannot be told from one
        that stands at 0, and nobody can be alerted by its first step.
        """
        values = self._reader.read(now)
        for number, (series, after) in enumerate(zip(self._reader.series, values, strict=True)):
            before = self._last[number]
            if before == after:
                continue
            self._last[number] = after
            yield from _differences(series, before, after)


def _differences(
    series: Sequence[Series], before: Values | None, after: Values
) -> Iterator[tuple[Series, float]]:
    if before is None:
        yield from zip(series, after, strict=True)
        return
    for one, old, new in zip(series, before, after, strict=True):
        if new != old:
            yield one, new - old if one.metric.kind is Kind.COUNTER else new


def _named(rows: Sequence[_Row], *owner: str) -> list[Series]:
    return [Series(row.metric, (*owner, *row.labels)) for row in rows]
