"""Bookkeeping of all tiers: pure decisions, no I/O."""

from __future__ import annotations

from kvtier.manager.plans import (
    LoadPlan,
    Lookup,
    ManagerLimits,
    ManagerSnapshot,
    ResidencyEvent,
    SlotTruth,
    StorePlan,
)
from kvtier.manager.tier import TierCounters, TierSnapshot, TierState
from kvtier.manager.tiered import TieredOffloadingManager

__all__ = [
    "LoadPlan",
    "Lookup",
    "ManagerLimits",
    "ManagerSnapshot",
    "ResidencyEvent",
    "SlotTruth",
    "StorePlan",
    "TierCounters",
    "TierSnapshot",
    "TierState",
    "TieredOffloadingManager",
]
