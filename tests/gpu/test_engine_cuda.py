"""A rank's engine on a CUDA device; skipped where there is none."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copiers import open_gds
from kvtier.memory.copy import KVBlocks
from kvtier.memory.cuda_driver import CudaDriver
from kvtier.memory.part_hashes import HashPlanner, hash_words, open_hasher
from kvtier.memory.slot_layout import RankShare
from kvtier.types import GdsMode, Outcome
from tests.gpu.paged import LAYERS, make_kv

try:
    from kvtier.connector.device import DeviceEngine
except ModuleNotFoundError as error:
    pytest.skip(f"{error}: see .ci/gpu_wheels", allow_module_level=True)

from tests.unit.gds_files import ScriptedFiles
from tests.unit.gds_rig import BLOCKS, SLOTS, GdsRig

pytestmark = pytest.mark.gpu

PAGE_NBYTES, PER_CHUNK = 32768, 2
BLOCK_NBYTES = LAYERS * PAGE_NBYTES
SLOT_NBYTES = PER_CHUNK * BLOCK_NBYTES
GEOMETRY = RegionGeometry(SLOTS, SLOT_NBYTES, BLOCK_NBYTES, 1)
SOON_S = 30.0
NUMBERS = itertools.count()


OpenEngine = Callable[[KVBlocks, GdsMode], tuple[DeviceEngine, HostRegion]]


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    with ExitStack() as opened:

        def open_one(kv: KVBlocks, gds: GdsMode) -> tuple[DeviceEngine, HostRegion]:
            name = f"engine-{os.getpid()}-{next(NUMBERS)}"
            region = HostRegion.create(name, GEOMETRY, attachers=0, timeout_s=1)
            opened.callback(region.close)
            staging = open_gds(gds, kv, region, share=RankShare(), blocks_per_chunk=PER_CHUNK)
            engine = DeviceEngine(
                kv,
                region,
                rank=0,
                share=RankShare(),
                blocks_per_chunk=PER_CHUNK,
                close_timeout_s=SOON_S,
                gds=staging,
            )
            opened.callback(engine.close)
            return engine, region

        yield open_one


class Chats:
    """Stores new content of blocks, and loads into others what was stored before."""

    def __init__(self, engine: DeviceEngine, region: HostRegion, kv: KVBlocks) -> None:
        self._engine = engine
        self._region = region
        self._kv = kv
        self._draw = np.random.default_rng(seed=1)
        self._jobs = itertools.count(1)
        self._heavy = torch.randn((4096, 4096), device="cuda")
        self.stored: tuple[list[int], list[int], list[torch.Tensor]] = [], [], []

    def store(self, step: int) -> None:
        """Queue a computation of new content for some blocks, and begin to store them."""
        chunks = 1 + step % (SLOTS // 2)
        first = step % 2 * (SLOTS // 2)
        slots = (first + self._draw.permutation(SLOTS // 2)[:chunks]).tolist()
        blocks = self._draw.permutation(BLOCKS // 2)[: PER_CHUNK * chunks].tolist()
        self._heavy = self._heavy @ self._heavy
        self._heavy /= self._heavy.norm()
        for tensor in self._kv.tensors:
            tensor[blocks] = torch.randint_like(tensor[blocks], -128, 128)
        self._region.control.issue(slots)
        plan = self._engine.plan(blocks, [len(blocks)], [0], slots)
        self._engine.store(next(self._jobs), plan, [step] * chunks)
        self.stored = slots, blocks, [tensor[blocks] for tensor in self._kv.tensors]

    def load(self, step: int) -> None:
        """Begin to load what the step before stored."""
        slots, blocks, _ = self.stored
        targets = [BLOCKS // 2 + block for block in blocks]
        self._region.control.issue(slots)
        plan = self._engine.plan(targets, [len(targets)], [0], slots)
        self._engine.load(next(self._jobs), plan, [step - 1] * len(slots))

    def end(self, jobs: int) -> None:
        """Wait until ``jobs`` jobs have ended, and check that all succeeded."""
        results = self._engine.poll()
        while len(results) < jobs:
            assert self._engine.wait_any(timeout_s=SOON_S)
            results += self._engine.poll()
        assert all(result.is_whole for result in results), [each.error for each in results]


def test_stores_and_loads_at_once_keep_the_order_of_the_program(
    open_engine: OpenEngine,
) -> None:
    kv = make_kv("cuda", BLOCKS, PAGE_NBYTES)
    chats = Chats(*open_engine(kv, "off"), kv)
    chats.store(1)
    chats.end(1)
    for step in range(2, 41):
        _, blocks, content = chats.stored
        chats.load(step)
        chats.store(step)
        chats.end(2)
        into = [BLOCKS // 2 + block for block in blocks]
        for tensor, expected in zip(kv.tensors, content, strict=True):
            assert torch.equal(tensor[into], expected)


def test_the_device_hashes_slots_as_the_host_does() -> None:
    kv = make_kv("cuda", BLOCKS, PAGE_NBYTES)
    options = {"share": RankShare(), "blocks_per_chunk": PER_CHUNK}
    words = np.random.default_rng(seed=2).integers(1 << 63, size=8 * SLOT_NBYTES // 8)
    slots = torch.from_numpy(words).cuda()
    planner = HashPlanner(kv, GEOMETRY, **options)  # type: ignore[arg-type]
    ranges = planner.of_slots(slots.data_ptr(), [0] * 8)
    found = open_hasher(CudaDriver(torch.device("cuda", 0))).hash(ranges, 8)
    chunks = words.view(np.uint64).reshape(8, -1)
    assert found.tolist() == [hash_words(chunk, 0) for chunk in chunks]


@pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="there is no kvikio")
def test_chunks_are_read_from_a_file_and_verified_on_the_device(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    kv = make_kv("cuda", BLOCKS, PAGE_NBYTES)
    engine, region = open_engine(kv, "require")
    path = tmp_path / "slots.bin"
    path.write_bytes(bytes(SLOTS * SLOT_NBYTES))
    rig = GdsRig(path, kv, region, engine, ScriptedFiles(None), None, RankShare(), SLOT_NBYTES)
    slots = [7, 3, 4, 11, 0]
    rig.store(range(len(slots)), slots)
    assert rig.outcomes(slots) == [Outcome.DONE] * len(slots)
    torch.cuda.synchronize()
    assert all(rig.loaded(chunk, chunk) for chunk in range(len(slots)))

    with path.open("r+b") as file:
        file.seek(slots[2] * SLOT_NBYTES + 12345)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    rig.store([15], [1])  # clears the targets of loads
    outcomes = rig.outcomes(slots)
    torch.cuda.synchronize()
    assert outcomes[2] is not Outcome.DONE
    assert rig.untouched(2)
    assert outcomes[:2] == [Outcome.DONE] * 2
    assert rig.loaded(0, 0)
    assert rig.loaded(1, 1)
