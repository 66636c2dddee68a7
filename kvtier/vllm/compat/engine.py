"""The engine's configuration, whatever a release calls it and wherever it keeps it."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.config import environment
from kvtier.connector.groups import CacheGroup
from kvtier.errors import UnsupportedError
from kvtier.keys import counting_group
from kvtier.manager.hits import Reach
from kvtier.vllm.compat.layers import layer_content
from kvtier.vllm.compat.meaning import kv_meaning
from kvtier.vllm.compat.sharing import require_shareable_kv
from kvtier.vllm.versions import SUPPORTED

__all__ = ["EngineFacts", "kv_content", "read_offloading_config", "read_vllm_config"]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What kvtier needs to know of the engine it serves, whatever vLLM calls it.

    Attributes:
        engine_id: The engine's name; the same in all its processes.
        extra_config: What ``kv_connector_extra_config`` says.
        records_events: Whether somebody listens to residency events.
        model_name: The model as it was given: a path or a hub's name.
        kv_dtype: Element type of the KV cache.
        kv_layout: How a block's bytes are laid out; None where vLLM does not tell a spec, and
            :func:`kv_content` says what it follows from.
        canonical_layout: Whether vLLM was asked for its parallelism-free pages.
        groups: Per KV cache group, the tokens of a block and the names of the layers.
        group_ids: What each is called in keys.
        counting_group: Which of these is the :func:`~kvtier.keys.counting_group`.
        tokens_per_hash: Tokens that one block hash covers.
        blocks_per_chunk: Blocks that are stored together.
        worker_kv_bytes_per_block: Bytes one worker keeps for a block, all layers.
        rank: This worker; 0 in the scheduler's process.
        world_size: Workers.
        tp_size: Workers that share every layer.
        pp_size: Stages the layers are split into.
        pcp_size: Workers that share a prompt's prefill.
        dcp_size: Workers that share a sequence's decode.
        data_parallel_rank: The engine's number among data-parallel ones; None if it is alone.
    """

    engine_id: str
    extra_config: Mapping[str, Any]
    records_events: bool
    model_name: str
    kv_dtype: str
    kv_layout: str | None
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
        """Tokens of a chunk of the counting group."""
        tokens_per_block, _ = self.groups[self.group_ids.index(self.counting_group)]
        return tokens_per_block * self.blocks_per_chunk


def read_vllm_config(
    vllm_config: Any,  # noqa: ANN401 - vLLM's
    kv_cache_config: Any,  # noqa: ANN401 - vLLM's
    groups: Sequence[CacheGroup],
) -> EngineFacts:
    """Return what kvtier needs to know of an engine that builds a connector.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: Its KV cache groups.
        groups: Those that kvtier stores.
    """
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # noqa: PLC0415

    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    cache, events = vllm_config.cache_config, vllm_config.kv_events_config
    _, tokens_per_hash = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    dtype = vllm_config.model_config.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    extra_config = transfer.kv_connector_extra_config
    return EngineFacts(
        engine_id=transfer.engine_id,
        extra_config=extra_config,
        records_events=events is not None and events.enable_kv_cache_events,
        model_name=vllm_config.model_config.model,
        kv_dtype=str(dtype).removeprefix("torch."),
        kv_layout=kv_cache_config.kv_cache_layout or cache.kv_cache_layout or "",
        canonical_layout=bool(extra_config.get("canonical_layout", False)),
        groups=tuple(
            (
                group.tokens_per_block,
                tuple(kv_cache_config.kv_cache_groups[group.index].layer_names),
            )
            for group in groups
        ),
        group_ids=tuple(group.index for group in groups),
        counting_group=_counting_group(
            [group.index for group in groups],
            [group.index for group in groups if group.reach is Reach.PREFIX],
        ),
        tokens_per_hash=tokens_per_hash,
        blocks_per_chunk=int(extra_config.get("blocks_per_chunk", 1)),
        worker_kv_bytes_per_block=_bytes_per_block(kv_cache_config),
        rank=parallel.rank,
        world_size=parallel.world_size,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pcp_size=parallel.prefill_context_parallel_size,
        dcp_size=parallel.decode_context_parallel_size,
        data_parallel_rank=_data_parallel_rank(parallel, transfer.engine_id),
    )


def read_offloading_config(config: Any) -> EngineFacts:  # noqa: ANN401 - vLLM's
    """Return what kvtier needs to know of an engine that builds an offloading spec."""
    parallel = config.parallel
    group_ids = tuple(
        getattr(group, "group_id", at)  # named since 0.30
        for at, group in enumerate(config.groups)
    )
    return EngineFacts(
        engine_id=config.engine_id,
        extra_config=config.extra_config,
        records_events=config.enable_kv_cache_events,
        model_name=config.model.name,
        kv_dtype=config.model.dtype,
        kv_layout=(config.kv_cache_layout or "")
        if hasattr(config, "kv_cache_layout")
        else None,
        canonical_layout=getattr(config, "canonical_layout", False),
        groups=tuple(
            (group.tokens_per_block, tuple(group.layer_names)) for group in config.groups
        ),
        group_ids=group_ids,
        counting_group=_counting_group(group_ids, group_ids),
        tokens_per_hash=config.cache.tokens_per_hash,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        worker_kv_bytes_per_block=config.worker_kv_bytes_per_block,
        rank=parallel.rank,
        world_size=parallel.world_size,
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        pcp_size=parallel.pcp_size,
        dcp_size=parallel.dcp_size,
        data_parallel_rank=_data_parallel_rank(parallel, config.engine_id),
    )


def _data_parallel_rank(parallel: Any, engine_id: str) -> int | None:  # noqa: ANN401 - vLLM's
    """Return which of several data-parallel engines this is; None if it is the only one.

    The ranks of a dense model are told that they are alone, and have their number left. For
    number 0 only its name is left, to which vLLM appends the number of each rank.
    """
    name = re.search(r"_dp(\d+)$", engine_id)
    number: int = getattr(parallel, "data_parallel_index", int(name[1]) if name else 0)
    is_named = name is not None and int(name[1]) == number
    several = getattr(parallel, "data_parallel_size", 1) > 1
    return number if number or is_named or several else None


def _counting_group(group_ids: Sequence[int], full_groups: Collection[int]) -> int:
    return counting_group({group: group in full_groups for group in group_ids})


def _bytes_per_block(kv_cache_config: Any) -> int:  # noqa: ANN401 - vLLM's
    """Return what one worker keeps for a block, all layers."""
    tensors, blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
    return int(tensors[0].size // blocks) if tensors and blocks else 0


def kv_content(
    config: Any,  # noqa: ANN401 - vLLM's
    engine: EngineFacts,
    *,
    load: Callable[[str], Any] = importlib.import_module,
) -> str:
    """Return what the bytes of each layer are and mean, which no configuration of a spec tells.

    To be asked where a worker registers its KV memory. Two layers may have pages of one size
    and another element type (``--kv-cache-dtype-skip-layers``), and two attention backends may
    order the same bytes differently, so every layer is named with what its bytes follow from
    (:func:`~kvtier.vllm.compat.layers.layer_content`); and equal bytes mean something else
    under other settings of the model (:func:`kv_meaning`). The ranks of an engine come to the
    same answer, whatever their number if no layer keeps states.

    Args:
        config: vLLM's configuration in a worker
            (:func:`~kvtier.vllm.compat.workers.current_config`).
        engine: The engine.
        load: Imports a module.

    Returns:
        The element type, what the layout follows from where ``engine.kv_layout`` is None, and
        two digests: of the layers, and of what else keys and values depend on.

    Raises:
        UnsupportedError: vLLM does not say, or computes anew at each start what a stored byte
            stands for, or no request can use what another one computed.
    """
    try:
        layers = config.compilation_config.static_forward_context
        names = [name for _, group in engine.groups for name in group]
        _require_lasting_scales({name: layers[name] for name in names})
        content = [layer_content(name, layers[name], config, load=load) for name in names]
        what = [_digest(json.dumps(content)), _digest(kv_meaning(config))]
        element = str(config.model_config.dtype)
        _require_one_scheduler(config, engine)
        _require_certain_kv(config)
        _require_quiet_sleep(config, engine)
        require_shareable_kv(config)
    except (AttributeError, ImportError, KeyError) as error:
        raise UnsupportedError(
            f"this vLLM does not say what its KV cache holds ({error!r}): {SUPPORTED}"
        ) from error
    return " ".join([element, *what])


def _require_one_scheduler(config: Any, engine: EngineFacts) -> None:  # noqa: ANN401 - vLLM's
    """Refuse workers that do not share memory, or the scheduler's side, with all others.

    They would wait for each other until a timeout of minutes, and then not start.
    """
    parallel = getattr(config, "parallel_config", None)
    hosts = getattr(parallel, "nnodes_within_dp", 1)
    if hosts > 1:
        raise UnsupportedError(
            f"this engine's workers run on {hosts} hosts, and those of one engine must share "
            "memory: start an engine on each host"
        )
    launcher = getattr(parallel, "distributed_executor_backend", None)
    if launcher == "external_launcher" and engine.world_size > 1:
        raise UnsupportedError(
            f"with --distributed-executor-backend external_launcher each of the "
            f"{engine.world_size} workers has a scheduler of its own, and a RAM tier has room "
            "for the decisions of one: use mp"
        )


def _require_certain_kv(config: Any) -> None:  # noqa: ANN401 - vLLM's
    """Refuse an engine of which nobody can say what a stored byte stands for."""
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError(
            "calculate_kv_scales is set: vLLM then computes the scales of the KV cache anew at "
            "every start, and stored bytes would mean something else after it; remove "
            "--calculate-kv-scales, and use a checkpoint that has scales"
        )
    parallel = getattr(config, "parallel_config", None)
    if getattr(parallel, "enable_fault_tolerance", False):
        raise UnsupportedError(
            "with --enable-fault-tolerance vLLM goes on after a step that failed, and takes "
            "what the step did not compute for computed, so it would be stored; remove it"
        )


def _require_lasting_scales(layers: Mapping[str, Any]) -> None:
    """Refuse layers whose scales vLLM sets to 1 in the first forward pass that it computes.

    That may be the pass of a request whose chunks were loaded.
    """
    for name, layer in layers.items():
        if str(getattr(layer, "kv_cache_dtype", "")).endswith("_per_token_head"):
            raise UnsupportedError(
                f"layer {name} keeps scales of each token and head, and vLLM resets them after "
                "chunks may have been loaded: choose another --kv-cache-dtype"
            )


def _require_quiet_sleep(config: Any, engine: EngineFacts) -> None:  # noqa: ANN401 - vLLM's
    """Refuse workers whose KV memory may be taken away while a store reads it.

    An engine in a process of its own sleeps when its connector has nothing left to do. One in
    its caller's process does not wait, and its scheduler cannot for workers in other processes.
    """
    asleep = getattr(config.model_config, "enable_sleep_mode", False)
    if asleep and engine.world_size > 1 and environment().vllm_in_process:
        raise UnsupportedError(
            "with --enable-sleep-mode, several workers and VLLM_ENABLE_V1_MULTIPROCESSING=0 "
            "vLLM takes the memory of the KV cache away while chunks may still be copied from "
            "it, which ends the engine; unset that variable, or start without sleep mode"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
