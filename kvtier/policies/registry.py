"""Policies by name."""

from __future__ import annotations

from importlib.metadata import entry_points

from kvtier.errors import ConfigError
from kvtier.policies.base import Eviction
from kvtier.policies.eviction import Lru

__all__ = ["EVICTION_GROUP", "build_eviction"]

EVICTION_GROUP = "kvtier.eviction"
_BUILT_IN: dict[str, type[Eviction]] = {"lru": Lru}


def build_eviction(name: str, *, capacity: int) -> Eviction:
    """Build the eviction policy called ``name`` for a tier of ``capacity`` slots.

    Raises:
        ConfigError: No such policy is built in or installed.
    """
    factory = _BUILT_IN.get(name)
    if factory is not None:
        return factory(capacity)
    installed = entry_points(group=EVICTION_GROUP)
    if name not in installed.names:
        known = ", ".join(sorted({*_BUILT_IN, *installed.names}))
        raise ConfigError(f"unknown eviction policy {name!r}; installed: {known}")
    loaded: type[Eviction] = installed[name].load()
    return loaded(capacity)
