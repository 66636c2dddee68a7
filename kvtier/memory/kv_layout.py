"""An engine's KV tensors as blocks of bytes.

Engines shape a layer's KV in many ways: blocks first or K and V first, heads before tokens or
after, permuted views of one or the other. A copy need not care as long as a block's page is one
stretch of memory. That is checked here, by sizes and strides; whatever is not, is refused:
bytes taken from the wrong place are wrong tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import torch

from kvtier.errors import UnsupportedError
from kvtier.memory.copy import KVBlocks

__all__ = ["KVTensor", "blocks_of_layers", "blocks_of_one_tensor"]

KVTensor: TypeAlias = torch.Tensor
"""What an engine keeps KV in; named here for those who may not import torch."""


_ALL_LAYERS: Final = "all layers together"


def blocks_of_layers(
    kv_caches: Mapping[str, KVTensor], groups: Sequence[Sequence[str]], *, blocks: int
) -> KVBlocks:
    """Return the KV memory of an engine that keeps each layer by itself.

    Args:
        kv_caches: Each layer's KV, of shape (blocks, ...) or, with all of K before all of V,
            (2, blocks, ...). Layers may share memory.
        groups: The layers of each KV cache group, in the order in which they are stored.
        blocks: Blocks of the engine's memory.

    Raises:
        UnsupportedError: A layer is missing or in no group, of another shape, or not on the
            same device as the others.
    """
    wanted = {layer for layers in groups for layer in layers}
    if wanted != kv_caches.keys():
        raise UnsupportedError(
            f"KV cache groups and KV caches name different layers: "
            f"{', '.join(sorted(wanted ^ kv_caches.keys()))}"
        )
    tensors: list[torch.Tensor] = []
    numbers: dict[tuple[object, ...], int] = {}
    pages: dict[str, list[tuple[int, int]]] = {}
    for layer, cache in kv_caches.items():
        pages[layer] = []
        for plane in _planes(layer, cache, blocks):
            page = _pages(layer, plane)
            place = (page.data_ptr(), page.stride(), page.shape)
            if place not in numbers:
                numbers[place] = len(tensors)
                tensors.append(page)
            pages[layer].append((numbers[place], page.shape[1]))
    _require_one_device(tensors)
    return KVBlocks(
        tensors, [[p for layer in layers for p in pages[layer]] for layers in groups]
    )


def blocks_of_one_tensor(kv_cache: KVTensor, *, groups: int, blocks: int) -> KVBlocks:
    """Return the KV memory of an engine that keeps all layers of a block together.

    Args:
        kv_cache: Of shape (blocks, ...); every KV cache group uses all of a block.
        groups: KV cache groups of the engine.
        blocks: Blocks of the engine's memory.

    Raises:
        UnsupportedError: It has another shape.
    """
    if kv_cache.dim() < 2 or kv_cache.shape[0] != blocks:
        raise UnsupportedError(
            f"the KV cache of {_ALL_LAYERS} has shape {tuple(kv_cache.shape)}; "
            f"kvtier knows ({blocks}, ...)"
        )
    page = _pages(_ALL_LAYERS, kv_cache)
    return KVBlocks([page], [[(0, page.shape[1])] for _ in range(groups)])


def _planes(layer: str, cache: object, blocks: int) -> Sequence[torch.Tensor]:
    """Return the parts of a layer's KV that have blocks first: all of it, or K and V."""
    if not isinstance(cache, torch.Tensor):
        raise UnsupportedError(
            f"the KV cache of layer {layer} is a {type(cache).__name__}, not a tensor: state "
            "that is not attention's is not supported"
        )
    shape = tuple(cache.shape)
    blocks_first = len(shape) >= 2 and shape[0] == blocks
    planes_first = len(shape) >= 3 and shape[:2] == (2, blocks)
    if blocks_first and planes_first:
        raise UnsupportedError(
            f"the KV cache of layer {layer} has shape {shape}, which with two blocks can be "
            "read in two ways: give the engine more blocks"
        )
    if planes_first:
        return cache.unbind(0)
    if blocks_first:
        return (cache,)
    raise UnsupportedError(
        f"the KV cache of layer {layer} has shape {shape}; "
        f"kvtier knows ({blocks}, ...) and (2, {blocks}, ...)"
    )


def _pages(layer: str, plane: torch.Tensor) -> torch.Tensor:
    """Return bytes of shape (blocks, page bytes) that share the plane's memory."""
    elements = plane[0].numel()
    strides = sorted(
        (int(stride), int(size))
        for stride, size in zip(plane.stride()[1:], plane.shape[1:], strict=True)
        if size > 1
    )
    dense = 1
    for stride, size in strides:
        if stride != dense:
            break
        dense *= size
    block_stride = int(plane.stride(0))
    if dense != elements or block_stride < elements:
        raise UnsupportedError(
            f"a block in the KV cache of layer {layer} is not one stretch of memory: shape "
            f"{tuple(plane.shape)}, strides {tuple(plane.stride())}"
        )
    flat = plane.as_strided(
        (plane.shape[0], elements), (block_stride, 1), int(plane.storage_offset())
    )
    return flat.view(torch.int8)


def _require_one_device(tensors: Sequence[torch.Tensor]) -> None:
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise UnsupportedError(
            f"KV caches are on several devices: {', '.join(sorted(devices))}"
        )
