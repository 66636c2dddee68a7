"""Policies: which copy leaves a full tier, and which tiers a chunk should be in."""

from __future__ import annotations

from kvtier.policies.base import (
    ChunkCopy,
    CopyState,
    Eviction,
    Placement,
    PolicyContext,
    Promotion,
)
from kvtier.policies.placement import LadderPlacement
from kvtier.policies.registry import build_eviction

__all__ = [
    "ChunkCopy",
    "CopyState",
    "Eviction",
    "LadderPlacement",
    "Placement",
    "PolicyContext",
    "Promotion",
    "build_eviction",
]
