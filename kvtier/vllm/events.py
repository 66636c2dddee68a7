"""Converts the cache's events to vLLM's KV events, which request routers read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.keys import ChunkKey, group_of, hash_part, strip_adapter
from kvtier.manager import ResidencyEvent

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

__all__ = ["kv_events"]


def kv_events(events: Iterable[ResidencyEvent], tiers: Sequence[str]) -> Iterator[KVCacheEvent]:
    """Convert each event to vLLM's events, one for each KV cache group in the event.

    Args:
        events: The cache's events.
        tiers: Names of the tiers.
    """
    for event in events:
        where = {
            "medium": MEDIUM_STORAGE if event.tier else MEDIUM_CPU,
            "ownership": tiers[event.tier] if event.tier else None,
        }
        for group, hashes in _hashes_by_group(event.keys).items():
            if event.removed:
                yield BlockRemoved(block_hashes=hashes, group_idx=group, **where)
                continue
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=None,
                token_ids=[],
                block_size=0,
                lora_id=None,
                lora_name=None,
                group_idx=group,
                **where,
            )


def _hashes_by_group(keys: Iterable[ChunkKey]) -> dict[int, list[Any]]:
    """Return the block hashes in ``keys``, in vLLM's form, by KV cache group."""
    by_group: dict[int, list[Any]] = {}
    for key in keys:
        block_hash = maybe_convert_block_hash(hash_part(strip_adapter(key)))
        by_group.setdefault(group_of(key), []).append(block_hash)
    return by_group
