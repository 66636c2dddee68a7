"""Tokens that are guessed: what was guessed wrong is computed, stored and never an answer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.demo.scenario import Prompt, Report, Wave
from tests.integration.drafting_models import (
    write_draft_model,
    write_eagle3_layer,
    write_eagle_layer,
    write_predicting_model,
    write_terse_model,
)
from tests.integration.features import (
    Feature,
    Make,
    Plain,
    assert_every_token_equal,
    assert_loaded,
    assert_well,
    some_prompts,
    two_ways,
)
from tests.integration.harness import words

pytestmark = pytest.mark.slow

TALKS = 4
TALK_TOKENS = 40
"""Generated at least: more than a block."""


def from_the_prompt(directory: Path) -> Feature:
    """Most of what is guessed is rejected, and stays in its block until overwritten."""
    write_terse_model(directory / "model")
    return speculating(
        directory,
        {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
    )


def with_a_layer(directory: Path) -> Feature:
    write_terse_model(directory / "model")
    write_eagle_layer(directory / "draft")
    return speculating(directory, drafted(directory, "eagle"))


def with_a_layer_that_sees_three(directory: Path) -> Feature:
    write_terse_model(directory / "model")
    write_eagle3_layer(directory / "draft")
    return speculating(directory, drafted(directory, "eagle3"))


def with_a_layer_of_the_model(directory: Path) -> Feature:
    write_predicting_model(directory / "model")
    return speculating(directory, {"method": "mtp", "num_speculative_tokens": 1})


def with_a_model(directory: Path) -> Feature:
    write_terse_model(directory / "model")
    write_draft_model(directory / "draft")
    return speculating(directory, drafted(directory, "draft_model"))


def drafted(directory: Path, method: str) -> dict[str, Any]:
    return {"method": method, "model": str(directory / "draft"), "num_speculative_tokens": 3}


def speculating(directory: Path, speculation: Mapping[str, Any]) -> Feature:
    """Talk at length, so that what is rejected comes to blocks that are stored."""
    prompts = [
        Prompt(tokens=(prompt.tokens[:30] * 14)[: len(prompt.tokens)]) if place % 2 else prompt
        for place, prompt in enumerate(some_prompts(TALKS))
    ]
    talk = Wave(prompts=tuple(prompts), max_tokens=TALK_TOKENS)
    draw = random.Random(3)
    more = tuple(Prompt(tokens=words(draw, 5, 20), after=each) for each in range(TALKS))
    goes_on = Wave(prompts=more, max_tokens=12)
    return Feature(
        directory,
        (talk, goes_on, *two_ways(prompts)),
        arguments={"speculative_config": {**speculation}},
        room_blocks=36,
    )


GUESSING = [
    from_the_prompt,
    with_a_layer,
    with_a_layer_that_sees_three,
    with_a_layer_of_the_model,
    with_a_model,
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("entry_point", ["spec", "staged"])
@pytest.mark.parametrize("make", GUESSING, ids=lambda make: make.__name__)
def test_with_speculative_decoding_every_token_is_plain_vllms(
    make: Make, entry_point: str, plain: Plain, tmp_path: Path
) -> None:
    feature, expected = plain(make)
    assert_some_guesses_are_right(expected)
    first, again = feature.tiered(tmp_path, entry_point)
    assert_every_token_equal(feature, expected, first, again)
    assert first.count("kvtier_hit_tokens", tier="nvme") > 0
    assert_loaded(again, entry_point)
    assert_well(first, again)


def assert_some_guesses_are_right(report: Report) -> None:
    guesses = report.count("vllm:spec_decode_num_draft_tokens")
    assert 0 < 10 * report.count("vllm:spec_decode_num_accepted_tokens") < 9 * guesses
