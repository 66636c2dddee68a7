"""Loads within the forward pass of a real engine: the same tokens, also when copies fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from kvtier.config import Door
from kvtier.vllm.demo.runner import EngineFailedError, run_engine
from kvtier.vllm.demo.scenario import Report, Scenario, Wave
from tests.integration.failing_copies import (
    FAULTS,
    LATE_S,
    NAME,
    injected,
    install,
    plan,
)
from tests.integration.harness import Reference, Site
from tests.integration.test_connector import windowed
from tests.integration.test_tokens import hit_tokens

__all__ = ["windowed"]

GPU_BLOCKS = 48
CONTEXT_TOKENS = 1024
PROMPTS = 8
ONE_IN = 8
"""Layers are copied one by one, four to a load, so nearly every other load fails."""


@pytest.fixture
def failing(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site whose engines' copies within the forward pass do as they are told."""
    install(site.directory)
    monkeypatch.setenv("PYTHONPATH", str(site.directory), prepend=os.pathsep)
    return site


def layerwise(scenario: Scenario, *, fails: bool = False) -> Scenario:
    """Return ``scenario`` with loads within the forward pass and little room for KV."""
    assert scenario.config is not None
    settings = yaml.safe_load(scenario.config.read_text())
    settings["transfer"] = {"load_mode": "layerwise"}
    if fails:
        settings["transfer"]["load_timeout"] = f"{LATE_S / 2}s"
        # Without a disk, whose reads could be late as well on a busy machine.
        settings["tiers"] = [settings["tiers"][0] | {"eviction": f"{NAME}:Order"}]
    scenario.config.write_text(yaml.safe_dump(settings))
    return scenario.model_copy(
        update={"gpu_blocks": GPU_BLOCKS, "context_tokens": CONTEXT_TOKENS}
    )


def few(wave: Wave, prompts: int = PROMPTS) -> Wave:
    return wave.model_copy(update={"prompts": wave.prompts[:prompts], "max_tokens": 4})


def sick(site: Site, wave: Wave, fault: str, one_in: int = ONE_IN) -> Wave:
    """Return ``wave``, sent to an engine whose copies suffer ``fault``; 0 for none."""
    return wave.model_copy(update={"files": plan(site.directory, fault, one_in)})


def failed_loads(report: Report, wave: int) -> float:
    one = Report(waves=(report.waves[wave],))
    return one.count("kvtier_failed_chunks", tier="ram", cause="load")


def assert_well(report: Report, site: Site) -> None:
    assert report.count("kvtier_internal_errors") == 0
    last = report.waves[-1].counters
    busy = ("kvtier_held_chunks", "kvtier_granted_chunks", "kvtier_dirty_chunks")
    assert {value for series, value in last.items() if series.startswith(busy)} == {0}
    site.assert_nothing_held()


def check_faults(site: Site, talk: Wave, *, ranks: int = 1) -> Report:
    """Store ``talk`` and load it, in good health before each fault and after the last."""
    well = sick(site, talk, "none", one_in=0)
    waves = [talk]
    for fault in FAULTS:
        waves += [well, sick(site, talk, fault)]
    waves.append(well)
    blocks = site.reference.footprint_blocks
    scenario = layerwise(
        site.scenario(waves, ram_blocks=blocks, nvme_blocks=blocks), fails=True
    )
    report = run_engine(
        scenario.model_copy(update={"ranks": ranks}), site.directory, "layerwise"
    )
    site.reference.assert_equal(report, waves=waves)
    assert not any(answer.failed for answer in report.answers())
    done = injected(site.directory)
    assert done["copied"] > 0, "nothing was loaded within a forward pass"
    failed = [failed_loads(report, wave) for wave in range(len(waves))]
    assert [loads > 0 for loads in failed] == [False, *[False, True] * len(FAULTS), False]
    assert all(done[fault] for fault in FAULTS)
    assert hit_tokens(report, "ram") > 0
    assert_well(report, site)
    return report


def test_copies_that_fail_are_torn_or_late_cost_a_recomputation_and_nothing_else(
    reference: Reference, failing: Site
) -> None:
    talk = few(reference.conversations[1])
    report = check_faults(failing, talk)
    loaded = Report(waves=(report.waves[1],))
    prompts = sum(len(prompt.tokens) for prompt in talk.prompts)
    assert hit_tokens(loaded, "ram") > 0.6 * prompts
    assert "load_mode: layerwise is not possible" not in failing.log("layerwise")


@pytest.mark.slow
def test_copies_that_fail_in_one_of_two_ranks_are_computed_by_both(
    reference: Reference, failing: Site
) -> None:
    check_faults(failing, few(reference.conversations[1]), ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_where_failed_loads_fail_requests_the_others_end_well(
    fault: str, reference: Reference, failing: Site
) -> None:
    talk = few(reference.conversations[1], prompts=40)
    waves = [talk, sick(failing, talk, fault), sick(failing, talk, "none", one_in=0)]
    blocks = reference.footprint_blocks
    scenario = layerwise(
        failing.scenario(waves, ram_blocks=blocks, nvme_blocks=blocks), fails=True
    )
    scenario = scenario.model_copy(update={"load_failures": "fail"})
    report = run_engine(scenario, failing.directory, "fail")
    failed = [answer for answer in report.waves[1].answers if answer.failed]
    assert 0 < len(failed) < len(talk.prompts)
    assert not any(answer.failed for answer in report.waves[2].answers)
    for answer in report.answers():
        if not answer.failed:
            assert answer.tokens == reference.answers[answer.prompt][:4]
    assert_well(report, failing)


@pytest.mark.slow
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_two_hundred_requests_keep_every_token(
    blocks_per_chunk: int, reference: Reference, site: Site
) -> None:
    """Hits in RAM are loaded within the pass, those below ahead of it."""
    blocks, waves = reference.footprint_blocks, reference.conversations
    scenario = site.scenario(
        waves, ram_blocks=blocks // 3, nvme_blocks=blocks, blocks_per_chunk=blocks_per_chunk
    )
    room = {"gpu_blocks": scenario.gpu_blocks, "context_tokens": scenario.context_tokens}
    scenario = layerwise(scenario).model_copy(update=room)
    report = run_engine(scenario, site.directory, "spill")
    reference.assert_equal(report, waves=waves)
    assert hit_tokens(report, "ram") > 0
    assert hit_tokens(report, "nvme") > 0
    assert_well(report, site)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_preemption_aborts_and_resets_amid_traffic_keep_every_token(
    fails: bool, reference: Reference, failing: Site
) -> None:
    preempting = reference.long_answers
    waves = [
        sick(failing, preempting, "torn", one_in=ONE_IN if fails else 0),
        preempting.model_copy(update={"abort": (0, 3, 4, 7, 11)}),
        preempting.model_copy(update={"abort": (1, 2), "abort_after_steps": 1}),
        preempting.model_copy(update={"reset_after_steps": 5}),
        preempting,
    ]
    scenario = layerwise(failing.scenario(waves, ram_blocks=400, nvme_blocks=400), fails=True)
    scenario = scenario.model_copy(update={"gpu_blocks": 40, "context_tokens": 512})
    report = run_engine(scenario, failing.directory, "preempt")
    reference.assert_equal(report, waves=waves)
    assert report.count("vllm:num_preemptions") > 0
    assert injected(failing.directory)["copied"] > 0
    assert_well(report, failing)


@pytest.mark.slow
def test_several_kv_cache_groups_are_loaded_ahead(
    windowed: Path, reference: Reference, site: Site
) -> None:
    wave = few(reference.conversations[1])
    plain = Scenario(model=windowed, waves=(wave,), gpu_blocks=2048)
    expected = run_engine(plain, site.directory, "plain").tokens()
    scenario = layerwise(site.scenario((wave, wave), ram_blocks=800, nvme_blocks=800))
    scenario = scenario.model_copy(update={"model": windowed, "gpu_blocks": 72})
    report = run_engine(scenario, site.directory, "ahead")
    assert report.tokens() == [*expected, *expected]
    assert hit_tokens(report, "ram") > 0
    log = site.log("ahead")
    assert "load_mode: layerwise is not possible, so ahead: the model has 2 KV" in log
    assert_well(report, site)


@pytest.mark.slow
def test_the_spec_refuses_to_load_within_the_forward_pass(
    reference: Reference, site: Site
) -> None:
    wave = Wave(prompts=reference.conversations[0].prompts[:1], max_tokens=1)
    scenario = layerwise(site.scenario((wave,), ram_blocks=64, nvme_blocks=64))
    with pytest.raises(EngineFailedError):
        run_engine(scenario.model_copy(update={"door": Door.SPEC}), site.directory, "refused")
    log = site.log("refused")
    assert "transfer.load_mode = layerwise: this door cannot report a load that fails" in log
