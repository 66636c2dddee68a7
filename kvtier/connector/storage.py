"""Opens one engine's tiers, the cache manager, and the transfer engine between the tiers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import combinations
from typing import Final

from kvtier.build import build_manager, build_tiers
from kvtier.config import KvtierConfig
from kvtier.connector.deadline import Deadline
from kvtier.connector.figures import StoreInfo
from kvtier.connector.gds_slots import GdsSlots
from kvtier.connector.observer import Observer, Positions, build_observer
from kvtier.errors import CapacityError, ConfigError
from kvtier.logs import get_logger
from kvtier.manager import GroupReach, TieredOffloadingManager
from kvtier.memory import HostRegion
from kvtier.os.iopool import IoPool, start_thread
from kvtier.os.memory import paused_garbage_collection
from kvtier.recording import Recorder
from kvtier.tiers.base import KeyFinder, StorageTier, TierContext
from kvtier.tiers.part_hashes import PartHashKeeper
from kvtier.tiers.registry import open_tier
from kvtier.transfer import (
    AskTier,
    BetweenTiers,
    BounceBuffer,
    EngineLimits,
    FromTier,
    Route,
    ToTier,
    TransferEngine,
)
from kvtier.types import LayoutFingerprint
from kvtier.units import format_size

__all__ = ["Storage", "open_storage"]

logger = get_logger(__name__)

_RECORDER_S: Final = 1.0
"""Seconds reserved for closing the recorder and the threads if the transfer engine hangs."""
_POOLS_S: Final = 0.25
"""Seconds reserved for closing the threads if the recorder hangs."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One engine's open tiers, and the objects that move chunks between them.

    Attributes:
        manager: Plans the moves of chunks between tiers.
        engine: The transfer engine that carries out these moves.
        tiers: The slower tiers, fastest first.
        pools: Threads for blocking calls, one pool for each of ``tiers``.
        region: The RAM tier.
        recorder: Writes the trace of requests; None if requests are not recorded.
        observer: Follows requests for the recorder and the shadow policies; None without a
            recorder and shadow policies.
        recovered: Number of chunks recovered from earlier engines, by tier name.
        stores: For each tier, where the tier keeps its chunks.
    """

    manager: TieredOffloadingManager
    engine: TransferEngine
    tiers: Sequence[StorageTier]
    pools: Sequence[IoPool]
    region: HostRegion
    recorder: Recorder | None
    observer: Observer | None
    recovered: Mapping[str, int] = field(default_factory=dict)
    stores: Sequence[StoreInfo] = ()

    def close(self, *, timeout_s: float) -> None:
        """Complete the queued jobs and close every part within ``timeout_s``. Idempotent.

        If one part fails to close, the other parts are closed too.
        """
        deadline = Deadline(timeout_s)
        with ExitStack() as stack:  # the last callback runs first
            stack.callback(self.region.close)
            stack.callback(_close_pools, self.pools, deadline)
            if (recorder := self.recorder) is not None:
                stack.callback(lambda: recorder.close(timeout_s=deadline.share_s(_POOLS_S)))
            stack.callback(lambda: self.engine.close(timeout_s=deadline.share_s(_RECORDER_S)))


def open_storage(  # noqa: PLR0913 - one keyword for each part
    config: KvtierConfig,
    region: HostRegion,
    fingerprint: LayoutFingerprint,
    *,
    tokens_per_chunk: int,
    groups: Sequence[GroupReach],
    record_events: bool,
    positions: Positions | None = None,
    counting_group: int = 0,
) -> Storage:
    """Open every tier, recover its chunks and start the transfer engine.

    Args:
        config: The configuration.
        region: The RAM tier; closed with the returned object.
        fingerprint: The settings that a chunk's bytes depend on, such as the model.
        tokens_per_chunk: Number of tokens of a chunk of the counting group.
        groups: For each KV cache group, the part of a prefix that a hit needs.
        record_events: Whether residency events have a listener.
        positions: Returns the chunks of a request, for the recorder and the shadow policies.
        counting_group: Index of the KV cache group used to count tokens.

    Raises:
        KvtierError: A tier cannot be opened. Only ``region`` is still open.
    """
    slot_nbytes = region.geometry.slot_nbytes
    pools: list[IoPool] = []
    tiers: list[StorageTier] = []
    recorder: Recorder | None = None
    try:
        tiers.extend(_open_tiers(config, region, fingerprint, pools))
        gds = _open_gds(config, region, tiers)
        if any(tier.moves_in_process for tier in tiers):
            region.map_pages()
        capacities = [region.geometry.slots, *(tier.capacity_slots for tier in tiers)]
        recorder = _open_recorder(config)
        observer = build_observer(
            config,
            recorder,
            capacities,
            positions=positions,
            chunk_tokens=tokens_per_chunk,
            counting_group=counting_group,
        )
        manager = build_manager(
            config,
            build_tiers(config, capacities),
            slot_nbytes=slot_nbytes,
            chunk_tokens=tokens_per_chunk,
            slot_status=region.control,
            record_events=record_events,
            groups=groups,
            counting_group=counting_group,
            gds=gds,
        )
        recovered = _recover(manager, tiers, slot_nbytes)
        _retain(config, manager, tiers)
        engine = _start_engine(config, region, tiers, gds)
    except BaseException:
        deadline = Deadline(config.transfer.close_timeout_s)
        if recorder is not None:
            recorder.close(timeout_s=deadline.left_s())
        _close_all(tiers, timeout_s=deadline.left_s())
        _close_pools(pools, deadline)
        raise
    stores = _stores(config, fingerprint)
    return Storage(manager, engine, tiers, pools, region, recorder, observer, recovered, stores)


def _open_tiers(
    config: KvtierConfig,
    region: HostRegion,
    fingerprint: LayoutFingerprint,
    pools: list[IoPool],
) -> Iterator[StorageTier]:
    """Open and yield the slower tiers; append each tier's thread pool to ``pools``.

    Each tier has its own threads, so that a hanging tier does not stop the others.
    """
    for options in config.tiers[1:]:
        pool = IoPool(config.transfer.io_threads, name=f"kvtier-io-{options.name}")
        pools.append(pool)
        context = TierContext(
            slot_nbytes=region.geometry.slot_nbytes,
            fingerprint=fingerprint,
            pool=pool,
            piece_nbytes=config.transfer.piece_bytes,
            memory=region.shared,
            hash_parts=region.control.gds_parts() if options.name == config.gds_tier else 0,
        )
        yield open_tier(options, context)


def _open_gds(
    config: KvtierConfig, region: HostRegion, tiers: Sequence[StorageTier]
) -> GdsSlots | None:
    """Prepare GDS reads of a tier; return None if they are disabled or impossible."""
    ranks = region.control
    for number, tier in enumerate(tiers, start=1):
        if tier.name != config.gds_tier or not isinstance(tier, PartHashKeeper):
            continue
        if not ranks.gds_parts() or tier.slot_file is None:
            logger.info(
                "tier %s: chunks are loaded through RAM, see the workers' logs", tier.name
            )
            continue
        logger.info("tier %s: %d workers do GDS reads", tier.name, ranks.gds_ranks())
        return GdsSlots(number, tier, tier, tier.slot_file, ranks)
    return None


def _close_pools(pools: Sequence[IoPool], deadline: Deadline) -> None:
    for pool in pools:  # all at once, because a pool that hangs would use up the time
        pool.close(timeout_s=0.0)
    for pool in pools:
        if not pool.close(timeout_s=deadline.left_s()):
            logger.error("threads %s: their I/O calls did not end in time", pool.name)


def _start_engine(
    config: KvtierConfig,
    region: HostRegion,
    tiers: Sequence[StorageTier],
    gds: GdsSlots | None,
) -> TransferEngine:
    transfer = config.transfer
    return TransferEngine(
        "storage",
        _routes(config, region, tiers, gds),
        chunk_nbytes=region.geometry.slot_nbytes,
        limits=EngineLimits(
            # The manager keeps the configured limits. This is a backstop, and it must accept
            # promotions of as much as RAM can hold.
            queued_bytes=max(transfer.queue_limit_bytes, region.geometry.payload_nbytes),
            running_bytes=8 * transfer.io_threads * transfer.piece_bytes,
            breaker_backoff_s=transfer.breaker_backoff_s,
        ),
        openers=[tier.aopen for tier in tiers],
        closers=[tier.aclose for tier in tiers],
    )


def _routes(
    config: KvtierConfig,
    region: HostRegion,
    tiers: Sequence[StorageTier],
    gds: GdsSlots | None,
) -> dict[tuple[str, str], Route]:
    """Return the routes between RAM and each tier, between slower tiers, and for questions."""
    ram, last = config.tiers[0].name, config.tiers[-1]
    routes: dict[tuple[str, str], Route] = {}
    for number, tier in enumerate(tiers, start=1):
        hashes = gds if gds is not None and gds.tier == number else None
        routes[ram, tier.name] = ToTier(region, tier, region.control, hashes)
        routes[tier.name, ram] = FromTier(region, tier, region.control)
    if last.is_shared and isinstance(tiers[-1], KeyFinder):
        routes[last.name, last.name] = AskTier(tiers[-1])
    if slots := region.geometry.bounce_range:
        bounce_buffer = BounceBuffer(region, slots)
        for upper, lower in combinations(tiers, 2):
            routes[upper.name, lower.name] = BetweenTiers(upper, lower, bounce_buffer)
    return routes


def _close_all(tiers: Sequence[StorageTier], *, timeout_s: float) -> None:
    """Close all tiers and wait up to ``timeout_s`` seconds; log their errors.

    Each tier closes in its own thread, because a tier with a hanging disk ignores cancellation.
    The caller must be able to continue, for example to report the error of a start.
    """
    deadline = Deadline(timeout_s)
    threads = [
        threading.Thread(target=_close, args=(tier,), name=f"close-{tier.name}", daemon=True)
        for tier in tiers
    ]
    for tier, thread in zip(tiers, threads, strict=True):
        try:
            start_thread(thread)
        except CapacityError:  # the start may have failed with the same error
            _close(tier)
    for tier, thread in zip(tiers, threads, strict=True):
        if thread.ident is not None:
            thread.join(deadline.left_s())
        if thread.is_alive():
            logger.error("tier %s: not closed within %.1f s", tier.name, timeout_s)


def _close(tier: StorageTier) -> None:
    try:
        asyncio.run(tier.aclose())
    except Exception:
        logger.exception("tier %s: not closed", tier.name)


def _open_recorder(config: KvtierConfig) -> Recorder | None:
    """Start and return the recorder; return None if the configuration asks for none.

    Raises:
        ConfigError: The recorder's directory cannot be created.
    """
    options = config.trace
    if options.record is None:
        return None
    try:
        return Recorder(options.record, options=options)
    except OSError as error:
        problem = f"cannot be made: {error.strerror}"
        remedy = "name a directory whose parent exists and that the engine may write to"
        text = config.origin.format_problem(
            "trace.record", problem, remedy, value=options.record
        )
        raise ConfigError(text) from error


def _recover(
    manager: TieredOffloadingManager, tiers: Sequence[StorageTier], slot_nbytes: int
) -> dict[str, int]:
    """Pass the chunks of earlier engines to the manager; return their number per tier."""
    recovered: dict[str, int] = {}
    # The slowest first: a chunk that only one tier has must be demoted before its eviction.
    for number, tier in reversed(list(enumerate(tiers, start=1))):
        with paused_garbage_collection():
            chunks = manager.recover(number, tier.recovered())
        recovered[tier.name] = chunks
        logger.info(
            "tier %s: %d of %d chunks of %s recovered",
            tier.name,
            chunks,
            tier.capacity_slots,
            format_size(slot_nbytes),
        )
    return recovered


def _retain(
    config: KvtierConfig, manager: TieredOffloadingManager, tiers: Sequence[StorageTier]
) -> None:
    """Protect recovered chunks that must not be evicted yet, within the tiers' quotas.

    If a tier has more such chunks than its quota, only the chunks whose protection ends last
    are protected.
    """
    now, now_s = int(datetime.now(UTC).timestamp()), time.monotonic()
    for number, (options, tier) in enumerate(
        zip(config.tiers[1:], tiers, strict=True), start=1
    ):
        asked = sorted(tier.retained().items(), key=lambda each: each[1], reverse=True)
        quota = int(options.retained_share() * tier.capacity_slots)
        if len(asked) > quota:
            logger.warning(
                "tier %s: %d of %d chunks to retain exceed retain_quota, and may be evicted",
                tier.name,
                len(asked) - quota,
                len(asked),
            )
        kept = {slot: now_s + until - now for slot, until in asked[:quota]}
        if kept:
            manager.retain_recovered(number, kept)
            logger.info("tier %s: %d chunks are retained", tier.name, len(kept))


def _stores(config: KvtierConfig, fingerprint: LayoutFingerprint) -> list[StoreInfo]:
    namespace = fingerprint.namespace()
    directories = [tier.local_directory() for tier in config.tiers]
    return [
        StoreInfo(tier.name, tier.kind, namespace, str(directory.path) if directory else "")
        for tier, directory in zip(config.tiers, directories, strict=True)
    ]
