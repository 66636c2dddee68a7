"""The negative controls: comparing tokens would notice wrong KV, and only wrong KV."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtier.vllm.demo.runner import run_engine
from kvtier.vllm.demo.scenario import Prompt, Report, Scenario, Wave
from tests.integration.harness import Reference

SAMPLE = 16


def with_another_first_block(prompt: Prompt, draw: random.Random) -> Prompt:
    return Prompt(tokens=tuple(draw.sample(range(2, 500), 32)) + prompt.tokens[32:])


@pytest.fixture(scope="module")
def control(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Plain vLLM: once in small steps, with damaged KV, and with other first tokens."""
    directory: Path = tmp_path_factory.mktemp("control")
    once = Wave(prompts=reference.conversations[2].prompts[:SAMPLE])
    draw = random.Random(3)
    other = tuple(with_another_first_block(prompt, draw) for prompt in once.prompts)
    damaged = once.model_copy(update={"damage_every": 16})
    scenario = Scenario(
        model=reference.model,
        waves=(once, damaged, Wave(prompts=other)),
        gpu_blocks=1024,
        step_tokens=320,
    )
    return run_engine(scenario, directory, "control")


def wrong_answers(reference: Reference, report: Report, wave: int) -> int:
    expected = [
        reference.answers[p.tokens] for p in reference.conversations[2].prompts[:SAMPLE]
    ]
    seen = [answer.tokens for answer in report.waves[wave].answers]
    return sum(mine != theirs for mine, theirs in zip(seen, expected, strict=True))


def test_the_size_of_a_step_does_not_change_the_tokens(
    reference: Reference, control: Report
) -> None:
    assert wrong_answers(reference, control, wave=0) == 0


def test_one_wrong_block_in_sixteen_changes_most_answers(
    reference: Reference, control: Report
) -> None:
    assert wrong_answers(reference, control, wave=1) > SAMPLE // 2


def test_other_tokens_early_in_the_prompt_change_nearly_every_answer(
    reference: Reference, control: Report
) -> None:
    assert wrong_answers(reference, control, wave=2) >= SAMPLE - 1
