"""Copies of whole KV blocks between an engine's memory and a host's, layer by layer.

This is the plain operation that an engine may ask a connector for: given blocks of one set of
KV caches into given blocks of another. It knows no slots and no chunks. Where the two sides
keep the dimensions of a block in different orders, it permutes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch

from kvtier.errors import UnsupportedError

__all__ = ["BlockOrder", "copy_kv_blocks"]


class BlockOrder(enum.Enum):
    """The order of the last three dimensions of a KV cache."""

    NHD = "NHD"
    """Tokens, heads, elements."""
    HND = "HND"
    """Heads, tokens, elements."""


def copy_kv_blocks(
    src_kv_caches: Mapping[str, torch.Tensor],
    dst_kv_caches: Mapping[str, torch.Tensor],
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    direction: Literal["h2d", "d2h"],
    orders: tuple[BlockOrder, BlockOrder] = (BlockOrder.NHD, BlockOrder.NHD),
) -> None:
    """Copy blocks of all layers; returns when the bytes are there.

    Args:
        src_kv_caches: What to read, by layer: (blocks, a, b, elements), or with all of K
            before all of V (2, blocks, a, b, elements); a and b are tokens and heads in one
            order or the other.
        dst_kv_caches: What to write; the same layers, dtypes and sizes, any number of blocks.
        src_block_ids: Blocks to read.
        dst_block_ids: Where each goes; no block twice.
        direction: From host to device or from device to host. Which side is the host's is
            checked where there is a device; tensors that are all in host memory go either way.
        orders: The order of dimensions in the source and in the destination.

    Raises:
        UnsupportedError: The two sides do not match, or a block does not exist. Nothing was
            copied.
    """
    _require_blocks(src_block_ids, dst_block_ids)
    if src_kv_caches.keys() != dst_kv_caches.keys():
        different = sorted(src_kv_caches.keys() ^ dst_kv_caches.keys())
        raise UnsupportedError(f"only one side has layers {', '.join(different)}")
    pairs = [(layer, source, dst_kv_caches[layer]) for layer, source in src_kv_caches.items()]
    permute = orders[0] is not orders[1]
    for layer, source, destination in pairs:
        _require_match(layer, source, destination, permute=permute)
        _require_direction(layer, source, destination, direction)
        _require_within(layer, "read", source, src_block_ids)
        _require_within(layer, "written", destination, dst_block_ids)
    if not src_block_ids:
        return
    for _, source, destination in pairs:
        for read, written in _planes(source, destination):
            _copy(read, written, src_block_ids, dst_block_ids, permute=permute)


def _copy(
    source: torch.Tensor,
    destination: torch.Tensor,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    *,
    permute: bool,
) -> None:
    """Copy blocks of one plane: gathered there, moved in one piece, scattered here."""
    blocks = source.index_select(0, torch.tensor(src_block_ids, device=source.device))
    moved = blocks.to(destination.device)
    if permute:
        moved = moved.transpose(1, 2)
    destination.index_copy_(0, torch.tensor(dst_block_ids, device=destination.device), moved)


def _planes(
    source: torch.Tensor, destination: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts of both caches that have blocks first: all of it, or K and V."""
    if source.dim() == 4:
        yield source, destination
    else:
        yield from zip(source.unbind(0), destination.unbind(0), strict=True)


def _require_blocks(src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> None:
    if len(src_block_ids) != len(dst_block_ids):
        raise UnsupportedError(
            f"{len(src_block_ids)} blocks to read and {len(dst_block_ids)} to write"
        )
    if len(set(dst_block_ids)) != len(dst_block_ids):
        raise UnsupportedError("a block is to be written twice")


def _require_match(
    layer: str, source: torch.Tensor, destination: torch.Tensor, *, permute: bool
) -> None:
    """Refuse caches whose blocks differ in more than the order of tokens and heads."""
    if source.dtype != destination.dtype:
        raise UnsupportedError(
            f"layer {layer}: source has dtype {source.dtype}, destination {destination.dtype}"
        )
    expected = list(source.shape)
    if permute and source.dim() >= 4:
        expected[-3], expected[-2] = expected[-2], expected[-3]
    known = source.dim() == 4 or (source.dim() == 5 and source.shape[0] == 2)
    at = source.dim() - 4
    if known and destination.dim() == source.dim():
        # Either side may have any number of blocks.
        expected[at] = destination.shape[at]
    if not known or list(destination.shape) != expected:
        raise UnsupportedError(
            f"layer {layer}: source has shape {tuple(source.shape)}, destination "
            f"{tuple(destination.shape)}; blocks must be of equal size, in shapes "
            "(blocks, a, b, elements) or (2, blocks, a, b, elements)"
        )


def _require_direction(
    layer: str,
    source: torch.Tensor,
    destination: torch.Tensor,
    direction: Literal["h2d", "d2h"],
) -> None:
    host = source if direction == "h2d" else destination
    if host.device.type != "cpu":
        raise UnsupportedError(
            f"layer {layer}: copying {direction} from {source.device} to {destination.device}: "
            "the host's side is not in host memory"
        )


def _require_within(
    layer: str, done: str, cache: torch.Tensor, block_ids: Sequence[int]
) -> None:
    blocks = cache.shape[cache.dim() - 4]
    outside = [block for block in block_ids if not 0 <= block < blocks]
    if outside:
        raise UnsupportedError(
            f"layer {layer}: blocks {outside} are to be {done}, there are {blocks}"
        )
