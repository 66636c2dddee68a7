"""The JSON Schema of a file, for editors and for other people's tools."""

from __future__ import annotations

from typing import Any

from kvtier.config._kinds import installed_kinds, options_of
from kvtier.config._models import KvtierConfig, TierConfig
from kvtier.policies.registry import ADMISSIONS, CLASS_PATTERN, EVICTIONS, PLACEMENTS

__all__ = ["schema"]

# Schemas are made in pydantic's mode "serialization" because only there are defaults written
# as in a file (512MiB, not 536870912); what a model reads and writes is otherwise the same.


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a file, including every installed tier kind.

    Raises:
        ConfigError: The package that provides a tier kind is broken.
    """
    root = KvtierConfig.model_json_schema(mode="serialization")
    definitions = root["$defs"]
    definitions.pop("TierConfig", None)
    references = []
    for kind in installed_kinds():
        tier = _tier_schema(kind)
        definitions.update(tier.pop("$defs", {}))
        definitions[f"tier-{kind}"] = tier
        references.append({"$ref": f"#/$defs/tier-{kind}"})
    definitions["tier-class"] = _schema_of_classes()
    references.append({"$ref": "#/$defs/tier-class"})
    root["properties"]["tiers"]["items"] = {"oneOf": references}
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
    """Return the schema of a tier of kind ``module:Class``, which accepts any keys."""
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
