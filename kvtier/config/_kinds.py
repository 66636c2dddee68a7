"""Finds the options model of a tier kind, and makes the JSON Schema of configuration files.

A kind is built in, comes from an installed package, or has the form ``module:Class``. For a
built-in kind, this module imports only the options model, not the tier.
"""

from __future__ import annotations

from typing import Any, Final

from kvtier.config._models import KvtierConfig
from kvtier.config._shared import MooncakeTierConfig, ObjectTierConfig, SharedDirTierConfig
from kvtier.config._tiers import NvmeTierConfig, RamTierConfig, TierConfig
from kvtier.errors import ConfigError
from kvtier.named_classes import CLASS_PATTERN, NamedClasses
from kvtier.policies.registry import ADMISSIONS, EVICTIONS, PLACEMENTS

__all__ = [
    "TIERS",
    "options_of",
    "schema",
]

_BUILT_IN: Final[dict[str, tuple[str, type[TierConfig]]]] = {
    "ram": ("kvtier.memory:HostRegion", RamTierConfig),
    "nvme": ("kvtier.tiers.slab:SlabTier", NvmeTierConfig),
    "mooncake": ("kvtier.tiers.shared.mooncake:MooncakeTier", MooncakeTierConfig),
    "object": ("kvtier.tiers.shared.object_store:ObjectTier", ObjectTierConfig),
    "shared_dir": ("kvtier.tiers.shared.shared_dir:SharedDirTier", SharedDirTierConfig),
}
"""Class and options model of each built-in kind. The model is found without an import of the
class."""
TIERS: Final = NamedClasses(
    "tier kind",
    ("kvtier.tiers", "kvtier.shared_tiers"),
    {kind: name for kind, (name, _) in _BUILT_IN.items()},
)
"""The classes of tiers. A class that is not built in has ``Options: type[TierConfig]``."""


def options_of(kind: str) -> type[TierConfig]:
    """Return the options model of the tier kind ``kind``.

    Args:
        kind: A built-in kind, a kind of an installed package, or ``module:Class``.

    Raises:
        ConfigError: The kind is not installed, or the package that provides it is broken.
    """
    if kind in _BUILT_IN:
        return _BUILT_IN[kind][1]
    loaded = TIERS.find(kind)
    options = getattr(loaded, "Options", None)
    if not (isinstance(options, type) and issubclass(options, TierConfig)):
        problem = f"tier kind {kind}: {loaded!r} has no Options derived from TierConfig"
        raise ConfigError(f"{problem}; derive it from kvtier.config.TierConfig")
    return options


# Schemas are made in pydantic's mode "serialization" because only there are defaults written
# as in a file (512MiB, not 536870912); what a model reads and writes is otherwise the same.


def _define_tiers(definitions: dict[str, Any]) -> list[dict[str, str]]:
    """Add a schema for each tier kind to ``definitions``; return references to the schemas."""
    for kind in TIERS.installed():
        tier = _tier_schema(kind)
        definitions.update(tier.pop("$defs", {}))
        definitions[f"tier-{kind}"] = tier
    definitions["tier-class"] = _schema_of_classes()
    return [{"$ref": f"#/$defs/tier-{kind}"} for kind in (*TIERS.installed(), "class")]


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of configuration files, with all installed tier kinds.

    Raises:
        ConfigError: The package that provides a tier kind is broken.
    """
    root = KvtierConfig.model_json_schema(mode="serialization")
    definitions = root["$defs"]
    definitions.pop("TierConfig", None)
    root["properties"]["tiers"]["items"] = {"oneOf": _define_tiers(definitions)}
    root["properties"]["shadow"]["items"] = EVICTIONS.schema()
    placement = definitions["PlacementConfig"]["properties"]
    placement["policy"] |= PLACEMENTS.schema()
    placement["admit"] |= ADMISSIONS.schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **root,
        "title": "kvtier configuration",
        "description": "Tiers for an LLM engine's KV cache, fastest first.",
    }


def _schema_of_classes() -> dict[str, Any]:
    """Return the schema of a tier of kind ``module:Class``. Such a tier may have any keys."""
    tier = TierConfig.model_json_schema(mode="serialization")
    tier["properties"]["kind"] |= {"pattern": CLASS_PATTERN}
    tier["properties"]["eviction"] |= EVICTIONS.schema()
    return {**tier, "additionalProperties": True, "title": "tier of a class"}


def _tier_schema(kind: str) -> dict[str, Any]:
    tier = options_of(kind).model_json_schema(mode="serialization")
    properties = tier["properties"]
    description = properties["kind"].get("description", "")
    properties["kind"] = {"const": kind, "description": description}
    # A model may have a default for `kind`; a file must state `kind`.
    tier["required"] = ["kind", *(key for key in tier.get("required", ()) if key != "kind")]
    properties["eviction"] |= EVICTIONS.schema()
    return {**tier, "title": f"{kind} tier"}
