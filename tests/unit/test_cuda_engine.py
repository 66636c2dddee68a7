"""A rank's engine on a fake GPU: who waits for whom, and what is left after an error."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch

from kvtier.connector import device as device_module
from kvtier.connector.device import DeviceEngine
from kvtier.errors import ClosedError, CudaError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import KVBlocks
from kvtier.memory.copy_plan import BlockCopyPlan, plan_copy
from kvtier.memory.cuda_copy import CudaCopier
from kvtier.memory.slot_layout import RankShare
from tests.support.fake_cuda import FakeCuda, FakeStream
from tests.unit.regions import open_regions

BLOCKS, SLOTS, PAGE_NBYTES = 16, 8, 4096
GENERATION = 8
SOON_S = 60.0


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with open_regions() as open_region:
        yield open_region(RegionGeometry(SLOTS, PAGE_NBYTES, PAGE_NBYTES, 1))


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    made = FakeCuda(random.Random(0))
    made.patience_s = SOON_S
    yield made
    assert not made.locked
    assert not made.violations


@pytest.fixture
def kv(cuda: FakeCuda) -> KVBlocks:
    pages = torch.arange(BLOCKS, dtype=torch.int8)[:, None].repeat(1, PAGE_NBYTES)
    cuda.own(pages)
    return KVBlocks([pages], [[(0, PAGE_NBYTES)]])


def open_engine(
    cuda: FakeCuda, kv: KVBlocks, region: HostRegion, patch: pytest.MonkeyPatch
) -> DeviceEngine:
    patch.setattr(
        device_module,
        "open_copier",
        lambda *arguments, **named: CudaCopier(cuda, *arguments, **named),
    )
    return DeviceEngine(
        kv, region, rank=0, share=RankShare(), blocks_per_chunk=1, close_timeout_s=SOON_S
    )


@pytest.fixture
def engine(
    cuda: FakeCuda, kv: KVBlocks, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DeviceEngine]:
    opened = open_engine(cuda, kv, region, monkeypatch)
    yield opened
    opened.close()


def plan(block: int, slot: int) -> BlockCopyPlan:
    return plan_copy([block], [1], [0], [slot], blocks_per_chunk=1)


def fill(region: HostRegion, slot: int, content: bytes) -> None:
    """Let a slot hold a chunk that may be loaded."""
    region.slot(slot)[:] = content * PAGE_NBYTES
    region.control.publish([slot], [GENERATION])


def test_a_load_ends_while_a_store_waits_for_the_computation_it_follows(
    engine: DeviceEngine, cuda: FakeCuda, kv: KVBlocks, region: HostRegion
) -> None:
    region.control.issue([0, 1])
    fill(region, 1, b"\x63")
    engine.store(0, plan(3, 0), [GENERATION])
    release = cuda.hold()  # a draft layer writes to the block
    engine.begin_stores()
    with pytest.MonkeyPatch.context() as patch:  # submitted before the computation began
        patch.setattr(CudaCopier, "mark", lambda _: None)
        engine.load(1, plan(5, 1), [GENERATION])
    assert engine.wait_any(timeout_s=SOON_S)
    (result,) = engine.poll()
    assert (result.job_id, result.destination, result.is_whole) == (1, "gpu", True)
    assert (kv.tensors[0][5] == 0x63).all()
    assert region.control.stored([0], [GENERATION]) == [False]
    release()
    assert engine.wait_for_stores()
    (result,) = engine.poll()
    assert (result.job_id, result.is_whole) == (0, True)
    assert bytes(region.slot(0)) == b"\x03" * PAGE_NBYTES


def test_each_direction_has_a_thread(engine: DeviceEngine) -> None:
    names = {thread.name for thread in threading.enumerate()}
    assert {"kvtier-store-0-0", "kvtier-load-0-0"} <= names
    assert not any(name.startswith("kvtier-copy") for name in names)


def test_a_start_that_fails_after_the_memory_was_locked_releases_it(
    cuda: FakeCuda, kv: KVBlocks, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        assert cuda.locked
        raise ClosedError("it does not start")

    for name in ("IoPool", "TransferEngine"):
        with monkeypatch.context() as patch:
            patch.setattr(device_module, name, refuse)
            with pytest.raises(ClosedError, match="does not start"):
                open_engine(cuda, kv, region, patch)
        assert not cuda.locked


def test_the_scheduler_learns_which_ranks_could_not_lock_the_memory(
    cuda: FakeCuda, kv: KVBlocks, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert region.control.pageable_ranks() == 0
    cuda.refuses_from = 0
    engine = open_engine(cuda, kv, region, monkeypatch)
    assert region.control.pageable_ranks() == 1
    region.control.issue([0])
    engine.store(0, plan(3, 0), [GENERATION])
    assert engine.wait_for_stores()
    assert bytes(region.slot(0)) == b"\x03" * PAGE_NBYTES
    engine.close()


def test_a_copy_that_cannot_be_queued_whole_ends_before_its_job_fails(
    engine: DeviceEngine, cuda: FakeCuda, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_batch = FakeStream.copy_batch

    def fail_afterwards(stream: FakeStream, *table: object, **named: object) -> None:
        copy_batch(stream, *table, **named)  # type: ignore[arg-type]
        raise CudaError("cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE (1)")

    region.control.issue([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(FakeStream, "copy_batch", fail_afterwards)
        engine.store(0, plan(3, 0), [GENERATION])
        engine.wait({0})
    (result,) = engine.poll()
    assert not result.is_whole
    assert "CUDA_ERROR_INVALID_VALUE" in result.error
    assert not any(stream.work for stream in cuda.copy_streams)
    assert region.control.all_acknowledged([0]) == [True]
    engine.store(1, plan(4, 1), [GENERATION])
    engine.wait({1})
    (result,) = engine.poll()
    assert result.is_whole


def test_a_block_or_slot_that_does_not_exist_fails_the_job_alone(
    engine: DeviceEngine, region: HostRegion
) -> None:
    region.control.issue([0])
    engine.store(0, plan(BLOCKS, 0), [GENERATION])
    engine.wait({0})
    (result,) = engine.poll()
    assert not result.is_whole
    assert region.control.stored([0], [GENERATION]) == [False]
