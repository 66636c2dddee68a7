"""Policies for eviction, for placement in tiers, and for admission to a tier."""

from __future__ import annotations

from kvtier.policies.admission import Admission
from kvtier.policies.base import (
    ChunkCopy,
    CopyState,
    Evictable,
    Eviction,
    Placement,
    PolicyContext,
    Promotion,
    RequestTerms,
)
from kvtier.policies.placement import TieredPlacement
from kvtier.policies.registry import build_admission, build_eviction, build_placement

__all__ = [
    "Admission",
    "ChunkCopy",
    "CopyState",
    "Evictable",
    "Eviction",
    "Placement",
    "PolicyContext",
    "Promotion",
    "RequestTerms",
    "TieredPlacement",
    "build_admission",
    "build_eviction",
    "build_placement",
]
