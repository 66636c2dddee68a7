"""Scenarios with every entry point, load path and number of ranks.

By day they run with the connector, its default load path, one rank, full attention and a
process for the NVMe tier, most of them in other modules. The other combinations run by night.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.demo.runner import EngineProcess, run_engine
from tests.demo.scenario import Scenario
from tests.integration.harness import (
    WINDOWED,
    Reference,
    Site,
    assert_nothing_pinned,
    hit_tokens,
    run_reference,
)
from tests.integration.test_connector import through


@dataclass(frozen=True, slots=True)
class Way:
    """A way through kvtier: entry point, load path, ranks, model and process of the I/O."""

    entry_point: str
    ranks: int
    windowed: bool
    own_process: bool = True

    def __str__(self) -> str:
        model = "windowed" if self.windowed else "full"
        return (
            f"{self.entry_point}-{self.ranks}-{model}{'' if self.own_process else '-inprocess'}"
        )


FULL, WINDOWED_TOO = False, True
DEFAULT = Way("direct", 1, FULL)
OTHERS = [
    Way("spec", 1, FULL),
    Way("staged", 1, FULL),
    Way("spec", 2, FULL),
    Way("staged", 2, FULL),
    Way("direct", 2, FULL),
    Way("staged", 1, WINDOWED_TOO),
    Way("direct", 1, WINDOWED_TOO),
    Way("direct", 2, WINDOWED_TOO),
    Way("direct", 1, FULL, own_process=False),
]
OTHERS_BY_NIGHT = [pytest.param(way, marks=pytest.mark.slow) for way in OTHERS]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory, reference: Reference) -> Reference:
    answers = run_reference(tmp_path_factory.mktemp("windowed"), WINDOWED)
    both = reference.answers.keys() & answers.answers.keys()
    assert any(reference.answers[prompt] != answers.answers[prompt] for prompt in both), (
        "the window is not felt"
    )
    return answers


@pytest.fixture(params=OTHERS_BY_NIGHT, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    chosen: Way = request.param
    return chosen


@pytest.fixture
def asked(way: Way, request: pytest.FixtureRequest) -> Reference:
    """The requests, and what this way's model answers without kvtier."""
    answers: Reference = request.getfixturevalue("windowed" if way.windowed else "reference")
    return answers


@pytest.fixture
def place(asked: Reference, tmp_path: Path) -> Site:
    return Site(tmp_path, asked)


def by(way: Way, scenario: Scenario) -> Scenario:
    # Two groups have half the blocks for a request that one has.
    context = min(scenario.context_tokens, 2048) if way.windowed else scenario.context_tokens
    changed = {"ranks": way.ranks, "context_tokens": context}
    chosen = through(way.entry_point, scenario.model_copy(update=changed))
    assert chosen.config is not None
    settings = yaml.safe_load(chosen.config.read_text())
    settings["tiers"][1]["own_process"] = way.own_process
    chosen.config.write_text(yaml.safe_dump(settings))
    return chosen


def io_processes(pid: int) -> list[int]:
    """Return the processes of tiers that a process started and that run."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for thread in threads for child in thread.read_text().split()]
    return [
        child
        for child in children
        if b"kvtier.tiers.hosted.host" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def test_preemption_aborts_and_a_reset_keep_every_token_equal(
    way: Way, asked: Reference, place: Site
) -> None:
    scenario = by(way, place.troubled_scenario())
    report = run_engine(scenario, place.directory, "preempted")
    asked.assert_equal(report, waves=scenario.waves)
    assert report.count("vllm:num_preemptions") > 0
    assert [answer.cached_tokens for answer in report.waves[2].answers] == [0, 0, 0]
    assert report.count("kvtier_internal_errors") == 0
    assert_nothing_pinned(report)
    place.assert_nothing_held()


@pytest.mark.parametrize("way", [DEFAULT, *OTHERS_BY_NIGHT], ids=str)
def test_tiers_too_small_for_the_work_and_chunks_of_four_blocks_keep_every_token_equal(
    way: Way, asked: Reference, place: Site
) -> None:
    blocks, waves = asked.footprint_blocks, asked.conversations[:3]
    scenario = place.scenario(
        waves, ram_blocks=blocks // 10, nvme_blocks=blocks // 5, blocks_per_chunk=4
    )
    report = run_engine(by(way, scenario), place.directory, "small")
    asked.assert_equal(report, waves=waves)
    assert hit_tokens(report, "nvme") > 0
    assert report.count("kvtier_evicted_chunks", tier="nvme") > 0
    assert report.count("kvtier_internal_errors") == 0
    assert_nothing_pinned(report)
    place.assert_nothing_held()


def test_chunks_of_a_killed_engine_are_loaded_by_the_next(
    way: Way, asked: Reference, place: Site
) -> None:
    blocks, waves = asked.footprint_blocks, asked.conversations[:2]
    scenario = by(way, place.scenario(waves, ram_blocks=blocks // 5, nvme_blocks=blocks))
    with EngineProcess(scenario, place.directory, "killed") as engine:
        for _ in waves:
            engine.wait_for("wave")
        assert len(io_processes(engine.pid)) == way.own_process
        os.kill(engine.pid, signal.SIGKILL)
    report = run_engine(scenario, place.directory, "after")
    asked.assert_equal(report, waves=waves)
    assert report.waves[0].counters["kvtier_hit_tokens{tier=nvme}"] > 0
    assert report.count("kvtier_internal_errors") == 0
    place.assert_nothing_held()
