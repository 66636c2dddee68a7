"""Images: the same words around another one are another prompt, and the same one is found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.demo.scenario import Prompt, Report
from tests.integration.features import (
    Feature,
    assert_every_token_equal,
    assert_loaded,
    assert_well,
    two_ways,
)
from tests.integration.harness import words
from tests.integration.seeing_model import IMAGE, WORDS, write_image, write_seeing_model
from tests.integration.test_connector import ENTRY_POINTS

pytestmark = pytest.mark.slow


def seeing(directory: Path) -> Feature:
    """The same words around one image, another, two in either order, and none."""
    write_seeing_model(directory / "model")
    images = [write_image(directory / f"{seed}.png", seed) for seed in range(4)]
    draw = random.Random(5)
    before, behind = words(draw, 75, 75, WORDS), words(draw, 170, 170, WORDS)

    def showing(*shown: Path) -> Prompt:
        return Prompt(tokens=before + (IMAGE,) * len(shown) + behind, images=shown)

    prompts = [showing(image) for image in images]
    prompts += [showing(*images[:2]), showing(*images[1::-1]), showing()]
    return Feature(
        directory,
        two_ways(prompts),
        arguments={"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}},
    )


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Feature, Report]:
    feature = seeing(tmp_path_factory.mktemp("plain"))
    return feature, feature.plain()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("entry_point", [*ENTRY_POINTS])
def test_an_image_is_found_again_and_never_taken_for_another(
    entry_point: str, asked: tuple[Feature, Report], tmp_path: Path
) -> None:
    feature, expected = asked
    assert_images_are_felt(expected)
    first, again = feature.tiered(tmp_path, entry_point)
    assert_every_token_equal(feature, expected, first, again)
    assert first.count("kvtier_hit_tokens", tier="nvme") > 0
    assert_loaded(again, entry_point)
    assert_well(first, again)


def assert_images_are_felt(report: Report) -> None:
    """Of each wave's prompts, all but the one without an image have the words of another."""
    for wave in report.waves:
        assert len({answer.tokens for answer in wave.answers}) == len(wave.answers)
        assert len({answer.prompt for answer in wave.answers}) == 3
