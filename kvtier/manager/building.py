"""From a configuration to a manager: the same one for a live engine and for a simulator."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.config import KvtierConfig
from kvtier.manager.plans import ManagerLimits, SlotTruth
from kvtier.manager.tier import TierState
from kvtier.manager.tiered import TieredOffloadingManager
from kvtier.policies import LadderPlacement, build_eviction

__all__ = ["build_manager"]


def build_manager(
    config: KvtierConfig,
    *,
    slot_nbytes: int,
    capacities: Sequence[int],
    truth: SlotTruth,
    record_events: bool,
) -> TieredOffloadingManager:
    """Build the manager that ``config`` describes, its tiers empty.

    Args:
        config: The configuration.
        slot_nbytes: Bytes a chunk takes in a tier.
        capacities: Slots of each of the configuration's tiers.
        truth: What the workers say about RAM slots.
        record_events: Whether somebody listens to residency events.

    Raises:
        ConfigError: A policy is not installed.
    """
    placement, transfer = config.placement, config.transfer
    tiers = [
        TierState(
            options.name,
            number,
            capacity,
            build_eviction(options.eviction, capacity=capacity),
        )
        for number, (options, capacity) in enumerate(zip(config.tiers, capacities, strict=True))
    ]
    return TieredOffloadingManager(
        tiers,
        placement=LadderPlacement(
            tiers=len(tiers),
            write=placement.write,
            promote_after=placement.promote_after,
        ),
        limits=ManagerLimits(
            pin_budget=max(int(placement.pin_budget * capacities[0]), 1),
            reserve=placement.clean_reserve,
            queue=max(transfer.queue_limit_bytes // slot_nbytes, 1),
            load_timeout_s=transfer.load_timeout_s,
            store_timeout_s=transfer.store_timeout_s,
        ),
        truth=truth,
        record_events=record_events,
    )
