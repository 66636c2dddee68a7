"""An engine's memory on a fake GPU, whose copies are compared with those on a CPU.

:class:`CudaWorld` computes, stores and loads blocks as the engine does. A second memory gets
the same in the order of the program, by the copier for CPUs: what the GPU's copier leaves must
be the same, byte for byte, whatever the fake GPU lets run when.

The modules under test are loaded anew with small constants, so that a few blocks need several
batches and segments; a test may also change their source (:func:`load_modules`).
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import torch

from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopier, KVBlocks
from kvtier.memory.copy_plan import BlockCopyPlan, plan_copy
from kvtier.memory.slot_layout import RankShare
from kvtier.memory.streams import Fence
from kvtier.os.memory import open_anonymous
from tests.support.fake_cuda import FakeCuda

__all__ = [
    "METHODS",
    "CudaWorld",
    "Layout",
    "Mutation",
    "draw_layout",
    "load_modules",
    "make_kv",
    "map_slots",
    "open_world",
]

METHODS: Final = ("batch", "buffered", "torch")
SLOTS: Final = 13
BLOCKS: Final = 14
_MODULES: Final = ("pinning", "cuda_methods", "cuda_choice", "cuda_copy")
_SMALL: Final = {
    "cuda_methods": {"_BATCHED": 5, "_ROWS": 7, "_FEWEST": 2},
    "cuda_choice": {"SCRATCH_NBYTES": 4096, "_ROUNDS": 1},
}


@dataclass(frozen=True)
class Mutation:
    """A change of the source of a module of :mod:`kvtier.memory`.

    Attributes:
        module: The module.
        old: Text that occurs once.
        new: Its replacement.
    """

    module: str
    old: str
    new: str


def load_modules(mutation: Mutation | None = None) -> Mapping[str, ModuleType]:
    """Return new copies of the modules under test, with small constants."""
    package = Path(cast("str", sys.modules["kvtier.memory"].__file__)).parent
    before = {name: sys.modules.get(f"kvtier.memory.{name}") for name in _MODULES}
    loaded: dict[str, ModuleType] = {}
    try:
        for name in _MODULES:
            path = package / f"{name}.py"
            source = path.read_text()
            if mutation is not None and mutation.module == name:
                assert source.count(mutation.old) == 1, (
                    f"{mutation.old!r} is not in {name} once"
                )
                source = source.replace(mutation.old, mutation.new)
            module = loaded[name] = ModuleType(f"kvtier.memory.{name}")
            sys.modules[module.__name__] = module
            exec(compile(source, str(path), "exec"), module.__dict__)
            module.__dict__.update(_SMALL.get(name, {}))
    finally:
        for name, module_before in before.items():
            if module_before is None:
                sys.modules.pop(f"kvtier.memory.{name}", None)
            else:
                sys.modules[f"kvtier.memory.{name}"] = module_before
    return loaded


@dataclass(frozen=True)
class Layout:
    """How the KV memory of a rank is laid out."""

    unit: int
    """Bytes of which a block's place and the pages of the first group are multiples."""
    pages: Sequence[int]
    """Bytes of each page of a block of the first group."""
    page: int
    """Bytes of the only page of a block of the second group."""
    blocks_first: bool
    """Whether all pages of a block are adjacent, else all blocks of a page."""
    gap_nbytes: int
    """Bytes between two pages."""
    blocks_per_chunk: int
    share: RankShare

    @property
    def geometry(self) -> RegionGeometry:
        nbytes = max(sum(self.pages), self.page) * self.share.parts
        block_nbytes = -(-nbytes // self.unit) * self.unit
        slot_nbytes = -(-block_nbytes * self.blocks_per_chunk // 8) * 8
        return RegionGeometry(SLOTS, slot_nbytes, block_nbytes, ranks=1)


def draw_layout(chance: random.Random, method: str) -> Layout:
    """Draw a layout.

    The first group is buffered only if its pages are whole words. In a third of the layouts
    adjacent blocks in adjacent slots are one range.
    """
    is_dense = chance.random() < 0.3
    unit = 8 if method == "buffered" or is_dense else chance.choice([4, 8])
    pages = [unit * chance.randint(1, 12) for _ in range(chance.randint(1, 4))]
    parts, writers = 1 if is_dense else chance.choice([1, 1, 2]), chance.choice([1, 1, 2])
    return Layout(
        unit,
        pages,
        pages[0] if is_dense else chance.choice([4, 8]) * chance.randint(1, 12),
        blocks_first=is_dense or chance.random() < 0.5,
        gap_nbytes=0 if is_dense else chance.choice([0, 0, unit]),
        blocks_per_chunk=chance.choice([1, 2]),
        share=RankShare(chance.randrange(parts), parts, writers, chance.randrange(writers)),
    )


def make_kv(layout: Layout) -> KVBlocks:
    """Return KV memory, with content."""
    gap = layout.gap_nbytes
    groups = ([page + gap for page in layout.pages], [layout.page + gap])
    tensors = []
    for sizes in groups:
        nbytes, at = sum(sizes), 0
        content = np.random.default_rng(nbytes).integers(-128, 128, BLOCKS * nbytes, np.int8)
        flat = torch.from_numpy(content)
        for size in sizes:
            stride, start = (nbytes, at) if layout.blocks_first else (size, BLOCKS * at)
            tensors.append(flat.as_strided((BLOCKS, size), (stride, 1), start))
            at += size
    numbered = list(enumerate([*layout.pages, layout.page]))
    return KVBlocks(tensors, [numbered[:-1], numbered[-1:]])


@dataclass(frozen=True)
class Job:
    """A store or a load that has been submitted."""

    plan: BlockCopyPlan
    after: Fence
    stores: bool


class CudaWorld:
    """A rank of an engine.

    Args:
        chance: Decides everything.
        cuda: The GPU.
        copiers: That of the GPU, and that of the CPU.
        kvs: The KV memory of each.
        regions: The slots of each.
    """

    def __init__(
        self,
        chance: random.Random,
        cuda: FakeCuda,
        copiers: tuple[Any, BlockCopier],
        kvs: tuple[KVBlocks, KVBlocks],
        regions: tuple[HostRegion, HostRegion],
    ) -> None:
        self._chance = chance
        self.cuda = cuda
        self.copier, self._by_cpu = copiers
        self._kv, self._model_kv = kvs
        self._regions = regions
        self._computed = 0

    def run(self, jobs: int) -> None:
        """Compute, store and load; some jobs run while one in the other direction waits.

        Some loads even end while the computations that a store follows get no further.
        """
        for _ in range(jobs):
            blocks, slots = list(range(BLOCKS)), list(range(SLOTS))
            if self._chance.random() < 0.6:  # or adjacent blocks go to adjacent slots
                self._chance.shuffle(blocks)
                self._chance.shuffle(slots)
            half, middle = BLOCKS // 2, SLOTS // 2
            stores = self._chance.random() < 0.5
            if self._chance.random() < 0.6:
                other = self._prepare(blocks[half:], slots[middle:], stores=not stores)
                release = self.cuda.hold() if stores else None
                self.cuda.meanwhile.append(partial(self._run_another, other, release))
            self._run_job(self._prepare(blocks[:half], slots[:middle], stores=stores))
            while self.cuda.meanwhile:
                self.cuda.meanwhile.popleft()()
            self.cuda.require_awaited()
        self.cuda.finish()
        for tensor, expected in zip(self._kv.tensors, self._model_kv.tensors, strict=True):
            assert torch.equal(tensor, expected), "a block has wrong bytes"

    def _prepare(self, blocks: Sequence[int], slots: Sequence[int], *, stores: bool) -> Job:
        """Compute some blocks; return a job that follows this."""
        self._compute(blocks)
        return Job(self._plan(blocks, slots), self.copier.mark(), stores)

    def _run_another(self, job: Job, release: Callable[[], None] | None) -> None:
        self._run_job(job)
        if release is not None:
            release()

    def _run_job(self, job: Job) -> None:
        plan, after, stores = job.plan, job.after, job.stores
        (self._by_cpu.store if stores else self._by_cpu.load)(plan, after=None)
        (self.copier.store if stores else self.copier.load)(plan, after=after)
        if not stores:
            return
        found, expected = (
            [bytes(region.slot(slot)) for slot in plan.slots] for region in self._regions
        )
        assert found == expected, "a slot has wrong bytes when the store returns"

    def _plan(self, blocks: Sequence[int], slots: Sequence[int]) -> BlockCopyPlan:
        """Return a plan for some of ``blocks`` and ``slots``."""
        per_chunk = self._by_cpu.blocks_per_chunk
        sizes, firsts, chunks = [], [], 0
        for _ in range(2):
            size = self._chance.randint(1, 3)
            first = self._chance.randrange(per_chunk)
            chunks += -(-(size + first) // per_chunk)
            sizes.append(size)
            firsts.append(first)
        return plan_copy(
            blocks[: sum(sizes)], sizes, firsts, slots[:chunks], blocks_per_chunk=per_chunk
        )

    def _compute(self, blocks: Sequence[int]) -> None:
        """Write to blocks, on the device when the time comes."""
        self._computed += 1
        content = np.random.default_rng(self._computed).integers(-128, 128, 1 << 12, np.int8)

        def compute(kv: KVBlocks) -> None:
            for tensor in kv.tensors:
                rows = torch.from_numpy(content[: len(blocks) * tensor.shape[1]])
                tensor[list(blocks)] = rows.view(len(blocks), -1)

        compute(self._model_kv)
        self.cuda.run_on_device(lambda: compute(self._kv))


@contextmanager
def open_world(
    chance: random.Random,
    method: str,
    modules: Mapping[str, ModuleType],
    *,
    prepare: Callable[[FakeCuda], None] = lambda _: None,
) -> Iterator[CudaWorld]:
    """Yield a world that copies by ``method`` where it can.

    Args:
        chance: Decides everything.
        method: One of :data:`METHODS`.
        modules: The modules under test.
        prepare: Called with the GPU before it is used.
    """
    layout = draw_layout(chance, method)
    geometry = layout.geometry
    cuda = FakeCuda(chance)
    cuda.lacks_batches = method == "torch"
    cuda.kernel_bytes_per_s = 1e15 if method == "buffered" else None
    prepare(cuda)
    modules["cuda_choice"].__dict__["time"] = SimpleNamespace(perf_counter=cuda.now_s)
    _set_staging(modules, layout, chance)
    with map_slots(geometry) as region, map_slots(geometry) as model:
        named: dict[str, Any] = {
            "share": layout.share,
            "blocks_per_chunk": layout.blocks_per_chunk,
        }
        kv, model_kv = make_kv(layout), make_kv(layout)
        cuda.own(*kv.tensors)
        reference = BlockCopier(model_kv, model, **named)
        try:
            segment_nbytes = geometry.slot_nbytes * chance.randint(1, 5)
            copier = modules["cuda_copy"].CudaCopier(
                cuda, kv, region, segment_nbytes=segment_nbytes, **named
            )
            wanted = "torch" if copier.is_pageable else method
            assert copier.store_method == copier.load_method == wanted
            assert not any(region.payload), "the trial at the start used slots"
            yield CudaWorld(chance, cuda, (copier, reference), (kv, model_kv), (region, model))
            cuda.finish()
            for _ in range(2):
                copier.close()
            assert not cuda.locked, "memory is still page-locked"
            assert not cuda.violations, cuda.violations
        finally:
            cuda.abandon()
            reference.close()


def _set_staging(
    modules: Mapping[str, ModuleType], layout: Layout, chance: random.Random
) -> None:
    """Make staging buffers hold two ranges, and often less than a block."""
    longest_nbytes = (sum if layout.blocks_first else max)(layout.pages)
    nbytes = longest_nbytes * chance.choice([2, 4])
    for name in ("cuda_methods", "cuda_choice", "cuda_copy"):
        modules[name].__dict__["STAGING_NBYTES"] = nbytes


@contextmanager
def map_slots(geometry: RegionGeometry) -> Iterator[HostRegion]:
    """Yield a region that no other process maps."""
    descriptor = open_anonymous("kvtier-cuda")
    try:
        os.ftruncate(descriptor, geometry.nbytes)
        region = HostRegion(geometry, descriptor)
    finally:
        os.close(descriptor)
    try:
        yield region
    finally:
        region.close()
