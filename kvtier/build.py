"""Builds the manager that a configuration describes, for a live engine or a simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtier.config import KvtierConfig, SharedTierConfig
from kvtier.manager import (
    CostModel,
    GdsSource,
    GroupReach,
    ManagerLimits,
    SlotStatus,
    TieredOffloadingManager,
    TierState,
)
from kvtier.policies import (
    Admission,
    Eviction,
    Placement,
    build_admission,
    build_eviction,
    build_placement,
)
from kvtier.policies.admission import WriteBudget

__all__ = ["build_manager", "build_tiers", "check_policies"]

_MAX_QUEUE_S: Final = 1.0
_RESERVE: Final = 0.1
"""Fraction of a tier's slots that write-on-evict keeps free for the stores of a few steps."""
_JOB_CHUNKS: Final = 256
_JOB_NBYTES: Final = 64 << 20
"""Number of bytes of one job. Larger jobs need fewer I/O calls; smaller jobs delay an urgent
job less, and leave time to queue the next job before the current one ends."""


def build_tiers(config: KvtierConfig, capacities: Sequence[int]) -> list[TierState]:
    """Build the empty tiers that ``config`` describes, fastest first.

    Args:
        config: The configuration.
        capacities: Number of slots of each configured tier.

    Raises:
        ConfigError: An eviction policy is not installed, or its constructor fails.
    """
    return [
        TierState(
            options.name,
            number,
            capacity,
            _build_eviction(config, number, capacity),
            is_shared=options.is_shared,
        )
        for number, (options, capacity) in enumerate(zip(config.tiers, capacities, strict=True))
    ]


def build_manager(  # noqa: PLR0913 - one keyword for each part
    config: KvtierConfig,
    tiers: Sequence[TierState],
    *,
    slot_nbytes: int,
    chunk_tokens: int,
    slot_status: SlotStatus,
    record_events: bool,
    track_reuse: bool = True,
    groups: Sequence[GroupReach] = (GroupReach(chunk_tokens=1),),
    counting_group: int = 0,
    gds: GdsSource | None = None,
) -> TieredOffloadingManager:
    """Build the manager that ``config`` describes.

    Args:
        config: The configuration.
        tiers: The tiers that :func:`build_tiers` made.
        slot_nbytes: Number of bytes of one slot.
        chunk_tokens: Number of tokens of a chunk of the counting group.
        slot_status: The workers' reports about RAM slots.
        record_events: Whether to record residency events; if so, call ``take_events``.
        track_reuse: Whether to record the times from each chunk's eviction to its next lookup;
            if so, call ``take_reuse_gaps``.
        groups: For each KV cache group, the part of a prefix that a hit needs.
        counting_group: Index of the KV cache group used to count tokens.
        gds: Reports which slots of a tier the workers can read; None without GDS reads.

    Raises:
        ConfigError: A placement or admission policy is not installed, or its constructor fails.
    """
    placement, transfer = config.placement, config.transfer
    return TieredOffloadingManager(
        tiers,
        placement=_build_placement(config, len(tiers)),
        conditions=_build_conditions(config, tiers, slot_nbytes),
        limits=ManagerLimits(
            pin_budget=max(int(placement.pin_budget * tiers[0].slots.capacity), 1),
            reserve=_RESERVE,
            queue=max(transfer.queue_limit_bytes // slot_nbytes, 1),
            batch=min(max(_JOB_NBYTES // slot_nbytes, 1), _JOB_CHUNKS),
            retained=int(placement.retain_quota * tiers[0].slots.capacity),
            backlog=max(int(placement.backlog_limit * tiers[0].slots.capacity), 1),
            max_queue_s=_MAX_QUEUE_S,
            load_timeout_s=transfer.load_timeout_s,
            store_timeout_s=transfer.store_timeout_s,
            direct_loads=transfer.load_path == "direct",
            lookup_timeout_s=_lookup_timeout_s(config),
        ),
        slot_status=slot_status,
        record_events=record_events,
        track_reuse=track_reuse,
        cost_model=CostModel(
            tiers=len(tiers),
            chunk_nbytes=slot_nbytes,
            chunk_tokens=0 if placement.load_if == "always" else chunk_tokens,
            recompute_s_per_token=placement.recompute_per_token_s,
        ),
        groups=groups,
        counting_group=counting_group,
        gds=gds,
    )


def _lookup_timeout_s(config: KvtierConfig) -> float:
    last = config.tiers[-1]
    return last.lookup_timeout_s if isinstance(last, SharedTierConfig) else 0.0


def check_policies(config: KvtierConfig) -> None:
    """Check that every policy that ``config`` names can be constructed.

    Raises:
        ConfigError: A policy is not installed, or its constructor fails.
    """
    tiers = build_tiers(config, [1] * len(config.tiers))
    _build_placement(config, len(tiers))
    _build_conditions(config, tiers, slot_nbytes=1)
    for number, name in enumerate(config.shadow):
        with config.origin.at(f"shadow[{number}]"):
            build_eviction(name, capacity=1)


def _build_eviction(config: KvtierConfig, number: int, capacity: int) -> Eviction:
    with config.origin.at(f"tiers[{number}].eviction"):
        return build_eviction(config.tiers[number].eviction, capacity=capacity)


def _build_placement(config: KvtierConfig, tiers: int) -> Placement:
    rules = config.placement
    with config.origin.at("placement.policy"):
        return build_placement(rules.policy, tiers=tiers, **rules.settings)


def _build_conditions(
    config: KvtierConfig, tiers: Sequence[TierState], slot_nbytes: int
) -> list[Admission]:
    """Build the conditions on writes to slower tiers; the write budget comes last."""
    rules = config.placement
    chunks = tiers[0].slots.capacity + max(tier.slots.capacity for tier in tiers)
    with config.origin.at("placement.admit"):
        conditions = [build_admission(rules.admit, capacity=chunks)]
    if rules.write_budget_per_day_bytes is not None:
        budget = rules.write_budget_per_day_bytes
        conditions.append(WriteBudget(bytes_per_day=budget, chunk_nbytes=slot_nbytes))
    return conditions
