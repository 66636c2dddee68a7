"""What an engine or a request may be besides plain: every token is plain vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.demo.model import write_model
from tests.demo.runner import EngineFailedError
from tests.demo.scenario import Adapter, Prompt, Report, Wave
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
from tests.integration.odd_models import (
    HIDDEN,
    write_adapter,
    write_latent_model,
    write_recurrent_model,
)
from tests.integration.test_connector import ENTRY_POINTS

pytestmark = pytest.mark.slow


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


FEATURES = [quantized, latent, recurrent, adapted, asking_much]
REFUSED_BY_SPEC = [recurrent, adapted]


def assert_adapters_are_felt(report: Report) -> None:
    """Each prompt is answered in four ways: by the model, and with each of three adapters."""
    ways: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for answer in report.answers():
        ways.setdefault(answer.prompt, set()).add(answer.tokens)
    assert {len(each) for each in ways.values()} == {4}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("entry_point", [*ENTRY_POINTS])
@pytest.mark.parametrize("make", FEATURES, ids=lambda make: make.__name__)
def test_whatever_an_engine_or_a_request_is_every_token_is_plain_vllms(
    make: Make, entry_point: str, plain: Plain, tmp_path: Path
) -> None:
    if make is latent and not torch.cpu._is_amx_tile_supported():
        pytest.skip("without AMX vLLM has no prefix caching for latent attention on a CPU")
    if make is quantized and not torch.cpu._is_avx512_supported():
        pytest.skip("without AVX-512 vLLM has no FP8 KV cache on a CPU")
    feature, expected = plain(make)
    if entry_point == "spec" and make in REFUSED_BY_SPEC:
        with pytest.raises(
            EngineFailedError, match=r"UnsupportedError: .* use KVTierConnector"
        ):
            feature.tiered(tmp_path, entry_point)
        return
    first, again = feature.tiered(tmp_path, entry_point)
    assert_every_token_equal(feature, expected, first, again)
    if make is adapted:
        assert_adapters_are_felt(expected)
    assert first.count("kvtier_hit_tokens", tier="nvme") > 0
    assert_loaded(again, entry_point)
    assert_well(first, again)
