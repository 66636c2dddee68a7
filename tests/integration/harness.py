"""One set of requests, the tokens plain vLLM answers, and the means to compare."""

from __future__ import annotations

import fcntl
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.demo.model import (
    BLOCK_TOKENS,
    KV_NBYTES_PER_BLOCK,
    VOCABULARY,
    architecture,
    write_model,
)
from tests.demo.runner import run_engine
from tests.demo.scenario import (
    Answer,
    Prompt,
    Report,
    Scenario,
    Wave,
    replayed,
    store_yaml,
)

CONVERSATIONS = 40
TURNS = 5
SYSTEM_PROMPTS = 8
LONG_ANSWERS = 12
CONTROLS = 16
ANSWER_TOKENS = 8
LONG_ANSWER_TOKENS = 64

WINDOWED = {
    "sliding_window": 2 * BLOCK_TOKENS,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""Every other layer sees a window of two blocks: two KV cache groups."""


def words(
    draw: random.Random, low: int, high: int, vocabulary: int = VOCABULARY
) -> tuple[int, ...]:
    return tuple(draw.randrange(2, vocabulary) for _ in range(draw.randint(low, high)))


def conversations(draw: random.Random) -> tuple[Wave, ...]:
    """Two hundred requests: each turn of all conversations is one wave, in random order."""
    systems = [words(draw, 160, 500) for _ in range(SYSTEM_PROMPTS)]
    latest: dict[int, int] = {}
    waves = []
    for turn in range(TURNS):
        order = draw.sample(range(CONVERSATIONS), CONVERSATIONS)
        prompts = [
            Prompt(
                tokens=words(draw, 40, 190)
                if turn
                else systems[conversation % SYSTEM_PROMPTS] + words(draw, 40, 190),
                after=latest.get(conversation),
            )
            for conversation in order
        ]
        latest = {
            conversation: turn * CONVERSATIONS + place
            for place, conversation in enumerate(order)
        }
        waves.append(Wave(prompts=tuple(prompts), max_tokens=ANSWER_TOKENS))
    return tuple(waves)


@dataclass(frozen=True, slots=True)
class Reference:
    """What vLLM answers without kvtier."""

    model: Path
    conversations: tuple[Wave, ...]
    """Five waves of forty literal prompts."""
    long_answers: Wave
    answers: dict[tuple[int, ...], tuple[int, ...]]
    footprint_blocks: int
    """Distinct whole blocks of KV that the conversations come to."""
    damaged: tuple[Answer, ...] = ()
    """Answers to prompts of a later turn on KV of which one block in sixteen is wrong."""
    other: tuple[Answer, ...] = ()
    """Answers to the first prompts, each with another first block."""

    def assert_equal(self, report: Report, *, waves: Sequence[Wave]) -> None:
        """Check every answer of ``report``, and that every request of ``waves`` has one."""
        for wave, done in zip(waves, report.waves, strict=True):
            for number, (prompt, answer) in enumerate(
                zip(wave.prompts, done.answers, strict=True)
            ):
                assert answer.prompt == prompt.tokens
                if not answer.aborted:
                    assert answer.tokens == self.answers[answer.prompt][: wave.max_tokens]
                else:
                    assert number in wave.abort


def distinct_blocks(sequences: Sequence[tuple[int, ...]]) -> int:
    prefixes = {
        sequence[:end]
        for sequence in sequences
        for end in range(BLOCK_TOKENS, len(sequence) + 1, BLOCK_TOKENS)
    }
    return len(prefixes)


@dataclass(frozen=True, slots=True)
class Site:
    """A directory for one test's store and logs."""

    directory: Path
    reference: Reference

    @property
    def store(self) -> Path:
        return self.directory / "store"

    def scenario(
        self,
        waves: Sequence[Wave],
        *,
        ram_blocks: int,
        nvme_blocks: int,
        blocks_per_chunk: int = 1,
    ) -> Scenario:
        """Return a scenario with kvtier and tiers of so many blocks."""
        config = store_yaml(
            self.directory / "kvtier.yaml",
            store=self.store,
            ram_nbytes=ram_blocks * KV_NBYTES_PER_BLOCK,
            nvme_nbytes=nvme_blocks * KV_NBYTES_PER_BLOCK,
            blocks_per_chunk=blocks_per_chunk,
        )
        return Scenario(model=self.reference.model, config=config, waves=tuple(waves))

    def troubled_scenario(self) -> Scenario:
        """Return a scenario with three waves: preemptions, with aborts too, after a reset."""
        preempting = self.reference.long_answers
        aborting = preempting.model_copy(update={"abort": (0, 3, 4, 7, 11)})
        few = {"prompts": preempting.prompts[:3], "max_tokens": 4, "reset_first": True}
        waves = (preempting, aborting, preempting.model_copy(update=few))
        return self.scenario(waves, ram_blocks=40, nvme_blocks=400).model_copy(
            update={"gpu_blocks": 40, "context_tokens": 512}
        )

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def assert_nothing_held(self) -> None:
        """No shared memory of ours is left and nothing in the store is locked."""
        assert [path.name for path in Path("/dev/shm").iterdir() if "kvtier" in path.name] == []
        # Each raises BlockingIOError while another process holds a lock of its kind.
        for path in self.store.rglob("*"):
            if path.is_dir():
                descriptor = os.open(path, os.O_RDONLY)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.close(descriptor)
            elif path.is_file():
                with path.open("rb+") as file:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def hit_tokens(report: Report, tier: str) -> float:
    return report.count("kvtier_hit_tokens", tier=tier)


def assert_nothing_pinned(report: Report) -> None:
    """Once all requests ended and all demotions arrived, every chunk may be evicted."""
    last = report.waves[-1].counters
    held = {series: value for series, value in last.items() if "held_chunks" in series}
    assert len(held) == 2
    assert set(held.values()) == {0}
    assert last["kvtier_granted_chunks{}"] == 0
    assert last["kvtier_dirty_chunks{tier=ram}"] == 0


def with_another_first_block(prompt: Prompt, draw: random.Random) -> Prompt:
    first = tuple(draw.sample(range(2, VOCABULARY), BLOCK_TOKENS))
    return Prompt(tokens=first + prompt.tokens[BLOCK_TOKENS:])


def controls(talk: Sequence[Wave], draw: random.Random) -> tuple[Wave, Wave]:
    """Return the waves whose answers must be others: comparing tokens would notice."""
    damaged = Wave(prompts=talk[2].prompts[:CONTROLS], damage_every=16)
    other = [with_another_first_block(prompt, draw) for prompt in talk[0].prompts[:CONTROLS]]
    return damaged, Wave(prompts=tuple(other))


def run_reference(
    directory: Path, changed: Mapping[str, object] = MappingProxyType({})
) -> Reference:
    """Ask plain vLLM, with a GPU cache large enough for everything.

    Args:
        directory: Where the model and the log are written.
        changed: What of the model's ``config.json`` is otherwise.
    """
    write_model(directory / "model")
    (directory / "model" / "config.json").write_text(json.dumps(architecture() | {**changed}))
    draw = random.Random(7)
    talk = conversations(draw)
    long_answers = Wave(
        prompts=tuple(Prompt(tokens=words(draw, 200, 240)) for _ in range(LONG_ANSWERS)),
        max_tokens=LONG_ANSWER_TOKENS,
    )
    waves = (*talk, long_answers)
    scenario = Scenario(
        model=directory / "model", waves=(*waves, *controls(talk, draw)), gpu_blocks=2048
    )
    report = run_engine(scenario, directory, "reference")
    *normal, damaged, other = report.waves
    report = Report(waves=tuple(normal))
    literal = replayed(waves, report)
    answered = [
        answer.prompt + answer.tokens for wave in normal[:-1] for answer in wave.answers
    ]
    return Reference(
        model=scenario.model,
        conversations=literal[:-1],
        long_answers=literal[-1],
        answers={answer.prompt: answer.tokens for answer in report.answers()},
        footprint_blocks=distinct_blocks(answered),
        damaged=damaged.answers,
        other=other.answers,
    )
