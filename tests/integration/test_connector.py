"""Both entry points into vLLM and both load paths generate the tokens of vLLM alone.

The scenarios of the other modules run with the connector, and all but one of
``test_recording`` with its default load path. This module has the offloading spec, long
scenarios (by night, except for the default), models with several KV cache groups, and loads
that fail. ``test_every_way`` has the combinations.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvtier.config import VllmEntryPoint
from tests.demo.model import (
    BLOCK_TOKENS,
    KV_NBYTES_PER_BLOCK,
    architecture,
    write_model,
)
from tests.demo.runner import EngineFailedError, run_engine
from tests.demo.scenario import Report, Scenario, Wave
from tests.integration.harness import (
    WINDOWED,
    Reference,
    Site,
    assert_nothing_pinned,
    hit_tokens,
)

ENTRY_POINTS = {
    "spec": (VllmEntryPoint.SPEC, "staged"),
    "staged": (VllmEntryPoint.CONNECTOR, "staged"),
    "direct": (VllmEntryPoint.CONNECTOR, "direct"),
}
OTHERS = ("spec", "staged")
GPU_BLOCKS = 72
CONTEXT_TOKENS = 1024


def through(entry_point: str, scenario: Scenario) -> Scenario:
    """Return ``scenario`` with the way into vLLM, and the load path, of that name."""
    way, load_path = ENTRY_POINTS[entry_point]
    assert scenario.config is not None
    settings = yaml.safe_load(scenario.config.read_text())
    settings["transfer"] = {"load_path": load_path}
    scenario.config.write_text(yaml.safe_dump(settings))
    return scenario.model_copy(update={"entry_point": way})


def assert_served_from_both_tiers(report: Report) -> None:
    assert hit_tokens(report, "ram") > 0
    assert hit_tokens(report, "nvme") > 0
    assert report.count("kvtier_failed_chunks") == 0
    assert report.count("kvtier_internal_errors") == 0
    assert_nothing_pinned(report)


def test_a_small_spill_comes_back_through_the_specification(
    reference: Reference, site: Site
) -> None:
    waves = reference.conversations[:2]
    scenario = through("spec", site.scenario(waves, ram_blocks=120, nvme_blocks=800))
    report = run_engine(scenario, site.directory, "spec")
    reference.assert_equal(report, waves=waves)
    assert_served_from_both_tiers(report)
    site.assert_nothing_held()


@pytest.mark.parametrize(
    "entry_point", ["direct", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_two_hundred_requests_spill_to_nvme_and_every_token_is_equal(
    entry_point: str, reference: Reference, site: Site
) -> None:
    blocks, waves = reference.footprint_blocks, reference.conversations
    scenario = site.scenario(waves, ram_blocks=blocks // 5, nvme_blocks=blocks)
    report = run_engine(through(entry_point, scenario), site.directory, entry_point)
    assert len(report.answers()) == 200
    reference.assert_equal(report, waves=waves)
    assert_served_from_both_tiers(report)
    site.assert_nothing_held()


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("windowed") / "model"
    write_model(model)
    (model / "config.json").write_text(json.dumps(architecture() | WINDOWED))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("entry_point", ["staged", "direct"])
def test_a_model_with_a_sliding_window_gets_the_same_tokens(
    entry_point: str, windowed: Path, reference: Reference, site: Site
) -> None:
    wave = Wave(prompts=reference.conversations[1].prompts[:12], max_tokens=8)
    backwards = Wave(prompts=wave.prompts[::-1], max_tokens=8)
    plain = Scenario(model=windowed, waves=(wave,), gpu_blocks=2048)
    expected = {
        answer.prompt: answer.tokens
        for answer in run_engine(plain, site.directory, "plain").answers()
    }
    assert expected != {
        prompt.tokens: reference.answers[prompt.tokens] for prompt in wave.prompts
    }, "the window is not felt"
    scenario = site.scenario((wave, backwards), ram_blocks=60, nvme_blocks=800)
    scenario = scenario.model_copy(
        update={
            "model": windowed,
            "gpu_blocks": GPU_BLOCKS,
            "context_tokens": CONTEXT_TOKENS,
        }
    )
    report = run_engine(through(entry_point, scenario), site.directory, entry_point)
    assert all(expected[answer.prompt] == answer.tokens for answer in report.answers())
    assert report.waves[1].counters["kvtier_hit_tokens{tier=nvme}"] > 0
    assert report.count("kvtier_internal_errors") == 0
    assert_nothing_pinned(report)
    site.assert_nothing_held()


def test_the_specification_refuses_a_model_with_a_sliding_window(
    windowed: Path, site: Site
) -> None:
    scenario = site.scenario((), ram_blocks=60, nvme_blocks=800)
    room = {"model": windowed, "gpu_blocks": GPU_BLOCKS, "context_tokens": CONTEXT_TOKENS}
    scenario = through("spec", scenario.model_copy(update=room))
    with pytest.raises(
        EngineFailedError, match=r"UnsupportedError: this model has 2 .* use KVT"
    ):
        run_engine(scenario, site.directory, "spec")


@pytest.mark.slow
def test_a_load_that_fails_costs_a_recomputation_and_nothing_else(
    reference: Reference, site: Site
) -> None:
    """A restarted engine finds one rotten chunk in the middle of every prefix."""
    wave = Wave(prompts=reference.conversations[2].prompts[:8], max_tokens=4)
    blocks = reference.footprint_blocks
    scenario = through("direct", site.scenario((wave,), ram_blocks=blocks, nvme_blocks=blocks))
    run_engine(scenario, site.directory, "writer")
    (slots,) = site.store.glob("*/slots.bin")
    rot(slots, every=7)
    report = run_engine(scenario, site.directory, "reader")
    reference.assert_equal(report, waves=(wave,))
    corrupt = report.count("kvtier_corrupt_chunks", tier="nvme")
    assert corrupt > 0
    assert hit_tokens(report, "nvme") > 0
    assert ": not loaded: " in site.log("reader")
    kept = [answer.cached_tokens for answer in report.answers()]
    assert any(
        0 < tokens < len(prompt.tokens) - BLOCK_TOKENS
        for tokens, prompt in zip(kept, wave.prompts, strict=True)
    ), "what came before the rotten chunk is kept"
    assert_nothing_pinned(report)
    site.assert_nothing_held()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_with_several_groups_a_failed_load_fails_only_its_request(
    policy: str, windowed: Path, reference: Reference, site: Site
) -> None:
    """With several groups, failed loads are reported by request, not by block."""
    wave = Wave(prompts=reference.conversations[2].prompts[:16], max_tokens=4)
    blocks = reference.footprint_blocks
    scenario = through("direct", site.scenario((wave,), ram_blocks=blocks, nvme_blocks=blocks))
    scenario = scenario.model_copy(
        update={"model": windowed, "gpu_blocks": 2048, "load_failures": policy}
    )
    written = run_engine(scenario, site.directory, "writer")
    assert written.count("kvtier_hit_tokens") == 0, "the writer computed all of it"
    expected = {answer.prompt: answer.tokens for answer in written.answers()}
    (slots,) = site.store.glob("*/slots.bin")
    rot(slots, every=20)
    report = run_engine(scenario, site.directory, "reader")
    lost = site.log("reader").count(": not loaded: ")
    assert 0 < lost < len(wave.prompts)
    failed = [answer for answer in report.answers() if answer.failed]
    assert len(failed) == (lost if policy == "fail" else 0)
    for answer in report.answers():
        assert answer.failed or answer.tokens == expected[answer.prompt]
    assert report.count("kvtier_corrupt_chunks", tier="nvme") > 0
    assert hit_tokens(report, "nvme") > 0
    assert report.count("kvtier_internal_errors") == 0
    assert_nothing_pinned(report)
    site.assert_nothing_held()


def rot(slots: Path, *, every: int) -> None:
    """Flip a bit in every ``every``-th slot of a store of the demo model."""
    with slots.open("r+b") as file:
        size = slots.stat().st_size
        for at in range(3 * KV_NBYTES_PER_BLOCK, size, every * KV_NBYTES_PER_BLOCK):
            file.seek(at + 100)
            byte = file.read(1)
            file.seek(at + 100)
            file.write(bytes([byte[0] ^ 4]))
