"""Policies by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kvtier.errors import ConfigError
from kvtier.policies import eviction
from kvtier.policies.base import Eviction

__all__ = ["BUILT_IN_EVICTIONS", "EVICTION_GROUP", "build_eviction"]

EVICTION_GROUP: Final = "kvtier.eviction"
"""Entry points: a policy's name -> its class."""

BUILT_IN_EVICTIONS: Final[dict[str, type[Eviction]]] = {
    "arc": eviction.Arc,
    "belady": eviction.Belady,
    "fifo": eviction.Fifo,
    "gdsf": eviction.Gdsf,
    "hedged-lhd": eviction.HedgedLhd,
    "lfu": eviction.Lfu,
    "lirs": eviction.Lirs,
    "lru": eviction.Lru,
    "2q": eviction.TwoQ,
    "prefix-lru": eviction.PrefixLru,
    "s3-fifo": eviction.S3Fifo,
    "sieve": eviction.Sieve,
    "slru": eviction.Slru,
    "slru-4": eviction.Slru4,
    "w-tinylfu": eviction.WTinyLfu,
    "w-tinylfu-exact": eviction.WTinyLfuExact,
}


def build_eviction(name: str, *, capacity: int, future: bool = False) -> Eviction:
    """Build the eviction policy called ``name`` for a tier of ``capacity`` slots.

    Args:
        name: A built-in policy, the entry point of an installed package, or ``module:Class``.
        capacity: Slots of the tier.
        future: Whether the caller sets ``ctx.next_use``, as a simulator can.

    Raises:
        ConfigError: There is no such policy, it does not load, or it needs a future that nobody
            knows.
    """
    factory = BUILT_IN_EVICTIONS.get(name) or _load(name)
    if factory.needs_future and not future:
        problem = f"eviction policy {name!r} must know the future"
        raise ConfigError(f"{problem}; use it in kvtier sim, and another one in a live tier")
    return factory(capacity)


def _load(name: str) -> type[Eviction]:
    if ":" in name:
        point = EntryPoint(name=name, value=name, group=EVICTION_GROUP)
    else:
        installed = entry_points(group=EVICTION_GROUP)
        if name not in installed.names:
            known = ", ".join(sorted({*BUILT_IN_EVICTIONS, *installed.names}))
            remedy = "or name a class as module:Class"
            raise ConfigError(f"unknown eviction policy {name!r}; installed: {known}; {remedy}")
        point = installed[name]
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        problem = f"eviction policy {name!r} ({point.value}) does not load: {error}"
        remedy = "repair or remove the package that provides it"
        raise ConfigError(f"{problem}; {remedy}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Eviction)):
        problem = f"eviction policy {name!r}: {point.value} is no Eviction"
        raise ConfigError(f"{problem}; derive it from kvtier.policies.Eviction")
    return loaded
