"""A store outlives its engine, however that ends, and has one engine at a time."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.demo.runner import EngineFailedError, EngineProcess, run_engine
from tests.demo.scenario import Wave
from tests.integration.harness import Reference, Site

WRITE_DEADLINE_S = 60.0
LOOK_S = 0.001  # less than storing a step's chunks takes; and the engine needs every core


@pytest.mark.slow
def test_a_second_engine_is_refused_a_store_whose_engine_does_not_answer(
    reference: Reference, site: Site
) -> None:
    scenario = site.scenario(reference.conversations, ram_blocks=64, nvme_blocks=64)
    with EngineProcess(scenario, site.directory, "first") as engine:
        engine.wait_for("ready")
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineFailedError):
            run_engine(scenario, site.directory, "second")
    assert f"pid {engine.pid}" in site.log("second")


def test_a_store_outlives_an_engine_that_is_killed_while_storing(
    reference: Reference, site: Site
) -> None:
    waves = reference.conversations
    blocks = reference.footprint_blocks
    scenario = site.scenario(waves, ram_blocks=blocks // 5, nvme_blocks=blocks)
    first = waves[:2]
    with EngineProcess(scenario, site.directory, "killed") as engine:
        for _ in first:
            engine.wait_for("wave")
        wait_for_a_write(site)
        engine.kill()
    again = scenario.model_copy(update={"waves": first})
    report = run_engine(again, site.directory, "after")
    reference.assert_equal(report, waves=first)
    assert report.waves[0].counters["kvtier_hit_tokens{tier=nvme}"] > 0
    assert "ERROR" not in site.log("after")
    site.assert_nothing_held()


def wait_for_a_write(site: Site) -> None:
    """Return the moment a chunk reaches the slab: more are on their way, its row may be."""
    (slots,) = site.store.glob("*/slots.bin")
    before = slots.stat().st_mtime_ns
    deadline = time.monotonic() + WRITE_DEADLINE_S
    while slots.stat().st_mtime_ns == before:
        assert time.monotonic() < deadline
        time.sleep(LOOK_S)


def test_chunks_that_two_ranks_spilled_load_with_one_rank(
    reference: Reference, site: Site
) -> None:
    """By night, ``test_every_way`` starts two ranks again, and ``test_ranks`` two after one."""
    wave = Wave(prompts=reference.conversations[0].prompts[:16], max_tokens=4)
    again = wave.model_copy(update={"prompts": wave.prompts[::-1]})
    scenario = site.scenario((wave, again), ram_blocks=48, nvme_blocks=512)
    scenario = scenario.model_copy(update={"ranks": 2})
    report = run_engine(scenario, site.directory, "ranks")
    reference.assert_equal(report, waves=(wave, again))
    assert report.count("kvtier_hit_tokens", tier="nvme") > 0
    site.assert_nothing_held()
    restarted = scenario.model_copy(update={"waves": (wave,), "ranks": 1})
    report = run_engine(restarted, site.directory, "again")
    reference.assert_equal(report, waves=(wave,))
    assert report.count("kvtier_hit_tokens", tier="nvme") > 0
    assert len(list(site.store.rglob("slots.bin"))) == 1
    site.assert_nothing_held()
