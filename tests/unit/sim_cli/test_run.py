"""``kvtier sim run``: names and keys that scripts depend on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sim_cli.commands import kvtier, refusal
from tests.unit.sim_traces import TRACES, needs_traces

SINGLE_KEYS = [
    "trace",
    "policy",
    "touch_order",
    "groups",
    "capacity_chunks",
    "refs",
    "hits",
    "block_hit_ratio",
    "prefix_hit_ratio",
    "lead_chunks",
    "stranded_hits",
    "seconds",
    "refs_per_second",
    "assumed",
    "warnings",
]
TIER_KEYS = {"hits", "hit_ratio", "chunks_written", "chunks_promoted", "evictions"}
RUN_KEYS = {"tiers", "total_hit_ratio", "writes_per_ref", "promotions_per_ref"}
LEVELS = {"p50", "p90", "p99"}


def test_one_policy_prints_one_object(trace: Path) -> None:
    arguments = ("sim", "run", trace, "--policy", "lru", "--capacity", "5%", "--json")
    printed: dict[str, Any] = json.loads(kvtier(*arguments))
    assert list(printed) == SINGLE_KEYS
    assert printed["trace"] == "chat"
    assert printed["policy"] == "lru"
    assert printed["touch_order"] == "reverse"
    facts = json.loads(kvtier("trace", "info", trace, "--json"))
    assert printed["refs"] == facts["refs"]
    assert printed["capacity_chunks"] == int(facts["distinct"] * 0.05 + 0.5)
    assert printed["block_hit_ratio"] == printed["hits"] / printed["refs"]
    assert 0 < printed["prefix_hit_ratio"] < facts["infinite_prefix_hit_ratio"]


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
    assert "prefix hit ratio" in kvtier("sim", "run", trace, "--policy", "arc", "--capacity", 9)
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


@needs_traces
@pytest.mark.parametrize(
    ("policy", "order", "capacity", "hits"),
    [
        ("lru", "forward", "5%", 56_382),
        ("lru", "reverse", "9140", 56_447),
        ("fifo", "forward", "10%", 73_806),
    ],
)
def test_hits_on_the_conversation_trace_are_the_references(
    policy: str, order: str, capacity: str, hits: int
) -> None:
    path = TRACES / "mooncake_conversation.jsonl"
    arguments = ("--policy", policy, "--capacity", capacity, "--touch-order", order, "--json")
    assert json.loads(kvtier("sim", "run", path, *arguments))["hits"] == hits


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "give either --policy or --config"),
        (("--policy", "lru", "--config", "x.yaml"), "give either --policy or --config"),
        (("--policy", "lru"), "--capacity is missing"),
        (("--policy", "lru", "--capacity", "0%"), "capacity 0%: holds no chunk"),
        (("--policy", "best", "--capacity", "5%"), "best"),
        (("--policy", "lruu", "--capacity", "5%"), "did you mean lru?"),
        (("--policy", "lru", "--capacity", "5 GB/s"), "capacity 5 GB/s"),
        (("--policy", "lru", "--capacity", "5%", "--touch-order", "up"), "--touch-order up"),
        (("--policy", "lru", "--capacity", "5%", "--format", "csv"), "--format csv"),
        (("--policy", "lru", "--capacity", "5%", "--chunk-bytes", "0"), "--chunk-bytes 0"),
    ],
)
def test_a_wrong_option_is_one_clear_line(
    trace: Path, arguments: tuple[str, ...], problem: str
) -> None:
    text = refusal("sim", "run", trace, *arguments)
    assert problem in text
    assert "\n" not in text


POLICY = ("--policy", "lru", "--capacity", "5%")


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("--capacity", "5%", "--config"),
        ("--touch-order", "policy", "--config"),
        ("--groups", "prefix,state", "--config"),
        ("--prefill-rate", "5000", "--policy"),
        ("--tier-speed", "ram=1GB/s,1GB/s,1ms", "--policy"),
    ],
)
def test_an_option_of_the_other_kind_of_run_is_refused(
    trace: Path, config: Path, option: str, value: str, kind: str
) -> None:
    run = ("--config", config) if kind == "--config" else POLICY
    text = refusal("sim", "run", trace, *run, option, value)
    assert text.startswith(f"{option} has no effect with {kind}; remove it, or ")
    assert "\n" not in text


def test_a_speed_of_a_tier_that_is_not_there_is_refused(trace: Path, config: Path) -> None:
    arguments = ("--config", config, "--tier-speed", "remote=1GB/s,1GB/s,5ms")
    assert "--tier-speed remote" in refusal("sim", "run", trace, *arguments)
