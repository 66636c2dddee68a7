"""A store outlives its engine, however that ends, and has one engine at a time."""

from __future__ import annotations

import os
import signal

import pytest

from kvtier.vllm.demo.runner import EngineFailedError, EngineProcess, run_engine
from kvtier.vllm.demo.scenario import Wave
from tests.integration.harness import Reference, Site


def test_a_killed_engine_leaves_a_store_that_the_next_one_just_opens(
    reference: Reference, site: Site
) -> None:
    waves = reference.conversations
    blocks = reference.footprint_blocks
    scenario = site.scenario(waves, ram_blocks=blocks // 5, nvme_blocks=blocks)
    with EngineProcess(scenario, site.directory, "killed") as engine:
        engine.wait_for("wave")
        engine.wait_for("wave")
        # The third wave has begun: its requests store while the earlier ones still spill.
        engine.kill()
    first = waves[:2]
    again = scenario.model_copy(update={"waves": first})
    report = run_engine(again, site.directory, "after")
    reference.assert_equal(report, waves=first)
    assert report.waves[0].counters["kvtier_hit_tokens{tier=nvme}"] > 0
    assert "ERROR kvtier" not in site.log("after")
    site.assert_nothing_held()


def test_a_second_engine_on_a_store_in_use_fails_and_names_the_first(
    reference: Reference, site: Site
) -> None:
    waves = reference.conversations[:1]
    scenario = site.scenario(waves, ram_blocks=64, nvme_blocks=256)
    with EngineProcess(scenario, site.directory, "first") as engine:
        engine.wait_for("ready")
        os.kill(engine.pid, signal.SIGSTOP)  # it owns the store and does not get on
        with pytest.raises(EngineFailedError):
            run_engine(scenario, site.directory, "second")
        assert f"pid {engine.pid}" in site.log("second")
        os.kill(engine.pid, signal.SIGCONT)
        reference.assert_equal(engine.result(), waves=waves)


def test_two_ranks_spill_and_restart_with_every_token_equal(
    reference: Reference, site: Site
) -> None:
    wave = Wave(prompts=reference.conversations[0].prompts[:16], max_tokens=4)
    again = wave.model_copy(update={"prompts": wave.prompts[::-1]})
    scenario = site.scenario((wave, again), ram_blocks=48, nvme_blocks=512)
    scenario = scenario.model_copy(update={"ranks": 2})
    report = run_engine(scenario, site.directory, "ranks")
    reference.assert_equal(report, waves=(wave, again))
    assert report.count("kvtier_hit_tokens", tier="nvme") > 0
    site.assert_nothing_held()
    restarted = scenario.model_copy(update={"waves": (wave,)})
    report = run_engine(restarted, site.directory, "again")
    reference.assert_equal(report, waves=(wave,))
    assert report.count("kvtier_hit_tokens", tier="nvme") > 0
    site.assert_nothing_held()
