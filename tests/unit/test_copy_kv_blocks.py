"""Whole blocks from one set of KV caches to another, with dimensions in either order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from kvtier.memory.block_copy import BlockOrder, copy_kv_blocks

from kvtier.errors import UnsupportedError

TOKENS, HEADS, SIZE = 4, 3, 8
NHD, HND = BlockOrder.NHD, BlockOrder.HND
ORDERS = [(a, b) for a in BlockOrder for b in BlockOrder]
Direction = Literal["h2d", "d2h"]


def caches(
    blocks: int, order: BlockOrder, *, planes: bool = False, fill: bool = False
) -> dict[str, torch.Tensor]:
    middle = (TOKENS, HEADS) if order is NHD else (HEADS, TOKENS)
    shape = ((2,) if planes else ()) + (blocks, *middle, SIZE)
    draw = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(shape, generator=draw) if fill else torch.zeros(shape)
        for name in ("layer.0", "layer.1")
    }


def as_nhd(block: torch.Tensor, order: BlockOrder) -> torch.Tensor:
    return block if order is NHD else block.transpose(-3, -2)


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize(("src", "dst"), ORDERS, ids=lambda order: order.value)
def test_each_block_arrives_element_by_element_and_no_other_is_touched(
    src: BlockOrder, dst: BlockOrder, direction: Direction, planes: bool
) -> None:
    source = caches(6, src, planes=planes, fill=True)
    target = caches(9, dst, planes=planes)
    copy_kv_blocks(source, target, [5, 0, 3], [2, 8, 7], direction, (src, dst))
    at = 1 if planes else 0
    for layer in source:
        for old, new in zip([5, 0, 3], [2, 8, 7], strict=True):
            got = as_nhd(target[layer].select(at, new), dst)
            assert torch.equal(got, as_nhd(source[layer].select(at, old), src))
        others = torch.tensor([0, 1, 3, 4, 5, 6])
        assert not target[layer].index_select(at, others).any()


NUMBERED = {
    "latent attention": (6, 4, 24),
    "flat": (6, 96),
    "K and V within a block": (6, 2, 4, 3, 8),
    "six dimensions": (6, 5, 2, 4, 3, 8),
    "two blocks, flat": (2, 96),
    "two blocks, K and V in one": (2, 4, 3, 8),
}


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(*shape)


@pytest.mark.parametrize("shape", NUMBERED.values(), ids=NUMBERED.keys())
@pytest.mark.parametrize("planes", [None, False])
def test_blocks_that_come_first_are_copied_whatever_a_block_is(
    shape: tuple[int, ...], planes: bool | None
) -> None:
    source, target = numbered(shape), torch.full(shape, -1.0)
    copy_kv_blocks({"layer": source}, {"layer": target}, [0], [1], "d2h", planes=planes)
    assert torch.equal(target[1], source[0])
    assert (target[0] == -1).all()
    assert (target[2:] == -1).all()


@pytest.mark.parametrize(("blocks", "other_blocks"), [(6, 2), (2, 6)])
def test_one_side_may_have_as_many_blocks_as_there_are_planes(
    blocks: int, other_blocks: int
) -> None:
    kv = (2, TOKENS, HEADS, SIZE)
    source, target = numbered((blocks, *kv)), torch.zeros((other_blocks, *kv))
    copy_kv_blocks({"layer": source}, {"layer": target}, [1], [0], "d2h")
    assert torch.equal(target[0], source[1])
    assert not target[1:].any()
    source, target = numbered((2, blocks, *kv[1:])), torch.zeros((2, other_blocks, *kv[1:]))
    copy_kv_blocks({"layer": source}, {"layer": target}, [1], [0], "d2h")
    assert torch.equal(target[:, 0], source[:, 1])
    assert not target[:, 1:].any()


TWO_WAYS = [
    (2, 2, TOKENS, HEADS, SIZE),
    (2, TOKENS, HEADS * SIZE),
    (2, 5, 2, TOKENS, HEADS, SIZE),
]


@pytest.mark.parametrize("shape", TWO_WAYS)
def test_two_blocks_that_may_be_keys_and_values_are_refused_until_it_is_said(
    shape: tuple[int, ...],
) -> None:
    source, target = {"layer": numbered(shape)}, {"layer": torch.full(shape, -1.0)}
    with pytest.raises(UnsupportedError, match=r"two ways: say with planes=True or"):
        copy_kv_blocks(source, target, [0], [1], "d2h")
    assert (target["layer"] == -1).all()
    copy_kv_blocks(source, target, [0], [1], "d2h", planes=True)
    assert torch.equal(target["layer"][:, 1], source["layer"][:, 0])
    assert (target["layer"][:, 0] == -1).all()
    target["layer"].fill_(-1)
    copy_kv_blocks(source, target, [0], [1], "d2h", planes=False)
    assert torch.equal(target["layer"][1], source["layer"][0])
    assert (target["layer"][0] == -1).all()


def test_what_is_said_of_planes_goes_before_what_the_shape_tells() -> None:
    shape = (2, 5, TOKENS, HEADS, SIZE)
    source, target = numbered(shape), torch.zeros(shape)
    copy_kv_blocks({"layer": source}, {"layer": target}, [1], [0], "d2h", planes=False)
    assert torch.equal(target[0], source[1])
    source = source[0]
    with pytest.raises(UnsupportedError, match="in shapes"):
        copy_kv_blocks({"layer": source}, {"layer": source}, [0], [1], "d2h", planes=True)


def test_keys_and_values_within_a_block_are_permuted_each() -> None:
    source = numbered((6, 2, TOKENS, HEADS, SIZE))
    target = torch.zeros((3, 2, HEADS, TOKENS, SIZE))
    copy_kv_blocks({"layer": source}, {"layer": target}, [4], [1], "h2d", (NHD, HND))
    assert torch.equal(target[1], source[4].transpose(1, 2))
    assert not target[[0, 2]].any()


def test_a_block_may_be_read_twice_and_no_blocks_are_no_work() -> None:
    source, target = caches(3, NHD, fill=True), caches(3, NHD)
    copy_kv_blocks(source, target, [], [], "d2h")
    assert not target["layer.0"].any()
    copy_kv_blocks(source, target, [1, 1], [0, 2], "d2h")
    assert torch.equal(target["layer.1"][0], source["layer.1"][1])
    assert torch.equal(target["layer.1"][2], source["layer.1"][1])


def test_memory_that_is_a_permuted_view_is_copied_by_what_it_shows() -> None:
    source = caches(3, HND, fill=True)
    shown = {layer: cache.transpose(1, 2) for layer, cache in source.items()}
    target = caches(3, NHD)
    copy_kv_blocks(shown, target, [2], [1], "h2d")
    assert torch.equal(target["layer.0"][1], source["layer.0"][2].transpose(0, 1))


GOOD = (caches(3, NHD, fill=True), caches(3, NHD))


def changed(layer: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"layer.0": GOOD[1]["layer.0"], "layer.1": layer}


@pytest.mark.parametrize(
    ("target", "read", "written", "message"),
    [
        (GOOD[1], [0, 1], [0], "2 blocks to read and 1 to write"),
        (GOOD[1], [0, 1], [2, 2], "written twice"),
        (GOOD[1], [3], [0], r"blocks \[3\] are to be read, there are 3"),
        (GOOD[1], [0], [-1], r"blocks \[-1\] are to be written, there are 3"),
        ({"layer.0": GOOD[1]["layer.0"]}, [0], [0], "only one side has layers layer.1"),
        (changed(torch.zeros(3, TOKENS, HEADS, SIZE).half()), [0], [0], "has dtype"),
        (changed(torch.zeros(3, HEADS, TOKENS, SIZE)), [0], [0], "blocks must be of equal"),
        (changed(torch.zeros(3, TOKENS, HEADS, SIZE + 1)), [0], [0], "blocks must be of equal"),
        (changed(torch.zeros(2, 3, TOKENS, HEADS, SIZE)), [0], [0], "blocks must be of equal"),
    ],
)
def test_sides_that_do_not_match_are_refused_and_nothing_is_copied(
    target: dict[str, torch.Tensor], read: list[int], written: list[int], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        copy_kv_blocks(GOOD[0], target, read, written, "h2d")
    assert not any(cache.any() for cache in target.values())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((3,), (3,)),
        ((), ()),
        ((3, 4, 5), (3, 5, 4)),
        ((2, 5, 4, 3, 8), (3, 5, 4, 3, 9)),
        # Blocks of different sizes, and not a different number of keys and of values.
        ((2, 4, 24), (2, 8, 24)),
        ((2, 4, 3, 8), (2, 8, 3, 8)),
    ],
)
def test_shapes_that_hold_no_equal_blocks_are_refused(
    source: tuple[int, ...], target: tuple[int, ...]
) -> None:
    written = torch.zeros(target)
    with pytest.raises(UnsupportedError, match=r"in shapes|in two ways"):
        copy_kv_blocks({"layer": torch.ones(source)}, {"layer": written}, [0], [1], "d2h")
    assert not written.any()


@pytest.mark.parametrize("shape", [(6, 4, 24), (6, 96), (6, 3, 4, 3, 8), (6, 1, 2, 4, 3, 8)])
def test_blocks_without_heads_and_tokens_in_known_places_are_not_permuted(
    shape: tuple[int, ...],
) -> None:
    cache = {"layer": torch.ones(shape)}
    with pytest.raises(UnsupportedError, match=r"in shapes \(blocks, a, b, elements\) or"):
        copy_kv_blocks(cache, cache, [0], [1], "d2h", (NHD, HND))


def test_the_hosts_side_must_be_in_host_memory() -> None:
    there = {layer: cache.to("meta") for layer, cache in GOOD[0].items()}
    with pytest.raises(UnsupportedError, match="copying d2h from cpu to meta"):
        copy_kv_blocks(GOOD[0], there, [0], [0], "d2h")
    with pytest.raises(UnsupportedError, match="copying h2d from meta to cpu"):
        copy_kv_blocks(there, GOOD[1], [0], [0], "h2d")
