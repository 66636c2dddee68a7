"""Finds the namespaces of a model in a cache directory."""

from __future__ import annotations

from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.printable import printable
from kvtier.tiers.slab.inspect import StoredNamespace, find_namespaces
from kvtier.vllm.identity import model_identity

__all__ = ["namespaces_of_model"]


def namespaces_of_model(
    directory: Path, model: str | None, name: str | None = None
) -> list[StoredNamespace]:
    """Return the namespaces of ``model`` in the cache directory ``directory``.

    Args:
        directory: A cache directory, or one of its namespaces.
        model: The engine's ``--model``, or the setting ``identity.name``; None for all models.
        name: If given, return only the namespace with this name.

    Raises:
        ConfigError: There is no such namespace, or the model's files cannot be read.
    """
    spaces = find_namespaces(directory, name)
    if model is None:
        return spaces
    found = [space for space in spaces if _is_of(space, model)]
    if not found:
        models = ", ".join(dict.fromkeys(space.layout.model for space in spaces))
        problem = f"{printable(str(directory))} has nothing of --model {printable(model)}"
        raise ConfigError(f"{problem}; it has chunks of {models}")
    return found


def _is_of(space: StoredNamespace, model: str) -> bool:
    fields, own = space.layout.fingerprint.fields, model_identity(model)
    if own["model_files"] and fields.get("model_files") == own["model_files"]:
        return True
    names = {model, own["model"]} - {""}
    return not names.isdisjoint({space.layout.model, fields.get("model")})
