"""Shared tiers: storage that many engines use at the same time."""

from __future__ import annotations

from kvtier.tiers.shared.base import SharedContext, SharedTier, Value, with_proof_buffers
from kvtier.tiers.shared.keyed_tier import KeyedTier, value_key
from kvtier.tiers.shared.proof import PROOF_NBYTES, is_proof_of

__all__ = [
    "PROOF_NBYTES",
    "KeyedTier",
    "SharedContext",
    "SharedTier",
    "Value",
    "is_proof_of",
    "value_key",
    "with_proof_buffers",
]
