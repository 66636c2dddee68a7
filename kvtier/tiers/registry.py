"""Storage tiers by kind."""

from __future__ import annotations

from importlib.metadata import entry_points

from kvtier.config import TIER_GROUP, TierConfig
from kvtier.errors import ConfigError
from kvtier.tiers.base import StorageTier, TierContext
from kvtier.tiers.hosted import HostedTier
from kvtier.tiers.slab import SlabTier

__all__ = ["open_tier"]

_BUILT_IN: dict[str, type[StorageTier]] = {"nvme": SlabTier}


def open_tier(options: TierConfig, context: TierContext) -> StorageTier:
    """Open the storage tier that ``options.kind`` names.

    If its options ask for a process of its own, it gets one, provided that the context has
    memory that the process can map.

    Raises:
        ConfigError: No such kind is built in or installed, or its options cannot work here.
        StoreLockedError: Another process has the store open.
        StoreDamagedError: The store's files are not what they should be.
    """
    if context.memory is not None and getattr(options, "own_process", False):
        return HostedTier.open(options, context)
    factory = _BUILT_IN.get(options.kind)
    if factory is None:
        installed = entry_points(group=TIER_GROUP)
        if options.kind not in installed.names:
            known = ", ".join(sorted({"ram", *_BUILT_IN, *installed.names}))
            raise ConfigError(f"unknown tier kind {options.kind!r}; installed: {known}")
        factory = installed[options.kind].load()
    return factory.open(options, context)
