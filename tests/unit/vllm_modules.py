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
    """Return what every vLLM says of the model it runs and where weights come from."""
    every = {
        "model": "some/model",
        "dtype": "f",
        "hf_config": {"model_type": "llama"},
        "max_model_len": 4096,
        "quantization": None,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**every, **(model or {})}),
        load_config=SimpleNamespace(**{"load_format": "auto", **(loading or {})}),
        **others,
    )
