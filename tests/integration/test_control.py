"""The controls: comparing tokens would notice wrong KV, and only wrong KV."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.demo.runner import run_engine
from tests.demo.scenario import Scenario, Wave
from tests.integration.harness import CONTROLS, Reference


def test_one_wrong_block_in_sixteen_changes_most_answers(reference: Reference) -> None:
    wrong = [answer.tokens != reference.answers[answer.prompt] for answer in reference.damaged]
    assert len(wrong) == CONTROLS
    assert sum(wrong) > CONTROLS // 2


def test_other_tokens_early_in_the_prompt_change_nearly_every_answer(
    reference: Reference,
) -> None:
    first = reference.conversations[0].prompts[:CONTROLS]
    changed = [
        answer.tokens != reference.answers[prompt.tokens]
        for answer, prompt in zip(reference.other, first, strict=True)
    ]
    assert sum(changed) >= CONTROLS - 1


@pytest.mark.slow
def test_the_size_of_a_step_does_not_change_the_tokens(
    reference: Reference, tmp_path: Path
) -> None:
    wave = Wave(prompts=reference.conversations[2].prompts[:CONTROLS])
    scenario = Scenario(model=reference.model, waves=(wave,), gpu_blocks=1024, step_tokens=320)
    report = run_engine(scenario, tmp_path, "steps")
    reference.assert_equal(report, waves=(wave,))
