"""Bytes per token from a model's config.json, against sizes worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.vllm.model_geometry import Attention, KvDtype, ModelGeometry, read_model_geometry
from tests.unit.model_shapes import LLAMA_8B

# Shapes as the models' authors publish them.
LLAMA2_7B = {**LLAMA_8B, "num_key_value_heads": None, "torch_dtype": "float16"}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def geometry(tmp_path: Path) -> Any:
    def read(values: object) -> ModelGeometry:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_model_geometry(tmp_path)

    return read


def test_grouped_heads_take_key_and_value_of_each_group(geometry: Any) -> None:
    model = geometry(LLAMA_8B)
    assert model.attention is Attention.GQA
    assert model.token_nbytes() == 2 * 32 * 8 * 128 * 2 == 128 << 10


def test_without_groups_every_head_counts(geometry: Any) -> None:
    model = geometry(LLAMA2_7B)
    assert model.attention is Attention.MHA
    assert model.token_nbytes() == 2 * 32 * 32 * 128 * 2 == 512 << 10


def test_a_latent_is_kept_once_for_all_heads_and_has_no_value(geometry: Any) -> None:
    model = geometry(DEEPSEEK_V3)
    assert model.attention is Attention.MLA
    assert model.token_nbytes() == 61 * (512 + 64) * 2 == 70272


def test_a_stated_head_dim_wins_over_the_hidden_size(geometry: Any) -> None:
    assert geometry({**LLAMA_8B, "head_dim": 256}).token_nbytes() == 256 << 10


def test_the_text_part_of_a_multimodal_model_counts(geometry: Any) -> None:
    model = geometry({"model_type": "mllm", "text_config": LLAMA_8B, "vision_config": {}})
    assert (model.model, model.token_nbytes()) == ("llama", 128 << 10)


def test_the_type_of_the_whole_model_is_used_where_the_text_part_has_none(
    geometry: Any,
) -> None:
    text = {key: value for key, value in LLAMA_8B.items() if key != "torch_dtype"}
    model = geometry({"torch_dtype": "float16", "text_config": text})
    assert model.dtype is KvDtype.FLOAT16


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        (KvDtype.AUTO, 128 << 10),
        (KvDtype.FLOAT16, 128 << 10),
        (KvDtype.FLOAT32, 256 << 10),
        (KvDtype.FP8, 64 << 10),
    ],
)
def test_the_element_type_scales_the_size(geometry: Any, dtype: KvDtype, nbytes: int) -> None:
    assert geometry(LLAMA_8B).token_nbytes(dtype) == nbytes


@pytest.mark.parametrize("stated", ["float32", None, "int4"])
def test_a_type_that_the_engine_does_not_serve_is_taken_as_16_bits(
    geometry: Any, stated: str | None
) -> None:
    model = geometry({**LLAMA_8B, "torch_dtype": stated})
    assert model.token_nbytes() == 128 << 10
    assert model.notes


def test_the_newer_name_of_the_type_wins(geometry: Any) -> None:
    assert geometry({**LLAMA_8B, "dtype": "float16"}).dtype is KvDtype.FLOAT16


@pytest.mark.parametrize(("tp", "copies"), [(1, 1), (2, 1), (8, 1), (16, 2), (32, 4)])
def test_ranks_beyond_the_kv_heads_hold_copies(geometry: Any, tp: int, copies: int) -> None:
    model = geometry(LLAMA_8B)
    assert model.copies(tp) == copies
    assert model.rank_token_nbytes(tp) * tp == model.token_nbytes() * copies


def test_every_rank_holds_the_whole_latent(geometry: Any) -> None:
    model = geometry(DEEPSEEK_V3)
    assert model.copies(8) == 8
    assert model.rank_token_nbytes(8) == model.token_nbytes()


def test_heads_that_cannot_be_split_are_refused(geometry: Any) -> None:
    with pytest.raises(ConfigError, match="--tp 3: 32 attention heads cannot be split"):
        geometry(LLAMA_8B).copies(3)
    uneven = geometry({**LLAMA_8B, "num_key_value_heads": 6})
    with pytest.raises(ConfigError, match="--tp 4: 6 KV heads can be neither"):
        uneven.copies(4)


def test_layers_without_kv_per_token_do_not_count(geometry: Any) -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    model = geometry({**LLAMA_8B, "layer_types": kinds})
    assert model.layers == 8
    assert "24 of 32 layers keep a fixed state" in model.notes[0]


def test_sliding_windows_count_in_full_and_are_mentioned(geometry: Any) -> None:
    kinds = ["sliding_attention", "full_attention"] * 16
    model = geometry({**LLAMA_8B, "layer_types": kinds})
    assert model.layers == 32
    assert "16 of 32 layers attend to a sliding window" in model.notes[0]


@pytest.mark.parametrize(
    ("key", "what"),
    [("num_nextn_predict_layers", "speculative decoding"), ("index_head_dim", "index cache")],
)
def test_parts_that_the_geometry_leaves_out_are_noted(
    geometry: Any, key: str, what: str
) -> None:
    (note,) = geometry({**DEEPSEEK_V3, key: 1}).notes
    assert what in note


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "num_attention_heads or n_head is missing"),
        ({**LLAMA_8B, "num_hidden_layers": "32"}, "num_hidden_layers = '32': not a positive"),
        (
            {**LLAMA_8B, "num_key_value_heads": True},
            "num_key_value_heads = True: not a positive",
        ),
        ({**LLAMA_8B, "hidden_size": 4097}, "4097 is not a multiple of the 32 attention heads"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        ([], "not a JSON object"),
    ],
)
def test_a_file_that_describes_no_transformer_is_refused(
    geometry: Any, values: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        geometry(values)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; give a directory that holds"):
        read_model_geometry(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_model_geometry(tmp_path)
    with pytest.raises(ConfigError, match="Not a directory"):
        read_model_geometry(tmp_path / "config.json" / "below")
    with pytest.raises(ConfigError, match="File name too long; check the path"):
        read_model_geometry(tmp_path / ("x" * 300))
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not JSON"):
        read_model_geometry(tmp_path)
