"""Open, check and examine storage tiers of every kind."""

from __future__ import annotations

from typing import Final

from kvtier.config import TIERS, KvtierConfig, SharedTierConfig, TierConfig
from kvtier.tiers.base import Fields, StorageTier, TierContext, TierExamination
from kvtier.tiers.slab.examine import examine_slab

__all__ = ["check_tiers", "examine_tier", "open_tier"]

_FAST_EXAMINERS: Final = {"nvme": examine_slab}
"""For each kind, a function that examines a cache without the slow import of the tier's
class."""


def open_tier(options: TierConfig, context: TierContext) -> StorageTier:
    """Open the storage tier of kind ``options.kind``.

    The tier runs in its own process if its options say so and the context has shared memory.
    The errors are those of :meth:`StorageTier.open`, and a ConfigError for an unknown kind.
    """
    if context.memory is not None and options.has_own_process():
        from kvtier.tiers.hosted import HostedTier  # noqa: PLC0415

        return HostedTier.open(options, context)
    if isinstance(options, SharedTierConfig):
        from kvtier.tiers.shared import KeyedTier  # noqa: PLC0415

        return KeyedTier.open(options, context)
    return _storage_tier(options.kind).open(options, context)


def examine_tier(options: TierConfig, identity: Fields) -> TierExamination | None:
    """Report what an engine would find at its start; see :meth:`StorageTier.examine`."""
    if examine := _FAST_EXAMINERS.get(options.kind):
        return examine(options, identity)
    if options.is_shared:
        return None
    return _storage_tier(options.kind).examine(options, identity)


def check_tiers(config: KvtierConfig) -> None:
    """Raise a ConfigError if the class of a tier is not installed or lacks methods."""
    from kvtier.tiers.shared import SharedTier  # noqa: PLC0415

    for number, tier in enumerate(config.tiers):
        if tier.kind not in TIERS.built_in:
            with config.origin.at(f"tiers[{number}].kind"):
                TIERS.find_derived(tier.kind, SharedTier if tier.is_shared else StorageTier)


def _storage_tier(kind: str) -> type[StorageTier]:
    return TIERS.find_derived(kind, StorageTier)
