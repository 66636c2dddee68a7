"""kvtier's numbers in vLLM's payload, as vLLM's front end takes it; no engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    get_connector_metric_definitions,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from kvtier.connector.metrics import METRICS, Kind, Reporter
from kvtier.vllm import KVTierConnector, KVTierOffloadingSpec
from kvtier.vllm.metrics import KVTierStats
from tests.demo.engine import growth
from tests.unit.test_connector_metrics import Source, engine, tier

CLASSES = {
    Kind.COUNTER: OffloadingCounterMetadata,
    Kind.GAUGE: OffloadingGaugeMetadata,
    Kind.HISTOGRAM: OffloadingHistogramMetadata,
}


def test_of_several_front_ends_the_latest_sets_a_gauge() -> None:
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


def test_reported_figures_reach_prometheus() -> None:
    registry = CollectorRegistry()

    def maker(kind: type[Any]) -> Callable[..., Any]:
        def make(multiprocess_mode: str | None = None, **arguments: Any) -> Any:
            return kind(**arguments, registry=registry)

        return make

    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={})
    )
    kinds: dict[Any, Any] = {kind: maker(kind) for kind in (Counter, Gauge, Histogram)}
    exported = KVTierConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    source = Source(is_active=False, now=engine(tier("ram"), tier("nvme")))
    reporter = Reporter(source)
    for hits, size, gap in ((3, 10, 0.5), (5, 20, 7.0)):
        source.now = engine(tier("ram", hit_chunks=hits, used_chunks=hits), tier("nvme"))
        source.transfers.record("gpu", "ram", nbytes=size, seconds=0.5)
        source.gaps = [[gap], []]
        stats = KVTierStats.of(reporter.take())
        # As vLLM does between processes: data is all that is sent.
        sent = KVTierConnector.build_kv_connector_stats(dict(stats.data))
        exported.observe(sent.data)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"engine": "0", **labels})

    assert value("kvtier_hit_chunks_total", tier="ram") == 5
    assert value("kvtier_used_chunks", tier="ram") == 5
    way = {"transfer_type": "gpu_to_ram"}
    assert value("kvtier_kv_offload_total_bytes_total", **way) == 30
    assert value("kvtier_kv_offload_size_count", **way) == 2
    gaps = "kvtier_evict_reuse_gap_seconds"
    assert value(f"{gaps}_count", tier="ram") == 2
    assert value(f"{gaps}_sum", tier="ram") == 7.5


def test_reports_add_up_until_they_are_sent() -> None:
    source = Source(is_active=False, now=engine(tier("ram", hit_chunks=3)))
    reporter = Reporter(source)
    total = KVTierConnector.build_kv_connector_stats()
    assert total.is_empty()
    for hits in (3, 5, 5):
        source.now = engine(tier("ram", hit_chunks=hits, used_chunks=hits))
        total.aggregate(KVTierStats.of(reporter.take()))
    assert reporter.take() == [], "a change is reported once"
    assert total.reduce()["kvtier_hit_chunks{ram}"] == 5
    total.reset()
    assert total.is_empty()


def test_an_offloading_spec_declares_every_metric_as_what_it_is() -> None:
    declared = KVTierOffloadingSpec.build_metric_definitions({})
    assert declared.keys() == METRICS.keys()
    for name, metric in METRICS.items():
        assert type(declared[name]) is CLASSES[metric.kind]
        assert declared[name].labelnames == metric.labels
        assert declared[name].documentation == metric.help
    assert declared.keys().isdisjoint(get_connector_metric_definitions())


def test_vllms_log_has_what_changed_and_no_zeros() -> None:
    source = Source(is_active=False, now=engine(tier("ram", capacity_chunks=8), tier("nvme")))
    reporter = Reporter(source)
    log = KVConnectorLogging(None)
    log.connector_cls = KVTierConnector
    lines: list[str] = []

    def say() -> None:
        log.observe(KVTierStats.of(reporter.take()).to_dict())
        log.log(lambda text, *arguments: lines.append(text % arguments))

    say()
    assert not [line for line in lines if re.search(r"=0(\.0)?(,|$)", line)]
    lines.clear()
    source.now = engine(tier("ram", capacity_chunks=8, hit_chunks=3), tier("nvme"))
    say()
    assert lines == ["KV Transfer metrics: kvtier_hit_chunks{ram}=3"]


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
