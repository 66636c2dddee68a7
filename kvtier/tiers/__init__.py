"""Storage tiers: they keep chunks on media slower than RAM."""

from __future__ import annotations

from kvtier.tiers.base import (
    SlotOutcomes,
    StorageTier,
    TierContext,
    TierExamination,
    check_batch,
)

__all__ = [
    "SlotOutcomes",
    "StorageTier",
    "TierContext",
    "TierExamination",
    "check_batch",
]
