"""Places slower than RAM where chunks live."""

from __future__ import annotations

from kvtier.tiers.base import (
    SlotOutcomes,
    StorageTier,
    TierContext,
)

__all__ = [
    "SlotOutcomes",
    "StorageTier",
    "TierContext",
]
