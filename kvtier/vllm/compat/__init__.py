"""Which vLLM this is: told by its features, never by its version string.

Forks and nightlies carry any version, and vLLM changes its offloading contract in most
releases. So whatever differs between two of the releases kvtier works with is looked up here,
and only here; what all of them have is imported by :mod:`kvtier.vllm.contract`.

========  ====================================================================================
release   what came with it, and what kvtier does about its absence
========  ====================================================================================
0.25      ``get_worker``, ``LookupResult``: without them vLLM is refused
0.26      ``OffloadingConfig``: read from vLLM's own configuration before; the key
          ``blocks_per_chunk`` is set on the spec, whose base knows only ``block_size``
0.27      ``Medium``: events carried strings before
0.28      ``canonical_layout``: nobody can have asked for it before; the KV cache's element type
          also where it is the model's
0.29      ``kv_cache_layout``: before, a worker tells what both follow from; a constant hash
          seed: before, PYTHONHASHSEED must be set
0.30      ``group_id``: a group's index before; ``CHUNK_LEVEL``: it was called
          ``BLOCK_LEVEL``; ``has_sync_kv_loads``: without it no load happens within the forward
          pass; ``KVConnectorTransferResults``: before, a failed load could be told of blocks
          only
0.31      groups of which nothing can be found again are not stored: before, they are refused
0.32      ``CacheHitSource``: nobody asked for it before
0.33      ``submit_load(expedited)``: kvtier copies at once either way; ``lock``,
          ``on_reset_flushed`` and ``config_info`` have defaults that suit a manager entered
          from one thread that knows by itself when a slot is quiet
========  ====================================================================================

Names of which no release is known are in :mod:`~kvtier.vllm.compat.names` alone.

What cannot be recognised is refused when the engine starts. A method that a newer vLLM made
abstract, or calls with an argument kvtier does not take, would otherwise end the engine in the
middle of a request.
"""

from __future__ import annotations

from kvtier.vllm.compat.checks import (
    CONNECTOR_NAMES,
    OFFLOADING_NAMES,
    missing_members,
    refusal,
    require_members,
    require_supported_vllm,
)
from kvtier.vllm.compat.engine import (
    FULL_GROUPS,
    EngineFacts,
    adopt_chunk_size,
    full_attention_groups,
    kv_content,
    read_engine,
)
from kvtier.vllm.compat.halves import (
    blocks_can_be_struck_out,
    bounds_aborted,
    event_payloads,
    half_is_known,
    loads_before_the_pass,
    moving_states,
    offers_can_be_bounded,
    offers_can_be_repeated,
    offers_late,
    parts_go_astray,
    source_was_read,
    writes_to_blocks_first,
)
from kvtier.vllm.compat.kinds import (
    kept_by_layers,
    require_known_groups,
    require_known_layers,
    states_are_kept,
)
from kvtier.vllm.compat.layers import settle_layers
from kvtier.vllm.compat.names import (
    chunk_level,
    chunk_positions,
    event_extras,
    hashes_are_seeded_at_random,
    hit_pending,
    hit_sources,
    kv_cache_layout,
    media,
    names_tiers,
    page_mapping,
    transfer_results,
)
from kvtier.vllm.compat.workers import (
    clears_for_nobody,
    current_config,
    hands_over_lost_states,
    has_adapters,
    worker_offers_late,
    worker_writes_to_blocks_first,
)

__all__ = [
    "CONNECTOR_NAMES",
    "FULL_GROUPS",
    "OFFLOADING_NAMES",
    "EngineFacts",
    "adopt_chunk_size",
    "blocks_can_be_struck_out",
    "bounds_aborted",
    "chunk_level",
    "chunk_positions",
    "clears_for_nobody",
    "current_config",
    "event_extras",
    "event_payloads",
    "full_attention_groups",
    "half_is_known",
    "hands_over_lost_states",
    "has_adapters",
    "hashes_are_seeded_at_random",
    "hit_pending",
    "hit_sources",
    "kept_by_layers",
    "kv_cache_layout",
    "kv_content",
    "loads_before_the_pass",
    "media",
    "missing_members",
    "moving_states",
    "names_tiers",
    "offers_can_be_bounded",
    "offers_can_be_repeated",
    "offers_late",
    "page_mapping",
    "parts_go_astray",
    "read_engine",
    "refusal",
    "require_known_groups",
    "require_known_layers",
    "require_members",
    "require_supported_vllm",
    "settle_layers",
    "source_was_read",
    "states_are_kept",
    "transfer_results",
    "worker_offers_late",
    "worker_writes_to_blocks_first",
    "writes_to_blocks_first",
]
