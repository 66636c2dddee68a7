"""The part of a model's identity that is known without an engine.

The start and ``kvtier check`` take it from here. What only an engine knows, such as its KV
cache's layout, :mod:`kvtier.vllm.layout` adds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvtier.config import KvtierConfig, environment
from kvtier.vllm.model_files import model_files

__all__ = ["declared_identity"]

_FORMAT: Final = "kvtier-vllm-2"
"""Raised when the bytes of a slot are laid out differently."""


def declared_identity(config: KvtierConfig, model: str | None) -> dict[str, str | int]:
    """Return the fields that follow from the file, the environment and the model's name.

    Args:
        config: The configuration.
        model: What the engine is started with; None leaves out what depends on it.
    """
    identity = config.identity
    fields: dict[str, str | int] = {
        "format": _FORMAT,
        "model_revision": identity.model_revision or "",
        "weights_epoch": identity.weights_epoch,
        "blocks_per_chunk": config.engine.blocks_per_chunk,
        "hash_seed": environment().python_hash_seed or "",
    }
    if model is not None:
        files = model_files(Path(model))
        fields["model"] = "" if files.has_weights else _canonical(model)
        fields["model_files"] = files.digest
    if identity.name is not None:
        fields["model"] = identity.name
    return fields


def _canonical(model: str) -> str:
    """Return one spelling of a local path, and the name of anything else."""
    return str(Path(model).resolve()) if Path(model).exists() else model
