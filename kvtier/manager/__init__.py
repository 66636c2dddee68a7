"""The manager: decides where every chunk is, without doing I/O.

An engine calls :class:`~kvtier.manager.tiered.TieredOffloadingManager`. Behind it:

* :mod:`~kvtier.manager.lookup` finds hits by the rules of :mod:`~kvtier.manager.hits`.
* :mod:`~kvtier.manager.promote` decides which chunks of a hit are promoted to RAM, and for
  which request. :mod:`~kvtier.manager.grants` pins chunks for waiting requests and owns the pin
  budget. :mod:`~kvtier.manager.cost_model` decides whether a load is faster than computing. The
  expected times come from :mod:`~kvtier.manager.estimates`.
* :mod:`~kvtier.manager.store`, :mod:`~kvtier.manager.load` and :mod:`~kvtier.manager.direct`
  plan the workers' jobs.
* :mod:`~kvtier.manager.demote` decides which chunks are copied to slower tiers.
* :mod:`~kvtier.manager.storage_jobs` plans the jobs of promotions and demotions.
* :mod:`~kvtier.manager.retention` keeps chunks until a deadline.
* :mod:`~kvtier.manager.quarantine` empties the tiers at a reset.

These modules share the :mod:`~kvtier.manager.tier_stack`, which has the tiers
(:mod:`~kvtier.manager.tier` and :mod:`~kvtier.manager.slots`) and the
:mod:`~kvtier.manager.reports`. ``copies`` orders the chunks of a prompt.
:mod:`kvtier.build` makes a manager from a configuration. The modules here do not read the
configuration. Code outside imports from this package, not from its modules.
"""

from __future__ import annotations

from kvtier.manager.cost_model import CostModel, LoadChoice, SkipCause
from kvtier.manager.estimates import prompt_tokens
from kvtier.manager.hits import GroupReach, HitRules, Prompt, Reach
from kvtier.manager.load import NO_LOAD, NO_SLOT, LoadPlan
from kvtier.manager.reports import ManagerSnapshot, ResidencyEvent, TierSnapshot
from kvtier.manager.store import NOTHING_TO_STORE, StorePlan
from kvtier.manager.tier import TierState
from kvtier.manager.tier_stack import NO_GENERATION, GdsSource, ManagerLimits, SlotStatus
from kvtier.manager.tiered import TieredOffloadingManager

__all__ = [
    "NOTHING_TO_STORE",
    "NO_GENERATION",
    "NO_LOAD",
    "NO_SLOT",
    "CostModel",
    "GdsSource",
    "GroupReach",
    "HitRules",
    "LoadChoice",
    "LoadPlan",
    "ManagerLimits",
    "ManagerSnapshot",
    "Prompt",
    "Reach",
    "ResidencyEvent",
    "SkipCause",
    "SlotStatus",
    "StorePlan",
    "TierSnapshot",
    "TierState",
    "TieredOffloadingManager",
    "prompt_tokens",
]
