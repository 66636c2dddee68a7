"""Slots whose bytes do not depend on the number of ranks: copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kvtier.errors import UnsupportedError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopier, KVBlocks
from kvtier.memory.copy_plan import plan_copy
from kvtier.memory.slot_layout import PageRun, RankShare
from tests.unit.kv_pages import BLOCKS, LAYOUTS, Model, block_bytes, kv_of
from tests.unit.regions import open_regions

SLOTS = 8
OpenSlots = Callable[[Model, int], HostRegion]


@pytest.fixture
def open_slots() -> Iterator[OpenSlots]:
    with open_regions() as open_region:

        def make(model: Model, blocks_per_chunk: int) -> HostRegion:
            nbytes = model.block_nbytes
            slot_nbytes = nbytes * blocks_per_chunk
            return open_region(RegionGeometry(SLOTS, slot_nbytes, nbytes, 1))

        yield make


def test_a_rank_that_has_all_has_one_range_of_a_place() -> None:
    assert list(RankShare(writers=2).runs([8, 8, 16])) == [PageRun(0, 0, 1, 32)]


def test_equal_pages_that_follow_one_another_are_one_run_of_parts() -> None:
    runs = list(RankShare(1, 3).runs([8, 8, 16, 8]))
    assert runs == [PageRun(0, 8, 2, 8), PageRun(16, 64, 1, 16), PageRun(32, 104, 1, 8)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("writers", "readers", "heads", "blocks_per_chunk"),
    [
        (1, 2, 2, 1),
        (1, 2, 2, 4),
        (2, 1, 2, 1),
        (2, 1, 2, 4),
        (4, 2, 8, 4),
        (2, 4, 2, 2),
        (4, 1, 2, 4),
        (1, 4, 1, 1),
        (8, 2, 1, 4),
        (3, 2, 6, 2),
        (6, 3, 3, 1),
    ],
)
def test_chunks_that_any_number_of_ranks_stored_load_with_any_other_number(
    open_slots: OpenSlots,
    layout: str,
    writers: int,
    readers: int,
    heads: int,
    blocks_per_chunk: int,
) -> None:
    model = Model(heads=heads, tokens=4, head_size=8)
    region = open_slots(model, blocks_per_chunk)
    whole = model.whole()
    stored, loaded = [7, 3, 1, 10, 4, 0], [2, 5, 9, 8, 11, 6]
    slots = [5, 6, 2, 7, 0, 3][: -(-len(stored) // blocks_per_chunk)]
    plan = plan_copy(stored, [6], [0], slots, blocks_per_chunk=blocks_per_chunk)
    for rank in range(writers):
        kv = kv_of(whole, model.heads_of(rank, writers), layout)
        share = model.share(rank, writers)
        out = BlockCopier(kv, region, share=share, blocks_per_chunk=blocks_per_chunk)
        out.store(plan, after=None)
        out.close()
    back = plan_copy(loaded, [6], [0], slots, blocks_per_chunk=blocks_per_chunk)
    for rank in range(readers):
        own = model.heads_of(rank, readers)
        kv = kv_of([torch.zeros_like(layer) for layer in whole], own, layout)
        share = model.share(rank, readers)
        into = BlockCopier(kv, region, share=share, blocks_per_chunk=blocks_per_chunk)
        into.load(back, after=None)
        into.close()
        expected = kv_of(whole, own, layout)
        for got, wanted in zip(kv.tensors, expected.tensors, strict=True):
            assert torch.equal(got[loaded], wanted[stored])
            assert not got[[block for block in range(BLOCKS) if block not in loaded]].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slot_holds_the_blocks_of_one_rank_whatever_the_number_of_ranks(
    open_slots: OpenSlots, layout: str
) -> None:
    model = Model(heads=6, layers=3, tokens=4, head_size=8)
    whole = model.whole()
    one = kv_of(whole, slice(None), layout)
    for ranks in (1, 2, 3, 6, 12):
        region = open_slots(model, 2)
        for rank in range(ranks):
            out = BlockCopier(
                kv_of(whole, model.heads_of(rank, ranks), layout),
                region,
                share=model.share(rank, ranks),
                blocks_per_chunk=2,
            )
            out.store(plan_copy([4, 9], [2], [0], [1], blocks_per_chunk=2), after=None)
            out.close()
        assert bytes(region.slot(1)) == block_bytes(one, 0, 4) + block_bytes(one, 0, 9)


def test_a_rank_that_is_not_the_writer_of_a_block_leaves_its_slot_alone(
    open_slots: OpenSlots,
) -> None:
    model = Model(heads=1)
    region = open_slots(model, 1)
    share = model.share(1, 2)
    out = BlockCopier(
        kv_of(model.whole(), slice(0, 1)), region, share=share, blocks_per_chunk=1
    )
    out.store(plan_copy([2, 3], [2], [0], [0, 1], blocks_per_chunk=1), after=None)
    assert not any(region.slot(0))
    assert any(region.slot(1))
    out.close()


def test_a_place_need_not_be_whole_words() -> None:
    rows = torch.arange(4 * 32).reshape(4, 32).to(torch.int8)
    with open_regions() as open_region:
        region = open_region(RegionGeometry(SLOTS, 4096, 36, 1))
        out = BlockCopier(
            KVBlocks([rows], [[(0, 32)]]), region, share=RankShare(), blocks_per_chunk=2
        )
        out.store(plan_copy([1, 3], [2], [0], [5], blocks_per_chunk=2), after=None)
        stored = bytes(region.slot(5))
        assert stored[:72] == bytes([*range(32, 64), *bytes(4), *range(96, 128), *bytes(4)])
        out.close()


@pytest.mark.parametrize(
    ("share", "blocks", "problem"),
    [
        (RankShare(2, 2), 1, "rank part 2 does not exist: there are 2"),
        (RankShare(0, 2), 2, r"2 blocks of \d+ bytes do not fit a slot of \d+ bytes"),
    ],
)
def test_parts_and_blocks_that_a_slot_does_not_have_are_refused(
    open_slots: OpenSlots, share: RankShare, blocks: int, problem: str
) -> None:
    model = Model()
    with pytest.raises(UnsupportedError, match=problem):
        BlockCopier(
            kv_of(model.whole(), slice(0, 1)),
            open_slots(model, 1),
            share=share,
            blocks_per_chunk=blocks,
        )


def test_pages_that_are_longer_than_their_rows_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="a page of 65 bytes does not fit rows of 64"):
        KVBlocks([torch.zeros((4, 64), dtype=torch.int8)], [[(0, 64), (0, 65)]])
