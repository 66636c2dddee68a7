"""Hashes of a rank's part of a slot: the same from blocks and from slots, for every layout."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtier.errors import UnsupportedError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopier, KVBlocks
from kvtier.memory.copy_plan import plan_copy
from kvtier.memory.part_hashes import Hashes, HashPlanner, hash_words, open_hasher
from kvtier.memory.slot_layout import RankShare
from tests.support.fake_cuda import FakeCuda
from tests.unit.cuda_world import BLOCKS, Layout, draw_layout, make_kv, map_slots

PAGE_NBYTES = 4096


def words(count: int, seed: int = 0) -> Hashes:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, np.uint64)


def test_every_flipped_bit_changes_the_hash() -> None:
    content = words(64)
    whole = hash_words(content, 0)
    for bit in range(64 * 64):
        changed = content.copy()
        changed[bit // 64] ^= np.uint64(1 << bit % 64)
        assert hash_words(changed, 0) != whole


def test_words_that_change_places_change_the_hash() -> None:
    content = words(64)
    assert hash_words(np.roll(content, 1), 0) != hash_words(content, 0)
    assert hash_words(content, 1) != hash_words(content, 0)
    assert hash_words(content, 1 << 40) != hash_words(content, 0)


def draw(seed: int) -> Layout:
    """Return a layout whose pages are whole words."""
    chance = random.Random(seed)
    while True:
        layout = draw_layout(chance, "buffered")
        if layout.page % 8 == layout.gap_nbytes % 8 == 0:
            return layout


def with_writer(layout: Layout, writer: int) -> Layout:
    return replace(layout, share=replace(layout.share, writer=writer))


def store(layout: Layout, kv: KVBlocks, region: HostRegion) -> Hashes:
    """Store two chunks of each group as one writer; return the hashes of what it stored."""
    per_chunk = layout.blocks_per_chunk
    blocks = list(range(BLOCKS))
    random.Random(per_chunk).shuffle(blocks)
    count = 2 * per_chunk
    plan = plan_copy(
        blocks[: 2 * count], [count, count], [0, 0], [7, 2, 3, 9], blocks_per_chunk=per_chunk
    )
    copier = BlockCopier(kv, region, share=layout.share, blocks_per_chunk=per_chunk)
    copier.store(plan, after=None)
    copier.close()
    return open_hasher(None).hash(planner_of(layout, kv).of_blocks(plan), 4)


def planner_of(layout: Layout, kv: KVBlocks) -> HashPlanner:
    return HashPlanner(
        kv, layout.geometry, share=layout.share, blocks_per_chunk=layout.blocks_per_chunk
    )


@pytest.mark.parametrize("seed", range(40))
def test_hashes_of_all_writers_add_up_to_the_hash_of_the_part_in_the_slot(seed: int) -> None:
    layout = draw(seed)
    kv = make_kv(layout)
    with map_slots(layout.geometry) as region:
        total = np.zeros(4, np.uint64)
        for writer in range(layout.share.writers):
            total += store(with_writer(layout, writer), kv, region)
        found = []
        for slot, group in zip([7, 2, 3, 9], [0, 0, 1, 1], strict=True):
            address = region.shared.address + slot * layout.geometry.slot_nbytes
            ranges = planner_of(layout, kv).of_slots(address, [group])
            found += open_hasher(None).hash(ranges, 1).tolist()
    assert found == total.tolist()
    assert len(set(found)) == 4


def test_padding_and_other_ranks_parts_do_not_count() -> None:
    layout = replace(draw(1), share=RankShare(1, 2), gap_nbytes=8, blocks_first=True)
    kv = make_kv(layout)
    with map_slots(layout.geometry) as region:
        before = store(layout, kv, region)
        other = replace(layout, share=RankShare(0, 2))
        store(other, make_kv(other), region)
        end = layout.blocks_per_chunk * layout.geometry.block_nbytes
        region.slot(7)[end:] = b"x" * (layout.geometry.slot_nbytes - end)
        address = region.shared.address + 7 * layout.geometry.slot_nbytes
        ranges = planner_of(layout, kv).of_slots(address, [0])
        assert open_hasher(None).hash(ranges, 1)[0] == before[0]


def test_long_pages_are_hashed_in_several_ranges() -> None:
    nbytes = 5 * 65536 + 8
    page = torch.from_numpy(words(3 * nbytes // 8).view(np.int8).reshape(3, nbytes).copy())
    kv = KVBlocks([page], [[(0, nbytes)]])
    geometry = RegionGeometry(2, nbytes, nbytes, 1)
    planner = HashPlanner(kv, geometry, share=RankShare(), blocks_per_chunk=1)
    plan = plan_copy([2], [1], [0], [0], blocks_per_chunk=1)
    ranges = planner.of_blocks(plan)
    assert len(ranges) == 6
    assert ranges[:, 2].max() == 8192
    whole = hash_words(page[2].numpy().view(np.uint64), 0)
    assert open_hasher(None).hash(ranges, 1).tolist() == [whole]


def test_pages_that_are_not_whole_words_are_refused() -> None:
    page = torch.zeros((2, PAGE_NBYTES), dtype=torch.int8)
    kv = KVBlocks([page], [[(0, PAGE_NBYTES - 4)]])
    geometry = RegionGeometry(2, PAGE_NBYTES, PAGE_NBYTES, 1)
    with pytest.raises(UnsupportedError, match="not whole words"):
        HashPlanner(kv, geometry, share=RankShare(), blocks_per_chunk=1)


@pytest.mark.parametrize("seed", range(8))
def test_a_gpu_gets_the_hashes_of_more_ranges_than_fit_one_launch(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.memory.part_hashes._AT_ONCE", 3)
    cuda = FakeCuda(random.Random(seed))
    memory = cuda.device_memory(11 * 64)
    memory.view(torch.int64)[:] = torch.from_numpy(words(88, seed).view(np.int64))
    rows = [[memory.data_ptr() + 64 * row, 5 * row, 8, row % 4] for row in range(11)]
    ranges = np.array(rows, np.int64)
    found = open_hasher(cuda).hash(ranges, 4)
    assert found.tolist() == open_hasher(None).hash(ranges, 4).tolist()
    assert not cuda.violations
    cuda.require_awaited()
