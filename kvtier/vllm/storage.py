"""Opens an engine's tiers and puts manager and storage engine together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.config import KvtierConfig
from kvtier.heap import bulk_loading
from kvtier.iopool import IoPool
from kvtier.manager import TieredOffloadingManager
from kvtier.manager.building import build_manager, build_tiers
from kvtier.memory import HostRegion
from kvtier.tiers.base import StorageTier, TierContext
from kvtier.tiers.registry import open_tier
from kvtier.transfer import EngineLimits, FromTier, Route, ToTier, TransferEngine
from kvtier.types import LayoutFingerprint
from kvtier.units import format_size

__all__ = ["Storage", "open_storage"]

logger = logging.getLogger(f"vllm.{__name__}")  # below the one logger vLLM configures


@dataclass(frozen=True, slots=True)
class Storage:
    """One engine's tiers, opened.

    Attributes:
        manager: Decides.
        engine: Moves chunks between RAM and the slower tiers.
        tiers: The slower tiers, fastest first.
        pool: Threads of the tiers' blocking calls.
        region: The RAM tier.
    """

    manager: TieredOffloadingManager
    engine: TransferEngine
    tiers: Sequence[StorageTier]
    pool: IoPool
    region: HostRegion

    def close(self, *, timeout_s: float) -> None:
        """Settle what is queued and close everything. Idempotent."""
        self.engine.close(timeout_s=timeout_s)
        self.pool.close(timeout_s=timeout_s)
        self.region.close()


def open_storage(
    config: KvtierConfig,
    region: HostRegion,
    fingerprint: LayoutFingerprint,
    *,
    record_events: bool,
) -> Storage:
    """Open every tier, recover what survived and start the storage engine.

    Args:
        config: The configuration.
        region: The RAM tier; owned by the result.
        fingerprint: What stored bytes mean.
        record_events: Whether somebody listens to residency events.

    Raises:
        KvtierError: A tier cannot be opened; nothing is left open.
    """
    slot_nbytes = region.geometry.slot_nbytes
    transfer = config.transfer
    pool = IoPool(transfer.io_threads, name="kvtier-io")
    context = TierContext(
        slot_nbytes=slot_nbytes,
        fingerprint=fingerprint,
        pool=pool,
        piece_nbytes=transfer.piece_bytes,
        memory=region.shared,
    )
    tiers: list[StorageTier] = []
    try:
        tiers.extend(open_tier(options, context) for options in config.tiers[1:])
        manager = _build_manager(config, region, tiers, record_events=record_events)
    except BaseException:
        asyncio.run(_close_all(tiers))
        pool.close(timeout_s=transfer.close_timeout_s)
        raise
    ram = config.tiers[0].name
    routes: dict[tuple[str, str], Route] = {}
    for tier in tiers:
        routes[ram, tier.name] = ToTier(region, tier)
        routes[tier.name, ram] = FromTier(region, tier)
    engine = TransferEngine(
        "storage",
        routes,
        chunk_nbytes=slot_nbytes,
        limits=EngineLimits(
            # The manager keeps to the configured limits itself; this is only a backstop, and
            # it must let through the promotion of as much as RAM can hold.
            queued_bytes=max(transfer.queue_limit_bytes, region.geometry.payload_nbytes),
            running_bytes=2 * transfer.io_threads * transfer.piece_bytes,
            breaker_failures=transfer.breaker_failures,
            breaker_backoff_s=transfer.breaker_backoff_s,
        ),
        closers=[tier.aclose for tier in tiers],
    )
    return Storage(manager, engine, tiers, pool, region)


async def _close_all(tiers: Sequence[StorageTier]) -> None:
    for tier in tiers:
        await tier.aclose()


def _build_manager(
    config: KvtierConfig,
    region: HostRegion,
    tiers: Sequence[StorageTier],
    *,
    record_events: bool,
) -> TieredOffloadingManager:
    slot_nbytes = region.geometry.slot_nbytes
    capacities = [region.geometry.slots, *(tier.capacity_slots for tier in tiers)]
    manager = build_manager(
        config,
        build_tiers(config, capacities),
        slot_nbytes=slot_nbytes,
        truth=region.control,
        record_events=record_events,
    )
    for number, tier in enumerate(tiers, start=1):
        with bulk_loading():
            chunks = manager.recover(number, tier.recovered())
        logger.info(
            "tier %s: %d of %d chunks of %s recovered",
            tier.name,
            chunks,
            tier.capacity_slots,
            format_size(slot_nbytes),
        )
    return manager
