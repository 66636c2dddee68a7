"""Copies of whole KV blocks between an engine's memory and a host's, layer by layer.

This is the plain operation that an engine may ask a connector for: given blocks of one set of
KV caches into given blocks of another. It knows no slots and no chunks. Where the two sides
keep the dimensions of a block in different orders, it permutes.

Nobody says how many blocks there are; that is read off the shapes. The first dimension counts
them, unless all of K lies before all of V, as two planes: then the first is 2 and the second
counts. Who takes two blocks for K and V, or K and V for two blocks, copies other bytes than
were asked for. So a first dimension of 2 is read as what engines use shapes of so many
dimensions for, and refused where they use them for both.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
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


def copy_kv_blocks(  # noqa: PLR0913 - five are the engine's
    src_kv_caches: Mapping[str, torch.Tensor],
    dst_kv_caches: Mapping[str, torch.Tensor],
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    direction: Literal["h2d", "d2h"],
    orders: tuple[BlockOrder, BlockOrder] = (BlockOrder.NHD, BlockOrder.NHD),
    *,
    planes: bool | None = None,
) -> None:
    """Copy blocks of all layers; returns when the bytes are there.

    Args:
        src_kv_caches: What to read, by layer: (blocks, ...), or with all of K before all of V
            (2, blocks, ...). Where the orders differ, a block is (a, b, elements) or
            (2, a, b, elements); a and b are tokens and heads in one order or the other.
        dst_kv_caches: What to write; the same layers, dtypes and sizes, any number of blocks.
        src_block_ids: Blocks to read.
        dst_block_ids: Where each goes; no block twice.
        direction: From host to device or from device to host. Which side is the host's is
            checked where there is a device; tensors that are all in host memory go either way.
        orders: The order of dimensions in the source and in the destination.
        planes: Whether all of K lies before all of V. None if the shapes are to tell: so it is
            with five dimensions that begin with 2 and another number, and with no others.

    Raises:
        UnsupportedError: The two sides do not match, a block does not exist, or the shapes can
            be read in two ways and ``planes`` does not say in which. Nothing was copied.
    """
    _require_blocks(src_block_ids, dst_block_ids)
    if src_kv_caches.keys() != dst_kv_caches.keys():
        different = sorted(src_kv_caches.keys() ^ dst_kv_caches.keys())
        raise UnsupportedError(f"only one side has layers {', '.join(different)}")
    permute = orders[0] is not orders[1]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer, source in src_kv_caches.items():
        destination = dst_kv_caches[layer]
        _require_dtype(layer, source, destination)
        _require_direction(layer, source, destination, direction)
        if _has_planes(layer, source, destination, planes=planes, permute=permute):
            parts = list(zip(source.unbind(0), destination.unbind(0), strict=True))
        else:
            parts = [(source, destination)]
        _require_within(layer, "read", parts[0][0], src_block_ids)
        _require_within(layer, "written", parts[0][1], dst_block_ids)
        pairs += parts
    if not src_block_ids:
        return
    for read, written in pairs:
        _copy(read, written, src_block_ids, dst_block_ids, permute=permute)


def _copy(
    source: torch.Tensor,
    destination: torch.Tensor,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    *,
    permute: bool,
) -> None:
    """Copy blocks where they come first: gathered there, moved in one piece, scattered here."""
    blocks = source.index_select(0, torch.tensor(src_block_ids, device=source.device))
    moved = blocks.to(destination.device)
    if permute:
        moved = moved.transpose(-3, -2)
    destination.index_copy_(0, torch.tensor(dst_block_ids, device=destination.device), moved)


def _has_planes(
    layer: str,
    source: torch.Tensor,
    destination: torch.Tensor,
    *,
    planes: bool | None,
    permute: bool,
) -> bool:
    """Return whether both caches have all of K before all of V; refuse what does not match."""
    as_blocks, as_planes = (_match(source, destination, at, permute=permute) for at in (0, 1))
    shapes = f"source has shape {tuple(source.shape)}, destination {tuple(destination.shape)}"
    if planes is None:
        # Of an engine's five dimensions one of the first two is for K and V, of four none is.
        # Of three it may be: vectors of latent attention by tokens, or flat blocks of K and V.
        five = source.dim() == 5
        unclear = as_blocks and source.shape[1] == 2 if five else source.dim() != 4
        if as_planes and unclear:
            raise UnsupportedError(
                f"layer {layer}: {shapes}, which can be read in two ways: say with planes=True "
                "or planes=False whether all of K lies before all of V"
            )
        planes = as_planes and five
    if not (as_planes if planes else as_blocks):
        block = "a, b, elements" if permute else "..."
        raise UnsupportedError(
            f"layer {layer}: {shapes}; blocks must be of equal size, in shapes "
            f"(blocks, {block}) or (2, blocks, {block})"
        )
    return planes


def _match(source: torch.Tensor, destination: torch.Tensor, at: int, *, permute: bool) -> bool:
    """Return whether blocks are equal but for their order, if dimension ``at`` counts them."""
    planes, block = list(source.shape[:at]), list(source.shape[at + 1 :])
    if permute:
        if len(block) != 3 and not (len(block) == 4 and block[0] == 2):
            return False
        block[-3], block[-2] = block[-2], block[-3]
    return (
        bool(block)
        and planes == [2] * at
        and list(destination.shape[:at]) == planes
        and list(destination.shape[at + 1 :]) == block
    )


def _require_blocks(src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> None:
    if len(src_block_ids) != len(dst_block_ids):
        raise UnsupportedError(
            f"{len(src_block_ids)} blocks to read and {len(dst_block_ids)} to write"
        )
    if len(set(dst_block_ids)) != len(dst_block_ids):
        raise UnsupportedError("a block is to be written twice")


def _require_dtype(layer: str, source: torch.Tensor, destination: torch.Tensor) -> None:
    if source.dtype != destination.dtype:
        raise UnsupportedError(
            f"layer {layer}: source has dtype {source.dtype}, destination {destination.dtype}"
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
    blocks = cache.shape[0]
    outside = [block for block in block_ids if not 0 <= block < blocks]
    if outside:
        raise UnsupportedError(
            f"layer {layer}: blocks {outside} are to be {done}, there are {blocks}"
        )
