"""Storage tiers by kind."""

from __future__ import annotations

from typing import cast

from kvtier.config import KvtierConfig, TierConfig, is_built_in, load_tier
from kvtier.errors import ConfigError
from kvtier.tiers.base import StorageTier, TierContext
from kvtier.tiers.hosted import HostedTier
from kvtier.tiers.slab import SlabTier

__all__ = ["check_tiers", "open_tier"]


def open_tier(options: TierConfig, context: TierContext) -> StorageTier:
    """Open the storage tier that ``options.kind`` names.

    If its options ask for a process of its own, it gets one, provided that the context has
    memory that the process can map.

    Raises:
        ConfigError: There is no such kind, it is broken, or its options cannot work here.
        StoreLockedError: Another process has the store open.
        StoreDamagedError: The store's files are not what they should be.
    """
    if context.memory is not None and getattr(options, "own_process", False):
        return HostedTier.open(options, context)
    return _class_of(options.kind).open(options, context)


def check_tiers(config: KvtierConfig) -> None:
    """Make sure that every tier of ``config`` has a class that can be opened.

    Raises:
        ConfigError: A kind is not installed, or its class is not a complete tier.
    """
    for number, tier in enumerate(config.tiers):
        if not is_built_in(tier.kind):
            with config.origin.at(f"tiers[{number}].kind"):
                _class_of(tier.kind)


def _class_of(kind: str) -> type[StorageTier]:
    if kind == "nvme":
        return SlabTier
    loaded = load_tier(kind)
    if not (isinstance(loaded, type) and issubclass(loaded, StorageTier)):
        problem = f"tier kind {kind}: {loaded!r} is no StorageTier"
        raise ConfigError(f"{problem}; derive it from kvtier.tiers.StorageTier")
    left_out = sorted(cast("frozenset[str]", getattr(loaded, "__abstractmethods__", ())))
    if left_out:
        problem = f"tier kind {kind}: {loaded.__name__} leaves out {', '.join(left_out)}"
        raise ConfigError(f"{problem}; kvtier.tiers.base says what each must do")
    return loaded
