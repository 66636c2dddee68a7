"""Policies: which chunk leaves a full tier, which tiers it should be in, what may enter one."""

from __future__ import annotations

from kvtier.policies.admission import Admission
from kvtier.policies.base import (
    NEVER,
    ChunkCopy,
    CopyState,
    Evictable,
    Eviction,
    Placement,
    PolicyContext,
    Promotion,
)
from kvtier.policies.placement import ConditionalPlacement, TieredPlacement
from kvtier.policies.registry import build_admission, build_eviction, build_placement

__all__ = [
    "NEVER",
    "Admission",
    "ChunkCopy",
    "ConditionalPlacement",
    "CopyState",
    "Evictable",
    "Eviction",
    "Placement",
    "PolicyContext",
    "Promotion",
    "TieredPlacement",
    "build_admission",
    "build_eviction",
    "build_placement",
]
