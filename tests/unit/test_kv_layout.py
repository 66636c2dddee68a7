"""Which KV tensors kvtier can take blocks from, and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvtier.memory.kv_layout import blocks_of_layers, blocks_of_one_tensor

from kvtier.errors import UnsupportedError
from tests.unit.kv_pages import block_bytes

BLOCKS, TOKENS, HEADS, SIZE = 6, 4, 2, 8


def filled(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def test_blocks_first_are_one_page_of_each_layer_in_the_groups_order() -> None:
    first, second = filled(BLOCKS, HEADS, TOKENS, SIZE), filled(BLOCKS, TOKENS, 3 * SIZE)
    kv = blocks_of_layers({"a": first, "b": second}, [["b", "a"]], blocks=BLOCKS)
    assert block_bytes(kv, 0, 4) == second[4].numpy().tobytes() + first[4].numpy().tobytes()


def test_keys_before_values_are_two_pages_of_a_layer() -> None:
    cache = filled(2, BLOCKS, TOKENS, HEADS, SIZE)
    kv = blocks_of_layers({"a": cache}, [["a"]], blocks=BLOCKS)
    assert block_bytes(kv, 0, 3) == cache[:, 3].contiguous().numpy().tobytes()


def test_a_permuted_view_gives_the_bytes_as_they_lie_in_memory() -> None:
    memory = filled(BLOCKS, HEADS, TOKENS, SIZE)
    kv = blocks_of_layers({"a": memory.transpose(1, 2)}, [["a"]], blocks=BLOCKS)
    assert block_bytes(kv, 0, 5) == memory[5].numpy().tobytes()


def test_layers_that_lie_within_one_anothers_blocks_keep_their_distance() -> None:
    memory = filled(BLOCKS, 3, TOKENS, SIZE)
    kv = blocks_of_layers({"a": memory[:, 0], "b": memory[:, 2]}, [["a", "b"]], blocks=BLOCKS)
    expected = memory[2, 0].numpy().tobytes() + memory[2, 2].numpy().tobytes()
    assert block_bytes(kv, 0, 2) == expected


def test_groups_that_share_memory_share_the_tensor() -> None:
    cache = filled(BLOCKS, TOKENS, SIZE)
    kv = blocks_of_layers({"a": cache, "b": cache}, [["a"], ["b"]], blocks=BLOCKS)
    assert len(kv.tensors) == 1
    assert kv.groups[0] == kv.groups[1]


def test_what_is_written_to_the_bytes_is_in_the_engines_memory() -> None:
    cache = filled(BLOCKS, TOKENS, SIZE)
    kv = blocks_of_layers({"a": cache}, [["a"]], blocks=BLOCKS)
    kv.tensors[0][1] = 0
    assert not cache[1].any()
    assert cache[0].any()


def test_all_layers_together_are_one_page_of_every_group() -> None:
    cache = filled(BLOCKS, 3, TOKENS, SIZE)
    kv = blocks_of_one_tensor(cache, groups=2, blocks=BLOCKS)
    assert block_bytes(kv, 0, 1) == block_bytes(kv, 1, 1) == cache[1].numpy().tobytes()


STRETCHED = filled(BLOCKS, TOKENS, 2 * SIZE)[:, :, :SIZE]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another number of blocks": (
        {"a": filled(5, TOKENS)},
        r"\(5, 4\); kvtier knows \(6, ...\)",
    ),
    "no dimensions": ({"a": filled(BLOCKS)}, r"has shape \(6,\)"),
    "holes in a block": ({"a": STRETCHED}, "layer a is not one stretch of memory"),
    "overlap": ({"a": torch.zeros(40).as_strided((BLOCKS, 8), (4, 1))}, "not one stretch"),
    "one for all": ({"a": torch.zeros(8).expand(BLOCKS, 8)}, "not one stretch"),
    "state": ({"a": [filled(BLOCKS, 2)]}, "layer a is a list, not a tensor"),
    "unknown layer": ({"a": filled(BLOCKS, 2), "b": filled(BLOCKS, 2)}, "different layers: b"),
    "missing layer": ({}, "different layers: a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_memory_of_an_unknown_shape_is_refused_by_name(name: str) -> None:
    caches, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        blocks_of_layers(caches, [["a"]], blocks=BLOCKS)


def test_two_blocks_that_may_be_keys_and_values_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="can be read in two ways"):
        blocks_of_layers({"a": filled(2, 2, TOKENS)}, [["a"]], blocks=2)


def test_layers_on_several_devices_are_refused() -> None:
    caches = {"a": filled(BLOCKS, 2), "b": torch.empty((BLOCKS, 2), device="meta")}
    with pytest.raises(UnsupportedError, match="several devices: cpu, meta"):
        blocks_of_layers(caches, [["a", "b"]], blocks=BLOCKS)


def test_all_layers_together_with_another_dimension_first_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"all layers together has shape \(3, 6, 4\)"):
        blocks_of_one_tensor(filled(3, BLOCKS, TOKENS), groups=1, blocks=BLOCKS)
