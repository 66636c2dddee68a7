"""The metrics: their names, what changed between two readings, and when to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtier.connector.figures import (
    EngineStatistics,
    ShadowPolicyFigures,
    StoreInfo,
    TierFigures,
)
from kvtier.connector.metadata import WorkerOutput
from kvtier.connector.metrics import (
    METRICS,
    Kind,
    MetricChange,
    Publisher,
    Reporter,
    StatisticsSource,
)
from kvtier.connector.transfers import Transfers
from tests.unit.toy_engine import TOKENS, ToyEngine

ZEROS = dict.fromkeys(TierFigures._fields[1:], 0)


def tier(name: str, **figures: float) -> TierFigures:
    return TierFigures(name=name, **(ZEROS | figures))  # type: ignore[arg-type]


def engine(*tiers: TierFigures, **figures: int) -> EngineStatistics:
    shadow = ShadowPolicyFigures("ram", "arc", asked_chunks=4, hit_chunks=1, hit_ratio=0.25)
    nothing = {
        "waiting_requests": 0,
        "granted_chunks": 0,
        "retained_chunks": 0,
        "recompute_seconds_per_token": 0,
        "pageable_ranks": 0,
        "gds_ranks": 0,
        "internal_errors": 0,
        "trace_records": 0,
        "trace_dropped": 0,
    }
    stores = [
        StoreInfo(tier.name, "nvme", "0123456789abcdef", f"/{tier.name}") for tier in tiers
    ]
    return EngineStatistics(tiers=tiers, shadows=[shadow], stores=stores, **(nothing | figures))


@dataclass
class Source:
    """Counts how often it is read."""

    is_active: bool = True
    reads: int = 0
    transfers: Transfers = field(default_factory=Transfers)
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

    def take_transfers(self) -> Transfers:
        return self.transfers.take()


Series = tuple[str, tuple[tuple[str, str], ...]]


class Published:
    """The metrics that Prometheus gets of a source.

    Args:
        source: The source.
        labels: Labels of every series.
    """

    def __init__(
        self, source: StatisticsSource, labels: Mapping[str, str] | None = None
    ) -> None:
        labels = labels or {}
        self._reporter = Reporter(source)
        self._values = tuple(labels.values())
        self.registry = CollectorRegistry()
        kinds = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}
        makers = {kind: partial(make, registry=self.registry) for kind, make in kinds.items()}
        self.publisher = Publisher(makers, list(labels))
        self.refresh()

    def refresh(self) -> None:
        """Publish what changed since the last call."""
        self.publisher.publish(self._reporter.take(), self._values)

    def series(self) -> dict[Series, float]:
        """Return the value of each series, without the times of creation."""
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    def value(self, name: str, **labels: str) -> float:
        """Return the value of one series."""
        return self.series()[name, tuple(sorted(labels.items()))]


def taken(reporter: Reporter) -> dict[tuple[str, tuple[str, ...]], object]:
    return {(change.name, change.labels): change.value for change in reporter.take()}


def test_every_figure_of_a_tier_is_reported() -> None:
    numbers = {name: float(at) for at, name in enumerate(TierFigures._fields[1:], start=1)}
    changes = Reporter(Source(now=engine(tier("ram", **numbers)))).take()
    reported = {change.value for change in changes if change.labels[:1] == ("ram",)}
    assert reported >= set(numbers.values())


def test_every_series_is_of_a_declared_metric_and_has_its_labels() -> None:
    first = taken(Reporter(Source(now=engine(tier("ram"), tier("nvme")))))
    for name, labels in first:
        assert len(labels) == len(METRICS[name].labels)
    names = {name for name, _ in first}
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


def test_the_first_reading_has_every_series_also_those_at_0() -> None:
    first = taken(Reporter(Source(now=engine(tier("ram", capacity_chunks=8), tier("nvme")))))
    assert first["kvtier_capacity_chunks", ("ram",)] == 8
    assert first["kvtier_failed_chunks", ("nvme", "expired")] == 0
    assert first["kvtier_internal_errors", ()] == 0
    assert first["kvtier_shadow_hit_ratio", ("ram", "arc")] == 0.25


def test_later_readings_have_growth_of_counters_and_values_of_gauges_that_changed() -> None:
    source = Source(is_active=False)
    source.now = engine(
        tier("ram", hit_chunks=3, used_chunks=5), tier("nvme", queue_seconds=0.5)
    )
    reporter = Reporter(source)
    reporter.take()
    assert reporter.take() == []
    source.now = engine(
        tier("ram", hit_chunks=10, used_chunks=4),
        tier("nvme", queue_seconds=0.75),
        waiting_requests=2,
        internal_errors=1,
    )
    assert taken(reporter) == {
        ("kvtier_hit_chunks", ("ram",)): 7,
        ("kvtier_used_chunks", ("ram",)): 4,
        ("kvtier_queue_seconds", ("nvme",)): 0.25,
        ("kvtier_waiting_requests", ()): 2,
        ("kvtier_internal_errors", ()): 1,
    }
    assert reporter.take() == []


def test_a_corrupt_chunk_is_counted_by_itself_and_as_a_cause_of_failure() -> None:
    source = Source(is_active=False, now=engine(tier("nvme")))
    reporter = Reporter(source)
    reporter.take()
    source.now = engine(tier("nvme", corrupt_chunks=2))
    assert taken(reporter) == {
        ("kvtier_corrupt_chunks", ("nvme",)): 2,
        ("kvtier_failed_chunks", ("nvme", "corrupt")): 2,
    }


class Clock:
    """Returns a given time."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.03])
def test_a_busy_engine_is_read_often_enough_and_no_more(step_s: float) -> None:
    source, clock = Source(), Clock()
    reporter = Reporter(source, clock=clock)
    last_s, reads = 0.0, 0
    for step in range(int(8 / step_s)):
        clock.now_s = step * step_s
        reporter.take()
        if source.reads > reads:
            last_s, reads = clock.now_s, source.reads
        assert clock.now_s - last_s < 1.1
    assert source.reads <= 8 / 1.0


def test_an_engine_that_may_not_step_again_is_read_at_once() -> None:
    source, clock = Source(), Clock()
    reporter = Reporter(source, clock=clock)
    assert reporter.take()
    source.transfers.record("ram", "nvme", nbytes=4096, seconds=0.5)
    assert not reporter.is_due()
    assert reporter.take() == []
    source.gaps = [[1.5, 90.0]]
    source.waits = [0.25]
    source.is_active = False
    assert not reporter.is_due(steps_follow=True)
    assert taken(reporter) == {
        ("kvtier_kv_offload_total_bytes", ("ram_to_nvme",)): 4096,
        ("kvtier_kv_offload_total_time", ("ram_to_nvme",)): 0.5,
        ("kvtier_kv_offload_size", ("ram_to_nvme",)): [4096],
        ("kvtier_evict_reuse_gap_seconds", ("ram",)): [1.5, 90.0],
        ("kvtier_load_wait_seconds", ()): [0.25],
    }


def test_changes_that_crossed_a_process_boundary_are_published() -> None:
    published = Published(Source(), {"engine": "0"})
    change = MetricChange("kvtier_hit_chunks", ("ram",), 3)
    plain: Any = ["kvtier_hit_chunks", ["ram"], 3]
    published.publisher.publish([change], ["0"])
    published.publisher.publish([plain, plain], ["0"])
    assert published.value("kvtier_hit_chunks_total", engine="0", tier="ram") == 9


def test_every_declared_metric_is_described_also_before_anything_was_observed() -> None:
    families = Published(Source()).registry.collect()
    assert {(each.name, each.type, each.documentation) for each in families} == {
        (name, metric.kind.value, metric.help) for name, metric in METRICS.items()
    }


def test_observations_add_up_over_readings() -> None:
    source = Source(is_active=False, now=engine(tier("ram"), tier("nvme")))
    source.transfers.record("ram", "nvme", nbytes=3_000_000, seconds=0.5)
    source.gaps, source.waits = [[0.5, 3.0], []], [0.2]
    published = Published(source)
    source.transfers.record("ram", "nvme", nbytes=5_000_000, seconds=0.25)
    source.transfers.record("nvme", "ram", nbytes=300_000_000, seconds=1.0)
    source.gaps, source.waits = [[2.0], [1e9]], [0.3, 7.0]
    published.refresh()
    value = published.value
    down = {"transfer_type": "ram_to_nvme"}
    assert value("kvtier_kv_offload_total_bytes_total", **down) == 8_000_000
    assert value("kvtier_kv_offload_total_time_total", **down) == 0.75
    assert value("kvtier_kv_offload_size_bucket", le="1e+06", **down) == 0
    # A bucket holds what is equal to its bound.
    assert value("kvtier_kv_offload_size_bucket", le="5e+06", **down) == 2
    up = {"transfer_type": "nvme_to_ram"}
    assert value("kvtier_kv_offload_size_bucket", le="2e+08", **up) == 0
    assert value("kvtier_kv_offload_size_bucket", le="+Inf", **up) == 1
    gap = "kvtier_evict_reuse_gap_seconds"
    assert value(f"{gap}_bucket", le="2.0", tier="ram") == 2
    assert value(f"{gap}_sum", tier="nvme") == 1e9
    assert value("kvtier_load_wait_seconds_bucket", le="0.25") == 1
    assert value("kvtier_load_wait_seconds_bucket", le="0.5") == 2


def copied(nbytes: int, seconds: float, way: tuple[str, str]) -> Transfers:
    transfers = Transfers()
    transfers.record(*way, nbytes=nbytes, seconds=seconds)
    return transfers


def test_a_cache_has_what_its_workers_copied_and_its_tiers() -> None:
    toy = ToyEngine(slots=(8, 16))
    published = Published(toy.cache.service)
    toy.fill("a", 2 * TOKENS)
    for _ in range(3):  # until the chunks are demoted: a busy engine is not read at every step
        toy.step()
    for copies in (
        copied(8192, 0.5, ("gpu", "ram")),
        copied(1024, 0.25, ("ram", "gpu")),
        copied(4096, 0.25, ("gpu", "ram")),
    ):
        toy.connector.update_connector_output(WorkerOutput(transfers=copies))
    toy.cache.service.record_copies(copied(2048, 0.5, ("ram", "nvme")))
    published.refresh()
    assert published.value("kvtier_stored_chunks_total", tier="ram") == 2
    for transfer_type, nbytes, count in (
        ("gpu_to_ram", 12288, 2),
        ("ram_to_gpu", 1024, 1),
        ("ram_to_nvme", 2048, 1),
    ):
        labels = {"transfer_type": transfer_type}
        assert published.value("kvtier_kv_offload_total_bytes_total", **labels) == nbytes
        assert published.value("kvtier_kv_offload_size_count", **labels) == count


def test_a_cache_is_active_until_its_tiers_and_its_workers_are_done() -> None:
    toy = ToyEngine()
    service = toy.cache.service
    seen = [service.is_active]
    request = toy.arrive("a", TOKENS)
    seen.append(service.is_active)
    toy.schedule(request)
    toy.step()
    toy.finish(request)
    toy.step()
    seen.append(service.is_active)  # the workers still copy, and their figures are to come
    toy.acknowledge()
    seen.append(service.is_active)
    assert seen == [False, True, True, False]


def test_a_reset_forgets_the_copies_of_workers() -> None:
    toy = ToyEngine()
    request = toy.arrive("a", TOKENS)
    toy.schedule(request)
    toy.step()
    toy.finish(request)
    toy.connector.reset_cache()
    toy.acknowledge()  # ignored: the job is of before the reset
    toy.step()
    assert not toy.cache.service.is_active
