"""Shared tiers: storage that many engines use at the same time."""

from __future__ import annotations

from kvtier.tiers.shared.base import SharedContext, SharedTier, Value
from kvtier.tiers.shared.keyed_tier import KeyedTier
from kvtier.tiers.shared.proof import PROOF_NBYTES

__all__ = [
    "PROOF_NBYTES",
    "KeyedTier",
    "SharedContext",
    "SharedTier",
    "Value",
]
