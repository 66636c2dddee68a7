"""The specification below ``MultiConnector``, beside a connector that hands prefills over.

``ExampleConnector`` writes each prompt's KV to files that another engine finds: what vLLM has
for disaggregated prefill that needs neither a network nor a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import VllmEntryPoint, load_config, vllm_transfer_config
from tests.demo.model import BLOCK_TOKENS, KV_NBYTES_PER_BLOCK, write_model
from tests.demo.runner import run_engine
from tests.demo.scenario import Report, Scenario, Wave, store_yaml
from tests.integration.features import (
    NVME_BLOCKS,
    RAM_BLOCKS,
    Feature,
    assert_same,
    assert_well,
    loaded_tokens,
    some_prompts,
    two_ways,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Feature, Report]:
    directory = tmp_path_factory.mktemp("plain")
    write_model(directory / "model")
    feature = Feature(directory, two_ways(some_prompts()))
    return feature, feature.plain()


def beside_files(directory: Path, name: str, scenario: Scenario, files: Path) -> Scenario:
    """Return ``scenario`` with kvtier's specification before ``ExampleConnector``."""
    config = store_yaml(
        directory / f"{name}.yaml",
        store=directory / name,
        ram_nbytes=RAM_BLOCKS * KV_NBYTES_PER_BLOCK,
        nvme_nbytes=NVME_BLOCKS * KV_NBYTES_PER_BLOCK,
    )
    ours = vllm_transfer_config(config, load_config(config), entry_point=VllmEntryPoint.SPEC)
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, example]},
    }
    return scenario.model_copy(update={"connector": both})


@pytest.mark.timeout(900)
def test_a_prompt_that_one_engine_prefills_is_decoded_and_stored_by_another(
    asked: tuple[Feature, Report], tmp_path: Path
) -> None:
    feature, expected = asked
    files = tmp_path / "handed"
    scenario = feature.scenario().model_copy(update={"gpu_blocks": feature.room_blocks})
    there, back = feature.waves
    params = {"transfer_params": {"do_remote_decode": True}}
    prefills = Wave(
        prompts=tuple(prompt.model_copy(update=params) for prompt in there.prompts),
        max_tokens=1,
    )
    first = beside_files(tmp_path, "prefilling", scenario, files)
    # The second wave is what the GPU has lost by then, and must come from kvtier.
    waves = (prefills, prefills.model_copy(update={"prompts": prefills.prompts[::-1]}))
    prefilled = run_engine(first.model_copy(update={"waves": waves}), tmp_path, "prefilling")
    for wave, answered in zip(expected.waves, prefilled.waves, strict=True):
        for whole, begun in zip(wave.answers, answered.answers, strict=True):
            assert begun.tokens == whole.tokens[:1]
    assert prefilled.count("kvtier_hit_tokens") > 0

    second = beside_files(tmp_path, "decoding", scenario, files)
    decoded = run_engine(
        second.model_copy(update={"waves": (there, back)}), tmp_path, "decoding"
    )
    assert_same(expected.answers(), decoded.answers())
    handed, again = decoded.waves
    assert Report(waves=(handed,)).count("kvtier_hit_tokens") == 0
    assert loaded_tokens(handed.answers) == sum(
        (len(answer.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for answer in handed.answers
    ), "all of it was handed over"
    assert Report(waves=(again,)).count("kvtier_hit_tokens", tier="nvme") > 0
    assert_well(prefilled, decoded)
