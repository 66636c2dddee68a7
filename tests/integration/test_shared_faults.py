"""The service of a shared tier fails below a real engine: it goes on, token for token."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.demo.runner import EngineProcess, run_engine
from tests.demo.scenario import Report, Scenario, Wave, WaveReport
from tests.integration.harness import Reference, Site, hit_tokens
from tests.integration.shared_services import (
    SERVICES,
    Directory,
    Service,
    running,
    write_config,
)
from tests.integration.test_faults import counted, few

pytestmark = pytest.mark.slow

PROMPTS = 10
RAM_BLOCKS = 64
LOAD_TIMEOUT_S = 2.0
LOOKUP_TIMEOUT_S = 2.0
"""Moto answers a few hundred requests a second, and a wave sends eighty at once."""
SLACK_S = 10.0
"""For what else the machine does; a wave that waits for the service takes longer."""
HEALTHY = 4
TROUBLED = 3
RECOVERING = 20
"""A client of Mooncake waits for some seconds before it connects again."""
BREAKER = re.compile(r"(\S+ -> \S+) is (out of service|in service again)")


def impatient(site: Site, service: Service) -> Path:
    """Write a configuration with little memory and short deadlines."""
    tier = {"lookup_timeout": f"{LOOKUP_TIMEOUT_S}s"}
    if not isinstance(service, Directory):
        tier["request_timeout"] = "1s"
    timeout = f"{LOAD_TIMEOUT_S}s"
    return write_config(
        site.directory / "kvtier.yaml",
        service,
        ram_blocks=RAM_BLOCKS,
        tier=tier,
        transfer={
            "load_timeout": timeout,
            "store_timeout": timeout,
            "breaker_backoff": "200ms",
        },
    )


def troubled_scenario(site: Site, service: Service) -> Scenario:
    """Return a scenario of waves that the test begins, each of which loads from the service."""
    prompts = site.reference.conversations[0].prompts
    pair = [
        Wave(prompts=prompts[first : first + PROMPTS], max_tokens=4) for first in (0, PROMPTS)
    ]
    waves = itertools.islice(itertools.cycle(pair), HEALTHY + TROUBLED + RECOVERING)
    return Scenario(
        model=site.reference.model,
        config=impatient(site, service),
        waves=tuple(waves),
        gpu_blocks=48,
        context_tokens=1024,
        timed=True,
    )


def serve(engine: EngineProcess, waves: int) -> None:
    """Let ``engine`` serve some waves."""
    for _ in range(waves):
        engine.go()
        engine.wait_for("wave")


def failures(wave: WaveReport, kind: str) -> float:
    """Return how many chunks and questions failed."""
    names = ("kvtier_failed_chunks", "kvtier_expired_jobs", "kvtier_refused_jobs")
    return sum(counted(wave, name, tier=kind) for name in names)


def check(site: Site, kind: str, waves: Sequence[Wave], report: Report) -> None:
    """Check what an engine answered, how long it took, and what it counted."""
    site.reference.assert_equal(report, waves=waves)
    assert not any(answer.failed for answer in report.answers())
    assert report.count("kvtier_internal_errors") == 0
    healthy, troubled, recovered = (
        report.waves[:HEALTHY],
        report.waves[HEALTHY : HEALTHY + TROUBLED],
        report.waves[HEALTHY + TROUBLED :],
    )
    computed_s = max(wave.seconds for wave in healthy)
    patience_s = 2 * computed_s + LOAD_TIMEOUT_S + LOOKUP_TIMEOUT_S + SLACK_S
    assert max(wave.seconds for wave in report.waves) < patience_s
    assert hit_tokens(Report(waves=healthy), kind) > 0
    assert hit_tokens(Report(waves=troubled[1:]), kind) == 0
    assert sum(failures(wave, kind) for wave in troubled) > 0
    assert hit_tokens(Report(waves=recovered), kind) > 0
    changes = {*BREAKER.findall(site.log("engine"))}
    opened, closed = (
        {pair for pair, found in changes if found == state}
        for state in ("out of service", "in service again")
    )
    assert opened
    assert closed == opened


@pytest.mark.parametrize("kind", SERVICES)
def test_a_service_is_killed_and_started_again_while_an_engine_serves(
    site: Site, kind: str
) -> None:
    """A directory is renamed, and gets its name back."""
    with ExitStack() as stack:
        service = stack.enter_context(running(kind, site.directory))
        scenario = troubled_scenario(site, service)
        engine = stack.enter_context(EngineProcess(scenario, site.directory, "engine"))
        serve(engine, HEALTHY)
        engine.go()
        service.kill()
        engine.wait_for("wave")
        serve(engine, TROUBLED - 1)
        engine.go()
        service.start()
        engine.wait_for("wave")
        serve(engine, RECOVERING - 1)
        report = engine.result()
    check(site, kind, scenario.waves, report)


@pytest.mark.parametrize("kind", [kind for kind in SERVICES if kind != Directory.kind])
def test_a_service_stops_answering_for_a_while_below_an_engine(site: Site, kind: str) -> None:
    with ExitStack() as stack:
        service = stack.enter_context(running(kind, site.directory))
        scenario = troubled_scenario(site, service)
        engine = stack.enter_context(EngineProcess(scenario, site.directory, "engine"))
        serve(engine, HEALTHY)
        engine.go()
        with service.stalled():
            engine.wait_for("wave")
            serve(engine, TROUBLED - 1)
            engine.go()
        engine.wait_for("wave")
        serve(engine, RECOVERING - 1)
        report = engine.result()
    check(site, kind, scenario.waves, report)


@pytest.mark.parametrize("keeps", [False, True], ids=["new-weights", "keep_after_reset"])
def test_after_a_reset_an_engine_shares_chunks_only_if_it_keeps_them(
    reference: Reference, site: Site, keeps: bool
) -> None:
    before = few(reference.conversations[0], 8)
    after = few(reference.long_answers, 8)
    service = Directory(site.directory / "shared")
    tier = {"keep_after_reset": keeps}
    config = write_config(site.directory / "a.yaml", service, ram_blocks=256, tier=tier)
    waves = (before, few(before, 8, reset_first=True), after)
    scenario = Scenario(model=reference.model, config=config, waves=waves)
    report = run_engine(scenario, site.directory, "first")
    reference.assert_equal(report, waves=waves)
    other = scenario.model_copy(update={"waves": (after, before)})
    theirs = run_engine(other, site.directory, "second")
    reference.assert_equal(theirs, waves=other.waves)
    _, old, _ = report.waves
    new_of_other, old_of_other = theirs.waves
    tokens = [
        counted(wave, "kvtier_hit_tokens", tier="shared_dir")
        for wave in (old, new_of_other, old_of_other)
    ]
    assert [count > 0 for count in tokens] == [keeps, keeps, True]
