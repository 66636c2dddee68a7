"""Finds tier kinds: built-in kinds, kinds of installed packages, and classes by name.

The module also makes the JSON Schema of configuration files.

Reading a configuration imports no built-in tier, only the model of its options.
"""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from kvtier.config._models import KvtierConfig, NvmeTierConfig, RamTierConfig, TierConfig
from kvtier.errors import ConfigError
from kvtier.policies.registry import (
    ADMISSIONS,
    CLASS_PATTERN,
    EVICTIONS,
    PLACEMENTS,
    path_remedy,
)

__all__ = [
    "installed_kinds",
    "is_built_in",
    "load_tier",
    "options_of",
    "schema",
]

_TIER_GROUP: Final = "kvtier.tiers"
"""Entry point group, from a kind's name to a class with ``Options: type[TierConfig]``."""
_BUILT_IN: Final[dict[str, type[TierConfig]]] = {"ram": RamTierConfig, "nvme": NvmeTierConfig}


def installed_kinds() -> tuple[str, ...]:
    """Return the names of all tier kinds, the built-in ones first."""
    others = entry_points(group=_TIER_GROUP).names - _BUILT_IN.keys()
    return (*_BUILT_IN, *sorted(others))


def is_built_in(kind: str) -> bool:
    """Return whether ``kind`` is a built-in tier kind."""
    return kind in _BUILT_IN


def options_of(kind: str) -> type[TierConfig]:
    """Return the options model of the tier kind ``kind``.

    Args:
        kind: One of :func:`installed_kinds`, or ``module:Class``.

    Raises:
        ConfigError: There is no such kind, or the package that provides it is broken.
    """
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    loaded = load_tier(kind)
    options = getattr(loaded, "Options", None)
    if not (isinstance(options, type) and issubclass(options, TierConfig)):
        problem = f"tier kind {kind}: {loaded!r} has no Options derived from TierConfig"
        raise ConfigError(f"{problem}; derive it from kvtier.config.TierConfig")
    return options


def load_tier(kind: str) -> Any:  # noqa: ANN401 - of another package
    """Return the class of the tier kind ``kind``: an installed kind or ``module:Class``.

    Raises:
        ConfigError: There is no such kind, or it does not load.
    """
    point = _point(kind)
    try:
        return point.load()
    except Exception as error:  # importing a package runs its code
        problem = f"tier kind {point.name} does not load: {error}"
        if point.name != point.value:
            problem = f"tier kind {point.name} ({point.value}) does not load: {error}"
        remedy = path_remedy(point, error) or "repair or remove the package that provides it"
        raise ConfigError(f"{problem}; {remedy}") from error


def _point(kind: str) -> EntryPoint:
    if re.match(CLASS_PATTERN, kind):
        return EntryPoint(name=kind, value=kind, group=_TIER_GROUP)
    installed = entry_points(group=_TIER_GROUP)
    if kind not in installed.names:
        known = ", ".join(installed_kinds())
        remedy = "or name a class as module:Class"
        raise ConfigError(f"unknown tier kind {kind!r}; installed: {known}; {remedy}")
    return installed[kind]


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
    """Return the schema of tiers of kind ``module:Class``; these tiers may have any keys."""
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
