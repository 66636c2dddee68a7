"""Policies: which copy leaves a full tier, and which tiers a chunk should be in."""

from __future__ import annotations

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
from kvtier.policies.placement import LadderPlacement
from kvtier.policies.registry import build_eviction

__all__ = [
    "NEVER",
    "ChunkCopy",
    "CopyState",
    "Evictable",
    "Eviction",
    "LadderPlacement",
    "Placement",
    "PolicyContext",
    "Promotion",
    "build_eviction",
]
