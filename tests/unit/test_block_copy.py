"""Copies between an engine's blocks and RAM slots, on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import UnsupportedError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory import copy as copy_module
from kvtier.memory.copiers import open_copier
from kvtier.memory.copy import BlockCopier, KVBlocks, copy_between
from kvtier.memory.copy_plan import BlockCopyPlan, plan_copy
from kvtier.memory.slot_layout import RankShare
from kvtier.memory.streams import Fence
from kvtier.os.iopool import IoPool
from kvtier.transfer.device import (
    BlockStore,
    DeviceLoadRoute,
    DeviceStoreRoute,
    LoadPayload,
    StorePayload,
)
from kvtier.types import Job, Outcome, Purpose
from tests.unit.kv_pages import block_bytes
from tests.unit.regions import open_regions

PAGES = ((0, 96), (1, 160))
BLOCK_NBYTES = 256
BLOCKS = 32

MakeRegion = Callable[..., HostRegion]
MakeDevice = Callable[..., "Device"]


def make_kv(fill: bool = True) -> KVBlocks:
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for _, page in PAGES:
        tensor = torch.zeros((BLOCKS, page + 32), dtype=torch.int8)
        if fill:
            tensor[:] = torch.randint(-128, 127, tensor.shape, generator=generator)
        tensors.append(tensor)
    return KVBlocks(tensors, [PAGES, PAGES[:1]])


@pytest.fixture
def make_region() -> Iterator[MakeRegion]:
    with open_regions() as open_region:

        def make(*, blocks_per_chunk: int, ranks: int = 1) -> HostRegion:
            block_nbytes = BLOCK_NBYTES * ranks
            slot_nbytes = -(-block_nbytes * blocks_per_chunk // 4096) * 4096
            return open_region(RegionGeometry(16, slot_nbytes, block_nbytes, ranks))

        yield make


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_stored_blocks_load_into_other_blocks_bit_for_bit(
    make_region: MakeRegion, blocks_per_chunk: int, rank: int
) -> None:
    region = make_region(blocks_per_chunk=blocks_per_chunk, ranks=2)
    source, target = make_kv(), make_kv(fill=False)
    blocks = [7, 3, 21, 30, 4, 0, 9]
    chunks = -(-len(blocks) // blocks_per_chunk)
    slots = [5, 6, 2, 15, 0, 9, 10][:chunks]
    plan = plan_copy(blocks, [7, 0], [0, 0], slots, blocks_per_chunk=blocks_per_chunk)
    out = BlockCopier(
        source, region, share=RankShare(rank, 2), blocks_per_chunk=blocks_per_chunk
    )
    out.store(plan, after=out.mark())
    into = [11, 12, 13, 14, 15, 16, 17]
    back = plan_copy(into, [7, 0], [0, 0], slots, blocks_per_chunk=blocks_per_chunk)
    load = BlockCopier(
        target, region, share=RankShare(rank, 2), blocks_per_chunk=blocks_per_chunk
    )
    load.load(back, after=load.mark())
    for old, new in zip(blocks, into, strict=True):
        assert block_bytes(target, 0, new) == block_bytes(source, 0, old)
    untouched = [block for block in range(BLOCKS) if block not in into]
    assert not target.tensors[0][untouched].any()
    assert not target.tensors[0][:, PAGES[0][1] :].any()
    for copier in (out, load):
        copier.close()
        copier.close()


def test_each_rank_writes_only_its_own_part_of_every_page(make_region: MakeRegion) -> None:
    region = make_region(blocks_per_chunk=1, ranks=2)
    kv = make_kv()
    copier = BlockCopier(kv, region, share=RankShare(1, 2), blocks_per_chunk=1)
    copier.store(plan_copy([3], [1, 0], [0, 0], [2], blocks_per_chunk=1), after=None)
    slot, own = bytes(region.slot(2)), block_bytes(kv, 0, 3)
    (_, first), (_, second) = PAGES
    assert slot[: 2 * first] == bytes(first) + own[:first]
    assert slot[2 * first : 2 * BLOCK_NBYTES] == bytes(second) + own[first:]
    assert not any(slot[2 * BLOCK_NBYTES :])
    copier.close()


def test_partial_first_and_last_chunks_take_only_their_own_blocks(
    make_region: MakeRegion,
) -> None:
    region = make_region(blocks_per_chunk=4)
    source, target = make_kv(), make_kv(fill=False)
    out = BlockCopier(source, region, share=RankShare(), blocks_per_chunk=4)
    out.store(plan_copy(list(range(8)), [8, 0], [0, 0], [4, 1], blocks_per_chunk=4), after=None)
    # Blocks 2 to 5 of the request: the end of the first chunk, the start of the second.
    part = plan_copy([20, 21, 22, 23], [4, 0], [2, 0], [4, 1], blocks_per_chunk=4)
    into = BlockCopier(target, region, share=RankShare(), blocks_per_chunk=4)
    into.load(part, after=None)
    for old, new in zip([2, 3, 4, 5], [20, 21, 22, 23], strict=True):
        assert block_bytes(target, 0, new) == block_bytes(source, 0, old)
    out.close()
    into.close()


@pytest.mark.parametrize("page", [33, 40])
@pytest.mark.parametrize("offset", [0, 3])
def test_bytes_that_are_no_whole_words_are_copied_too(
    make_region: MakeRegion, page: int, offset: int
) -> None:
    region = make_region(blocks_per_chunk=2)
    memory = torch.arange(BLOCKS * 48, dtype=torch.int64).to(torch.int8)
    rows = memory.as_strided((BLOCKS, page), (page + 7, 1), offset)
    expected = rows[4:7].clone()
    copier = BlockCopier(
        KVBlocks([rows], [[(0, page)]]), region, share=RankShare(), blocks_per_chunk=2
    )
    plan = plan_copy([4, 5, 6], [3], [0], [9, 2], blocks_per_chunk=2)
    copier.store(plan, after=None)
    untouched = memory.clone()
    rows[4:7] = 0
    copier.load(plan, after=None)
    assert torch.equal(rows[4:7], expected)
    assert torch.equal(memory, untouched)
    copier.close()


def test_a_long_copy_borrows_a_bounded_amount_of_memory(
    make_region: MakeRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_module, "_KEPT_NBYTES", 3 * BLOCK_NBYTES)
    borrowed: list[int] = []
    empty = torch.empty

    def measured(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        tensor = empty(shape, **options)
        borrowed.append(tensor.nbytes)
        return tensor

    region = make_region(blocks_per_chunk=1)
    source, target = make_kv(), make_kv(fill=False)
    out = BlockCopier(source, region, share=RankShare(), blocks_per_chunk=1)
    back = BlockCopier(target, region, share=RankShare(), blocks_per_chunk=1)
    blocks, slots = list(range(16)), [15, 3, *range(4, 15), 0, 1, 2]
    plan = plan_copy(blocks, [16, 0], [0, 0], slots, blocks_per_chunk=1)
    monkeypatch.setattr(torch, "empty", measured)
    out.store(plan, after=None)
    back.load(plan, after=None)
    assert max(borrowed) <= 3 * BLOCK_NBYTES
    borrowed.clear()
    back.load(plan, after=None)
    assert not borrowed, "new memory would fault page by page"
    monkeypatch.undo()
    assert all(block_bytes(target, 0, b) == block_bytes(source, 0, b) for b in blocks)
    out.close()
    back.close()


def test_groups_follow_one_another_and_a_skipped_group_takes_no_slot(
    make_region: MakeRegion,
) -> None:
    region = make_region(blocks_per_chunk=2)
    source, target = make_kv(), make_kv(fill=False)
    plan = plan_copy([1, 2, 3, 4, 5], [3, 2], [0, 3], [8, 9, 2, 3], blocks_per_chunk=2)
    assert [group.group for group in plan.groups] == [0, 1]
    assert sorted(zip(plan.groups[1].slots, plan.groups[1].places, strict=True)) == [
        (2, 1),
        (3, 0),
    ]
    copier = BlockCopier(source, region, share=RankShare(), blocks_per_chunk=2)
    copier.store(plan, after=None)
    back = BlockCopier(target, region, share=RankShare(), blocks_per_chunk=2)
    back.load(plan_copy([9, 10], [0, 2], [0, 3], [2, 3], blocks_per_chunk=2), after=None)
    assert block_bytes(target, 1, 9) == block_bytes(source, 1, 4)
    assert block_bytes(target, 1, 10) == block_bytes(source, 1, 5)
    copier.close()
    back.close()


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    first=st.integers(0, 7),
    blocks_per_chunk=st.integers(1, 4),
)
def test_every_block_gets_its_place_once(
    sizes: list[int], first: int, blocks_per_chunk: int
) -> None:
    starts = [first] * len(sizes)
    chunks = [
        (size + first % blocks_per_chunk + blocks_per_chunk - 1) // blocks_per_chunk
        if size
        else 0
        for size in sizes
    ]
    slots = [int(slot) for slot in np.random.default_rng(0).permutation(sum(chunks))]
    blocks = list(range(100, 100 + sum(sizes)))
    plan = plan_copy(blocks, sizes, starts, slots, blocks_per_chunk=blocks_per_chunk)
    seen = [
        (int(slot), int(place))
        for group in plan.groups
        for slot, place in zip(group.slots, group.places, strict=True)
    ]
    assert len(set(seen)) == len(blocks)
    assert [b for group in plan.groups for b in sorted(group.blocks)] == blocks
    at = 0
    for group in plan.groups:
        order = np.argsort(group.blocks)
        expected = first % blocks_per_chunk + np.arange(len(group.blocks))
        own = slots[at : at + chunks[group.group]]
        assert [int(s) for s in group.slots[order]] == [
            own[i // blocks_per_chunk] for i in expected
        ]
        assert [int(s) for s in group.places[order]] == [i % blocks_per_chunk for i in expected]
        at += chunks[group.group]


@pytest.mark.parametrize(
    ("blocks", "sizes", "slots"), [([1, 2], [2], [0]), ([1, 2], [2], [0, 1, 2]), ([1], [0], [])]
)
def test_blocks_and_slots_that_do_not_match_are_refused(
    blocks: list[int], sizes: list[int], slots: list[int]
) -> None:
    with pytest.raises(UnsupportedError):
        plan_copy(blocks, sizes, [0] * len(sizes), slots, blocks_per_chunk=1)


class _Unread(Sequence[int]):
    """Numbers that must not be read one by one."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the thread that plans reads every number")


def test_blocks_are_matched_when_they_are_first_used() -> None:
    plan_copy(_Unread(), [2], [0], _Unread(), blocks_per_chunk=1)
    plan = plan_copy([5, 4], [2], [0], [1, 0], blocks_per_chunk=1)
    assert plan.groups[0].blocks.tolist() == [4, 5]
    assert plan.groups is plan.groups


def test_missing_blocks_of_a_whole_chunk_are_an_error() -> None:
    with pytest.raises(
        UnsupportedError, match=r"missing: the 4 given belong to 2 chunks, not to 3$"
    ):
        plan_copy([3, 4, 7, 8], [4], [0], [0, 1, 2], blocks_per_chunk=2)


def test_a_group_whose_blocks_do_not_fit_their_slots_is_refused(
    make_region: MakeRegion,
) -> None:
    region = make_region(blocks_per_chunk=1)
    kv = KVBlocks([torch.zeros((4, 512), dtype=torch.int8)], [[(0, 512)]])
    with pytest.raises(UnsupportedError, match=r"group 0 has 512 bytes.*room for 256"):
        BlockCopier(kv, region, share=RankShare(), blocks_per_chunk=1)


def test_a_device_without_a_way_to_copy_is_refused(make_region: MakeRegion) -> None:
    kv = KVBlocks([torch.zeros((1, 1), dtype=torch.int8, device="meta")], [[(0, 1)]])
    with pytest.raises(UnsupportedError, match="meta"):
        open_copier(kv, make_region(blocks_per_chunk=1), share=RankShare(), blocks_per_chunk=1)


def load_job(plan: BlockCopyPlan, generations: Sequence[int]) -> Job:
    payload = LoadPayload(plan, None, generations)
    return Job(1, Purpose.LOAD, "ram", "gpu", (), plan.slots, plan.slots, 1.0, payload)


def store_job(*plans: BlockCopyPlan, generation: int = 8) -> Job:
    slots = [slot for plan in plans for slot in plan.slots]
    stores = [
        BlockStore(number, plan, [generation] * len(plan.slots))
        for number, plan in enumerate(plans, start=1)
    ]
    payload = StorePayload(stores, None)
    return Job(1, Purpose.STORE, "gpu", "ram", (), slots, slots, 1.0, payload)


class Device:
    """A device whose blocks are copied to RAM slots and back.

    Args:
        region: The slots.
        pool: Copies.
        blocks_per_chunk: Blocks of a slot.
    """

    def __init__(self, region: HostRegion, pool: IoPool, blocks_per_chunk: int) -> None:
        self.region = region
        self.control = region.control
        self.kv = make_kv()
        self.copier = BlockCopier(
            self.kv, region, share=RankShare(), blocks_per_chunk=blocks_per_chunk
        )
        self.store = DeviceStoreRoute(self.copier, self.control, rank=0, pool=pool)
        self.load = DeviceLoadRoute(self.copier, self.control, rank=0, pool=pool)


@pytest.fixture
def make_device(make_region: MakeRegion, pool: IoPool) -> Iterator[MakeDevice]:
    devices: list[Device] = []

    def make(*, blocks_per_chunk: int) -> Device:
        region = make_region(blocks_per_chunk=blocks_per_chunk)
        devices.append(Device(region, pool, blocks_per_chunk))
        return devices[-1]

    yield make
    for device in devices:
        device.copier.close()


def test_a_store_sets_its_generation_and_a_load_requires_it(make_device: MakeDevice) -> None:
    device = make_device(blocks_per_chunk=1)
    control = device.control
    plan = plan_copy([3, 4], [2, 0], [0, 0], [0, 1], blocks_per_chunk=1)
    control.issue([0, 1])
    moved = asyncio.run(device.store.run(store_job(plan)))
    assert list(moved.outcomes) == [Outcome.DONE] * 2
    assert control.stored([0, 1], [8, 8]) == [True, True]
    assert control.all_acknowledged([0, 1]) == [True, True]
    loaded = asyncio.run(device.load.run(load_job(plan, [8, 8])))
    assert list(loaded.outcomes) == [Outcome.DONE] * 2
    refused = asyncio.run(device.load.run(load_job(plan, [8, 9])))
    assert list(refused.outcomes) == [Outcome.DONE, Outcome.FAILED]
    assert control.loaded([0, 1], [8, 9]) == [True, False]


@pytest.mark.parametrize(
    ("blocks", "first", "whole"),
    [
        ([3, 4, 5, 6, 7, 8], 0, [True, True, True]),
        ([4, 5, 6, 7, 8], 1, [False, True, True]),
        # Of the first, the second or the last chunk: what is behind a gap has moved up.
        ([3, 4, 6, 7, 8], 0, [False, False, False]),
        ([4, 6, 7, 8], 1, [False, False, False]),
    ],
)
def test_a_chunk_some_of_whose_blocks_are_gone_is_never_whole(
    make_device: MakeDevice, blocks: list[int], first: int, whole: list[bool]
) -> None:
    device = make_device(blocks_per_chunk=2)
    control = device.control
    slots = [0, 1, 2, 3]
    # Another group's chunk is as whole as ever.
    plan = plan_copy([*blocks, 1, 2], [len(blocks), 2], [first, 0], slots, blocks_per_chunk=2)
    control.issue(slots)
    moved = asyncio.run(device.store.run(store_job(plan)))
    assert [outcome is Outcome.DONE for outcome in moved.outcomes] == [*whole, True]
    assert bool(moved.error) is not all(whole)
    assert control.stored(slots, [8] * 4) == [*whole, True]
    assert control.all_acknowledged(slots) == [True] * 4


def test_the_end_of_one_chunk_and_the_begin_of_the_next_are_not_taken_for_neighbours(
    make_device: MakeDevice,
) -> None:
    """Though their slots are: a load that begins and ends amid chunks may have only these."""
    device = make_device(blocks_per_chunk=2)
    whole = plan_copy([3, 4, 5, 6], [4, 0], [0, 0], [5, 4], blocks_per_chunk=2)
    device.copier.store(whole, after=None)
    part = plan_copy([8, 9], [2, 0], [1, 0], [5, 4], blocks_per_chunk=2)
    device.copier.load(part, after=None)
    for loaded, stored in ((8, 4), (9, 5)):
        assert block_bytes(device.kv, 0, loaded) == block_bytes(device.kv, 0, stored)


def test_a_store_that_fails_is_acknowledged_but_never_whole(make_device: MakeDevice) -> None:
    device = make_device(blocks_per_chunk=1)
    control = device.control
    plan = plan_copy([BLOCKS + 5], [1, 0], [0, 0], [0], blocks_per_chunk=1)
    control.issue([0])
    with pytest.raises((IndexError, RuntimeError)):
        asyncio.run(device.store.run(store_job(plan)))
    assert control.stored([0], [8]) == [False]
    assert control.all_acknowledged([0]) == [True]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[BlockCopyPlan]:
    """The plans that a copier must store, in order."""
    seen: list[BlockCopyPlan] = []
    store = BlockCopier.store

    def spy(copier: BlockCopier, plan: BlockCopyPlan, *, after: Fence | None) -> None:
        seen.append(plan)
        store(copier, plan, after=after)

    monkeypatch.setattr(BlockCopier, "store", spy)
    return seen


def test_the_stores_of_a_job_are_copied_in_one_call(
    make_device: MakeDevice, calls: list[BlockCopyPlan]
) -> None:
    device = make_device(blocks_per_chunk=2)
    control = device.control
    plans = [
        plan_copy([3, 4, 5], [2, 1], [0, 0], [4, 1], blocks_per_chunk=2),
        plan_copy([6, 7], [2, 0], [0, 0], [5], blocks_per_chunk=2),
        plan_copy([8, 9], [0, 2], [0, 0], [2], blocks_per_chunk=2),
    ]
    control.issue([1, 2, 4, 5])
    moved = asyncio.run(device.store.run(store_job(*plans)))
    assert len(calls) == 1
    # The half of a chunk in slot 1 concerns itself alone.
    done, refused = Outcome.DONE, Outcome.REFUSED
    assert list(moved.outcomes) == [done, refused, done, done]
    assert control.stored([4, 1, 5, 2], [8] * 4) == [True, False, True, True]
    assert control.all_acknowledged([1, 2, 4, 5]) == [True] * 4
    for group, slot, blocks in ((0, 4, (3, 4)), (0, 5, (6, 7)), (1, 2, (8, 9))):
        for place, block in enumerate(blocks):
            at, wanted = place * BLOCK_NBYTES, block_bytes(device.kv, group, block)
            assert bytes(device.region.slot(slot)[at : at + len(wanted)]) == wanted


def test_the_stores_of_a_job_fail_together_and_the_next_do_not(make_device: MakeDevice) -> None:
    device = make_device(blocks_per_chunk=1)
    control = device.control
    good = plan_copy([3], [1, 0], [0, 0], [0], blocks_per_chunk=1)
    bad = plan_copy([BLOCKS + 5], [1, 0], [0, 0], [1], blocks_per_chunk=1)
    control.issue([0, 1])
    with pytest.raises((IndexError, RuntimeError)):
        asyncio.run(device.store.run(store_job(good, bad)))
    assert control.stored([0, 1], [8, 8]) == [False, False]
    assert control.all_acknowledged([0, 1]) == [True, True]
    control.issue([0])
    again = asyncio.run(device.store.run(store_job(good, generation=9)))
    assert again.outcomes == [Outcome.DONE]


KIB = 1024


@dataclass(frozen=True)
class Strided:
    """Rows of parts on a device, and where in slots they go.

    Attributes:
        rows: How many.
        parts: Of each row.
        part_nbytes: Of each part.
        between_parts_nbytes: In a slot, from one part to the next.
        between_rows_nbytes: From one slot to the next.
        copies: How many copies this takes, and whether they may be left under way.
    """

    rows: int
    parts: int
    part_nbytes: int
    between_parts_nbytes: int
    between_rows_nbytes: int
    copies: tuple[int, bool]


STRIDED = {
    "all in one": Strided(6, 1, 128 * KIB, 128 * KIB, 128 * KIB, (1, True)),
    "a rank's share of each slot": Strided(6, 2, 64 * KIB, 64 * KIB, 256 * KIB, (6, True)),
    "its parts apart": Strided(6, 2, 64 * KIB, 128 * KIB, 256 * KIB, (12, True)),
    "short parts apart": Strided(6, 2, 16 * KIB, 32 * KIB, 256 * KIB, (1, False)),
    "short shares": Strided(6, 2, 16 * KIB, 16 * KIB, 256 * KIB, (1, False)),
}


@pytest.mark.parametrize("way", ["store", "load"])
@pytest.mark.parametrize("case", STRIDED.values(), ids=STRIDED)
def test_long_ranges_are_left_under_way_one_by_one_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch, case: Strided, way: str
) -> None:
    rows = torch.randint(-128, 127, (case.rows, case.parts, case.part_nbytes)).to(torch.int8)
    slots = torch.zeros(case.rows * case.between_rows_nbytes, dtype=torch.int8)
    strides = (case.between_rows_nbytes, case.between_parts_nbytes, 1)
    source, destination = rows, slots.as_strided(rows.shape, strides)
    if way == "load":
        source, destination = destination.copy_(rows), torch.zeros_like(rows)
    copy_to = torch.Tensor.copy_
    copies: list[tuple[bool, bool]] = []

    def record(
        target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False
    ) -> Any:
        in_one = target.is_contiguous() and source.is_contiguous()
        copies.append((in_one, non_blocking))
        return copy_to(target, source)

    with monkeypatch.context() as watched:
        watched.setattr(torch.Tensor, "copy_", record)
        copy_between(destination, source)
    number, under_way = case.copies
    assert copies == [(under_way, under_way)] * number
    assert torch.equal(destination, rows)
