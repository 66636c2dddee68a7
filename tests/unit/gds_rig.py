"""A rank with GDS reads, without a scheduler: it stores chunks, and reads them from a file.

The rig is the tier: it writes slots of RAM to a slot file, and keeps the hashes that the rank
recorded. On a fake GPU everything runs as late as CUDA allows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.connector import device as device_module
from kvtier.connector.device import DeviceEngine
from kvtier.memory import HostRegion, RegionGeometry, gds_staging
from kvtier.memory.copy import KVBlocks
from kvtier.memory.cuda_copy import CudaCopier
from kvtier.memory.gds_staging import GdsStaging
from kvtier.memory.slot_layout import RankShare
from kvtier.types import GdsReads, Outcome, TransferResult
from tests.support.fake_cuda import FakeCuda
from tests.unit.gds_files import ScriptedFiles, file_id
from tests.unit.regions import open_regions

__all__ = ["BLOCKS", "SLOTS", "SLOT_NBYTES", "GdsRig", "open_rig"]

LAYERS, PAGE_NBYTES, PER_CHUNK = 2, 1024, 2
SLOT_NBYTES = 4096
BLOCKS, SLOTS = 64, 16
SOON_S = 30.0
WHOLE = RankShare()


@dataclass
class GdsRig:
    """The rank, its slot file and its hashes.

    Blocks ``2 * i`` and ``2 * i + 1`` of the KV memory are chunk ``i``'s source. Loads go to
    the second half of the memory.
    """

    path: Path
    kv: KVBlocks
    region: HostRegion
    device: DeviceEngine
    files: ScriptedFiles
    cuda: FakeCuda | None
    share: RankShare
    slot_nbytes: int
    hashes: dict[int, int] = field(default_factory=dict)
    _jobs: int = 0

    def store(self, chunks: Sequence[int], slots: Sequence[int]) -> None:
        """Store chunks in RAM, write them to ``slots`` of the file, and keep their hashes."""
        ram = list(range(len(chunks)))
        self._jobs += 1
        generation = self._jobs
        self.region.control.issue(ram)
        self.device.store(
            self._jobs,
            self.device.plan(self._blocks(chunks), [2 * len(chunks)], [0], ram),
            [generation] * len(ram),
        )
        assert self.device.wait_for_stores()
        (result,) = self.device.poll()
        assert result.is_whole, result.error
        hashes = self.region.control.part_hashes(ram, [generation] * len(ram))
        with self.path.open("r+b") as file:
            for slot, number in zip(slots, ram, strict=True):
                file.seek(slot * self.slot_nbytes)
                file.write(self.region.slot(number))
        self.hashes.update(zip(slots, hashes[:, self.share.part].tolist(), strict=True))
        for memory in self.kv.tensors:
            memory[BLOCKS // 2 :] = 0

    def load(
        self,
        slots: Sequence[int],
        *,
        wait_s: float = SOON_S,
        ram: Sequence[tuple[int, int]] = (),
        hashes: Sequence[int] | None = None,
    ) -> int:
        """Begin to load tier slots, and then RAM slots with a generation; return the job."""
        self._jobs += 1
        numbers = [-2 - at for at in range(len(slots))] + [slot for slot, _ in ram]
        self.region.control.issue([slot for slot, _ in ram])
        count = len(numbers)
        targets = list(range(BLOCKS // 2, BLOCKS // 2 + 2 * count))
        expected = np.zeros((len(slots), self.share.parts), np.uint64)
        own = [self.hashes[slot] for slot in slots] if hashes is None else hashes
        expected[:, self.share.part] = np.array(own, np.uint64)
        self.device.load(
            self._jobs,
            self.device.plan(targets, [2 * count], [0], numbers),
            [0] * len(slots) + [generation for _, generation in ram],
            wait_s=wait_s,
            gds=GdsReads(
                file_id(self.path), range(len(slots)), list(slots), expected.tobytes()
            ),
        )
        return self._jobs

    def end(self) -> TransferResult:
        """Wait for the next job to end, and return its result."""
        assert self.device.wait_any(timeout_s=SOON_S)
        (result,) = self.device.poll()
        return result

    def loaded(self, chunk: int, at: int) -> bool:
        """Return whether the load's chunk number ``at`` has the bytes of ``chunk``."""
        target = BLOCKS // 2 + 2 * at
        return all(
            torch.equal(memory[2 * chunk : 2 * chunk + 2], memory[target : target + 2])
            for memory in self.kv.tensors
        )

    def untouched(self, at: int) -> bool:
        """Return whether the blocks of the load's chunk number ``at`` are as before."""
        target = BLOCKS // 2 + 2 * at
        return not any(memory[target : target + 2].any() for memory in self.kv.tensors)

    def outcomes(self, slots: Sequence[int], **options: Any) -> list[Outcome]:
        """Load tier slots and return what became of each."""
        self.load(slots, **options)
        return list(self.end().outcomes)

    @staticmethod
    def _blocks(chunks: Sequence[int]) -> list[int]:
        return [block for chunk in chunks for block in (2 * chunk, 2 * chunk + 1)]


@contextmanager
def open_rig(
    tmp_path: Path,
    *,
    buffer_slots: int = 2,
    seed: int | None = None,
    share: RankShare = WHOLE,
    page_nbytes: int = PAGE_NBYTES,
) -> Iterator[GdsRig]:
    """Yield a rank whose staging buffers hold ``buffer_slots`` slots each.

    Args:
        tmp_path: Where the slot file is.
        buffer_slots: Slots of a staging buffer.
        seed: What a fake GPU does when; None for a CPU.
        share: The rank's share of each slot.
        page_nbytes: Bytes of the rank's part of a page; a block has two pages.
    """
    kv = _make_kv(page_nbytes)
    block_nbytes = LAYERS * page_nbytes * share.parts
    geometry = RegionGeometry(SLOTS, PER_CHUNK * block_nbytes, block_nbytes, 1)
    path = tmp_path / "slots.bin"
    path.write_bytes(bytes(SLOTS * geometry.slot_nbytes))
    cuda = None if seed is None else FakeCuda(random.Random(seed))
    options: dict[str, Any] = {"share": share, "blocks_per_chunk": PER_CHUNK}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(gds_staging, "BUFFER_NBYTES", buffer_slots * geometry.slot_nbytes)
        patch.setattr(gds_staging, "SHORTEST_NBYTES", 1024)
        if cuda is not None:
            _use(cuda, kv, patch)
        files = ScriptedFiles(cuda)
        region = stack.enter_context(open_regions())(geometry)
        staging = GdsStaging(kv, geometry, files=files, driver=cuda, **options)
        device = DeviceEngine(
            kv, region, rank=0, close_timeout_s=SOON_S, gds=staging, **options
        )
        stack.callback(device.close)
        yield GdsRig(path, kv, region, device, files, cuda, share, geometry.slot_nbytes)
        device.close()
        if files.gate.is_set():
            assert not files.opened
            assert not files.staged
        if cuda is not None:
            assert not cuda.violations


def _make_kv(page_nbytes: int) -> KVBlocks:
    content = np.random.default_rng(1).integers(-128, 128, (LAYERS, BLOCKS, page_nbytes))
    tensors = list(torch.from_numpy(content.astype(np.int8)))
    return KVBlocks(tensors, [[(layer, page_nbytes) for layer in range(LAYERS)]])


def _use(cuda: FakeCuda, kv: KVBlocks, patch: pytest.MonkeyPatch) -> None:
    """Let copies between blocks and RAM go through the fake GPU as well."""
    cuda.patience_s = SOON_S
    cuda.own(*kv.tensors)
    patch.setattr(
        device_module, "open_copier", lambda *args, **named: CudaCopier(cuda, *args, **named)
    )
