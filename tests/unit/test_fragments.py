"""The ranges that a device's copy engine is given, against a map of every byte."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch

from kvtier.errors import UnsupportedError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopier, KVBlocks
from kvtier.memory.copy_plan import BlockCopyPlan, plan_copy
from kvtier.memory.fragments import FragmentPlanner, Fragments, fragment_nbytes
from kvtier.memory.slot_layout import RankShare
from tests.unit.kv_pages import BLOCKS, LAYOUTS, Model, kv_of
from tests.unit.regions import open_regions

SLOTS = 8
MODEL = Model(heads=4, layers=3, tokens=2, head_size=4, dtype=torch.int8)
PLANS = {
    "neighbours": ([2, 3, 4, 5, 6, 7], 0, [1, 2, 3, 4, 5, 6]),
    "apart": ([7, 3, 11, 0, 4, 10], 0, [5, 0, 2, 7, 3, 6]),
    "backwards": ([9, 8, 7, 6, 5, 4], 0, [6, 5, 4, 3, 2, 1]),
    "without a chunk's head and end": ([5, 6, 7, 8], 3, [4, 5, 2, 3]),
}
"""Blocks, the index of the first one in its request, and slots."""


@dataclass(frozen=True)
class Rank:
    """One rank's memory and the slots.

    Attributes:
        kv: The rank's memory, with two groups: all pages of a block, and its first page.
        share: Its share.
        region: The slots.
        blocks_per_chunk: Blocks of a chunk.
    """

    kv: KVBlocks
    share: RankShare
    region: HostRegion
    blocks_per_chunk: int

    def planner(self) -> FragmentPlanner:
        return FragmentPlanner(
            self.kv,
            self.region.shared.address,
            self.region.geometry,
            share=self.share,
            blocks_per_chunk=self.blocks_per_chunk,
        )

    def copier(self) -> BlockCopier:
        return BlockCopier(
            self.kv, self.region, share=self.share, blocks_per_chunk=self.blocks_per_chunk
        )

    def plan(self, name: str) -> BlockCopyPlan:
        """Return copies of the first half of the blocks in one group, the rest in the other."""
        blocks, first, slots = PLANS[name]
        half, step = len(blocks) // 2, self.blocks_per_chunk
        chunks = -(-(half + first % step) // step) + -(-half // step)
        return plan_copy(
            blocks, [half, half], [first, 0], slots[:chunks], blocks_per_chunk=step
        )

    def map_bytes(self, plan: BlockCopyPlan, *, stores: bool) -> dict[int, int]:
        """Return the device address of every byte to copy, by its host address."""
        geometry, share = self.region.geometry, self.share
        found: dict[int, int] = {}
        for copy in plan.groups:
            for block, slot, place in zip(copy.blocks, copy.slots, copy.places, strict=True):
                if stores and block % share.writers != share.writer:
                    continue
                page_at = self.region.shared.address + int(slot) * geometry.slot_nbytes
                page_at += int(place) * geometry.block_nbytes
                for number, nbytes in self.kv.groups[copy.group]:
                    device = self.kv.tensors[number][int(block)].data_ptr()
                    host = page_at + share.part * nbytes
                    found.update((host + at, device + at) for at in range(nbytes))
                    page_at += share.parts * nbytes
        return found


MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank() -> Iterator[MakeRank]:
    with open_regions() as open_region:

        def make(
            layout: str,
            *,
            ranks: int = 1,
            rank: int = 0,
            blocks_per_chunk: int = 1,
            padding: int = 0,
        ) -> Rank:
            one = kv_of(MODEL.whole(), MODEL.heads_of(rank, ranks), layout, padding)
            kv = KVBlocks(one.tensors, [one.groups[0], one.groups[0][:1]])
            slot_nbytes = MODEL.block_nbytes * blocks_per_chunk + 2 * padding
            region = open_region(RegionGeometry(SLOTS, slot_nbytes, MODEL.block_nbytes, ranks))
            return Rank(kv, MODEL.share(rank, ranks), region, blocks_per_chunk)

        yield make


def rows(found: Fragments) -> list[tuple[int, int, int]]:
    columns = (found.device.tolist(), found.host.tolist(), found.nbytes.tolist())
    return list(zip(*columns, strict=True))


def expand(found: Fragments) -> dict[int, int]:
    """Return the device address of every byte in ``found``, by its host address."""
    by_byte: dict[int, int] = {}
    for device, host, nbytes in rows(found):
        assert nbytes > 0
        by_byte |= {host + at: device + at for at in range(nbytes)}
    assert len(by_byte) == found.nbytes.sum(), "a byte is copied twice"
    return by_byte


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 1), (4, 2), (8, 0), (8, 5)])
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
@pytest.mark.parametrize("padding", [0, 21])
def test_ranges_have_every_byte_once_and_copy_what_the_copier_copies(
    make_rank: MakeRank, layout: str, ranks: int, rank: int, blocks_per_chunk: int, padding: int
) -> None:
    own = make_rank(
        layout, ranks=ranks, rank=rank, blocks_per_chunk=blocks_per_chunk, padding=padding
    )
    planner, copier, tensors = own.planner(), own.copier(), own.kv.tensors
    slots = np.frombuffer(own.region.payload, np.uint8)
    full = [tensor.clone() for tensor in tensors]
    for name, stores in product(PLANS, (True, False)):
        plan = own.plan(name)
        found = planner.plan(plan, stores=stores)
        assert expand(found) == own.map_bytes(plan, stores=stores)
        results = []
        for by_hand in (True, False):
            slots[:] = 0 if stores else np.arange(slots.size) % 251
            for tensor, content in zip(tensors, full, strict=True):
                tensor.copy_(content if stores else torch.zeros_like(content))
            if not by_hand:
                (copier.store if stores else copier.load)(plan, after=None)
            else:
                for device, host, nbytes in rows(found):
                    ctypes.memmove(*((host, device) if stores else (device, host)), nbytes)
            results.append([slots.tobytes(), *(tensor.numpy().tobytes() for tensor in tensors)])
        assert results[0] == results[1]
    copier.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("first_nbytes", [1, 200, 500, 1 << 20])
def test_gradual_batches_are_bounded_and_have_the_bytes_of_the_plan(
    make_rank: MakeRank, layout: str, ranks: int, first_nbytes: int
) -> None:
    own = make_rank(layout, ranks=ranks, blocks_per_chunk=2)
    planner = own.planner()
    for name, stores in product(PLANS, (True, False)):
        plan = own.plan(name)
        yielded = list(planner.plan_gradually(plan, stores=stores, first_nbytes=first_nbytes))
        found = [expand(some) for some in yielded]
        assert {host: device for each in found for host, device in each.items()} == (
            own.map_bytes(plan, stores=stores)
        )
        assert sum(map(len, found)) == planner.plan(plan, stores=stores).nbytes.sum()
        block_nbytes = MODEL.block_nbytes // own.share.parts
        for number, each in enumerate(found):
            assert len(each) <= max(first_nbytes << number, block_nbytes)
        if first_nbytes == 1 << 20:
            assert len(yielded) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_no_two_ranges_of_a_group_could_be_one(
    make_rank: MakeRank, layout: str, ranks: int, name: str
) -> None:
    own = make_rank(layout, ranks=ranks, blocks_per_chunk=2)
    planner, plan = own.planner(), own.plan(name)
    for copy in plan.groups:
        found = rows(planner.plan(BlockCopyPlan([copy], plan.slots), stores=False))
        starts = {(device, host) for device, host, _ in found}
        ends = {(device + nbytes, host + nbytes) for device, host, nbytes in found}
        assert not starts & ends


@pytest.mark.parametrize(
    ("layout", "ranks", "ranges", "nbytes"),
    [
        ("LBHNC", 1, 18, 64),  # a layer of a block
        ("LBHNC", 2, 18, 32),
        ("BLHNC", 1, 1, 6 * 192),  # all six blocks, whose slots are neighbours too
        ("BLHNC", 2, 18, 32),
        ("BHLNC", 1, 1, 6 * 192),
        ("BHLNC", 2, 6, 96),  # a block
        ("BHLNC", 4, 6, 48),
    ],
)
def test_ranges_are_as_long_as_the_layout_allows(
    make_rank: MakeRank, layout: str, ranks: int, ranges: int, nbytes: int
) -> None:
    own = make_rank(layout, ranks=ranks)
    blocks, _, slots = PLANS["neighbours"]
    plan = plan_copy(blocks, [6, 0], [0, 0], slots, blocks_per_chunk=1)
    found = own.planner().plan(plan, stores=True)
    assert found.nbytes.tolist() == [nbytes] * ranges
    assert fragment_nbytes(own.kv, own.share) == min(nbytes, MODEL.block_nbytes)


def test_a_plan_without_blocks_has_no_ranges(make_rank: MakeRank) -> None:
    assert rows(make_rank("LBHNC").planner().plan(BlockCopyPlan([], []), stores=True)) == []


@pytest.mark.parametrize(
    ("block", "slot", "reason"),
    [
        (BLOCKS, 0, f"block {BLOCKS} does not exist, there are {BLOCKS}"),
        (-1, 0, "block -1 does not exist"),
        (0, SLOTS, f"slot {SLOTS} does not exist, there are {SLOTS}"),
        (0, -1, "slot -1 does not exist"),
    ],
)
def test_addresses_outside_the_memory_are_refused(
    make_rank: MakeRank, block: int, slot: int, reason: str
) -> None:
    planner = make_rank("LBHNC").planner()
    plan = plan_copy([3, block], [2], [0], [1, slot], blocks_per_chunk=1)
    with pytest.raises(UnsupportedError, match=reason):
        planner.plan(plan, stores=True)


def test_blocks_that_do_not_fit_their_slots_are_refused(make_rank: MakeRank) -> None:
    small = RegionGeometry(SLOTS, 64, 64, 1)
    with pytest.raises(
        UnsupportedError, match="group 0 has 192 bytes, its slot has room for 64"
    ):
        FragmentPlanner(make_rank("LBHNC").kv, 0, small, share=RankShare(), blocks_per_chunk=1)
