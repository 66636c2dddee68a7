"""Bookkeeping of all tiers: pure decisions, no I/O."""

from __future__ import annotations

from kvtier.manager.counters import TierCounters, TierSnapshot
from kvtier.manager.estimates import LoadPrice
from kvtier.manager.events import ResidencyEvent
from kvtier.manager.plans import (
    LoadPlan,
    Lookup,
    ManagerLimits,
    ManagerSnapshot,
    SlotTruth,
    StorePlan,
)
from kvtier.manager.tier import TierState
from kvtier.manager.tiered import TieredOffloadingManager
from kvtier.manager.weighing import LoadChoice, SkipCause
from kvtier.manager.worth import LoadWorth, WorthFigures
from kvtier.policies.terms import NO_TERMS, RequestTerms

__all__ = [
    "NO_TERMS",
    "LoadChoice",
    "LoadPlan",
    "LoadPrice",
    "LoadWorth",
    "Lookup",
    "ManagerLimits",
    "ManagerSnapshot",
    "RequestTerms",
    "ResidencyEvent",
    "SkipCause",
    "SlotTruth",
    "StorePlan",
    "TierCounters",
    "TierSnapshot",
    "TierState",
    "TieredOffloadingManager",
    "WorthFigures",
]
