"""Which settings of an engine make its KV another one's, and which do not."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.vllm.content import kv_meaning
from tests.unit.vllm_modules import model_settings

LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
LONG = {"model_type": "phi3", "rope_parameters": LONG_ROPE}
SWITCHED = {"model_type": "llama4", "text_config": {"attn_temperature_tuning": True}}


class LoadFormat(enum.Enum):
    """As a release may have it."""

    DUMMY = "dummy"


class Config:
    """Stands for transformers' ``PretrainedConfig``."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def to_dict(self) -> dict[str, Any]:
        return self.settings


class BrokenConfig:
    """A configuration with a checkpoint's own code."""

    def __init__(self, theta: float) -> None:
        self.theta = theta

    def to_dict(self) -> dict[str, Any]:
        raise TypeError(self)


class Unreadable:
    """Has nothing that tells one from another."""

    def __repr__(self) -> str:
        raise ValueError


@dataclass
class Online:
    """Stands for the arguments of an online quantisation."""

    linear: object = field(default_factory=object)
    bits: int = 8


def of(
    model: dict[str, Any] | None = None, loading: dict[str, Any] | None = None, **others: Any
) -> str:
    return kv_meaning(model_settings(model, loading, **others))


def media(**settings: Any) -> dict[str, Any]:
    return {"multimodal_config": SimpleNamespace(**settings)}


def drafting(model: str) -> dict[str, Any]:
    return {
        "speculative_config": SimpleNamespace(draft_model_config=SimpleNamespace(model=model))
    }


def test_each_setting_that_changes_keys_or_values_changes_the_identity() -> None:
    meanings = [
        of(),
        of({"hf_config": {"model_type": "llama", "rope_theta": 1e6}}),
        of({"hf_config": {"model_type": "llama", "rope_parameters": {"factor": 8}}}),
        of({"hf_config": {"model_type": "llama", "rope_parameters": {"factor": 9}}}),
        of({"architecture": "TransformersForCausalLM"}),
        of({"model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}}),
        of({"quantization": "fp8"}),
        of({"quantization": "fp8", "quantization_config": Online(bits=4)}),
        of({"quantization": "fp8", "quantization_config": Online(bits=8)}),
        of({"revision": "5b0e4e8"}),
        of({"model_weights": "s3://models/one"}),
        of({"model_weights": "s3://models/two"}),
        of(loading={"load_format": "dummy"}),
        of(loading={"model_loader_extra_config": {"tensorizer_uri": "s3://one"}}),
        of(loading={"model_loader_extra_config": {"qlora_adapter_name_or_path": "a"}}),
        of(media(mm_processor_kwargs={"max_pixels": 1})),
        of(media(mm_processor_kwargs={"max_pixels": 2})),
        of(media(media_io_kwargs={"video": {"num_frames": 8}})),
        of(media(video_pruning_rate=0.5)),
        of(media(mm_encoder_attn_dtype="fp8")),
        of(media(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path="scales.json")),
        of(kernel_config=SimpleNamespace(moe_backend="flashinfer_moe_ep_cutedsl")),
        of(**drafting("a/drafter")),
        of(**drafting("another/drafter")),
    ]
    assert len(set(meanings)) == len(meanings)


def test_weights_that_an_environment_rounds_are_other_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meanings = [of()]
    for bits in (4, 8):
        monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", f'{{"bits": {bits}}}')
        meanings.append(of())
    assert len(set(meanings)) == 3


@pytest.mark.parametrize(
    "variable",
    [
        "VLLM_MARLIN_INPUT_DTYPE",  # activations of 8 bits
        "VLLM_ROCM_USE_AITER_FP4BMM",  # weights of 4 bits
        "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",  # activations of 8 bits
        "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",  # another order of a block, of one backend
        "VLLM_VIDEO_LOADER_BACKEND",  # other frames of a video whose file is hashed
    ],
)
def test_a_variable_that_changes_keys_or_values_counts(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanings = [of()]
    for value in ("one", "another"):
        monkeypatch.setenv(variable, value)
        meanings.append(of())
    assert len(set(meanings)) == 3
    monkeypatch.delenv(variable)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert of() == meanings[0]


@pytest.mark.parametrize(
    "model",
    [
        {"max_model_len": 8192},
        {"hf_config": {"model_type": "llama", "transformers_version": "5"}},
        {"hf_config": {"model_type": "llama", "_name_or_path": "/elsewhere"}},
        {"hf_config": {"model_type": "llama", "max_model_len": 8192}},
        {"served_model_name": "other", "seed": 7, "enforce_eager": True},
        {"override_generation_config": {"temperature": 0.1}},
        {"generation_config": "vllm"},
        media(mm_processor_kwargs=None, media_io_kwargs={}, video_pruning_rate=None),
        media(mm_processor_kwargs={"device": "cuda"}, limit_per_prompt={"image": 2}),
    ],
)
def test_a_setting_that_changes_no_key_costs_no_cache(model: dict[str, Any]) -> None:
    assert of(model) == of()


def test_ways_to_load_the_same_weights_cost_no_cache() -> None:
    quick = {"load_format": "safetensors", "model_loader_extra_config": {"num_threads": 8}}
    assert of(loading=quick) == of()
    assert of(loading={"load_format": LoadFormat.DUMMY}) == of(loading={"load_format": "dummy"})
    assert of(**drafting("some/model")) == of(), "as vLLM says of drafts without a model"
    assert of(speculative_config=None) == of()
    assert of(kernel_config=SimpleNamespace(moe_backend="triton")) == of()


@pytest.mark.parametrize(
    "config",
    [
        LONG,
        {"rope_scaling": {"type": "su", "long_factor": [2.0]}},
        {"rope_parameters": {"full_attention": LONG_ROPE, "other": {"rope_type": "default"}}},
        {"text_config": LONG},
        {"rope_parameters": {"rope_type": "of a later release"}},
        {"rope_scaling": {"type": ["of", "a", "later", "release"]}},
        SWITCHED,
    ],
)
def test_the_longest_context_counts_where_keys_depend_on_it(config: dict[str, Any]) -> None:
    short, long = (of({"hf_config": config, "max_model_len": at}) for at in (512, 1024))
    assert short != long


@pytest.mark.parametrize("config", [LONG, SWITCHED])
def test_a_context_that_is_fitted_into_memory_is_another_one_at_every_start(
    config: dict[str, Any],
) -> None:
    fitted = {"hf_config": config, "original_max_model_len": -1}
    some, more = (of({**fitted, "max_model_len": at}) for at in (512, 1024))
    assert some == more
    asked = {"hf_config": config, "original_max_model_len": 512, "max_model_len": 512}
    assert of(asked) != some, "the model was built for another length"


def test_the_longest_context_counts_where_media_are_fitted_into_it() -> None:
    model = {"architecture": "NemotronH_Nano_VL_V2", "original_max_model_len": -1}
    short, long = (of({**model, "max_model_len": at}) for at in (8192, 16384))
    assert short != long, "images are fitted after the context was cut to what memory allows"


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn", "dynamic", "linear"])
def test_the_longest_context_does_not_count_for_other_embeddings(rope: str) -> None:
    config = {
        "rope_parameters": {"rope_type": rope, "original_max_position_embeddings": 512},
        "rope_scaling": {"type": rope},
        "quantization_config": {"type": "any"},
    }
    short, long = (of({"hf_config": config, "max_model_len": at}) for at in (512, 1024))
    assert short == long


def test_overrides_of_the_long_context_switch_count_with_it() -> None:
    off = {"override_generation_config": {"attn_temperature_tuning": False}}
    meanings = [
        of({"hf_config": SWITCHED}),
        of({"hf_config": SWITCHED, **off}),
        of({"hf_config": SWITCHED, "generation_config": "/other"}),
    ]
    assert len(set(meanings)) == len(meanings)


def test_values_that_json_lacks_become_a_stable_text() -> None:
    def twice() -> str:
        nested: dict[str, Any] = {"within": {1: "number"}}
        nested["itself"] = nested
        return of(
            {
                "hf_config": Config(
                    model_type="own",
                    nested=nested,
                    names={"b", "a", "c"},
                    nan=float("nan"),
                    function=functools.partial(print, object()),
                    type=Config,
                    vision=Config(depth=2),
                    object=object(),
                    broken=Unreadable(),
                    text="\ud800",
                )
            }
        )

    assert twice() == twice()
    assert twice().encode()
    assert of({"hf_config": BrokenConfig(1.0)}) != of({"hf_config": BrokenConfig(2.0)})
    assert of({"hf_config": BrokenConfig(1.0)}) == of({"hf_config": BrokenConfig(1.0)})


def test_configurations_of_real_models_are_read() -> None:
    transformers = pytest.importorskip("transformers")
    phi = {
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": 512,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [2.0] * 48,
        },
    }
    counting = [transformers.Phi3Config(**phi), transformers.Llama4Config()]
    others = [
        transformers.LlamaConfig(),
        transformers.Qwen2VLConfig(),
        transformers.DeepseekV3Config(),
        transformers.Gemma3Config(),
    ]
    for configs, differ in ((counting, True), (others, False)):
        for config in configs:
            lengths = [of({"hf_config": config, "max_model_len": at}) for at in (512, 1024)]
            assert (lengths[0] != lengths[1]) is differ, type(config).__name__
            again = type(config).from_dict(config.to_dict())
            assert of({"hf_config": again, "max_model_len": 512}) == lengths[0]
            again.update({"hidden_size": 7})
            assert of({"hf_config": again, "max_model_len": 512}) != lengths[0]
