"""Modules that stand for a vLLM, and what kvtier imports of the real one."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvtier.vllm import compat

DOORS = Path(compat.__file__).parents[1]
CONTRACT = DOORS / "contract.py"
VERSIONS = "kvtier works with vLLM 0.25 to 0.33"
BASE = "vllm.v1.kv_offload.base"

Load = Callable[[str], Any]


def imported_names(contract: Path = CONTRACT) -> dict[str, set[str]]:
    """Return what a contract module imports of vLLM."""
    tree = ast.parse(contract.read_text())
    return {
        node.module: {alias.name for alias in node.names}
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm")
    }


def vllm_with(**modules: Any) -> Load:
    """Return an importer of a complete vLLM, in which ``modules`` take the place of others.

    Args:
        modules: By name, with underscores for dots; None for one that does not exist.
    """
    found: dict[str, Any] = {
        name: SimpleNamespace(**dict.fromkeys(names, object))
        for name, names in imported_names().items()
    }
    found |= {name.replace("__", "."): module for name, module in modules.items()}

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


@dataclasses.dataclass
class Job:
    """A job of vLLM's."""

    req_id: str
    spec: object
