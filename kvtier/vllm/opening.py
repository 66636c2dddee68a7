"""Reads the configuration and opens an engine's memory and tiers, for both entry points."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from kvtier.config import (
    KvtierConfig,
    VllmEntryPoint,
    check_chunk_fits,
    load_config,
    resolve_rank_paths,
    slot_nbytes,
    with_staged_loads,
)
from kvtier.connector.device import DeviceEngine
from kvtier.connector.groups import describe_groups
from kvtier.connector.observer import Positions
from kvtier.connector.service import CacheService
from kvtier.connector.storage import open_storage
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.logs import get_logger
from kvtier.manager import GroupReach
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copiers import open_gds
from kvtier.memory.copy import KVBlocks
from kvtier.memory.fragments import fragment_nbytes
from kvtier.transfer import bounce_slots_for
from kvtier.units import approximate_size
from kvtier.vllm.engine import EngineFacts
from kvtier.vllm.identity import fingerprint
from kvtier.vllm.pages import SlotShape

__all__ = [
    "offer_region",
    "open_cache",
    "open_device",
    "read_settings",
    "report_fragments",
    "require_same_file",
]

logger = get_logger(__name__)

_MEET_TIMEOUT_S: Final = 600.0
"""Longest time for which an engine's processes wait for each other, after loading the
weights."""

_OFFER_TIMEOUT_S: Final = 24 * 3600.0
"""Longest time for which the first worker offers its memory. vLLM builds the scheduler after
the workers' warm-up, and nothing limits the time of a warm-up. If vLLM fails, vLLM ends the
worker."""


_FAST_NBYTES: Final = 64 << 10
"""Length from which copies between a GPU and RAM run at nearly full speed."""

_LONGEST: Final = "BHLNC"
"""The KV cache layout with the longest ranges, for any number of ranks."""


def read_settings(engine: EngineFacts, entry_point: VllmEntryPoint) -> KvtierConfig:
    """Return kvtier's configuration, with the paths of this data-parallel rank.

    Args:
        engine: The engine.
        entry_point: The entry point through which vLLM loads kvtier.

    Raises:
        ConfigError: vLLM's configuration names no file, or the file is invalid.
    """
    path = engine.extra_config.get("kvtier_config")
    if not path:
        raise ConfigError(
            "kv_connector_extra_config has no kvtier_config: start vLLM with what "
            f"`kvtier vllm-args FILE --entry-point {entry_point.value}` prints"
        )
    settings = load_config(path)
    if entry_point is VllmEntryPoint.SPEC:
        settings = with_staged_loads(settings)
    return resolve_rank_paths(settings, rank=engine.data_parallel_rank)


def offer_region(
    engine: EngineFacts, settings: KvtierConfig, shape: SlotShape, *, content: str
) -> HostRegion:
    """Create the RAM tier's memory in the first rank; attach to it in the others.

    Args:
        engine: The engine.
        settings: kvtier's configuration.
        shape: The size of a block in a slot.
        content: Description of the slots' bytes.

    Raises:
        ConfigError: The RAM tier is smaller than one chunk.
    """
    geometry = _geometry(engine, settings, shape, content=content)
    if engine.rank:
        return HostRegion.attach(engine.engine_id, geometry, timeout_s=_MEET_TIMEOUT_S)
    return HostRegion.create(
        engine.engine_id,
        geometry,
        attachers=engine.world_size,
        timeout_s=_OFFER_TIMEOUT_S,
        huge_pages=settings.ram.huge_pages,
    )


def open_device(
    engine: EngineFacts,
    settings: KvtierConfig,
    kv: KVBlocks,
    shape: SlotShape,
    *,
    content: str,
) -> DeviceEngine:
    """Open a worker's :class:`DeviceEngine`, which copies between KV memory and RAM slots.

    Args:
        engine: The engine.
        settings: kvtier's configuration.
        kv: The rank's KV memory.
        shape: The size of a block in a slot, and this rank's share of the block.
        content: Description of the slots' bytes.

    Raises:
        ConfigError: The RAM tier is smaller than one chunk, or kvikio is installed for another
            version of CUDA.
        UnsupportedError: The KV memory does not fit the slots, or ``gds: require`` cannot be
            met.
    """
    region = offer_region(engine, settings, shape, content=content)
    with ExitStack() as opened:
        opened.callback(region.close)
        if not engine.rank:
            report_fragments(
                fragment_nbytes(kv, shape.share), device=kv.device.type, layout=engine.kv_layout
            )
        gds = open_gds(
            settings.gds,
            kv,
            region,
            share=shape.share,
            blocks_per_chunk=engine.blocks_per_chunk,
        )
        if gds is not None:
            opened.callback(gds.close)
        device = DeviceEngine(
            kv,
            region,
            rank=engine.rank,
            share=shape.share,
            blocks_per_chunk=engine.blocks_per_chunk,
            close_timeout_s=settings.transfer.close_timeout_s,
            gds=gds,
        )
        opened.pop_all()
    return device


def report_fragments(nbytes: int, *, device: str, layout: str) -> None:
    """Log the size of the contiguous ranges of a copy, and how to get longer ranges.

    Args:
        nbytes: Bytes of a range.
        device: Type of the device that has the KV memory.
        layout: The KV cache's layout.
    """
    advice = ""
    if device == "cuda" and nbytes < _FAST_NBYTES:
        layouts = (
            "VLLM_KV_CACHE_LAYOUT=BHLNC, or BLHNC where the attention backend does not allow "
            "it, or with "
        )
        advice = (
            f"; copies of less than {approximate_size(_FAST_NBYTES)} are slower: start vLLM "
            f"with {'' if layout == _LONGEST else layouts}a larger --block-size"
        )
    size = approximate_size(nbytes)
    logger.info("a copy moves ranges of %s (KV cache layout %s)%s", size, layout, advice)


def require_same_file(
    geometry: RegionGeometry, engine: EngineFacts, settings: KvtierConfig
) -> None:
    """Check that the workers' RAM tier has the shape that ``settings`` give.

    Raises:
        UnsupportedError: The shape of the RAM tier does not match ``settings``.
    """
    slots = settings.tiers[0].capacity_bytes // geometry.slot_nbytes
    bounce_slots = bounce_slots_for(settings, geometry.slot_nbytes)
    found = geometry.slots, geometry.ranks, geometry.bounce_slots
    if found != (slots, engine.world_size, bounce_slots):
        raise UnsupportedError(
            f"the workers' RAM tier has another shape: {geometry} instead of {slots} slots for "
            f"{engine.world_size} ranks; all processes of an engine must read the same "
            "configuration file"
        )


def _geometry(
    engine: EngineFacts, settings: KvtierConfig, shape: SlotShape, *, content: str
) -> RegionGeometry:
    payload_nbytes = shape.block_nbytes * engine.blocks_per_chunk
    check_chunk_fits(settings, payload_nbytes)
    size = slot_nbytes(payload_nbytes)
    return RegionGeometry(
        slots=settings.tiers[0].capacity_bytes // size,
        slot_nbytes=size,
        block_nbytes=shape.block_nbytes,
        ranks=engine.world_size,
        is_portable=shape.is_portable,
        content=content,
        bounce_slots=bounce_slots_for(settings, size),
    )


def open_cache(
    engine: EngineFacts,
    settings: KvtierConfig,
    groups: Sequence[GroupReach],
    positions: Positions | None = None,
) -> CacheService:
    """Attach to the workers' memory and open the tiers, in the scheduler's process.

    Args:
        engine: The engine.
        settings: kvtier's configuration.
        groups: For each KV cache group, the chunks of a prefix that a hit needs.
        positions: Returns a request's chunks, each with its end in tokens; None if the entry
            point does not know the chunks.

    Raises:
        UnsupportedError: The workers read another configuration.
        CacheLockedError: Another engine uses a tier's cache.
    """
    # The workers chose the region's shape: only they know how the KV memory is laid out.
    region = HostRegion.attach(engine.engine_id, timeout_s=_MEET_TIMEOUT_S)
    with ExitStack() as opened:
        opened.callback(region.close)
        require_same_file(region.geometry, engine, settings)
        identity = fingerprint(engine, settings, region.geometry)
        described = describe_groups(
            engine.group_ids, groups, tokens_per_hash=engine.tokens_per_hash
        )
        storage = open_storage(
            settings,
            region,
            replace(identity, groups=described),
            tokens_per_chunk=engine.chunk_tokens,
            groups=groups,
            counting_group=engine.counting_group,
            record_events=engine.records_events,
            positions=positions,
        )
        close_timeout_s = settings.transfer.close_timeout_s
        opened.callback(storage.close, timeout_s=close_timeout_s)
        cache = CacheService(
            storage,
            tokens_per_chunk=engine.chunk_tokens,
            retain_s=settings.placement.retain_s or 0.0,
            close_timeout_s=close_timeout_s,
        )
        opened.pop_all()
    return cache
