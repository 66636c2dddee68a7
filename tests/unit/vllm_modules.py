"""Modules that stand for a vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

Load = Callable[[str], Any]


def vllm_with(**modules: Any) -> Load:
    """Return an importer of a vLLM that has ``modules``.

    Args:
        modules: By name, with underscores for dots; None for one that does not exist.
    """
    found = {name.replace("__", "."): module for name, module in modules.items()}

    def load(name: str) -> Any:
        if found.get(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found[name]

    return load


def model_settings(
    model: Mapping[str, Any] | None = None,
    loading: Mapping[str, Any] | None = None,
    **others: Any,
) -> SimpleNamespace:
    """Return vLLM's configuration of the model and of where its weights come from."""
    settings = {
        "model": "some/model",
        "dtype": "f",
        "hf_config": {"model_type": "llama"},
        "architecture": "LlamaForCausalLM",
        "model_class_overrides": {},
        "max_model_len": 4096,
        "original_max_model_len": 4096,
        "quantization": None,
        "quantization_config": None,
        "revision": None,
        "model_weights": "",
        "multimodal_config": None,
        "generation_config": "auto",
        "override_generation_config": {},
        "is_diffusion": False,
        "runner_type": "generate",
        "is_prefix_caching_supported": True,
        "enable_sleep_mode": False,
    }
    parallel = {
        "nnodes_within_dp": 1,
        "distributed_executor_backend": "mp",
        "enable_fault_tolerance": False,
    }
    weights = {"load_format": "auto", "model_loader_extra_config": {}}
    everything = {
        "model_config": SimpleNamespace(**{**settings, **(model or {})}),
        "load_config": SimpleNamespace(**{**weights, **(loading or {})}),
        "speculative_config": None,
        "kernel_config": SimpleNamespace(moe_backend="auto"),
        "parallel_config": SimpleNamespace(**parallel),
    }
    return SimpleNamespace(**{**everything, **others})
