"""``kvtier sim run`` with several engines: names and keys that scripts depend on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sim_cli.commands import kvtier, refusal

SHARED_KEYS = {
    "traffic",
    "questions_per_s",
    "read_bytes_per_s",
    "written_bytes_per_s",
    "chunks_at_end",
    "belady_hit_ratio",
    "belady_prefix_hit_ratio",
}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "shared.yaml"
    path.write_text(
        "tiers:\n"
        "  - {kind: ram, capacity: 64MiB}\n"
        "  - {kind: shared_dir, path: /nowhere/at/all, capacity: 256MiB}\n"
    )
    return path


def run(trace: Path, config: Path, *more: object) -> str:
    size = ("--chunk-bytes", "1MiB", "--engines", 3)
    return kvtier("sim", "run", trace, "--config", config, *size, *more)


def test_several_engines_print_one_object(trace: Path, shared: Path) -> None:
    printed: dict[str, Any] = json.loads(run(trace, shared, "--json"))
    assert [tier["name"] for tier in printed["tiers"]] == ["ram", "shared_dir"]
    assert printed["routing"] == "round-robin"
    assert len(printed["engines"]) == 3
    assert printed["shared"].keys() == SHARED_KEYS
    assert printed["shared"]["read_bytes_per_s"].keys() == {"mean", "peak"}
    assert printed["shared"]["traffic"]["chunks_read"] > 0
    for tier in printed["tiers"]:
        total = sum(engine["hit_tokens"][tier["name"]] for engine in printed["engines"])
        assert total == tier["hits"] * printed["chunk_tokens"]


def test_several_engines_have_tables(trace: Path, shared: Path, config: Path) -> None:
    table = " ".join(run(trace, shared).split())
    assert "from shared_dir" in table
    assert "belady at the shared tier's size" in table
    assert "busiest minute: read" in table
    private = run(trace, config, "--routing", "prefix")
    assert "belady" not in private
    assert "routing: prefix" in private


def test_one_engine_can_have_a_shared_tier_too(trace: Path, shared: Path) -> None:
    ram, tier = json.loads(run(trace, shared, "--engines", 1, "--json"))["tiers"]
    assert ram["capacity_chunks"] == 64
    assert tier["capacity_chunks"] == 256
    assert tier["hits"] > 0
    assert tier["dwpd"] is None


def test_an_unknown_routing_is_refused_with_the_choices(trace: Path, shared: Path) -> None:
    asked = ("sim", "run", trace, "--config", shared, "--engines", 2, "--routing", "prefx")
    assert "did you mean prefix" in refusal(*asked)
