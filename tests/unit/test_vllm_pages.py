"""Where the pages of a block are, and whose part of a slot they are."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.errors import UnsupportedError
from kvtier.memory.slot_layout import RankShare
from kvtier.vllm.pages import SlotShape, find_pages, share_slots, wanted_layout
from tests.unit.vllm_kv import (
    BLOCKS,
    FullAttentionSpec,
    Group,
    MambaSpec,
    MLAAttentionSpec,
    kv_cache_config,
)

LAYERS = ("a", "b")
HEADS = 8
ATTENTION = FullAttentionSpec(num_kv_heads=HEADS)
PAGE_NBYTES = ATTENTION.page_size_bytes


@dataclass
class Tensor:
    """vLLM's ``KVCacheTensor``: where layers of one allocation begin."""

    layers: Sequence[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


class Memory:
    """The KV memory of some layers in one allocation.

    Args:
        spec: The kind of every layer.
        tensor: Where the layers are; one after the other unless given.
        nbytes: Bytes of the allocation.
        layout: What vLLM calls this order.
    """

    def __init__(
        self,
        spec: Any = ATTENTION,
        *,
        tensor: Tensor | None = None,
        nbytes: int = 0,
        layout: str = "LBHNC",
    ) -> None:
        page = spec.page_size_bytes
        self.layout = layout
        self.tensor = tensor or Tensor(LAYERS, BLOCKS * page, page)
        self.spec = spec
        self.config: Any = kv_cache_config([Group(list(LAYERS), spec)], [self.tensor])
        self.bytes = torch.zeros(nbytes or len(LAYERS) * BLOCKS * page, dtype=torch.int8)
        self.caches: dict[str, Any] = {
            layer: self.bytes[self.tensor.offset + number * self.tensor.layer_stride :]
            for number, layer in enumerate(LAYERS)
        }

    def find(self) -> Any:
        return find_pages(self.caches, self.config, (0,), self.layout)

    def share(
        self,
        views: Mapping[str, Any],
        *,
        ranks: int = 1,
        rank: int = 0,
        heads: int = HEADS,
    ) -> SlotShape:
        vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=ranks, world_size=ranks, rank=rank
            ),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
        )
        return share_slots(vllm_config, self.config, views, self.find(), (0,), self.layout)


def heads_outermost(heads: int) -> dict[str, torch.Tensor]:
    return dict.fromkeys(LAYERS, torch.zeros((BLOCKS, heads, 16, 4)))


def test_layers_one_after_the_other_are_two_tensors_of_pages() -> None:
    memory = Memory()
    kv = memory.find()
    assert kv.groups == [[(0, PAGE_NBYTES), (1, PAGE_NBYTES)]]
    kv.tensors[1][3] = 7
    start = (BLOCKS + 3) * PAGE_NBYTES
    assert memory.bytes.nonzero().flatten().tolist() == list(range(start, start + PAGE_NBYTES))


def test_layers_side_by_side_in_a_block_keep_their_own_pages() -> None:
    placed = Tensor(LAYERS, PAGE_NBYTES, len(LAYERS) * PAGE_NBYTES)
    memory = Memory(tensor=placed)
    kv = memory.find()
    assert kv.groups == [[(0, PAGE_NBYTES), (1, PAGE_NBYTES)]]
    kv.tensors[1][0] = 7
    assert memory.bytes.nonzero().flatten().tolist() == list(
        range(PAGE_NBYTES, 2 * PAGE_NBYTES)
    )


def test_interleaved_heads_make_the_pages_of_all_layers_one_part() -> None:
    placed = Tensor(LAYERS, PAGE_NBYTES // HEADS, len(LAYERS) * PAGE_NBYTES)
    assert Memory(tensor=placed, layout="BHLNC").find().groups == [[(0, 2 * PAGE_NBYTES)]]


def test_the_layers_of_a_single_head_are_one_part_where_those_of_several_heads_are() -> None:
    """Or the ranks of an engine with more ranks would have other parts of a block."""
    spec = FullAttentionSpec(num_kv_heads=1)
    page = spec.page_size_bytes
    placed = Tensor(LAYERS, page, len(LAYERS) * page)
    assert Memory(spec, tensor=placed, layout="BHLNC").find().groups == [[(0, 2 * page)]]
    assert Memory(spec, tensor=placed, layout="BLHNC").find().groups == [[(0, page), (1, page)]]


def test_padded_layers_of_a_single_head_keep_their_own_pages() -> None:
    spec = FullAttentionSpec(num_kv_heads=1)
    page = spec.page_size_bytes
    placed = Tensor(LAYERS, page + 64, 2 * (page + 64))
    memory = Memory(spec, tensor=placed, nbytes=BLOCKS * 2 * (page + 64), layout="BHLNC")
    assert memory.find().groups == [[(0, page), (1, page)]]


def test_padding_is_not_copied() -> None:
    padded = FullAttentionSpec(num_kv_heads=HEADS, page_size_padded=PAGE_NBYTES + 512)
    assert Memory(padded).find().groups == [[(0, PAGE_NBYTES), (1, PAGE_NBYTES)]]


def test_layers_of_groups_that_are_not_stored_are_left_out() -> None:
    memory = Memory()
    memory.config.kv_cache_groups = [Group(["a"], ATTENTION), Group(["b"], ATTENTION)]
    kv = find_pages(memory.caches, memory.config, (1,), "LBHNC")
    assert kv.groups == [[(0, PAGE_NBYTES)]]
    kv.tensors[0][0] = 7
    assert int(memory.bytes.nonzero()[0]) == BLOCKS * PAGE_NBYTES


def test_a_group_whose_blocks_are_longer_than_the_first_groups_keeps_all_of_its_page() -> None:
    """Groups share their memory, so their blocks begin at the same place."""
    memory = Memory()
    narrow = FullAttentionSpec(num_kv_heads=HEADS // 2)
    memory.config.kv_cache_groups = [Group(["a"], narrow), Group(["b"], ATTENTION)]
    block = PAGE_NBYTES + 64
    memory.config.kv_cache_tensors = [Tensor([each], block, block) for each in LAYERS]
    memory.caches = dict.fromkeys(LAYERS, memory.bytes)
    kv = find_pages(memory.caches, memory.config, (0, 1), "BLHNC")
    for (tensor, nbytes), wanted in zip(
        (page for (page,) in kv.groups), (PAGE_NBYTES // 2, PAGE_NBYTES), strict=True
    ):
        assert nbytes == wanted
        assert kv.tensors[tensor][0, :nbytes].numel() == wanted


def test_a_layer_that_vllm_registers_as_several_tensors_begins_at_the_first() -> None:
    memory = Memory()
    memory.caches = {layer: [view, view[1:]] for layer, view in memory.caches.items()}
    assert memory.find().groups == [[(0, PAGE_NBYTES), (1, PAGE_NBYTES)]]


def test_a_layer_without_a_place_is_refused() -> None:
    memory = Memory(tensor=Tensor(["a"], BLOCKS * PAGE_NBYTES, PAGE_NBYTES))
    with pytest.raises(UnsupportedError, match=r"gives layer b no memory; .* without kvtier"):
        memory.find()


def test_a_layer_without_memory_is_refused() -> None:
    memory = Memory()
    del memory.caches["b"]
    with pytest.raises(UnsupportedError, match="registered no KV cache for layer b"):
        memory.find()


def test_memory_that_begins_elsewhere_is_refused_with_both_places() -> None:
    memory = Memory()
    memory.caches["a"] = memory.bytes[64:]
    with pytest.raises(UnsupportedError, match="of layer a begins at byte 64 instead of 0"):
        memory.find()


def test_pages_beyond_the_memory_are_refused() -> None:
    memory = Memory(nbytes=2 * BLOCKS * PAGE_NBYTES - 1)
    with pytest.raises(UnsupportedError, match="of layer b exceeds its memory"):
        memory.find()


@pytest.mark.parametrize(
    ("ranks", "rank", "share"),
    [
        (1, 0, RankShare(0, 1)),
        (2, 1, RankShare(1, 2)),
        (8, 3, RankShare(3, 8)),
        (16, 7, RankShare(3, 8, writers=2, writer=1)),  # two ranks have the same head
    ],
)
def test_heads_outermost_give_slots_for_any_number_of_ranks(
    ranks: int, rank: int, share: RankShare
) -> None:
    heads = max(HEADS // ranks, 1)
    memory = Memory(FullAttentionSpec(num_kv_heads=heads))
    shape = memory.share(heads_outermost(heads), ranks=ranks, rank=rank)
    assert shape.is_portable
    assert shape.share == share
    assert shape.block_nbytes == len(LAYERS) * PAGE_NBYTES


@pytest.mark.parametrize("heads", [1, 4])
def test_heads_outside_layers_give_slots_for_any_number_of_ranks(heads: int) -> None:
    spec = FullAttentionSpec(num_kv_heads=heads)
    page = spec.page_size_bytes
    placed = Tensor(LAYERS, page // heads, len(LAYERS) * page)
    memory = Memory(spec, tensor=placed, layout="BHLNC")
    block = torch.zeros((BLOCKS, heads, len(LAYERS), 16, 4))
    views = dict(zip(LAYERS, block.unbind(2), strict=True))
    shape = memory.share(views, ranks=HEADS // heads, rank=1)
    assert shape.is_portable
    assert shape.share == RankShare(1, HEADS // heads)
    assert shape.block_nbytes == len(LAYERS) * PAGE_NBYTES


@pytest.mark.parametrize(
    ("device", "hip", "hybrid", "layout"),
    [
        ("cuda", None, False, "BHLNC"),
        ("cuda", None, True, "LBHNC"),
        ("cuda", "7.0", False, "LBHNC"),
        ("cpu", None, False, "LBHNC"),
    ],
)
def test_vllm_is_asked_for_whole_blocks_only_where_it_can_give_them(
    monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, hybrid: bool, layout: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(is_hybrid=hybrid),
    )
    assert wanted_layout(config) == layout


def test_latent_attention_is_written_by_ranks_in_turn() -> None:
    shape = Memory(MLAAttentionSpec()).share(dict.fromkeys(LAYERS), ranks=4, rank=3)
    assert shape.share == RankShare(writers=4, writer=3)


CONTIGUOUS = heads_outermost(HEADS)
REFUSED: list[tuple[str, Any, Any, int]] = [
    ("layer a keeps MambaSpec, which is not split by heads", MambaSpec(), CONTIGUOUS, HEADS),
    (
        "layer a keeps MLAAttentionSpec, which is not split by heads",
        MLAAttentionSpec(tokens_per_state=4),
        CONTIGUOUS,
        HEADS,
    ),
    (
        "layer a keeps scales beside its heads",
        FullAttentionSpec(num_kv_heads=HEADS, has_scales=True),
        CONTIGUOUS,
        HEADS,
    ),
    ("9 KV heads cannot be divided over 2 ranks", ATTENTION, CONTIGUOUS, 9),
    (
        "the heads of layer a are not outermost in a block",
        FullAttentionSpec(num_kv_heads=4),
        dict.fromkeys(LAYERS, torch.zeros((BLOCKS, 16, 4, 4)).transpose(1, 2)),
        HEADS,
    ),
    (  # vLLM hands over a block that its kernel takes in parts as several blocks
        "the heads of layer a are not outermost in a block",
        FullAttentionSpec(num_kv_heads=4),
        dict.fromkeys(LAYERS, torch.zeros((2 * BLOCKS, 4, 8, 4))),
        HEADS,
    ),
    (  # the next layer of a head is not between two heads of a layer
        "the heads of layer a are not outermost in a block",
        FullAttentionSpec(num_kv_heads=4),
        dict.fromkeys(LAYERS, torch.zeros((BLOCKS, 4, 2, 16, 4))[:, :, 0]),
        HEADS,
    ),
]


@pytest.mark.parametrize(("reason", "spec", "views", "heads"), REFUSED)
def test_other_slots_belong_to_one_number_of_ranks_and_the_log_gives_the_reason(
    reason: str, spec: Any, views: Any, heads: int, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory(spec)
    with caplog.at_level(logging.INFO):
        shape = memory.share(views, ranks=2, rank=1, heads=heads)
    assert not shape.is_portable
    assert shape.share == RankShare(1, 2)
    assert shape.block_nbytes == 2 * len(LAYERS) * (memory.find().groups[0][0][1])
    assert f"--tensor-parallel-size 2 only: {reason}" in caplog.text


def test_layers_that_are_split_in_different_ways_bind_a_store_to_its_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = Memory()
    latent = MLAAttentionSpec(block_size=16)
    memory.config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(
        kv_cache_specs={"a": FullAttentionSpec(num_kv_heads=4), "b": latent}
    )
    with caplog.at_level(logging.INFO):
        shape = memory.share(heads_outermost(4), ranks=2, rank=0)
    assert not shape.is_portable
    assert "layers are split over the ranks in different ways" in caplog.text
