"""Finds the pages of vLLM's KV blocks in memory, and this rank's part of every slot.

vLLM says in ``KVCacheConfig.kv_cache_tensors`` where the page of each layer and block begins
in one allocation. So one rule finds every kind of page: of attention, of recurrent states,
padded pages, and pages of layers that lie side by side in a block.

With tensor parallelism each rank keeps the KV of its own heads. If heads are the outermost
dimension of a page (``LBHNC``), the concatenated pages of all ranks equal the page of an engine
with one rank. A slot's bytes then need not depend on the number of ranks
(:mod:`kvtier.memory.slot_layout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtier.errors import UnsupportedError
from kvtier.logs import get_logger
from kvtier.memory.copy import KVBlocks
from kvtier.memory.slot_layout import STRIPES, RankShare, shard_of
from kvtier.vllm.kinds import layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, KVCacheTensor

__all__ = ["SlotShape", "find_pages", "share_slots"]

logger = get_logger(__name__)

_WITH_ANOTHER: Final = (-1, 0)
"""Stands for a layer's page that is part of another layer's page."""


@dataclass(frozen=True, slots=True)
class SlotShape:
    """Division of a slot into stripes, and this rank's stripes.

    Attributes:
        stripes: Number of stripes of a slot.
        stripe_nbytes: Bytes of one stripe.
        share: This rank's stripes.
        is_portable: Whether another number of ranks would store the same bytes.
    """

    stripes: int
    stripe_nbytes: int
    share: RankShare
    is_portable: bool


def find_pages(
    kv_caches: Mapping[str, Any], kv_cache_config: KVCacheConfig, group_ids: tuple[int, ...]
) -> KVBlocks:
    """Return the KV memory of the groups that are stored.

    Args:
        kv_caches: vLLM's KV memory by layer: a tensor or a list of tensors.
        kv_cache_config: Where vLLM put each layer.
        group_ids: The groups that are stored.

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
        for offset, layers in _parts(placed, specs):
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
        raise UnsupportedError(f"vLLM does not say where layer {min(missing)} keeps its KV")
    held = [[pages[layer] for layer in group] for group in groups]
    return KVBlocks(
        tensors, [[page for page in group if page != _WITH_ANOTHER] for group in held]
    )


def _parts(
    placed: KVCacheTensor, specs: Mapping[str, KVCacheSpec]
) -> Iterator[tuple[int, list[str]]]:
    """Yield where each contiguous part of a block begins, and the layers in this part.

    Where heads come before layers (``BHLNC``), the pages of all layers are one part.
    """
    layers = [layer for layer in placed.layers if layer in specs]
    if len(layers) > 1 and placed.layer_stride < _page_nbytes(specs[layers[0]]):
        yield placed.offset, layers
        return
    for at, layer in enumerate(placed.layers):
        if layer in specs:
            yield placed.offset + at * placed.layer_stride, [layer]


def share_slots(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, Any],
    kv: KVBlocks,
    group_ids: tuple[int, ...],
    *,
    blocks_per_chunk: int,
) -> SlotShape:
    """Return the division of slots for this engine, and this rank's stripes.

    All ranks get the same result, except for ``share``.
    """
    rank = vllm_config.parallel_config.rank
    ranks = vllm_config.parallel_config.world_size
    block_nbytes = max(sum(nbytes for _, nbytes in pages) for pages in kv.groups)
    try:
        specs = {
            layer: spec
            for index in group_ids
            for layer, spec in layer_specs(kv_cache_config.kv_cache_groups[index]).items()
        }
        share = _portable_share(vllm_config, specs, kv_caches)
    except UnsupportedError as error:
        logger.info("chunks can be read with --tensor-parallel-size %d only: %s", ranks, error)
        return SlotShape(
            ranks, block_nbytes * blocks_per_chunk, shard_of(rank), is_portable=False
        )
    stripe_nbytes = block_nbytes // len(share.stripes) * blocks_per_chunk
    return SlotShape(STRIPES, stripe_nbytes, share, is_portable=True)


def _view(
    layer: str, kv_caches: Mapping[str, Any], offset: int, shape: tuple[int, int], stride: int
) -> torch.Tensor:
    """Return the pages of a layer as bytes of shape (blocks, page bytes)."""
    cache = kv_caches.get(layer)
    first = cache[0] if isinstance(cache, list | tuple) else cache
    if not isinstance(first, torch.Tensor):
        raise UnsupportedError(f"vLLM registered no KV cache for layer {layer}")
    storage = first.untyped_storage()
    if first.data_ptr() != storage.data_ptr() + offset:
        raise UnsupportedError(
            f"the KV cache of layer {layer} does not begin where vLLM says: byte "
            f"{first.data_ptr() - storage.data_ptr()} instead of {offset}"
        )
    if offset + (shape[0] - 1) * stride + shape[1] > storage.nbytes():
        raise UnsupportedError(f"the KV cache of layer {layer} ends beyond its memory")
    flat = torch.tensor([], dtype=torch.int8, device=first.device)
    return flat.set_(storage, offset, shape, (stride, 1))


def _page_nbytes(spec: KVCacheSpec) -> int:
    """Return how many bytes a page has without its padding."""
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    if unpadded is not None:
        return int(unpadded)
    if getattr(spec, "page_size_padded", None) is not None:
        spec = replace(spec, page_size_padded=None)
    return int(spec.page_size_bytes)


def _portable_share(
    vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], kv_caches: Mapping[str, Any]
) -> RankShare:
    """Return this rank's stripes, if a slot's bytes do not depend on the number of ranks.

    Raises:
        UnsupportedError: The bytes depend on the number of ranks; the message says why.
    """
    shares = {
        _layer_share(vllm_config, layer, spec, kv_caches[layer])
        for layer, spec in specs.items()
    }
    if len(shares) > 1:
        raise UnsupportedError("layers are split over the ranks in different ways")
    return shares.pop()


def _layer_share(
    vllm_config: VllmConfig,
    layer: str,
    spec: Any,  # noqa: ANN401 - one of vLLM's kinds
    cache: Any,  # noqa: ANN401 - a tensor or several
) -> RankShare:
    parallel = vllm_config.parallel_config
    tp, rank = parallel.tensor_parallel_size, parallel.rank
    kind = type(spec).__name__
    if kind == "MLAAttentionSpec" and spec.tokens_per_state == 1:
        _require_parts(layer, spec, STRIPES)
        return RankShare(tuple(range(STRIPES)), writers=tp, writer=rank)
    if kind not in ("FullAttentionSpec", "SlidingWindowSpec"):
        raise UnsupportedError(f"layer {layer} keeps {kind}, which is not split by heads")
    if spec.kv_quant_mode.is_per_token_head:
        raise UnsupportedError(f"layer {layer} keeps scales beside its heads")
    heads = vllm_config.model_config.get_total_num_kv_heads()
    shards = min(heads, tp)
    replicas = tp // shards
    even = heads % shards == 0 and tp % shards == 0 and spec.num_kv_heads == heads // shards
    if not even or STRIPES % shards:
        raise UnsupportedError(f"{heads} KV heads over {tp} ranks are not whole {STRIPES}ths")
    outermost = (
        isinstance(cache, torch.Tensor)
        and cache.dim() == 4
        and cache.shape[1] == spec.num_kv_heads
        and cache[0].is_contiguous()
        # vLLM hands over a block that its kernel takes in parts as several blocks.
        and cache[0].nbytes == _page_nbytes(spec)
    )
    if not outermost:
        raise UnsupportedError(f"the heads of layer {layer} are not outermost in a block")
    each = STRIPES // shards
    _require_parts(layer, spec, each)
    first = rank // replicas * each
    return RankShare(
        tuple(range(first, first + each)), writers=replicas, writer=rank % replicas
    )


def _require_parts(layer: str, spec: KVCacheSpec, parts: int) -> None:
    nbytes = _page_nbytes(spec)
    if nbytes % parts:
        raise UnsupportedError(
            f"a page of layer {layer} of {nbytes} bytes has no {parts} parts"
        )
