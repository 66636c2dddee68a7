"""Copies between a CUDA device and pinned RAM slots; skipped where there is no device."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopier, KVBlocks, plan_copy
from kvtier.memory.slot_layout import RankShare

pytestmark = pytest.mark.gpu

BLOCKS, PAGE_NBYTES, LAYERS, SLOTS = 64, 32768, 4, 32
BLOCK_NBYTES = PAGE_NBYTES * LAYERS


def make_kv() -> KVBlocks:
    tensors = [
        torch.randint(-128, 127, (BLOCKS, PAGE_NBYTES), dtype=torch.int8, device="cuda")
        for _ in range(LAYERS)
    ]
    return KVBlocks(tensors, [[(layer, PAGE_NBYTES) for layer in range(LAYERS)]])


@pytest.fixture(params=[1, 2])
def region(request: pytest.FixtureRequest) -> Iterator[HostRegion]:
    ranks: int = request.param
    geometry = RegionGeometry(SLOTS, BLOCK_NBYTES * ranks, BLOCK_NBYTES * ranks, ranks)
    region = HostRegion.create(f"cuda-{os.getpid()}", geometry, attachers=0, timeout_s=1)
    yield region
    region.close()


@pytest.mark.parametrize("slots", [list(range(8)), [9, 3, 30, 4, 5, 6, 0, 17]])
def test_blocks_come_back_from_pinned_slots_bit_for_bit(
    region: HostRegion, slots: list[int]
) -> None:
    kv = make_kv()
    expected = [tensor[:8].cpu() for tensor in kv.tensors]
    share = RankShare(region.geometry.ranks - 1, region.geometry.ranks)
    copier = BlockCopier(kv, region, share=share, blocks_per_chunk=1)
    blocks = list(range(8))
    copier.store(plan_copy(blocks, [8], [0], slots, blocks_per_chunk=1), after=copier.mark())
    for tensor in kv.tensors:
        tensor.zero_()
    into = list(range(40, 48))
    copier.load(plan_copy(into, [8], [0], slots, blocks_per_chunk=1), after=copier.mark())
    for tensor, content in zip(kv.tensors, expected, strict=True):
        assert torch.equal(tensor[40:48].cpu(), content)
    copier.close()


def test_two_ranks_load_what_one_stored() -> None:
    geometry = RegionGeometry(SLOTS, BLOCK_NBYTES, BLOCK_NBYTES, 1)
    region = HostRegion.create(f"cuda-parts-{os.getpid()}", geometry, attachers=0, timeout_s=1)
    kv = make_kv()
    out = BlockCopier(kv, region, share=RankShare(), blocks_per_chunk=1)
    plan = plan_copy([3, 9], [2], [0], [5, 0], blocks_per_chunk=1)
    out.store(plan, after=out.mark())
    out.close()
    half = PAGE_NBYTES // 2
    for rank in range(2):
        own = KVBlocks(
            [torch.zeros((BLOCKS, half), dtype=torch.int8, device="cuda") for _ in kv.tensors],
            [[(layer, half) for layer in range(LAYERS)]],
        )
        into = BlockCopier(own, region, share=RankShare(rank, 2), blocks_per_chunk=1)
        into.load(plan, after=into.mark())
        into.close()
        for whole, part in zip(kv.tensors, own.tensors, strict=True):
            assert torch.equal(part[[3, 9]], whole[[3, 9], rank * half : (rank + 1) * half])
    region.close()


def test_a_store_reads_what_the_compute_stream_was_still_writing(region: HostRegion) -> None:
    kv = make_kv()
    copier = BlockCopier(kv, region, share=RankShare(), blocks_per_chunk=1)
    heavy = torch.randn((8192, 8192), device="cuda")
    for _ in range(8):
        heavy = heavy @ heavy
        heavy = heavy / heavy.norm()
    for tensor in kv.tensors:
        tensor[0] = 7 + (heavy[0, 0] * 0).to(torch.int8)
    copier.store(plan_copy([0], [1], [0], [3], blocks_per_chunk=1), after=copier.mark())
    assert bytes(region.slot(3)[:BLOCK_NBYTES]) == bytes([7]) * BLOCK_NBYTES
    copier.close()
