"""Copies between a CUDA device and pinned RAM slots; skipped where there is no device."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from kvtier.memory import HostRegion, RegionGeometry, copiers
from kvtier.memory.copy import Copier, KVBlocks
from kvtier.memory.copy_plan import plan_copy
from kvtier.memory.slot_layout import RankShare

pytestmark = pytest.mark.gpu

BLOCKS, PAGE_NBYTES, LAYERS, SLOTS = 64, 32768, 4, 32
BLOCK_NBYTES = PAGE_NBYTES * LAYERS
NUMBERS = itertools.count()

OpenRegion = Callable[[RegionGeometry], HostRegion]
OpenCopier = Callable[[KVBlocks, HostRegion, RankShare], Copier]


def make_kv() -> KVBlocks:
    tensors = [
        torch.randint(-128, 127, (BLOCKS, PAGE_NBYTES), dtype=torch.int8, device="cuda")
        for _ in range(LAYERS)
    ]
    return KVBlocks(tensors, [[(layer, PAGE_NBYTES) for layer in range(LAYERS)]])


@pytest.fixture
def open_region() -> Iterator[OpenRegion]:
    with ExitStack() as opened:

        def open_one(geometry: RegionGeometry) -> HostRegion:
            name = f"cuda-{os.getpid()}-{next(NUMBERS)}"
            region = HostRegion.create(name, geometry, attachers=0, timeout_s=1)
            opened.callback(region.close)
            return region

        yield open_one


@pytest.fixture
def open_copier(open_region: OpenRegion) -> Iterator[OpenCopier]:
    """Closes copiers before regions: memory that stays page-locked fails the next tests."""
    with ExitStack() as opened:

        def open_one(kv: KVBlocks, region: HostRegion, share: RankShare) -> Copier:
            copier = copiers.open_copier(kv, region, share=share, blocks_per_chunk=1)
            opened.callback(copier.close)
            return copier

        yield open_one


@pytest.fixture(params=[1, 2])
def region(request: pytest.FixtureRequest, open_region: OpenRegion) -> HostRegion:
    ranks: int = request.param
    return open_region(RegionGeometry(SLOTS, BLOCK_NBYTES * ranks, BLOCK_NBYTES * ranks, ranks))


@pytest.mark.parametrize("slots", [list(range(8)), [9, 3, 30, 4, 5, 6, 0, 17]])
def test_blocks_come_back_from_pinned_slots_bit_for_bit(
    region: HostRegion, open_copier: OpenCopier, slots: list[int]
) -> None:
    kv = make_kv()
    expected = [tensor[:8].cpu() for tensor in kv.tensors]
    ranks = region.geometry.ranks
    copier = open_copier(kv, region, RankShare(ranks - 1, ranks))
    blocks = list(range(8))
    copier.store(plan_copy(blocks, [8], [0], slots, blocks_per_chunk=1), after=copier.mark())
    for tensor in kv.tensors:
        tensor.zero_()
    into = list(range(40, 48))
    copier.load(plan_copy(into, [8], [0], slots, blocks_per_chunk=1), after=copier.mark())
    for tensor, content in zip(kv.tensors, expected, strict=True):
        assert torch.equal(tensor[40:48].cpu(), content)


@pytest.mark.parametrize(
    ("layers", "page_nbytes", "per_chunk"),
    [(32, 4096, 1), (5, 1000, 3), (3, 3 << 20, 1), (8, 65536, 2), (48, 24576, 1)],
)
def test_slots_and_blocks_are_those_of_a_cpu(
    open_region: OpenRegion, layers: int, page_nbytes: int, per_chunk: int
) -> None:
    block_nbytes = layers * page_nbytes
    slot_nbytes = -(-per_chunk * block_nbytes // 4096) * 4096
    geometry = RegionGeometry(SLOTS, slot_nbytes, block_nbytes, 1)
    draw = torch.Generator().manual_seed(layers)
    content = [
        torch.randint(-128, 128, (BLOCKS, page_nbytes), dtype=torch.int8, generator=draw)
        for _ in range(layers)
    ]
    groups = [[(layer, page_nbytes) for layer in range(layers)]]
    blocks = torch.randperm(BLOCKS // 2, generator=draw)[: 9 * per_chunk].tolist()
    slots = torch.randperm(SLOTS, generator=draw)[:9].tolist()
    into = [BLOCKS // 2 + block for block in blocks]
    ended = []
    for device in ("cpu", "cuda"):
        kv = KVBlocks([each.to(device, copy=True) for each in content], groups)
        region = open_region(geometry)
        copier = copiers.open_copier(kv, region, share=RankShare(), blocks_per_chunk=per_chunk)
        with contextlib.closing(copier):
            plan = plan_copy(blocks, [len(blocks)], [0], slots, blocks_per_chunk=per_chunk)
            copier.store(plan, after=copier.mark())
            plan = plan_copy(into, [len(into)], [0], slots, blocks_per_chunk=per_chunk)
            copier.load(plan, after=copier.mark())
            stored = [bytes(region.slot(slot)) for slot in range(SLOTS)]
            ended.append((stored, [tensor.cpu() for tensor in kv.tensors]))
    (slots_of_cpu, blocks_of_cpu), (slots_of_gpu, blocks_of_gpu) = ended
    assert slots_of_cpu == slots_of_gpu
    assert all(map(torch.equal, blocks_of_cpu, blocks_of_gpu))


def test_two_ranks_load_what_one_stored(
    open_region: OpenRegion, open_copier: OpenCopier
) -> None:
    region = open_region(RegionGeometry(SLOTS, BLOCK_NBYTES, BLOCK_NBYTES, 1))
    kv = make_kv()
    out = open_copier(kv, region, RankShare())
    plan = plan_copy([3, 9], [2], [0], [5, 0], blocks_per_chunk=1)
    out.store(plan, after=out.mark())
    out.close()
    half = PAGE_NBYTES // 2
    for rank in range(2):
        own = KVBlocks(
            [torch.zeros((BLOCKS, half), dtype=torch.int8, device="cuda") for _ in kv.tensors],
            [[(layer, half) for layer in range(LAYERS)]],
        )
        into = open_copier(own, region, RankShare(rank, 2))
        into.load(plan, after=into.mark())
        into.close()
        for whole, part in zip(kv.tensors, own.tensors, strict=True):
            assert torch.equal(part[[3, 9]], whole[[3, 9], rank * half : (rank + 1) * half])


def test_a_store_reads_what_the_compute_stream_was_still_writing(
    region: HostRegion, open_copier: OpenCopier
) -> None:
    kv = make_kv()
    copier = open_copier(kv, region, RankShare())
    heavy = torch.randn((8192, 8192), device="cuda")
    for _ in range(8):
        heavy = heavy @ heavy
        heavy = heavy / heavy.norm()
    for tensor in kv.tensors:
        tensor[0] = 7 + (heavy[0, 0] * 0).to(torch.int8)
    copier.store(plan_copy([0], [1], [0], [3], blocks_per_chunk=1), after=copier.mark())
    assert bytes(region.slot(3)[:BLOCK_NBYTES]) == bytes([7]) * BLOCK_NBYTES
