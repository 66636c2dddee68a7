"""What every vLLM that kvtier works with must do: spill, end, start again and reload.

Each entry point has a cache of its own: vLLM chooses another layout behind the spec.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtier.config import VllmEntryPoint
from tests.demo.model import write_model
from tests.demo.runner import run_engine
from tests.demo.scenario import Prompt, Report, Scenario, Wave
from tests.integration.harness import Reference, Site, distinct_blocks, words

ENGINE_S = 900.0
"""What one engine may take: on a busy machine warming up alone takes minutes."""
PROMPTS = 16
RAM_SHARE = 0.25
BLOCKS_PER_CHUNK = 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The answers of plain vLLM; also shows that wrong KV would be seen."""
    tmp_path = tmp_path_factory.mktemp("reference")
    draw = random.Random(11)
    wave = Wave(prompts=tuple(Prompt(tokens=words(draw, 300, 700)) for _ in range(PROMPTS)))
    damaged = wave.model_copy(update={"damage_every": 16})
    model = tmp_path / "model"
    write_model(model)
    scenario = Scenario(model=model, waves=(wave, damaged), gpu_blocks=1024)
    right, wrong = run_engine(scenario, tmp_path, "plain", timeout_s=ENGINE_S).waves
    pairs = zip(right.answers, wrong.answers, strict=True)
    assert sum(mine.tokens != theirs.tokens for mine, theirs in pairs) > PROMPTS // 2
    return Reference(
        model=model,
        conversations=(wave,),
        long_answers=wave,
        answers={answer.prompt: answer.tokens for answer in right.answers},
        footprint_blocks=distinct_blocks([prompt.tokens for prompt in wave.prompts]),
    )


def assert_sound(report: Report) -> None:
    assert report.count("kvtier_internal_errors") == 0
    assert report.count("kvtier_failed_chunks") == 0


@pytest.mark.parametrize("entry_point", VllmEntryPoint)
def test_an_engine_reloads_what_another_spilled_and_no_token_differs(
    reference: Reference, tmp_path: Path, entry_point: VllmEntryPoint
) -> None:
    site = Site(tmp_path, reference)
    waves, blocks = reference.conversations, reference.footprint_blocks
    scenario = site.scenario(
        (*waves, *waves),
        ram_blocks=int(RAM_SHARE * blocks),
        nvme_blocks=2 * blocks,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
    ).model_copy(update={"entry_point": entry_point})
    first = run_engine(scenario, site.directory, "first", timeout_s=ENGINE_S)
    reference.assert_equal(first, waves=scenario.waves)
    assert_sound(first)
    assert first.count("kvtier_evicted_chunks", tier="ram") > 0
    assert first.count("kvtier_hit_tokens", tier="nvme") > 0
    again = scenario.model_copy(update={"waves": waves})
    second = run_engine(again, site.directory, "second", timeout_s=ENGINE_S)
    reference.assert_equal(second, waves=waves)
    assert_sound(second)
    reloaded_tokens = second.count("kvtier_hit_tokens", tier="nvme")
    assert reloaded_tokens == sum(answer.cached_tokens for answer in second.answers())
    assert reloaded_tokens > 0.5 * second.prompt_tokens()
    site.assert_nothing_held()
