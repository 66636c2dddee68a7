"""What a real engine was asked is recorded, and can be simulated.

Engines start slowly, so these also stand, by day, for staged loads and for preemptions, aborts
and a reset: every token is compared.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.config import load_config
from kvtier.sim.cache import simulate_cache
from kvtier.sim.traces import Trace, read_trace
from tests.demo.model import BLOCK_TOKENS, KV_NBYTES_PER_BLOCK
from tests.demo.runner import run_engine
from tests.demo.scenario import Report, Scenario
from tests.integration.harness import Reference, Site, assert_nothing_pinned
from tests.integration.test_connector import through

RAM_SHARE = 0.15


def recording(scenario: Scenario, directory: Path, **settings: Any) -> Scenario:
    """Return ``scenario`` with everything recorded in ``directory``."""
    assert scenario.config is not None
    values = yaml.safe_load(scenario.config.read_text())
    values |= {"trace": {"record": str(directory)}, **settings}
    scenario.config.write_text(yaml.safe_dump(values))
    return scenario


def recorded(site: Site) -> Path:
    """Return the recording's file of requests."""
    (requests,) = site.directory.glob("trace/requests-*.jsonl")
    return requests


def assert_traffic_is_recorded(requests: Path, report: Report) -> Trace:
    trace = read_trace(requests)
    assert trace.format == "mooncake"
    assert trace.chunk_tokens == BLOCK_TOKENS
    lengths = (len(answer.prompt) // BLOCK_TOKENS for answer in report.answers())
    assert sorted(trace.input_tokens.tolist()) == sorted(
        length * BLOCK_TOKENS for length in lengths if length
    )
    arrivals = [json.loads(line)["timestamp"] for line in requests.read_text().splitlines()]
    assert arrivals == sorted(arrivals)
    return trace


def assert_shadows_saw(trace: Trace, report: Report) -> None:
    for tier, policy in itertools.product(("ram", "nvme"), ("lhd", "arc")):
        asked = report.count("kvtier_shadow_asked_chunks", tier=tier, policy=policy)
        hits = report.count("kvtier_shadow_hit_chunks", tier=tier, policy=policy)
        assert 0 < hits < asked == trace.refs
        ratio = report.waves[-1].counters[
            f"kvtier_shadow_hit_ratio{{policy={policy},tier={tier}}}"
        ]
        assert ratio == pytest.approx(hits / asked)


def test_a_recorded_run_can_be_simulated(reference: Reference, site: Site) -> None:
    blocks, waves = reference.footprint_blocks, reference.conversations[:3]
    sizes = {"ram_blocks": int(RAM_SHARE * blocks), "nvme_blocks": int(0.3 * blocks)}
    scenario = recording(
        through("staged", site.scenario(waves, **sizes)),
        site.directory / "trace",
        shadow=["arc"],
        placement={"write": "evict"},
    )
    report = run_engine(scenario, site.directory, "recorded")
    reference.assert_equal(report, waves=waves)
    assert report.count("kvtier_failed_chunks") == 0
    assert report.count("kvtier_internal_errors") == 0
    assert report.count("kvtier_trace_dropped") == 0
    assert report.count("kvtier_trace_records") > 0
    config = load_config(site.directory / "kvtier.yaml")
    trace = assert_traffic_is_recorded(recorded(site), report)
    simulated = simulate_cache(trace, config, chunk_bytes=KV_NBYTES_PER_BLOCK)
    assert simulated.total_hit_ratio > 0
    assert_shadows_saw(trace, report)
    site.assert_nothing_held()


def test_preemptions_aborts_and_a_reset_keep_every_token_equal(
    reference: Reference, site: Site
) -> None:
    scenario = recording(site.troubled_scenario(), site.directory / "trace")
    report = run_engine(scenario, site.directory, "reset")
    reference.assert_equal(report, waves=scenario.waves)
    assert report.count("vllm:num_preemptions") > 0
    assert any(answer.aborted for answer in report.waves[1].answers)
    fresh = report.model_copy(update={"waves": report.waves[2:]})
    assert [answer.cached_tokens for answer in fresh.answers()] == [0, 0, 0]
    assert fresh.count("kvtier_hit_tokens") == 0
    assert_nothing_pinned(report)
    site.assert_nothing_held()
    assert recorded(site).stat().st_size > 0
