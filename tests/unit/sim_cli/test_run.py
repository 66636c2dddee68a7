"""``kvtier sim run``: names and keys that scripts depend on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.sim_cli.commands import kvtier, refusal

TIER_KEYS = {"hits", "hit_ratio", "chunks_written", "chunks_promoted", "evictions"}
RUN_KEYS = {"tiers", "total_hit_ratio", "writes_per_ref", "promotions_per_ref"}
LEVELS = {"p50", "p90", "p99"}


def test_all_tiers_are_printed_and_what_requests_wait(trace: Path, config: Path) -> None:
    arguments = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB", "--json")
    printed: dict[str, Any] = json.loads(kvtier(*arguments))
    assert printed.keys() >= RUN_KEYS
    assert [tier["name"] for tier in printed["tiers"]] == ["ram", "nvme"]
    for tier in printed["tiers"]:
        assert tier.keys() >= TIER_KEYS | {"bytes_written_per_day", "dwpd"}
        assert tier["hit_ratio"] == tier["hits"] / printed["refs"]
    assert printed["ttft_s"].keys() == printed["ttft_no_cache_s"].keys() == LEVELS
    assert printed["tiers"][1]["chunks_written"] > 0
    assert 0 < printed["total_hit_ratio"] < 1


def test_tables_are_for_people(trace: Path, config: Path) -> None:
    table = kvtier("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB")
    assert "time to first token p50" in table
    assert "written per day" in table
    assert "transfer.load_path: direct" in " ".join(table.split())


def test_no_table_loses_a_column_where_there_is_little_room(trace: Path, config: Path) -> None:
    run = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB")
    table = kvtier(*run, width=80)
    head, ram, nvme, *_ = table.splitlines()
    assert head.split()[:3] == ["tier", "eviction", "chunks"]
    assert [ram.split()[0], nvme.split()[0]] == ["ram", "nvme"]
    assert head.split()[-1] == "DWPD"
    assert max(map(len, table.splitlines())) <= 80


def test_tiers_whose_lines_are_too_long_get_a_column_each_and_keep_every_figure(
    trace: Path, config: Path
) -> None:
    name = "nvme-on-the-second-disk"
    text = config.read_text()
    config.write_text(text.replace("kind: nvme,", f"kind: nvme, name: {name},"))
    run = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB")
    narrow, wide = (kvtier(*run, width=width).splitlines() for width in (80, 100))
    assert max(map(len, wide)) > 80 >= max(map(len, narrow))
    heads, ram, nvme = (line.split() for line in wide[:3])
    assert nvme[0] == name
    # RAM does not wear out: it has no last figure.
    expected = [list(row) for row in zip(heads, ram, nvme, strict=False)]
    assert [line.split() for line in narrow[: len(heads)]] == [*expected, ["DWPD", nvme[-1]]]


def test_the_time_model_can_be_set(trace: Path, config: Path) -> None:
    run = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB", "--json")
    told = ("--prefill-rate", 5000, "--tier-speed", "nvme=1GB/s,1GB/s,5ms")
    model = json.loads(kvtier(*run, *told))["time_model"]
    assert model["prefill_tokens_per_s"] == 5000
    assert model["speeds"]["nvme"] == {
        "read_bytes_per_s": 10**9,
        "write_bytes_per_s": 10**9,
        "latency_s": 0.005,
    }


def test_a_tier_slower_than_computing_is_noted(trace: Path, config: Path) -> None:
    run = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB")
    slow = kvtier(*run, "--prefill-rate", 1_000_000, "--tier-speed", "nvme=1GB/s,1GB/s,1ms")
    assert "note: nvme reads a chunk in 1.05 ms, longer than computing it (0.51 ms)" in slow
    assert "note: nvme" not in kvtier(*run, "--prefill-rate", 1000)


def test_chunks_of_all_tiers_are_the_trace_s(trace: Path, config: Path) -> None:
    config.write_text(config.read_text() + "engine: {blocks_per_chunk: 4}\n")
    run = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB")
    assert "assumed: chunks of 1.00 MiB (512 tokens, of the trace); " in kvtier(*run)


def test_a_speed_of_a_tier_that_is_not_there_is_refused(trace: Path, config: Path) -> None:
    arguments = ("--config", config, "--tier-speed", "remote=1GB/s,1GB/s,5ms")
    assert "--tier-speed remote" in refusal("sim", "run", trace, *arguments)
