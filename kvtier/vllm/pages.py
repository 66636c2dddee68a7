"""Finds the pages of vLLM's KV blocks in memory, and this rank's share of every slot.

vLLM reports in ``KVCacheConfig.kv_cache_tensors`` where the page of each layer and block begins
in an allocation. So one rule finds every kind of page: pages of attention, pages of recurrent
states, padded pages, and pages of adjacent layers.

With tensor parallelism each rank keeps the KV of its own heads. If heads are the outermost
dimension of a page, the concatenated pages of all ranks equal the page of an engine with one
rank. A slot's bytes are then independent of the number of ranks
(:mod:`kvtier.memory.slot_layout`). If layers come before heads (``LBHNC``, ``BLHNC``), a page
has one layer of a block. If heads come before layers (``BHLNC``), a page has all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtier.errors import UnsupportedError
from kvtier.logs import get_logger
from kvtier.memory.copy import KVBlocks
from kvtier.memory.slot_layout import RankShare
from kvtier.vllm.kinds import layer_specs
from kvtier.vllm.versions import supported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, KVCacheTensor

__all__ = ["SlotShape", "find_pages", "share_slots", "wanted_layout"]

logger = get_logger(__name__)

_WITH_ANOTHER: Final = (-1, 0)
"""Stands for a layer's page that is part of another layer's page."""


@dataclass(frozen=True, slots=True)
class SlotShape:
    """Size of a block in a slot, and this rank's share of the block.

    Attributes:
        block_nbytes: Bytes of one block, summed over all ranks.
        share: This rank's share of the block.
        is_portable: Whether engines with another number of ranks would store the same bytes.
    """

    block_nbytes: int
    share: RankShare
    is_portable: bool


def wanted_layout(vllm_config: VllmConfig) -> str:
    """Return the layout to request from vLLM: the one with the longest contiguous ranges.

    If the attention backend does not support this layout, vLLM warns and chooses another one.
    Engines on CPUs, on AMD's GPUs and with recurrent states never support ``BHLNC``. For these
    engines the result is ``LBHNC``, which any number of ranks can read too.

    Args:
        vllm_config: vLLM's configuration.
    """
    on_cuda = vllm_config.device_config.device_type == "cuda" and torch.version.hip is None
    return "BHLNC" if on_cuda and not vllm_config.model_config.is_hybrid else "LBHNC"


def find_pages(
    kv_caches: Mapping[str, Any],
    kv_cache_config: KVCacheConfig,
    group_ids: tuple[int, ...],
    layout: str,
) -> KVBlocks:
    """Return the KV memory of the groups that kvtier stores.

    Args:
        kv_caches: vLLM's KV memory by layer: a tensor or a list of tensors.
        kv_cache_config: vLLM's placement of each layer.
        group_ids: The groups that are stored.
        layout: Order of the dimensions, such as ``LBHNC``.

    Raises:
        UnsupportedError: The memory does not match ``kv_cache_config``.
    """
    groups = [layer_specs(kv_cache_config.kv_cache_groups[index]) for index in group_ids]
    specs = {layer: spec for group in groups for layer, spec in group.items()}
    blocks = kv_cache_config.num_blocks
    tensors: list[torch.Tensor] = []
    numbers: dict[tuple[int, int, int], int] = {}
    pages: dict[str, tuple[int, int]] = {}
    for placed in kv_cache_config.kv_cache_tensors:
        for offset, layers in _parts(placed, specs, layout):
            nbytes = len(layers) * _page_nbytes(specs[layers[0]])
            whole = max(nbytes, specs[layers[0]].page_size_bytes)
            place = (offset, placed.block_stride, whole)
            if place not in numbers:
                numbers[place] = len(tensors)
                tensors.append(
                    _view(layers[0], kv_caches, offset, (blocks, whole), placed.block_stride)
                )
            pages[layers[0]] = (numbers[place], nbytes)
            pages.update(dict.fromkeys(layers[1:], _WITH_ANOTHER))
    missing = specs.keys() - pages.keys()
    if missing:
        raise _unsupported(f"vLLM gives layer {min(missing)} no memory")
    held = [[pages[layer] for layer in group] for group in groups]
    return KVBlocks(
        tensors, [[page for page in group if page != _WITH_ANOTHER] for group in held]
    )


def _parts(
    placed: KVCacheTensor, specs: Mapping[str, KVCacheSpec], layout: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield the offset and the layers of each contiguous part of a block.

    If heads come before layers (``BHLNC``), the pages of all layers are one part. If a rank has
    only one head, each layer could be a separate part. The layers still form one part, so that
    all ranks have the same parts.
    """
    layers = [layer for layer in placed.layers if layer in specs]
    if layers:
        step, page = placed.layer_stride, _page_nbytes(specs[layers[0]])
        if step < page or (step == page and _joins_layers(layout)):
            yield placed.offset, layers
            return
    for at, layer in enumerate(placed.layers):
        if layer in specs:
            yield placed.offset + at * placed.layer_stride, [layer]


def _joins_layers(layout: str) -> bool:
    """Return whether the layers of each head are adjacent in a block."""
    return 0 <= layout.find("H") < layout.find("L")


def share_slots(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, Any],
    kv: KVBlocks,
    group_ids: tuple[int, ...],
    layout: str,
) -> SlotShape:
    """Return how many bytes slots have for a block, and which of them are this rank's.

    All ranks get the same result, except for ``share``.
    """
    rank = vllm_config.parallel_config.rank
    ranks = vllm_config.parallel_config.world_size
    own_nbytes = max(map(sum, kv.page_nbytes))
    try:
        share = _portable_share(vllm_config, kv_cache_config, kv_caches, group_ids, layout)
    except UnsupportedError as error:
        logger.info("chunks can be read with --tensor-parallel-size %d only: %s", ranks, error)
        return SlotShape(own_nbytes * ranks, RankShare(rank, ranks), is_portable=False)
    return SlotShape(own_nbytes * share.parts, share, is_portable=True)


def _view(
    layer: str, kv_caches: Mapping[str, Any], offset: int, shape: tuple[int, int], stride: int
) -> torch.Tensor:
    """Return the pages of a layer as an int8 tensor of shape (blocks, page bytes)."""
    cache = kv_caches.get(layer)
    first = cache[0] if isinstance(cache, list | tuple) else cache
    if not isinstance(first, torch.Tensor):
        raise _unsupported(f"vLLM registered no KV cache for layer {layer}")
    storage = first.untyped_storage()
    if first.data_ptr() != storage.data_ptr() + offset:
        begin = first.data_ptr() - storage.data_ptr()
        raise _unsupported(
            f"the KV cache of layer {layer} begins at byte {begin} instead of {offset}"
        )
    if offset + (shape[0] - 1) * stride + shape[1] > storage.nbytes():
        raise _unsupported(f"the KV cache of layer {layer} exceeds its memory")
    flat = torch.tensor([], dtype=torch.int8, device=first.device)
    return flat.set_(storage, offset, shape, (stride, 1))


def _page_nbytes(spec: KVCacheSpec) -> int:
    """Return the bytes of a page without its padding."""
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    if unpadded is not None:
        return int(unpadded)
    if getattr(spec, "page_size_padded", None) is not None:
        spec = replace(spec, page_size_padded=None)
    return int(spec.page_size_bytes)


def _portable_share(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, Any],
    group_ids: tuple[int, ...],
    layout: str,
) -> RankShare:
    """Return this rank's share of a slot that any number of ranks can read.

    Raises:
        UnsupportedError: The bytes depend on the number of ranks; the message says why.
    """
    joined_layers = {
        layer: len(placed.layers) if _joins_layers(layout) else 1
        for placed in kv_cache_config.kv_cache_tensors
        for layer in placed.layers
    }
    shares = {
        _layer_share(vllm_config, layer, spec, kv_caches[layer], joined_layers[layer])
        for index in group_ids
        for layer, spec in layer_specs(kv_cache_config.kv_cache_groups[index]).items()
    }
    if len(shares) > 1:
        raise UnsupportedError("layers are split over the ranks in different ways")
    return shares.pop()


def _layer_share(
    vllm_config: VllmConfig,
    layer: str,
    spec: Any,  # noqa: ANN401 - one of vLLM's kinds
    cache: Any,  # noqa: ANN401 - a tensor or several
    joined_layers: int,
) -> RankShare:
    """Return this rank's share of a layer; require slots that any number of ranks can read.

    Args:
        vllm_config: vLLM's configuration.
        layer: The layer's name.
        spec: The layer's kind.
        cache: The layer's KV memory.
        joined_layers: Number of layers of each head that are adjacent in a block.

    Raises:
        UnsupportedError: The bytes depend on the number of ranks; the message says why.
    """
    parallel = vllm_config.parallel_config
    tp, rank = parallel.tensor_parallel_size, parallel.rank
    kind = type(spec).__name__
    if kind == "MLAAttentionSpec" and spec.tokens_per_state == 1:
        return RankShare(writers=tp, writer=rank)
    if kind not in ("FullAttentionSpec", "SlidingWindowSpec"):
        raise UnsupportedError(f"layer {layer} keeps {kind}, which is not split by heads")
    if spec.kv_quant_mode.is_per_token_head:
        raise UnsupportedError(f"layer {layer} keeps scales beside its heads")
    heads = vllm_config.model_config.get_total_num_kv_heads()
    parts = min(heads, tp)
    replicas = tp // parts
    if heads % parts or tp % parts or spec.num_kv_heads != heads // parts:
        raise UnsupportedError(f"{heads} KV heads cannot be divided over {tp} ranks")
    if not _has_heads_outermost(cache, spec, joined_layers):
        raise UnsupportedError(f"the heads of layer {layer} are not outermost in a block")
    return RankShare(rank // replicas, parts, writers=replicas, writer=rank % replicas)


def _has_heads_outermost(
    cache: Any,  # noqa: ANN401 - a tensor or several
    spec: Any,  # noqa: ANN401 - one of vLLM's kinds
    joined_layers: int,
) -> bool:
    """Return whether a block has all bytes of the first head, then of the second, and so on."""
    if not isinstance(cache, torch.Tensor) or cache.dim() != 4:
        return False
    heads, head = cache.shape[1], cache[0, 0]
    return (
        heads == spec.num_kv_heads
        and head.is_contiguous()
        # If the kernel takes a block in parts, vLLM registers each part as a block.
        and heads * head.nbytes == _page_nbytes(spec)
        and (heads == 1 or cache.stride(1) == joined_layers * head.numel())
    )


def _unsupported(problem: str) -> UnsupportedError:
    """Return the error for a KV cache that is not laid out as vLLM's configuration says."""
    remedy = "if this is one of them, start vLLM without kvtier"
    return UnsupportedError(f"{problem}; {supported()}; {remedy}")
