"""What an engine or a request may be besides plain: every token is plain vLLM's all the same.

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
import torch

from kvtier.vllm.demo.model import KV_NBYTES_PER_BLOCK, write_model
from kvtier.vllm.demo.runner import run_engine
from kvtier.vllm.demo.scenario import (
    Adapter,
    Answer,
    Prompt,
    Report,
    Scenario,
    Wave,
    store_yaml,
)
from tests.integration.harness import words
from tests.integration.odd_models import (
    HIDDEN,
    write_adapter,
    write_latent_model,
    write_recurrent_model,
)
from tests.integration.test_connector import DOORS, through

pytestmark = pytest.mark.slow

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

    def tiered(self, directory: Path, door: str) -> tuple[Report, Report]:
        """Ask an engine with kvtier, and the one after it."""
        config = store_yaml(
            directory / "kvtier.yaml",
            store=directory / "store",
            ram_nbytes=int(RAM_BLOCKS * self.block_share * KV_NBYTES_PER_BLOCK),
            nvme_nbytes=NVME_BLOCKS * KV_NBYTES_PER_BLOCK,
        )
        changed = {"config": config, "gpu_blocks": self.room_blocks}
        scenario = through(door, self.scenario().model_copy(update=changed))
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


def quantized(directory: Path) -> Feature:
    write_model(directory / "model")
    return Feature(
        directory,
        two_ways(some_prompts()),
        arguments={"kv_cache_dtype": "fp8"},
        block_share=1 / 4,
    )


def latent(directory: Path) -> Feature:
    write_latent_model(directory / "model")
    # vLLM's answers depend on what else is in a batch, with this attention on a CPU.
    return Feature(
        directory,
        two_ways(some_prompts()),
        arguments={"dtype": "bfloat16", "max_num_seqs": 1},
    )


def recurrent(directory: Path) -> Feature:
    write_recurrent_model(directory / "model")
    # The same holds for the recurrent layers.
    return Feature(
        directory,
        two_ways(some_prompts()),
        arguments={"max_num_seqs": 1},
        room_blocks=72,
        block_share=1 / 2,
    )


def guessing(directory: Path) -> Feature:
    """Most of what is guessed is rejected, and stays in its block until overwritten."""
    write_model(directory / "model")
    speculation = {"method": "ngram", "num_speculative_tokens": 5}
    speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    prompts = [
        Prompt(tokens=(prompt.tokens[:30] * 14)[: len(prompt.tokens)]) if place % 2 else prompt
        for place, prompt in enumerate(some_prompts())
    ]
    talk = Wave(prompts=tuple(prompts), max_tokens=70)
    draw = random.Random(3)
    more = tuple(Prompt(tokens=words(draw, 5, 20), after=each) for each in range(PROMPTS))
    goes_on = Wave(prompts=more, max_tokens=40)
    return Feature(
        directory,
        (talk, goes_on, *two_ways(prompts)),
        arguments={"speculative_config": speculation},
        room_blocks=72,
    )


def adapted(directory: Path) -> Feature:
    write_model(directory / "model")
    for seed, name in enumerate(("one", "two", "three")):
        write_adapter(directory / name, seed)
    adapters = [
        Adapter(name="a", number=1, path=directory / "one"),
        Adapter(name="b", number=2, path=directory / "two"),
    ]
    moved = Adapter(name="a", number=3, path=directory / "three")
    base = some_prompts(5)

    def asking(*chosen: Adapter) -> tuple[Wave, Wave]:
        return two_ways(
            [
                each.model_copy(update={"adapter": adapter})
                for adapter in chosen
                for each in base
            ]
        )

    # vLLM's CPU kernels apply an adapter to what asks for none, in a batch that has both.
    (plain, plain_back), (both, both_back) = two_ways(base), asking(*adapters)
    return Feature(
        directory,
        (plain, both, asking(moved)[0], plain_back, both_back),
        again=2,
        arguments={"enable_lora": True, "max_loras": 3, "max_lora_rank": 8},
    )


def asking_much(directory: Path) -> Feature:
    """Large blocks, odd steps, priorities, too little room, and all a request can say."""
    write_model(directory / "model")
    base = some_prompts(4)
    changed: list[dict[str, Any]] = [
        {"salt": "pepper"},
        {"salt": "paprika"},
        {"sampling": {"n": 3, "temperature": 1.0, "top_k": 1}},
        {"sampling": {"prompt_logprobs": 0}},
    ]
    prompts = base + [base[0].model_copy(update=change) for change in changed]
    for number in range(2):
        file = directory / f"embeds{number}.pt"
        random_embeds = torch.Generator().manual_seed(number)
        torch.save(torch.randn(300, HIDDEN, generator=random_embeds), file)
        prompts.append(Prompt(tokens=(number,) * 300, embeds=file))
    ranked = [
        each.model_copy(update={"priority": place * 7 % 5})
        for place, each in enumerate(prompts)
    ]
    there, back = two_ways(ranked, max_tokens=24)
    aborting = back.model_copy(update={"abort": (0, 3, 5, 8), "abort_after_steps": 2})
    return Feature(
        directory,
        (there, aborting, back),
        arguments={
            "block_size": 64,
            "scheduling_policy": "priority",
            "enable_prompt_embeds": True,
            "max_num_seqs": 32,
        },
        room_blocks=20,
        block_share=2,
        step_tokens=211,
    )


FEATURES = [quantized, latent, recurrent, guessing, adapted, asking_much]


def assert_same(plain: Sequence[Answer], tiered: Sequence[Answer]) -> None:
    for ours, theirs in zip(tiered, plain, strict=True):
        if not ours.aborted:
            assert ours.prompt == theirs.prompt
            assert (ours.tokens, ours.others) == (theirs.tokens, theirs.others)
            assert ours.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=1e-3)


def assert_adapters_are_felt(report: Report) -> None:
    """Each prompt is answered in four ways: by the model, and with each of three adapters."""
    ways: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for answer in report.answers():
        ways.setdefault(answer.prompt, set()).add(answer.tokens)
    assert {len(each) for each in ways.values()} == {4}


def assert_well(report: Report) -> None:
    assert report.count("kvtier_internal_errors") == 0
    assert report.count("kvtier_failed_chunks") == 0


class Plain:
    """What plain vLLM answers, once for all doors."""

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


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("door", [*DOORS])
@pytest.mark.parametrize("make", FEATURES, ids=lambda make: make.__name__)
def test_whatever_an_engine_or_a_request_is_every_token_is_plain_vllms(
    make: Make, door: str, plain: Plain, tmp_path: Path
) -> None:
    feature, expected = plain(make)
    first, again = feature.tiered(tmp_path, door)
    assert_same(expected.answers(), first.answers())
    for wave, answered in zip(expected.waves[-feature.again :], again.waves, strict=True):
        assert_same(wave.answers, answered.answers)
    if make is adapted:
        assert_adapters_are_felt(expected)
    assert first.count("kvtier_hit_tokens", tier="nvme") > 0
    # With several groups and the specification the counter is of another group's chunks.
    restarted = Report(waves=again.waves[:1])
    loaded_tokens = sum(answer.cached_tokens for answer in restarted.answers())
    if make is adapted and door == "spec":
        assert loaded_tokens == 0  # it begins empty where there are adapters
    else:
        assert again.count("kvtier_hit_tokens", tier="nvme") > 0
        assert loaded_tokens > 0.4 * restarted.prompt_tokens()
    assert_well(first)
    assert_well(again)
