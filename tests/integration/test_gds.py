"""Chunks that a real engine's worker reads from the store itself: every token is right."""

from __future__ import annotations

import pytest
import yaml

from tests.demo import runner
from tests.demo.runner import EngineFailedError, run_engine
from tests.demo.scenario import Scenario, Wave
from tests.integration.harness import Reference, Site


def require_gds(scenario: Scenario) -> Scenario:
    """Let the scenario's configuration require GDS reads."""
    assert scenario.config is not None
    settings = yaml.safe_load(scenario.config.read_text())
    settings["tiers"][1]["gds"] = "require"
    scenario.config.write_text(yaml.safe_dump(settings))
    return scenario


@pytest.mark.parametrize("blocks_per_chunk", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_restarted_engine_reads_the_store_past_ram_with_every_token_equal(
    reference: Reference, site: Site, monkeypatch: pytest.MonkeyPatch, blocks_per_chunk: int
) -> None:
    plain = runner.command
    monkeypatch.setattr(
        runner, "command", lambda *args: [*plain(*args)[:-1], "tests.integration.gds_engine"]
    )
    wave = Wave(prompts=reference.conversations[0].prompts[:16], max_tokens=4)
    scenario = require_gds(
        site.scenario(
            (wave,), ram_blocks=256, nvme_blocks=512, blocks_per_chunk=blocks_per_chunk
        )
    )
    reference.assert_equal(run_engine(scenario, site.directory, "first"), waves=(wave,))
    report = run_engine(scenario, site.directory, "second")
    reference.assert_equal(report, waves=(wave,))
    assert report.count("kvtier_hit_tokens", tier="nvme") > 0
    moved = report.waves[0].counters
    read = [name for name in moved if "nvme_to_gpu" in name and moved[name]]
    assert read, sorted(moved)
    assert not [name for name in moved if "nvme_to_ram" in name and moved[name]]
    site.assert_nothing_held()


def test_an_engine_without_a_gpu_refuses_required_gds_reads_and_says_why(
    reference: Reference, site: Site
) -> None:
    wave = Wave(prompts=reference.conversations[0].prompts[:1], max_tokens=1)
    scenario = require_gds(site.scenario((wave,), ram_blocks=64, nvme_blocks=64))
    with pytest.raises(EngineFailedError, match="gds: require, but no GDS reads are possible"):
        run_engine(scenario, site.directory, "refused")
