"""Tier kinds: the built-in ones, those of installed packages, and any class.

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
    "TIER_GROUP",
    "has_custom_policies",
    "installed_kinds",
    "is_built_in",
    "load_tier",
    "options_of",
]

TIER_GROUP: Final = "kvtier.tiers"
"""Entry points: a kind's name -> a class with ``Options: type[TierConfig]``."""
_BUILT_IN: Final[dict[str, type[TierConfig]]] = {"ram": RamTierConfig, "nvme": NvmeTierConfig}


def installed_kinds() -> tuple[str, ...]:
    """Return the names of all tier kinds, the built-in ones first."""
    others = entry_points(group=TIER_GROUP).names - _BUILT_IN.keys()
    return (*_BUILT_IN, *sorted(others))


def is_built_in(kind: str) -> bool:
    """Return whether ``kind`` is one of kvtier's own."""
    return kind in _BUILT_IN


def has_custom_policies(config: KvtierConfig) -> bool:
    """Return whether ``config`` names a policy of another package."""
    rules = config.placement
    evictions = {*config.shadow, *(tier.eviction for tier in config.tiers)}
    return not (
        evictions <= EVICTIONS.built_in.keys()
        and rules.policy in PLACEMENTS.built_in
        and rules.admit in ADMISSIONS.built_in
    )


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
    """Return the class of ``kind``, from a package or as ``module:Class``.

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
        return EntryPoint(name=kind, value=kind, group=TIER_GROUP)
    installed = entry_points(group=TIER_GROUP)
    if kind not in installed.names:
        known = ", ".join(installed_kinds())
        remedy = "or name a class as module:Class"
        raise ConfigError(f"unknown tier kind {kind!r}; installed: {known}; {remedy}")
    return installed[kind]
