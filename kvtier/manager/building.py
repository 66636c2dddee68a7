"""From a configuration to a manager: the same one for a live engine and for a simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from kvtier.config import KvtierConfig, PlacementConfig
from kvtier.manager.plans import ManagerLimits, SlotTruth
from kvtier.manager.tier import TierState
from kvtier.manager.tiered import TieredOffloadingManager
from kvtier.manager.worth import LoadWorth
from kvtier.policies import LadderPlacement, build_eviction
from kvtier.policies.admission import Admission, SecondTouch, TinyLfu, WriteBudget

__all__ = ["build_manager", "build_tiers"]

_PATIENCE_S: Final = 1.0
_JOB_CHUNKS: Final = 256
_JOB_NBYTES: Final = 64 << 20
"""Most of one job: enough to merge long runs into few large I/O calls; few enough that an
urgent job never waits long behind one, and that the next is with the tier before one ends."""


def build_tiers(config: KvtierConfig, capacities: Sequence[int]) -> list[TierState]:
    """Build the tiers that ``config`` describes, empty, fastest first.

    Args:
        config: The configuration.
        capacities: Slots of each of its tiers.

    Raises:
        ConfigError: An eviction policy is not installed.
    """
    return [
        TierState(
            options.name,
            number,
            capacity,
            build_eviction(options.eviction, capacity=capacity),
        )
        for number, (options, capacity) in enumerate(zip(config.tiers, capacities, strict=True))
    ]


def build_manager(  # noqa: PLR0913 - one keyword for each part
    config: KvtierConfig,
    tiers: Sequence[TierState],
    *,
    slot_nbytes: int,
    chunk_tokens: int,
    truth: SlotTruth,
    record_events: bool,
    follow_reuse: bool = True,
    counting_group: int = 0,
    make: Callable[..., TieredOffloadingManager] = TieredOffloadingManager,
) -> TieredOffloadingManager:
    """Build the manager that ``config`` describes.

    Args:
        config: The configuration.
        tiers: Its tiers, of :func:`build_tiers`.
        slot_nbytes: Bytes a chunk takes in a tier.
        chunk_tokens: Tokens of a chunk of the counting group.
        truth: What the workers say about RAM slots.
        record_events: Whether somebody listens to residency events.
        follow_reuse: Whether somebody wants to know how soon chunks are asked for again.
        counting_group: Index of the KV cache group whose chunks stand for tokens.
        make: What makes the manager: the class, or one derived from it.
    """
    placement, transfer = config.placement, config.transfer
    return make(
        tiers,
        placement=LadderPlacement(
            tiers=len(tiers),
            write=placement.write,
            write_after=placement.write_after,
            promote=placement.promote,
            promote_after=placement.promote_after,
            min_chunks=placement.min_chunks,
            admissions=_build_admissions(placement, tiers, slot_nbytes),
        ),
        limits=ManagerLimits(
            pin_budget=max(int(placement.pin_budget * tiers[0].slots.capacity), 1),
            reserve=placement.clean_reserve,
            queue=max(transfer.queue_limit_bytes // slot_nbytes, 1),
            batch=min(max(_JOB_NBYTES // slot_nbytes, 1), _JOB_CHUNKS),
            retained=int(placement.retain_quota * tiers[0].slots.capacity),
            backlog=max(int(placement.backlog_limit * tiers[0].slots.capacity), 1),
            patience_s=_PATIENCE_S,
            load_timeout_s=transfer.load_timeout_s,
            store_timeout_s=transfer.store_timeout_s,
            streams=transfer.load_path == "direct",
        ),
        truth=truth,
        record_events=record_events,
        follow_reuse=follow_reuse,
        worth=LoadWorth(
            tiers=len(tiers),
            chunk_nbytes=slot_nbytes,
            chunk_tokens=chunk_tokens,
            recompute_s_per_token=placement.recompute_per_token_s,
            margin=math.inf if placement.load_if == "always" else 1.0,
        ),
        counting_group=counting_group,
    )


def _build_admissions(
    placement: PlacementConfig, tiers: Sequence[TierState], slot_nbytes: int
) -> list[Admission]:
    """Build the conditions for entering a slower tier; the budget is asked last."""
    chunks = tiers[0].slots.capacity + max(tier.slots.capacity for tier in tiers)
    conditions: list[Admission] = []
    if placement.admit == "second-touch":
        conditions.append(SecondTouch(chunks))
    elif placement.admit == "tinylfu":
        conditions.append(TinyLfu(chunks))
    if placement.write_budget_per_day_bytes is not None:
        budget = placement.write_budget_per_day_bytes
        conditions.append(WriteBudget(bytes_per_day=budget, chunk_nbytes=slot_nbytes))
    return conditions
