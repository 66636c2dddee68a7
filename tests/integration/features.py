"""An engine's settings and questions, asked of plain vLLM and of one with kvtier.

An engine with little room stores what one wave computes and loads it for the next; another
loads it after a restart. Plain vLLM gets the same waves with room for everything, so that it
has in its prefix cache what kvtier has in its tiers: where arithmetic of few bits makes the
answer depend on how much was computed at once, it is still the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.demo.model import KV_NBYTES_PER_BLOCK
from tests.demo.runner import run_engine
from tests.demo.scenario import Answer, Prompt, Report, Scenario, Wave, store_yaml
from tests.integration.harness import words
from tests.integration.test_connector import through

PROMPTS = 8
ROOM_BLOCKS = 48
"""Of the GPU: three or four prompts."""
RAM_BLOCKS = 24
NVME_BLOCKS = 2000
CONTEXT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Feature:
    """An engine's settings, and what it is asked.

    Attributes:
        directory: Of the model and everything else the engine reads.
        waves: What is asked, of each engine.
        again: How many waves, counted from the last, are asked again after a restart.
        arguments: Of the engine.
        room_blocks: Blocks of the GPU with kvtier.
        block_share: Bytes of a block, as a share of the demo model's.
        step_tokens: Most tokens of one step.
    """

    directory: Path
    waves: Sequence[Wave]
    again: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    room_blocks: int = ROOM_BLOCKS
    block_share: float = 1.0
    step_tokens: int = 2048

    def scenario(self) -> Scenario:
        return Scenario(
            model=self.directory / "model",
            waves=tuple(self.waves),
            gpu_blocks=2048,
            context_tokens=CONTEXT_TOKENS,
            step_tokens=self.step_tokens,
            arguments={**self.arguments},
        )

    def plain(self) -> Report:
        """Ask plain vLLM; nothing is aborted, so that every answer is known."""
        whole = [wave.model_copy(update={"abort": ()}) for wave in self.waves]
        scenario = self.scenario().model_copy(update={"waves": tuple(whole)})
        return run_engine(scenario, self.directory, "plain")

    def tiered(self, directory: Path, entry_point: str) -> tuple[Report, Report]:
        """Ask an engine with kvtier, and the one after it."""
        config = store_yaml(
            directory / "kvtier.yaml",
            store=directory / "store",
            ram_nbytes=int(RAM_BLOCKS * self.block_share * KV_NBYTES_PER_BLOCK),
            nvme_nbytes=NVME_BLOCKS * KV_NBYTES_PER_BLOCK,
        )
        changed = {"config": config, "gpu_blocks": self.room_blocks}
        scenario = through(entry_point, self.scenario().model_copy(update=changed))
        first = run_engine(scenario, directory, "first")
        again = tuple(self.waves)[-self.again :]
        return first, run_engine(
            scenario.model_copy(update={"waves": again}), directory, "again"
        )


Make = Callable[[Path], Feature]


def two_ways(prompts: Sequence[Prompt], max_tokens: int = 8) -> tuple[Wave, Wave]:
    """Return a wave, and the same prompts the other way round."""
    wave = Wave(prompts=tuple(prompts), max_tokens=max_tokens)
    return wave, wave.model_copy(update={"prompts": wave.prompts[::-1]})


def some_prompts(count: int = PROMPTS) -> list[Prompt]:
    draw = random.Random(9)
    # No whole number of blocks: of such a prompt the GPU's prefix cache finds a block less.
    lengths = [draw.randrange(8, 14) * 32 + draw.randrange(3, 30) for _ in range(count)]
    return [Prompt(tokens=words(draw, length, length)) for length in lengths]


def assert_same(plain: Sequence[Answer], tiered: Sequence[Answer]) -> None:
    for ours, theirs in zip(tiered, plain, strict=True):
        if not ours.aborted:
            assert ours.prompt == theirs.prompt
            assert (ours.tokens, ours.others) == (theirs.tokens, theirs.others)
            assert ours.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=1e-3)


def assert_every_token_equal(
    feature: Feature, expected: Report, first: Report, again: Report
) -> None:
    """Compare both engines' answers with plain vLLM's."""
    assert_same(expected.answers(), first.answers())
    for wave, answered in zip(expected.waves[-feature.again :], again.waves, strict=True):
        assert_same(wave.answers, answered.answers)


def assert_loaded(again: Report, entry_point: str) -> None:
    """Part of what the engine after a restart was asked first came from NVMe.

    Behind the spec, vLLM asks for chunk after chunk and computes a prompt whose chunks find no
    slot. The RAM tier holds little more than one prompt, so one of four may be all.
    """
    assert again.count("kvtier_hit_tokens", tier="nvme") > 0
    # With several groups and the specification the counter is of another group's chunks.
    asked = again.waves[0].answers
    share = loaded_tokens(asked) / sum(len(answer.prompt) for answer in asked)
    assert share > (0.15 if entry_point == "spec" else 0.4)


def loaded_tokens(answers: Sequence[Answer]) -> int:
    return sum(answer.cached_tokens for answer in answers)


def assert_well(*reports: Report) -> None:
    for report in reports:
        assert report.count("kvtier_internal_errors") == 0
        assert report.count("kvtier_failed_chunks") == 0


class Plain:
    """The answers of plain vLLM, once for all entry points."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Make, tuple[Feature, Report]] = {}

    def __call__(self, make: Make) -> tuple[Feature, Report]:
        if make not in self._known:
            directory = self._directory / make.__name__
            directory.mkdir()
            feature = make(directory)
            self._known[make] = feature, feature.plain()
        return self._known[make]
