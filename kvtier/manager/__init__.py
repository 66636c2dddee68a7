"""Bookkeeping of all tiers: pure decisions, no I/O.

:mod:`~kvtier.manager.tiered` is what an engine calls. Behind it, by what happens to a chunk:

* It is stored: :mod:`~kvtier.manager.storer`.
* It goes down: :mod:`~kvtier.manager.placing` says where to, the
  :mod:`~kvtier.manager.demoter` queues what goes at once, the
  :mod:`~kvtier.manager.reserves` send victims ahead of need, by
  :mod:`~kvtier.manager.demotion_jobs`.
* It is looked up: :mod:`~kvtier.manager.hits` are the rules, :mod:`~kvtier.manager.lookup`
  applies them and reserves room.
* It comes up: the :mod:`~kvtier.manager.promoter` says whose turn it is,
  :mod:`~kvtier.manager.cost_model` and :mod:`~kvtier.manager.weighing` how much pays by the
  :mod:`~kvtier.manager.estimates`, :mod:`~kvtier.manager.grants` keep it, and
  :mod:`~kvtier.manager.promotion_jobs` bring it.
* It is loaded: :mod:`~kvtier.manager.loader`.
* It outlives its turn, or a reset: :mod:`~kvtier.manager.retention`,
  :mod:`~kvtier.manager.quarantine`.

What they share is the :mod:`~kvtier.manager.ladder`: its tiers (:mod:`~kvtier.manager.tier`,
:mod:`~kvtier.manager.holds`, :mod:`~kvtier.manager.kids`, :mod:`~kvtier.manager.slots`), the
:mod:`~kvtier.manager.ledger` of jobs in flight, and the :mod:`~kvtier.manager.events`. Values
that pass between them are in ``plans``, ``requests``, ``run``, ``found`` and ``counters``;
``reuse`` measures, and ``building`` makes a manager of a configuration.
"""

from __future__ import annotations

from kvtier.manager.cost_model import CostFigures, CostModel
from kvtier.manager.counters import TierCounters, TierSnapshot
from kvtier.manager.estimates import LoadPrice, prompt_tokens
from kvtier.manager.events import ResidencyEvent
from kvtier.manager.plans import (
    LoadPlan,
    ManagerLimits,
    ManagerSnapshot,
    SlotStatus,
    StorePlan,
)
from kvtier.manager.tier import TierState
from kvtier.manager.tiered import TieredOffloadingManager
from kvtier.manager.weighing import LoadChoice, SkipCause
from kvtier.policies.terms import NO_TERMS, RequestTerms

__all__ = [
    "NO_TERMS",
    "CostFigures",
    "CostModel",
    "LoadChoice",
    "LoadPlan",
    "LoadPrice",
    "ManagerLimits",
    "ManagerSnapshot",
    "RequestTerms",
    "ResidencyEvent",
    "SkipCause",
    "SlotStatus",
    "StorePlan",
    "TierCounters",
    "TierSnapshot",
    "TierState",
    "TieredOffloadingManager",
    "prompt_tokens",
]
