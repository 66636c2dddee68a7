"""The exporter without an engine: scraped over HTTP, parsed as Prometheus does."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvtier
from kvtier.connector.exporter import MetricsExporter
from kvtier.connector.figures import EngineStatistics, TierFigures
from kvtier.connector.metadata import WorkerOutput
from kvtier.connector.metrics import METRICS, Kind
from kvtier.connector.transfers import Transfers
from kvtier.errors import ConfigError
from tests.unit.test_connector_metrics import engine, tier
from tests.unit.toy_engine import TOKENS, ToyEngine

Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass
class Source:
    """Figures that a test sets."""

    tiers: list[TierFigures] = field(default_factory=lambda: [tier("ram"), tier("nvme")])
    gaps: list[list[float]] = field(default_factory=lambda: [[], []])
    waits: list[float] = field(default_factory=list)
    transfers: Transfers = field(default_factory=Transfers)
    is_active: bool = False

    def statistics(self) -> EngineStatistics:
        return engine(*self.tiers)

    def take_load_waits(self) -> list[float]:
        taken, self.waits = self.waits, []
        return taken

    def take_reuse_gaps(self) -> list[list[float]]:
        taken, self.gaps = self.gaps, [[], []]
        return taken

    def take_transfers(self) -> Transfers:
        return self.transfers.take()


def scrape(exporter: MetricsExporter) -> dict[Series, float]:
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: dict[Series, float], name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def test_a_scrape_has_every_number_of_every_tier() -> None:
    source = Source([tier("ram", hit_chunks=3), tier("nvme", queue_seconds=0.5)])
    with MetricsExporter(source, 0) as exporter:
        found = scrape(exporter)
    assert value(found, "kvtier_hit_chunks_total", tier="ram") == 3
    assert value(found, "kvtier_queue_seconds_total", tier="nvme") == 0.5
    assert value(found, "kvtier_failed_chunks_total", tier="nvme", cause="refused") == 0
    assert value(found, "kvtier_waiting_requests") == 0
    assert value(found, "kvtier_shadow_hit_ratio", tier="ram", policy="arc") == 0.25
    place = {"namespace": "0123456789abcdef", "path": "/nvme", "version": kvtier.__version__}
    assert value(found, "kvtier_info", tier="nvme", **place) == 1


def test_every_declared_metric_is_described_also_before_anything_was_observed() -> None:
    with MetricsExporter(Source(), 0) as exporter:
        url = f"http://127.0.0.1:{exporter.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    assert {(each.name, each.type, each.documentation) for each in families} == {
        (name, metric.kind.value, metric.help) for name, metric in METRICS.items()
    }


def test_a_scrape_sees_what_the_last_refresh_read() -> None:
    source = Source()
    with MetricsExporter(source, 0) as exporter:
        source.tiers = [tier("ram", stored_chunks=5), tier("nvme")]
        assert value(scrape(exporter), "kvtier_stored_chunks_total", tier="ram") == 0
        exporter.refresh()
        assert value(scrape(exporter), "kvtier_stored_chunks_total", tier="ram") == 5


def test_what_is_observed_adds_up_over_refreshes() -> None:
    source = Source()
    source.transfers.record("ram", "nvme", nbytes=3_000_000, seconds=0.5)
    source.gaps = [[0.5, 3.0], []]
    source.waits = [0.2]
    with MetricsExporter(source, 0) as exporter:
        source.transfers.record("ram", "nvme", nbytes=5_000_000, seconds=0.25)
        source.transfers.record("nvme", "ram", nbytes=300_000_000, seconds=1.0)
        source.gaps = [[2.0], [1e9]]
        source.waits = [0.3, 7.0]
        exporter.refresh()
        found = scrape(exporter)
    down = {"transfer_type": "ram_to_nvme"}
    assert value(found, "kvtier_kv_offload_total_bytes_total", **down) == 8_000_000
    assert value(found, "kvtier_kv_offload_total_time_total", **down) == 0.75
    assert value(found, "kvtier_kv_offload_size_bucket", le="1e+06", **down) == 0
    # A bucket holds what is equal to its bound.
    assert value(found, "kvtier_kv_offload_size_bucket", le="5e+06", **down) == 2
    assert value(found, "kvtier_kv_offload_size_sum", **down) == 8_000_000
    up = {"transfer_type": "nvme_to_ram"}
    assert value(found, "kvtier_kv_offload_size_bucket", le="2e+08", **up) == 0
    assert value(found, "kvtier_kv_offload_size_bucket", le="+Inf", **up) == 1
    gap = "kvtier_evict_reuse_gap_seconds"
    assert value(found, f"{gap}_bucket", le="1.0", tier="ram") == 1
    assert value(found, f"{gap}_bucket", le="2.0", tier="ram") == 2
    assert value(found, f"{gap}_count", tier="ram") == 3
    assert value(found, f"{gap}_sum", tier="nvme") == 1e9
    assert value(found, "kvtier_load_wait_seconds_bucket", le="0.25") == 1
    assert value(found, "kvtier_load_wait_seconds_bucket", le="0.5") == 2
    assert value(found, "kvtier_load_wait_seconds_sum") == 7.5


def copied(nbytes: int, seconds: float, way: tuple[str, str]) -> Transfers:
    transfers = Transfers()
    transfers.record(*way, nbytes=nbytes, seconds=seconds)
    return transfers


def test_a_scheduler_side_has_what_its_workers_copied_and_its_tiers() -> None:
    toy = ToyEngine(slots=(8, 16))
    between_tiers = toy.cache.service._jobs.transfers
    with MetricsExporter(toy.connector, 0) as exporter:
        toy.fill("a", 2 * TOKENS)
        for _ in range(
            3
        ):  # until the chunks are demoted: a busy engine is not read at every step
            toy.step()
        for stats in (
            copied(8192, 0.5, ("gpu", "ram")),
            copied(1024, 0.25, ("ram", "gpu")),
            copied(4096, 0.25, ("gpu", "ram")),
        ):
            toy.connector.update_connector_output(WorkerOutput(transfers=stats))
        between_tiers.record("ram", "nvme", nbytes=2048, seconds=0.5)
        exporter.refresh()
        found = scrape(exporter)
    assert value(found, "kvtier_stored_chunks_total", tier="ram") == 2
    for transfer_type, nbytes, seconds, count in (
        ("gpu_to_ram", 12288, 0.75, 2),
        ("ram_to_gpu", 1024, 0.25, 1),
        ("ram_to_nvme", 2048, 0.5, 1),
    ):
        labels = {"transfer_type": transfer_type}
        assert value(found, "kvtier_kv_offload_total_bytes_total", **labels) == nbytes
        assert value(found, "kvtier_kv_offload_total_time_total", **labels) == seconds
        assert value(found, "kvtier_kv_offload_size_count", **labels) == count


def test_a_scheduler_side_is_active_until_its_cache_and_its_workers_are_done() -> None:
    toy = ToyEngine()
    seen = []

    def look() -> None:
        seen.append((toy.connector.is_active, toy.cache.service.is_active))

    look()
    request = toy.arrive("a", TOKENS)
    look()
    toy.schedule(request)
    toy.step()
    toy.finish(request)
    toy.step()
    look()  # the workers still copy, and their figures are to come
    toy.acknowledge()
    look()
    assert seen == [(False, False), (True, True), (True, False), (False, False)]


def test_labels_of_the_job_are_on_every_series() -> None:
    with MetricsExporter(Source(), 0, labels={"job_name": "warm-up"}) as exporter:
        found = scrape(exporter)
    assert found
    assert all(("job_name", "warm-up") in labels for _, labels in found)


def test_scrapes_and_refreshes_at_once_see_whole_readings() -> None:
    source = Source()
    stop = threading.Event()

    def drive(exporter: MetricsExporter) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            source.tiers = [tier("ram", hit_chunks=count, stored_chunks=count), tier("nvme")]
            source.transfers.record("ram", "nvme", nbytes=count, seconds=0.5)
            exporter.refresh()

    with MetricsExporter(source, 0) as exporter:
        driver = threading.Thread(target=drive, args=(exporter,))
        driver.start()
        try:
            last = 0.0
            for _ in range(5):
                found = scrape(exporter)
                hits = value(found, "kvtier_hit_chunks_total", tier="ram")
                assert value(found, "kvtier_stored_chunks_total", tier="ram") == hits
                assert hits >= last
                last = hits
        finally:
            stop.set()
            driver.join()


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with MetricsExporter(Source(), 0) as first:
        with pytest.raises(
            ConfigError, match="another process listens there: choose another port"
        ):
            MetricsExporter(Source(), first.port)
        assert scrape(first)


def test_an_address_of_another_machine_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="choose one it has"):
        MetricsExporter(Source(), 0, host="192.0.2.1")


def test_a_port_that_is_none_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="port must be 0-65535"):
        MetricsExporter(Source(), 70000)


def test_closing_gives_the_port_back_and_may_be_repeated() -> None:
    exporter = MetricsExporter(Source(), 0)
    exporter.close()
    exporter.close()
    with pytest.raises(urllib.error.URLError):
        scrape(exporter)
    with socket.create_server(("127.0.0.1", exporter.port)):
        pass


def test_only_this_machine_can_ask_by_default() -> None:
    with MetricsExporter(Source(), 0) as exporter:
        assert exporter._server.server_address[0] == "127.0.0.1"


def test_histograms_are_the_only_metrics_with_buckets_on_the_wire() -> None:
    source = Source(gaps=[[1.0], []])
    with MetricsExporter(source, 0) as exporter:
        bucketed = {name for name, _ in scrape(exporter) if name.endswith("_bucket")}
    histograms = {name for name, metric in METRICS.items() if metric.kind is Kind.HISTOGRAM}
    assert {name.removesuffix("_bucket") for name in bucketed} <= histograms
