"""KV memory of a made-up engine and RAM slots to copy it to, in fragments of one size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copiers import open_copier
from kvtier.memory.copy import KVBlocks
from kvtier.memory.copy_plan import BlockCopyPlan, plan_copy
from kvtier.memory.slot_layout import RankShare
from tests.gpu.bench import Bench, Device
from tests.gpu.torch_device import random_bytes

__all__ = ["LAYERS", "Direction", "PagedMemory", "make_kv", "opened_memory", "opened_region"]

Direction = Literal["load", "store"]
LAYERS: Final = 8
"""A block has one page in each layer, so it is as many fragments."""


def make_kv(device: Device, blocks: int, page_nbytes: int) -> KVBlocks:
    """Return KV memory with random bytes."""
    tensors = [random_bytes(device, blocks, page_nbytes) for _ in range(LAYERS)]
    return KVBlocks(tensors, [[(layer, page_nbytes) for layer in range(LAYERS)]])


@contextmanager
def opened_region(name: str, slots: int, page_nbytes: int) -> Iterator[HostRegion]:
    """Yield RAM slots, each with room for one block of one rank."""
    slot_nbytes = LAYERS * page_nbytes
    geometry = RegionGeometry(slots, slot_nbytes, slot_nbytes, 1)
    region = HostRegion.create(
        f"gpu-{os.getpid()}-{name}", geometry, attachers=0, timeout_s=1, huge_pages="auto"
    )
    try:
        yield region
    finally:
        region.close()


class PagedMemory:
    """Blocks to store, blocks to load into, and slots; in random order, none adjacent.

    So no two fragments can be merged on the device, and no two blocks in the slots.

    Args:
        device: Where the KV memory is.
        region: The slots, twice as many as blocks are stored.
        page_nbytes: Bytes of a fragment.

    Attributes:
        device: Where the KV memory is.
        kv: The KV memory.
        region: The slots.
        copier: kvtier's copies; the slots are page-locked while it is open.
        plans: What to copy in each direction.
        page_nbytes: Bytes of a fragment.
        nbytes: Bytes of all fragments of one direction.
    """

    def __init__(self, device: Device, region: HostRegion, page_nbytes: int) -> None:
        self.device: Device = device
        self.region = region
        self.page_nbytes = page_nbytes
        blocks = region.geometry.slots // 2
        self.nbytes = blocks * LAYERS * page_nbytes
        self.kv = make_kv(device, 4 * blocks, page_nbytes)
        draw = np.random.default_rng(seed=page_nbytes)
        order = draw.permutation(2 * blocks) * 2
        self._blocks = {"store": order[:blocks], "load": order[blocks:]}
        self._slots = draw.permutation(blocks) * 2
        self.copier = open_copier(self.kv, region, share=RankShare(), blocks_per_chunk=1)
        self.plans = {direction: self._plan(direction) for direction in ("load", "store")}
        self._stored = self._read_blocks("store")
        self._expected = self._stored.cpu().numpy().reshape(blocks, -1)

    def fragments(self, direction: Direction) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the fragments of ``direction``: on the device, and in the slots."""
        slots = torch.frombuffer(self.region.payload, dtype=torch.int8)
        slots = slots.view(self.region.geometry.slots, LAYERS, self.page_nbytes)
        return [
            (tensor[block], slots[slot, layer])
            for layer, tensor in enumerate(self.kv.tensors)
            for block, slot in zip(self._blocks[direction], self._slots, strict=True)
        ]

    def prepare(self, direction: Direction) -> None:
        """Make the destination wrong, and the source of a load right."""
        if direction == "store":
            self._slot_bytes()[:] = 0
            return
        self._slot_bytes()[self._slots] = self._expected
        blocks = torch.from_numpy(self._blocks["load"]).to(self.device)
        for tensor in self.kv.tensors:
            tensor.index_fill_(0, blocks, 0)

    def is_right(self, direction: Direction) -> bool:
        """Return whether every byte of the destination is right."""
        if direction == "store":
            return bool(np.array_equal(self._slot_bytes()[self._slots], self._expected))
        return bool(torch.equal(self._read_blocks("load"), self._stored))

    def _plan(self, direction: str) -> BlockCopyPlan:
        blocks = self._blocks[direction]
        return plan_copy(blocks, [len(blocks)], [0], self._slots.tolist(), blocks_per_chunk=1)

    def _read_blocks(self, direction: str) -> torch.Tensor:
        blocks = torch.from_numpy(self._blocks[direction]).to(self.device)
        return torch.stack([tensor[blocks] for tensor in self.kv.tensors], 1)

    def _slot_bytes(self) -> npt.NDArray[np.int8]:
        geometry = self.region.geometry
        flat = np.frombuffer(self.region.payload, np.int8)
        return flat.reshape(geometry.slots, geometry.slot_nbytes)


@contextmanager
def opened_memory(
    bench: Bench, page_nbytes: int, total_nbytes: int, name: str = "copies"
) -> Iterator[PagedMemory]:
    """Yield memory with ``total_nbytes`` to copy, in fragments of ``page_nbytes``."""
    blocks = max(total_nbytes // (LAYERS * page_nbytes), 2)
    with opened_region(name, 2 * blocks, page_nbytes) as region:
        memory = PagedMemory(bench.device, region, page_nbytes)
        try:
            yield memory
        finally:
            memory.copier.close()
