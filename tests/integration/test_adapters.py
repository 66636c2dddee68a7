"""A LoRA adapter that is trained again, under the path it had, while no engine runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.demo.model import write_model
from tests.demo.runner import run_engine
from tests.demo.scenario import Adapter, Report, Wave
from tests.integration.features import Feature, assert_same, assert_well, some_prompts
from tests.integration.odd_models import write_adapter
from tests.integration.test_connector import through


def cached_tokens(report: Report) -> int:
    return sum(answer.cached_tokens for answer in report.answers())


@pytest.mark.slow
def test_an_adapter_is_served_kv_of_its_own_content_after_a_restart(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    path = tmp_path / "adapter"
    write_adapter(path, 0)
    adapter = Adapter(name="a", number=1, path=path)
    wave = Wave(
        prompts=tuple(each.model_copy(update={"adapter": adapter}) for each in some_prompts(5)),
        max_tokens=8,
    )
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    feature = Feature(tmp_path, (wave,), arguments=lora)
    first, again = feature.tiered(tmp_path, "direct")
    assert_same(first.answers(), again.answers())
    assert cached_tokens(first) == 0
    assert cached_tokens(again) > 0.4 * again.prompt_tokens()

    shutil.rmtree(path)
    write_adapter(path, 1)
    expected = feature.plain()
    assert [each.tokens for each in expected.answers()] != [
        each.tokens for each in first.answers()
    ]
    update = {"config": tmp_path / "kvtier.yaml", "gpu_blocks": feature.room_blocks}
    scenario = through("direct", feature.scenario().model_copy(update=update))
    changed = run_engine(scenario, tmp_path, "changed")
    assert_same(expected.answers(), changed.answers())
    assert cached_tokens(changed) == 0
    for report in (first, again, changed):
        assert_well(report)
