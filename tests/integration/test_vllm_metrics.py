"""kvtier's numbers in vLLM's payload, as vLLM's front end takes it; no engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    get_connector_metric_definitions,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from kvtier.connector.metrics import METRICS, Kind
from kvtier.vllm import KVTierConnector
from kvtier.vllm.demo.engine import growth
from kvtier.vllm.metrics import StatsReporter, add_device_transfers, metric_definitions
from tests.unit.test_connector_metrics import Source, engine, tier

CLASSES = {
    Kind.COUNTER: OffloadingCounterMetadata,
    Kind.GAUGE: OffloadingGaugeMetadata,
    Kind.HISTOGRAM: OffloadingHistogramMetadata,
}


def test_of_several_front_ends_the_one_told_last_says_what_a_gauge_is() -> None:
    made: list[tuple[type[Any], str | None]] = []

    def maker(kind: type[Any]) -> Callable[..., Any]:
        def make(multiprocess_mode: str | None = None, **arguments: Any) -> Any:
            made.append((kind, multiprocess_mode))
            return kind(**arguments, registry=CollectorRegistry())

        return make

    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={})
    )
    kinds: dict[Any, Any] = {kind: maker(kind) for kind in (Counter, Gauge, Histogram)}
    KVTierConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    assert {mode for kind, mode in made if kind is Gauge} == {"mostrecent"}
    assert {mode for kind, mode in made if kind is not Gauge} == {None}


def test_every_metric_is_declared_as_what_it_is() -> None:
    declared = metric_definitions()
    assert declared.keys() == METRICS.keys()
    for name, metric in METRICS.items():
        assert type(declared[name]) is CLASSES[metric.kind]
        assert declared[name].labelnames == metric.labels
        assert declared[name].documentation == metric.help
    assert declared.keys().isdisjoint(get_connector_metric_definitions())


def test_what_is_reported_adds_up_in_vllms_payload() -> None:
    source = Source(is_active=False, now=engine(tier("ram", hit_chunks=3)))
    reporter = StatsReporter(source)
    total = OffloadingConnectorStats()
    for hits, size in ((3, 10), (5, 20), (5, 30)):
        source.now = engine(tier("ram", hit_chunks=hits, used_chunks=hits))
        source.transfers.record_transfer(size, 0.5, ("ram", "nvme"))
        stats = reporter.report()
        assert stats is not None
        total.aggregate(stats)
    assert reporter.report() is None
    reduced = total.reduce()
    assert reduced["kvtier_hit_chunks:('ram',)"] == 5
    assert reduced["kvtier_used_chunks:('ram',)"] == 5
    assert reduced["kvtier_failed_chunks:('ram', 'load')"] == 0
    assert reduced["kvtier_kv_offload_total_bytes:('ram_to_nvme',)"] == 60
    assert reduced["kvtier_kv_offload_size:('ram_to_nvme',)_count"] == 3


def test_vllms_log_has_what_changed_and_no_zeros() -> None:
    source = Source(is_active=False, now=engine(tier("ram", capacity_chunks=8), tier("nvme")))
    reporter = StatsReporter(source)
    log = KVConnectorLogging(None)
    log.connector_cls = KVTierConnector
    lines: list[str] = []

    def say() -> None:
        stats = reporter.report()
        log.observe({} if stats is None else stats.to_dict())
        log.log(lambda text, *arguments: lines.append(text % arguments))

    say()
    assert "kvtier_capacity_chunks:('ram',)=8" in lines[0]
    assert not re.search(r"=0(\.0)?(,|$)", lines[0])
    assert len(lines[0]) < 500
    say()
    source.now = engine(tier("ram", capacity_chunks=8, hit_chunks=3), tier("nvme"))
    say()
    assert lines[1:] == ["KV Transfer metrics: kvtier_hit_chunks:('ram',)=3"]


def test_gaps_between_eviction_and_reuse_are_observed_tier_by_tier() -> None:
    source = Source(is_active=False, now=engine(tier("ram"), tier("nvme")))
    reporter = StatsReporter(source)
    total = OffloadingConnectorStats()
    for gaps in ([[0.5, 3.0], []], [[], [40.0]], [[7.0], [2.0]]):
        source.gaps = [list(of_tier) for of_tier in gaps]
        stats = reporter.report()
        assert stats is not None
        total.aggregate(stats)
    assert reporter.report() is None, "what was reported is reported once"
    reduced = total.reduce()
    gap = "kvtier_evict_reuse_gap_seconds"
    for name, seconds in (("ram", [0.5, 3.0, 7.0]), ("nvme", [40.0, 2.0])):
        assert reduced[f"{gap}:('{name}',)_count"] == len(seconds)
        assert reduced[f"{gap}:('{name}',)_sum"] == sum(seconds)


def test_what_workers_copied_is_reported_by_transfer_type_too() -> None:
    stats = OffloadingConnectorStats()
    stats.increase_counter("vllm:kv_offload_load_bytes", 30)
    stats.increase_counter("vllm:kv_offload_load_time", 0.5)
    stats.observe_histogram("vllm:kv_offload_load_size", 10)
    stats.observe_histogram("vllm:kv_offload_load_size", 20)
    stats.increase_counter("vllm:kv_offload_store_bytes", 7)
    before = stats.reduce()
    add_device_transfers(stats)
    assert stats.reduce() == before | {
        "kvtier_kv_offload_total_bytes:('ram_to_gpu',)": 30,
        "kvtier_kv_offload_total_time:('ram_to_gpu',)": 0.5,
        "kvtier_kv_offload_size:('ram_to_gpu',)_count": 2,
        "kvtier_kv_offload_size:('ram_to_gpu',)_sum": 30,
        "kvtier_kv_offload_total_bytes:('gpu_to_ram',)": 7,
    }


def test_a_wave_reports_what_counters_grew_by_and_what_gauges_are() -> None:
    names = {
        f"{name}{{tier=ram}}": metric.kind
        for name, metric in METRICS.items()
        if metric.kind is not Kind.HISTOGRAM
    }
    wave = growth(dict.fromkeys(names, 7.0), dict.fromkeys(names, 5.0))
    assert wave == {
        series: 5.0 if kind is Kind.GAUGE else -2.0 for series, kind in names.items()
    }
