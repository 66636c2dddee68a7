"""What ``kind`` may name: what is built in, and what installed packages add.

The built-in kinds are known here directly, so that a configuration can be read without
importing the tier that it configures, or anything heavier.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kvtier.config._models import NvmeTierConfig, RamTierConfig, TierConfig
from kvtier.errors import ConfigError

__all__ = ["TIER_GROUP", "installed_kinds", "options_of"]

TIER_GROUP: Final = "kvtier.tiers"
"""Entry points: a kind's name -> a class with ``Options: type[TierConfig]``."""
_BUILT_IN: Final[dict[str, type[TierConfig]]] = {"ram": RamTierConfig, "nvme": NvmeTierConfig}


def installed_kinds() -> tuple[str, ...]:
    """Return every tier kind a file may name, the built-in ones first."""
    others = entry_points(group=TIER_GROUP).names - _BUILT_IN.keys()
    return (*_BUILT_IN, *sorted(others))


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
    except Exception as error:  # importing it runs somebody's code
        remedy = "repair or remove the package that provides it"
        problem = f"tier kind {entry_point.name} ({entry_point.value}) does not load: {error}"
        raise ConfigError(f"{problem}; {remedy}") from error
    if not (isinstance(options, type) and issubclass(options, TierConfig)):
        problem = f"tier kind {entry_point.name}: {entry_point.value}.Options is no TierConfig"
        raise ConfigError(f"{problem}; derive it from kvtier.config.TierConfig")
    return options
