"""The facts about an engine that kvtier needs, read from vLLM's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.connector.groups import CacheGroup
from kvtier.keys import counting_group
from kvtier.manager import Reach

__all__ = ["EngineFacts", "data_parallel_rank", "kv_dtype", "read_vllm_config"]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts about an engine that kvtier needs, independent of vLLM's classes.

    Attributes:
        engine_id: The engine's name; the same in all its processes.
        extra_config: vLLM's ``kv_connector_extra_config``.
        records_events: Whether residency events have a listener.
        model_name: The model as the user named it: a path, or a name on a hub.
        kv_dtype: Element type of the KV cache.
        kv_layout: Order of the dimensions of the KV cache.
        canonical_layout: Whether the user asked vLLM for pages that are independent of
            parallelism.
        groups: Per KV cache group, the number of tokens of a block and the names of the layers.
        group_ids: Index of each group in keys.
        counting_group: Index of the KV cache group used to count tokens.
        tokens_per_hash: Number of prompt tokens from one block hash to the next.
        blocks_per_chunk: Number of blocks that are stored together.
        worker_kv_bytes_per_block: Bytes of a block in one worker, in all layers together.
        rank: Number of this worker; 0 in the scheduler's process.
        world_size: Number of workers.
        tp_size: Number of workers that share every layer.
        pp_size: Number of pipeline stages, each with a part of the layers.
        pcp_size: Number of workers that divide the prefill of a prompt.
        dcp_size: Number of workers that divide the decoding of a sequence.
        data_parallel_rank: This engine's data-parallel rank; None for a single engine.
    """

    engine_id: str
    extra_config: Mapping[str, Any]
    records_events: bool
    model_name: str
    kv_dtype: str
    kv_layout: str
    canonical_layout: bool
    groups: tuple[tuple[int, tuple[str, ...]], ...]
    group_ids: tuple[int, ...]
    counting_group: int
    tokens_per_hash: int
    blocks_per_chunk: int
    worker_kv_bytes_per_block: int
    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    data_parallel_rank: int | None

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens of a chunk of the counting group."""
        tokens_per_block, _ = self.groups[self.group_ids.index(self.counting_group)]
        return tokens_per_block * self.blocks_per_chunk


def read_vllm_config(
    vllm_config: Any,  # noqa: ANN401 - vLLM's
    kv_cache_config: Any,  # noqa: ANN401 - vLLM's
    groups: Sequence[CacheGroup],
) -> EngineFacts:
    """Return an engine's facts, read from the configuration of a connector.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV cache groups.
        groups: The groups that kvtier stores.
    """
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # noqa: PLC0415

    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    cache, events = vllm_config.cache_config, vllm_config.kv_events_config
    _, tokens_per_hash = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    extra_config = transfer.kv_connector_extra_config
    tensors, blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
    layers = [kv_cache_config.kv_cache_groups[group.index].layer_names for group in groups]
    return EngineFacts(
        engine_id=transfer.engine_id,
        extra_config=extra_config,
        records_events=events is not None and events.enable_kv_cache_events,
        model_name=vllm_config.model_config.model,
        kv_dtype=kv_dtype(vllm_config),
        kv_layout=kv_cache_config.kv_cache_layout or cache.kv_cache_layout or "",
        canonical_layout=bool(extra_config.get("canonical_layout", False)),
        groups=tuple(
            (group.tokens_per_block, tuple(names))
            for group, names in zip(groups, layers, strict=True)
        ),
        group_ids=tuple(group.index for group in groups),
        counting_group=counting_group(
            {group.index: group.reach is Reach.PREFIX for group in groups}
        ),
        tokens_per_hash=tokens_per_hash,
        blocks_per_chunk=int(extra_config.get("blocks_per_chunk", 1)),
        worker_kv_bytes_per_block=int(tensors[0].size // blocks) if tensors and blocks else 0,
        rank=parallel.rank,
        world_size=parallel.world_size,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pcp_size=parallel.prefill_context_parallel_size,
        dcp_size=parallel.decode_context_parallel_size,
        data_parallel_rank=data_parallel_rank(parallel, transfer.engine_id),
    )


def kv_dtype(vllm_config: Any) -> str:  # noqa: ANN401 - vLLM's
    """Return the element type of the KV cache."""
    dtype = vllm_config.cache_config.cache_dtype
    dtype = vllm_config.model_config.dtype if dtype == "auto" else dtype
    return str(dtype).removeprefix("torch.")


def data_parallel_rank(parallel: Any, engine_id: str) -> int | None:  # noqa: ANN401 - vLLM's
    """Return this engine's data-parallel rank; None for a single engine.

    For each rank of a dense model, vLLM sets the data-parallel size to 1 and keeps the rank's
    index. So the settings of rank 0 look like those of a single engine. Only the engine's name
    differs, because vLLM appends the index to the name of each rank.

    Args:
        parallel: vLLM's configuration of parallelism.
        engine_id: The engine's name.
    """
    number: int = parallel.data_parallel_index
    name = re.search(r"_dp(\d+)$", engine_id)
    is_named = name is not None and int(name[1]) == number
    return number if number or is_named or parallel.data_parallel_size > 1 else None
