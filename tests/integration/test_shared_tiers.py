"""What one engine computed, another one loads from a shared tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.demo.runner import EngineProcess, run_engine
from tests.demo.scenario import Scenario, Wave
from tests.integration.harness import Reference, Site
from tests.integration.shared_services import cached_tokens, reusable_tokens, write_config


def shared_dir(directory: Path) -> str:
    return f"kind: shared_dir\npath: {directory / 'shared'}\ncapacity: 1GiB"


SERVICES: dict[str, Callable[[Path], str]] = {"shared_dir": shared_dir}


@pytest.mark.parametrize("service", SERVICES)
def test_an_engine_loads_what_a_killed_engine_computed(
    reference: Reference, site: Site, service: str
) -> None:
    section = SERVICES[service](site.directory)
    wave = Wave(prompts=reference.conversations[0].prompts[:16], max_tokens=4)
    config = write_config(site.directory / "kvtier.yaml", section, ram_blocks=256)
    scenario = Scenario(model=reference.model, config=config, waves=(wave,))
    with EngineProcess(scenario, site.directory, "killed") as engine:
        engine.wait_for("wave")
        engine.kill()
    report = run_engine(scenario, site.directory, "second")
    reference.assert_equal(report, waves=(wave,))
    assert cached_tokens(report) >= 0.95 * reusable_tokens(wave)
    loaded = report.count("kvtier_hit_tokens", tier=service)
    distinct = len({prompt.tokens[:160] for prompt in wave.prompts})
    assert loaded >= 160 * distinct, "the rest was in the engine's own prefix cache"
