"""What fails behind a door is a miss, a refusal or loud, and never a wrong byte."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.connector import service as service_module
from kvtier.types import Outcome, TransferResult
from kvtier.vllm.specs import SlotLoadStoreSpec
from tests.integration.door.doors import (
    BLOCKS,
    PAGE_NBYTES,
    OpenDoor,
    Settings,
    fill_and_store,
    key,
)


def test_a_flipped_bit_on_the_disk_is_a_miss_and_the_rest_of_the_prefix_is_used(
    settings: Settings, open_door: OpenDoor, tmp_path: Path
) -> None:
    path = settings(ram=16)
    door = open_door(path)
    keys = fill_and_store(door, 50, 8)
    door.close()
    (slots,) = tmp_path.glob("store/*/slots.bin")
    data = bytearray(slots.read_bytes())
    position = data.index(bytes([55]) * PAGE_NBYTES + bytes([56]) * PAGE_NBYTES)
    data[position + 17] ^= 4
    slots.write_bytes(data)
    again = open_door(path)
    assert again.load(keys, list(range(8))) == [CacheHitSource.DISK] * 5
    assert again.figures(1).corrupt_chunks == 1
    assert again.load(keys, list(range(8))) == [CacheHitSource.HOST] * 5


def test_a_store_whose_worker_failed_is_a_miss_although_it_was_acknowledged(
    settings: Settings, open_door: OpenDoor, caplog: pytest.LogCaptureFixture
) -> None:
    door = open_door(settings())
    context = door.request()
    plan = door.manager.prepare_store([key(1)], context)
    outside = GPULoadStoreSpec([BLOCKS + 3], [1], [0])
    assert door.worker.submit_store(0, outside, plan.store_spec)
    door.finish(0)
    door.manager.complete_store({key(1)}, context)
    assert door.manager.lookup(key(1), context) is LookupResult.MISS
    assert door.figures(0).failed_writes == 1
    assert "gpu -> ram" in caplog.text


def test_a_load_that_does_not_bear_its_stamp_is_never_reported_as_a_success(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings())
    fill_and_store(door, 10, 1)
    forged = SlotLoadStoreSpec([0], [12345])
    assert door.worker.submit_load(7, forged, GPULoadStoreSpec([3], [1], [0]))
    door.worker.wait({7})
    (result,) = door.worker.get_finished()
    assert not result.success


def test_a_reset_that_fails_is_loud_and_reaches_every_tier(
    settings: Settings, open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    second = f"- kind: nvme\n  name: big\n  path: {tmp_path / 'big'}\n  capacity: 1MiB\n"
    door = open_door(settings(ram=16, extra=second))
    keys = fill_and_store(door, 50, 4)
    door.settle()
    reached: list[str] = []
    said: list[str] = []

    def failing(name: str) -> Callable[[], Awaitable[None]]:
        async def reset() -> None:
            reached.append(name)
            raise OSError(5, name)

        return reset

    for tier in door.manager._service._storage.tiers:
        monkeypatch.setattr(tier, "reset", failing(tier.name))
    monkeypatch.setattr(
        service_module.logger, "error", lambda text, *_, **__: said.append(text)
    )
    door.manager.reset_cache()
    assert reached == ["nvme", "big"]
    assert "remove the stores' directories" in said[-1]
    assert door.manager.owes_reset
    assert door.load(keys, list(range(4))) == []


@pytest.mark.interpreted
def test_an_unexpected_error_is_a_miss_or_a_refusal_and_is_counted(
    settings: Settings,
    open_door: OpenDoor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = open_door(settings())
    context = door.request()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(door.manager._service._manager, "lookup", fail)
    monkeypatch.setattr(door.manager._service._manager, "prepare_store", fail)
    with caplog.at_level(logging.ERROR):
        assert door.manager.lookup(key(1), context) is LookupResult.MISS
        assert door.manager.prepare_store([key(1)], context).keys_to_store == []
    assert caplog.text.count("ZeroDivisionError: a bug") == 1
    assert door.manager.statistics().internal_errors == 2


@pytest.mark.interpreted
def test_a_result_that_cannot_be_applied_does_not_take_the_others_with_it(
    settings: Settings,
    open_door: OpenDoor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = open_door(settings())
    context = door.request()
    arrived = [[TransferResult(number, [Outcome.DONE]) for number in (1, 2, 3)]]
    applied: list[int] = []

    def fail_at_first(result: TransferResult) -> None:
        applied.append(result.job_id)
        if len(applied) == 1:
            raise ZeroDivisionError("a bug")

    monkeypatch.setattr(
        door.manager._service._engine, "poll", lambda: arrived.pop() if arrived else []
    )
    monkeypatch.setattr(door.manager._service._manager, "apply", fail_at_first)
    with caplog.at_level(logging.ERROR):
        assert door.manager.lookup(key(1), context) is LookupResult.MISS
    assert applied == [1, 2, 3]
    assert door.manager.statistics().internal_errors == 1
    assert caplog.text.count("ZeroDivisionError: a bug") == 1
