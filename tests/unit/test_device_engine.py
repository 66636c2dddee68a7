"""When a rank's copies begin: stores together, once the model has computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.connector import deadline
from kvtier.connector import device as device_module
from kvtier.connector.device import DeviceEngine
from kvtier.errors import ClosedError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopier, KVBlocks
from kvtier.memory.slot_layout import RankShare
from kvtier.os.iopool import IoPool
from kvtier.transfer import TransferEngine
from kvtier.types import Job, Outcome
from tests.unit.regions import open_regions

BLOCKS, SLOTS, PAGE_NBYTES = 16, 8, 4096
GENERATION = 8
SOON_S = 60.0


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with open_regions() as open_region:
        yield open_region(RegionGeometry(SLOTS, PAGE_NBYTES, PAGE_NBYTES, 1))


def open_device(region: HostRegion, gds: Any = None) -> DeviceEngine:
    pages = torch.arange(BLOCKS, dtype=torch.int8)[:, None].repeat(1, PAGE_NBYTES)
    kv = KVBlocks([pages], [[(0, PAGE_NBYTES)]])
    return DeviceEngine(
        kv,
        region,
        rank=0,
        share=RankShare(),
        blocks_per_chunk=1,
        close_timeout_s=SOON_S,
        gds=gds,
    )


@pytest.fixture
def device(region: HostRegion) -> Iterator[DeviceEngine]:
    engine = open_device(region)
    yield engine
    engine.close()


@pytest.fixture
def submitted(device: DeviceEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the jobs that the transfer engine got, in order."""
    seen: list[int] = []
    submit = TransferEngine.submit

    def spy(engine: TransferEngine, *jobs: Job) -> None:
        seen.extend(job.job_id for job in jobs)
        submit(engine, *jobs)

    monkeypatch.setattr(TransferEngine, "submit", spy)
    return seen


def store(device: DeviceEngine, region: HostRegion, number: int) -> None:
    """Store block ``number + 1`` in slot ``number``, as job ``number``."""
    region.control.issue([number])
    device.store(number, device.plan([number + 1], [1], [0], [number]), [GENERATION])


def test_stores_wait_for_the_end_of_the_step_and_begin_together(
    device: DeviceEngine, region: HostRegion, submitted: list[int]
) -> None:
    for number in range(3):
        store(device, region, number)
    assert not device.idle
    assert device.poll() == []
    assert submitted == []
    device.begin_stores()
    assert submitted == [0]
    device.wait({0, 1, 2})
    results = device.poll()
    assert [(each.job_id, each.destination, each.is_whole) for each in results] == [
        (number, "ram", True) for number in range(3)
    ]
    assert {each.nbytes for each in results} == {PAGE_NBYTES}
    assert [bytes(region.slot(number))[:1] for number in range(3)] == [b"\1", b"\2", b"\3"]
    assert device.idle


def test_a_device_that_does_not_start_leaves_no_thread_and_no_pinned_memory(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    close = BlockCopier.close

    def close_and_note(copier: BlockCopier) -> None:
        close(copier)
        freed.append(1)

    monkeypatch.setattr(BlockCopier, "close", close_and_note)

    def refuse(*_: object, **__: object) -> None:
        raise ClosedError("it does not start")

    monkeypatch.setattr(device_module, "TransferEngine", refuse)
    before = set(threading.enumerate())
    with pytest.raises(ClosedError, match="does not start"):
        open_device(region)
    assert len(freed) == 1
    assert set(threading.enumerate()) <= before
    monkeypatch.setattr(device_module, "IoPool", refuse)
    with pytest.raises(ClosedError, match="does not start"):
        open_device(region)
    assert len(freed) == 2


def test_a_wait_for_a_store_ends_when_the_store_ends(
    device: DeviceEngine, region: HostRegion
) -> None:
    store(device, region, 0)
    device.wait({0})
    assert region.control.stored([0], [GENERATION]) == [True]
    device.poll()
    store(device, region, 1)
    assert device.wait_any(timeout_s=SOON_S)
    assert [result.job_id for result in device.poll()] == [1]


def test_awaited_stores_are_copied_before_the_others(
    device: DeviceEngine, region: HostRegion, submitted: list[int]
) -> None:
    for number in range(4):
        store(device, region, number)
    device.wait({1, 3})
    assert region.control.stored([1, 3], [GENERATION] * 2) == [True, True]
    assert submitted == [1, 0]
    device.wait({2})
    assert [result.job_id for result in device.poll()] == [1, 3, 0, 2]
    assert region.control.stored([0, 2], [GENERATION] * 2) == [True, True]


def test_a_store_whose_blocks_changed_is_not_whole_even_if_it_ended(
    device: DeviceEngine, region: HostRegion
) -> None:
    for number in range(3):
        store(device, region, number)
    device.wait({0, 1})
    store(device, region, 3)
    device.retract({0, 3, 9})
    device.wait({0, 1, 2, 3})
    results = {each.job_id: each.is_whole for each in device.poll()}
    assert results == {0: False, 1: True, 2: True, 3: False}
    assert region.control.stored(range(4), [GENERATION] * 4) == [False, True, True, False]
    assert region.control.all_acknowledged(range(4)) == [True] * 4


def test_a_load_takes_the_stores_before_it_along(
    device: DeviceEngine, region: HostRegion, submitted: list[int]
) -> None:
    store(device, region, 0)
    device.load(7, device.plan([9], [1], [0], [0]), [GENERATION], wait_s=SOON_S)
    assert submitted == [0, 7]
    device.wait({0, 7})
    assert [result.job_id for result in device.poll()] == [0, 7]


def test_closing_copies_held_stores(
    device: DeviceEngine, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[bool] = []
    monkeypatch.setattr(BlockCopier, "store", lambda *_, **__: copied.append(True))
    store(device, region, 0)
    device.close()
    assert copied == [True]


def test_closing_leaves_the_memory_to_a_copy_that_does_not_end(
    device: DeviceEngine,
    region: HostRegion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    began, gate, freed = threading.Event(), threading.Event(), threading.Event()

    def stick(*_: object, **__: object) -> None:
        began.set()
        gate.wait(SOON_S)

    close = IoPool.close
    monkeypatch.setattr(BlockCopier, "store", stick)
    monkeypatch.setattr(BlockCopier, "close", lambda _: freed.set())
    store(device, region, 0)
    device.begin_stores()
    assert began.wait(SOON_S)
    with monkeypatch.context() as patch:
        # They would wait for a minute.
        patch.setattr(TransferEngine, "close", lambda *_, **__: False)
        patch.setattr(IoPool, "close", lambda pool, *, timeout_s: close(pool, timeout_s=0.01))
        device.close()
    assert not freed.is_set()
    assert "their memory is not freed" in caplog.text
    assert region.slot(0).nbytes == PAGE_NBYTES
    gate.set()
    device.close()
    assert freed.is_set()


def test_closing_ends_in_time_although_every_part_hangs(
    device: DeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []

    def hang(_: object, *, timeout_s: float) -> bool:
        waits_s.append(timeout_s)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: sum(waits_s)))
        patch.setattr(TransferEngine, "close", hang)
        patch.setattr(IoPool, "close", hang)
        device.close()
    assert len(waits_s) == 2
    assert min(waits_s) > 0
    assert sum(waits_s) == pytest.approx(SOON_S)


def test_a_store_that_outlasts_the_wait_for_its_blocks_is_never_whole(
    device: DeviceEngine, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, gate = threading.Event(), threading.Event()
    copy = BlockCopier.store

    def copy_late(*arguments: Any, **named: Any) -> None:
        began.set()
        assert gate.wait(SOON_S)
        copy(*arguments, **named)

    monkeypatch.setattr(BlockCopier, "store", copy_late)
    store(device, region, 0)
    device.begin_stores()
    assert began.wait(SOON_S)
    with monkeypatch.context() as patch:
        patch.setattr(device_module, "_COPY_TIMEOUT_S", 0.01)
        assert not device.wait_for_stores(), "the copy still reads them"
    gate.set()  # the copy ends after the engine may have overwritten its blocks
    assert device.wait_for_stores()
    assert device.wait_any(timeout_s=SOON_S)
    (result,) = device.poll()
    assert list(result.outcomes) == [Outcome.OVERWRITTEN]
    assert region.control.stored([0], [GENERATION]) == [False]
    assert region.control.all_acknowledged([0]) == [True]


def test_closing_waits_for_no_chunk_that_is_on_its_way(
    device: DeviceEngine, region: HostRegion, caplog: pytest.LogCaptureFixture
) -> None:
    region.control.issue([0])
    device.load(1, device.plan([1], [1], [0], [0]), [GENERATION], wait_s=6 * SOON_S)
    device.close()
    (result,) = device.poll()
    assert (result.job_id, list(result.outcomes)) == (1, [Outcome.FAILED])
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_gds_reads_that_do_not_close_leave_no_memory_behind(region: HostRegion) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    engine = open_device(region, SimpleNamespace(part=0, store_hasher=None, close=fail))
    with pytest.raises(ZeroDivisionError):
        engine.close()
    with pytest.raises(ValueError, match="released"):
        region.slot(0)


def test_a_store_after_the_end_fails_alone(
    device: DeviceEngine, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ClosedError("its thread died")

    control = region.control
    control.issue([0])
    plan = device.plan([1], [1], [0], [0])
    monkeypatch.setattr(TransferEngine, "submit", refuse)
    device.store(0, plan, [GENERATION])
    device.begin_stores()
    (result,) = device.poll()
    assert (result.job_id, list(result.outcomes)) == (0, [Outcome.FAILED])
    assert control.stored([0], [GENERATION]) == [False]
    assert control.all_acknowledged([0]) == [True]
