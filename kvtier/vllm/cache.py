"""Opens the tiers of one engine in the process of its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtier.config import KvtierConfig
from kvtier.connector.service import CacheService
from kvtier.connector.storage import open_storage
from kvtier.keys import ChunkKey
from kvtier.manager.hits import GroupReach
from kvtier.memory import HostRegion
from kvtier.vllm.compat.engine import EngineFacts
from kvtier.vllm.layout import fingerprint
from kvtier.vllm.regions import MEET_TIMEOUT_S, require_same_file

__all__ = ["open_cache"]


def open_cache(
    engine: EngineFacts,
    settings: KvtierConfig,
    groups: Sequence[GroupReach],
    positions: Callable[[Any], Mapping[ChunkKey, int]] | None = None,
) -> CacheService:
    """Attach to the workers' memory and open the tiers.

    Args:
        engine: The engine.
        settings: kvtier's configuration.
        groups: What each KV cache group needs of a prefix.
        positions: Returns a request's chunks and the token each ends before; None where the
            engine does not say.

    Raises:
        UnsupportedError: The workers read another configuration.
        StoreLockedError: Another engine has a tier's store.
    """
    # The workers chose the region's shape: only they see how the KV memory is laid out.
    region = HostRegion.attach(engine.engine_id, timeout_s=MEET_TIMEOUT_S)
    try:
        require_same_file(region.geometry, engine, settings)
        storage = open_storage(
            settings,
            region,
            fingerprint(engine, settings, region.geometry),
            tokens_per_chunk=engine.chunk_tokens,
            groups=groups,
            counting_group=engine.counting_group,
            record_events=engine.records_events,
            positions=positions,
        )
    except BaseException:
        region.close()
        raise
    return CacheService(
        storage,
        tokens_per_chunk=engine.chunk_tokens,
        retain_s=settings.placement.retain_s or 0.0,
        close_timeout_s=settings.transfer.close_timeout_s,
    )
