"""``kvtier sim recommend``: a configuration with its reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import parse_config
from tests.unit.sim_cli.commands import kvtier, refusal


def test_times_of_an_engine_that_is_asked_for_too_much_are_noted(
    trace: Path, config: Path
) -> None:
    run = ("sim", "run", trace, "--config", config, "--chunk-bytes", "1MiB", "--prefill-rate")
    note = "note: the busiest tenth of the trace needs "
    assert note in kvtier(*run, 1000)
    assert note not in kvtier(*run, 100_000)
    sizes = ("--ram", "64MiB", "--nvme", "1GiB", "--chunk-bytes", "1MiB", "--prefill-rate")
    remark = "# (in its busiest tenth"
    assert remark in kvtier("sim", "recommend", trace, *sizes, 1000).replace("#   ", "# ")


def test_a_recommendation_is_a_file_that_loads_and_says_why(trace: Path) -> None:
    arguments = ("--ram", "64MiB", "--nvme", "1GiB", "--chunk-bytes", "1MiB")
    text = kvtier("sim", "recommend", trace, *arguments)
    config = parse_config(text, source="recommended")
    assert [tier.kind for tier in config.tiers] == ["ram", "nvme"]
    assert [tier.capacity_bytes for tier in config.tiers] == [64 << 20, 1 << 30]
    assert config.engine.blocks_per_chunk == 512 // 16
    assert "# Assumes chunks of 512 tokens: set engine.blocks_per_chunk" in text
    assert text.count("<- chosen") == 1
    assert "stays unless another hits 0.3 points more" in text
    assert "per second, and tiers so fast:\n#   ram reads 25.00 GB/s and writes" in text
    assert "no cache at all" in text
    assert f"write: {config.placement.write}" in next(
        line for line in text.splitlines() if "<- chosen" in line
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--ram", "1KiB", "--nvme", "1GiB"), "--ram: holds no chunk"),
        (("--ram", "64", "--nvme", "1GiB"), "--ram 64: 64 has no unit"),
        (
            ("--ram", "1GiB", "--nvme", "9GiB", "--tier-speed", "tape=1GB/s,1GB/s,1s"),
            "--tier-speed tape",
        ),
    ],
)
def test_unusable_sizes_and_speeds_are_refused(
    trace: Path, arguments: tuple[str, ...], problem: str
) -> None:
    text = refusal("sim", "recommend", trace, "--chunk-bytes", "1MiB", *arguments)
    assert text.startswith(problem)
