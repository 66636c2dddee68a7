"""Finds the namespace of a deployment, and the settings that make an engine use another.

A namespace is a directory in a store, for engines with equal models and settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from kvtier.config import KvtierConfig, NvmeTierConfig
from kvtier.errors import ConfigError
from kvtier.printable import printable
from kvtier.tiers.base import Fields
from kvtier.tiers.slab.explain import explained
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import StoredNamespace, find_namespaces
from kvtier.vllm.identity import model_identity

__all__ = [
    "declared_namespaces",
    "namespaces_of_model",
    "persistent_tiers",
    "require_same_identity",
]

_MODEL: Final = ("model", "model_files")


def persistent_tiers(config: KvtierConfig) -> list[NvmeTierConfig]:
    """Return the NVMe tiers, which a warm-up fills and whose index it reads.

    Raises:
        ConfigError: There is none.
    """
    tiers = [tier for tier in config.tiers if isinstance(tier, NvmeTierConfig)]
    if not tiers:
        problem = "none of them outlives a warm-up"
        remedy = "add a tier with kind: nvme"
        raise ConfigError(config.origin.format_problem("tiers", problem, remedy))
    return tiers


def namespaces_of_model(
    directory: Path, model: str | None, name: str | None = None
) -> list[StoredNamespace]:
    """Return the namespaces of ``model`` in the store at ``directory``.

    Args:
        directory: A store or a namespace in it.
        model: The engine's ``--model``, or the name of ``identity.name``; None for all.
        name: Return only the namespace of this name.

    Raises:
        ConfigError: There is none, or the model's files cannot be read.
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


def declared_namespaces(
    tier: NvmeTierConfig, identity: Fields
) -> tuple[list[StoredNamespace], list[StoredNamespace]]:
    """Find the namespaces that an engine of ``identity`` might use.

    Args:
        tier: The tier.
        identity: The part of an engine's identity that is known before it starts.

    Returns:
        The namespaces whose settings equal ``identity``, and all namespaces of the same model.
    """
    try:
        spaces = find_namespaces(tier.path)
    except ConfigError:  # there is no store yet
        return [], []
    same = [space for space in spaces if not _differing(space, identity, _MODEL)]
    return [space for space in same if not _differing(space, identity, identity)], same


def _differing(
    space: StoredNamespace, identity: Fields, names: Iterable[str]
) -> dict[str, tuple[object, object]]:
    """Return the fields in ``names`` that differ: (value in the store, value of the engine)."""
    theirs = space.layout.fingerprint.fields
    return {
        name: (theirs.get(name), identity.get(name))
        for name in names
        if theirs.get(name) != identity.get(name)
    }


def require_same_identity(
    tier: NvmeTierConfig, identity: Fields, *, own: StoredNamespace | None
) -> None:
    """Check that an engine uses the namespace in which the deployment stored its chunks.

    Args:
        tier: The tier.
        identity: The engine's identity, or the known part of it.
        own: The namespace that the running engine uses; None if none runs.

    Raises:
        ConfigError: Another namespace has chunks of the same model, and the engine's own has
            none; the message names the settings that differ.
    """
    fitting, same = declared_namespaces(tier, identity)
    others = [space for space in same if own is None or space.name != own.name]
    if own is None and fitting:
        return
    filled = [space for space in others if _has_chunks(space)]
    if filled and (own is None or not _has_chunks(own)):
        raise ConfigError(_refusal(tier, identity, filled))


def _has_chunks(space: StoredNamespace) -> bool:
    with contextlib.suppress(ConfigError), explained(space), IndexReader(space) as reader:
        return reader.chunks_from(0) > 0
    return False


def _refusal(tier: NvmeTierConfig, identity: Fields, others: Sequence[StoredNamespace]) -> str:
    nearest = min(others, key=lambda space: len(_differing(space, identity, identity)))
    differing = _differing(nearest, identity, identity)
    settings = ", ".join(
        f"{name} is {printable(str(theirs))!r} there and {printable(str(ours))!r} here"
        for name, (theirs, ours) in sorted(differing.items())
    )
    return (
        f"tier {tier.name}: {nearest.directory} has the model's chunks, but an engine with "
        f"these arguments would not read them: {settings}; give the arguments of the "
        "deployment after --, or --new-cache to fill another cache beside it"
    )
