"""What ``kind`` and ``eviction`` may name: what is built in, and what installed packages add.

The built-in kinds are known here directly, so that a configuration can be read without
importing the tier that it configures, or anything heavier.
"""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kvtier.config._models import NvmeTierConfig, RamTierConfig, TierConfig
from kvtier.errors import ConfigError

__all__ = [
    "CLASS_PATTERN",
    "EVICTION_GROUP",
    "TIER_GROUP",
    "check_eviction",
    "installed_evictions",
    "installed_kinds",
    "options_of",
]

TIER_GROUP: Final = "kvtier.tiers"
"""Entry points: a kind's name -> a class with ``Options: type[TierConfig]``."""
EVICTION_GROUP: Final = "kvtier.eviction"
"""Entry points: an eviction policy's name -> its class."""
CLASS_PATTERN: Final = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""How a class is named that no package provides under a name of its own: ``module:Class``."""

_BUILT_IN_EVICTIONS: Final = (
    "2q",
    "arc",
    "fifo",
    "gdsf",
    "hedged-lhd",
    "lfu",
    "lirs",
    "lru",
    "prefix-lru",
    "s3-fifo",
    "sieve",
    "slru",
    "slru-4",
    "w-tinylfu",
    "w-tinylfu-exact",
)
_NEEDS_FUTURE: Final = "belady"
_BUILT_IN: Final[dict[str, type[TierConfig]]] = {"ram": RamTierConfig, "nvme": NvmeTierConfig}


def installed_kinds() -> tuple[str, ...]:
    """Return every tier kind a file may name, the built-in ones first."""
    others = entry_points(group=TIER_GROUP).names - _BUILT_IN.keys()
    return (*_BUILT_IN, *sorted(others))


def installed_evictions() -> tuple[str, ...]:
    """Return the name of every eviction policy that a tier may have."""
    installed = entry_points(group=EVICTION_GROUP).names
    return tuple(sorted({*_BUILT_IN_EVICTIONS, *installed} - {_NEEDS_FUTURE}))


def check_eviction(name: str) -> tuple[str, str] | None:
    """Return what keeps the policy called ``name`` from ordering a tier, and a remedy.

    Args:
        name: A policy's name, known or not, or ``module:Class``.
    """
    if name == _NEEDS_FUTURE:
        return "a policy that must know the future", "use it with kvtier sim run --policy"
    if not re.match(CLASS_PATTERN, name):
        return None
    try:
        EntryPoint(name=name, value=name, group=EVICTION_GROUP).load()
    except (ImportError, AttributeError) as error:
        return f"does not load: {error}", "put its package on the path of Python, or mend it"
    return None


def options_of(kind: str) -> type[TierConfig]:
    """Return the model of the options that a tier of ``kind`` takes.

    Args:
        kind: One of :func:`installed_kinds`.

    Raises:
        ConfigError: The package that provides the kind is broken.
    """
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    return _load_options(entry_points(group=TIER_GROUP)[kind])


def _load_options(entry_point: EntryPoint) -> type[TierConfig]:
    try:
        options = entry_point.load().Options
    except (ImportError, AttributeError) as error:
        remedy = "repair or remove the package that provides it"
        problem = f"tier kind {entry_point.name} ({entry_point.value}) does not load: {error}"
        raise ConfigError(f"{problem}; {remedy}") from error
    if not (isinstance(options, type) and issubclass(options, TierConfig)):
        problem = f"tier kind {entry_point.name}: {entry_point.value}.Options is no TierConfig"
        raise ConfigError(f"{problem}; derive it from kvtier.config.TierConfig")
    return options
