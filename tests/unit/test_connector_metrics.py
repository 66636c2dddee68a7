"""The table of metrics, what changed between two readings, and when to read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from kvtier.connector.metrics import METRICS, Changes, Kind, SeriesReader
from kvtier.connector.report.reporter import Reporter
from kvtier.connector.report.statistics import (
    EngineStatistics,
    ShadowFigures,
    StoreInfo,
    TierFigures,
)
from kvtier.connector.stats import ConnectorStats

ZEROS = dict.fromkeys(TierFigures._fields[1:], 0)


def tier(name: str, **figures: float) -> TierFigures:
    return TierFigures(name=name, **(ZEROS | figures))  # type: ignore[arg-type]


def engine(*tiers: TierFigures, **figures: int) -> EngineStatistics:
    shadow = ShadowFigures("ram", "arc", asked_chunks=4, hit_chunks=1)
    nothing = {
        "waiting_requests": 0,
        "granted_chunks": 0,
        "retained_chunks": 0,
        "recompute_seconds_per_token": 0,
        "internal_errors": 0,
        "trace_records": 0,
        "trace_dropped": 0,
    }
    stores = [StoreInfo(tier.name, "0123456789abcdef", f"/{tier.name}") for tier in tiers]
    return EngineStatistics(tiers=tiers, shadows=[shadow], stores=stores, **(nothing | figures))


def changes(log: Changes, now: EngineStatistics) -> dict[tuple[str, tuple[str, ...]], float]:
    return {(series.metric.name, series.labels): value for series, value in log.take(now)}


def test_every_figure_of_a_tier_is_reported() -> None:
    numbers = {name: float(at) for at, name in enumerate(TierFigures._fields[1:], start=1)}
    now = engine(tier("ram", **numbers))
    reader = SeriesReader(now)
    reported = set(reader.read(now)[0])
    assert reported == set(numbers.values())


def test_every_series_is_of_a_declared_metric_and_has_its_labels() -> None:
    now = engine(tier("ram"), tier("nvme"))
    seen = set()
    for group in SeriesReader(now).series:
        for metric, labels in group:
            assert METRICS[metric.name] is metric
            assert len(labels) == len(metric.labels)
            assert (metric.name, labels) not in seen
            seen.add((metric.name, labels))
    names = {name for name, _ in seen}
    observed = {name for name in METRICS if name not in names}
    assert observed == {
        "kvtier_evict_reuse_gap_seconds",
        "kvtier_load_wait_seconds",
        "kvtier_kv_offload_total_bytes",
        "kvtier_kv_offload_total_time",
        "kvtier_kv_offload_size",
    }


def test_names_do_not_clash_once_prometheus_has_added_its_suffixes() -> None:
    exposed = []
    for name, metric in METRICS.items():
        suffixes = {
            Kind.COUNTER: ("_total", "_created"),
            Kind.GAUGE: ("",),
            Kind.HISTOGRAM: ("", "_bucket", "_sum", "_count", "_created"),
        }[metric.kind]
        exposed += [name + suffix for suffix in suffixes]
        assert not name.endswith("_total")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert len(exposed) == len(set(exposed))


def test_the_first_reading_yields_every_series_also_what_stands_at_0() -> None:
    now = engine(tier("ram", capacity_chunks=8), tier("nvme"))
    first = changes(Changes(now), now)
    assert first["kvtier_capacity_chunks", ("ram",)] == 8
    assert first["kvtier_failed_chunks", ("nvme", "expired")] == 0
    assert first["kvtier_internal_errors", ()] == 0
    assert first["kvtier_shadow_hit_ratio", ("ram", "arc")] == 0.25
    assert len(first) == sum(len(group) for group in SeriesReader(now).series)


def test_later_ones_yield_growth_of_counters_and_values_of_gauges_that_changed() -> None:
    before = engine(tier("ram", hit_chunks=3, used_chunks=5), tier("nvme", queue_seconds=0.5))
    log = Changes(before)
    list(log.take(before))
    assert changes(log, before) == {}
    after = engine(
        tier("ram", hit_chunks=10, used_chunks=4),
        tier("nvme", queue_seconds=0.75),
        waiting_requests=2,
        internal_errors=1,
    )
    assert changes(log, after) == {
        ("kvtier_hit_chunks", ("ram",)): 7,
        ("kvtier_used_chunks", ("ram",)): 4,
        ("kvtier_queue_seconds", ("nvme",)): 0.25,
        ("kvtier_waiting_requests", ()): 2,
        ("kvtier_internal_errors", ()): 1,
    }
    assert changes(log, after) == {}


def test_a_corrupt_chunk_is_counted_by_itself_and_as_a_cause_of_failure() -> None:
    before = engine(tier("nvme"))
    log = Changes(before)
    list(log.take(before))
    assert changes(log, engine(tier("nvme", corrupt_chunks=2))) == {
        ("kvtier_corrupt_chunks", ("nvme",)): 2,
        ("kvtier_failed_chunks", ("nvme", "corrupt")): 2,
    }


@dataclass
class Source:
    """Counts how often it is read."""

    is_active: bool = True
    reads: int = 0
    transfers: ConnectorStats = field(default_factory=ConnectorStats)
    now: EngineStatistics = field(default_factory=lambda: engine(tier("ram")))
    gaps: list[list[float]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def statistics(self) -> EngineStatistics:
        self.reads += 1
        return replace(self.now)

    def take_load_waits(self) -> list[float]:
        taken, self.waits = self.waits, []
        return taken

    def take_reuse_gaps(self) -> list[list[float]]:
        taken, self.gaps = self.gaps, []
        return taken or [[] for _ in self.now.tiers]

    def take_transfers(self) -> ConnectorStats:
        return self.transfers.clone_and_reset()


class Clock:
    """Says what it is told."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.03])
def test_a_busy_engine_is_read_often_enough_and_no_more(step_s: float) -> None:
    source, clock = Source(), Clock()
    reporter = Reporter(source, clock=clock)
    last_s = 0.0
    for step in range(int(8 / step_s)):
        clock.now_s = step * step_s
        if reporter.take() is not None:
            last_s = clock.now_s
        assert clock.now_s - last_s < 1.1
    assert source.reads <= 8 / 1.0


def test_an_engine_that_may_not_step_again_is_read_at_once() -> None:
    source, clock = Source(), Clock()
    reporter = Reporter(source, clock=clock)
    assert reporter.take() is not None
    source.transfers.record_transfer(4096, 0.5, ("ram", "nvme"))
    assert reporter.take() is None
    source.gaps = [[1.5, 90.0]]
    source.is_active = False
    last = reporter.take()
    assert last is not None
    assert last.transfers.reduce()["ram_to_nvme_total_bytes"] == 4096
    assert last.reuse_gaps == [[1.5, 90.0]]
