"""The connector's two halves without an engine: loads that stream, and loads that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.errors import ConfigError
from kvtier.vllm.spec import KVTierConnectorSpec, KVTierOffloadingSpec
from kvtier.vllm.specs import SlotLoadStoreSpec
from kvtier.vllm.worker import EndedLoad
from tests.integration.door.doors import (
    PAGE_NBYTES,
    Door,
    OpenDoor,
    Settings,
    fill_and_store,
    key,
    offloading_config,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS
CHUNKS = 8
DISK = CacheHitSource.DISK

OpenDirect = Callable[[], Door]


@pytest.fixture
def path(settings: Settings) -> Path:
    return settings(ram=4 * CHUNKS, extra="transfer:\n  load_path: direct\n")


@pytest.fixture
def open_direct(path: Path, open_door: OpenDoor) -> OpenDirect:
    return lambda: open_door(path, KVTierConnectorSpec)


@pytest.fixture
def keys(open_direct: OpenDirect) -> list[bytes]:
    """Chunks that only the disk has: an engine stored them and ended."""
    door = open_direct()
    keys = fill_and_store(door, 50, CHUNKS)
    door.close()
    return keys


def ask_for(door: Door, count: int) -> tuple[list[bytes], ReqContext]:
    """Store so many chunks, and look them up for a request."""
    keys = fill_and_store(door, 10, count)
    context = door.request()
    assert door.lookup(keys, context) == count
    return keys, context


def begin_load(door: Door, keys: list[bytes]) -> ReqContext:
    """Look up and load as the connector does, without ending the load."""
    context = door.request()
    assert door.lookup(keys, context) == len(keys)
    spec = door.manager.prepare_load(keys, context)
    blocks = GPULoadStoreSpec(list(range(len(keys))), [len(keys)], [0])
    assert door.worker.submit_load(7, spec, blocks)
    return context


def end_load(door: Door, keys: list[bytes], context: ReqContext) -> EndedLoad:
    door.worker.wait({7})
    (result,) = door.worker.get_finished()
    assert result.success, "vLLM's half of the worker asserts on it"
    ended: dict[int, EndedLoad] = door.worker.take_ended_loads()
    assert list(ended) == [7]
    door.manager.complete_load(set(keys), context)
    return ended[7]


def test_a_chunk_on_disk_is_loaded_in_the_step_that_asks_for_it(
    open_direct: OpenDirect, keys: list[bytes]
) -> None:
    door = open_direct()
    context = begin_load(door, keys)
    assert door.manager.get_load_source(keys[3], context) is DISK
    assert end_load(door, keys, context).is_whole
    assert all(door.holds(block, 50 + block) for block in range(CHUNKS))
    door.step()
    assert door.figures(1).hit_chunks == CHUNKS
    assert door.load(keys, list(range(10, 10 + CHUNKS))) == [CacheHitSource.HOST] * CHUNKS


def test_a_rotten_chunk_fails_the_load_keeps_its_head_and_is_missed_by_its_request(
    open_direct: OpenDirect, keys: list[bytes], tmp_path: Path
) -> None:
    (slots,) = tmp_path.glob("store/*/slots.bin")
    data = bytearray(slots.read_bytes())
    at = data.index(bytes([55]) * PAGE_NBYTES + bytes([56]) * PAGE_NBYTES)
    data[at + 17] ^= 4
    slots.write_bytes(data)
    door = open_direct()
    context = begin_load(door, keys)
    ended = end_load(door, keys, context)
    assert not ended.is_whole
    assert ended.lost_blocks == frozenset({5, 6, 7})
    assert "did not come up" in ended.error
    assert all(door.holds(block, 50 + block) for block in range(5))
    assert door.manager.lookup(keys[0], context) is MISS
    door.step()
    assert door.figures(1).corrupt_chunks == 1
    assert door.lookup(keys, door.request()) == 5


def test_a_tier_out_of_service_is_a_miss_at_once_and_ram_goes_on(
    open_direct: OpenDirect, keys: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    door = open_direct()
    warm = keys[:2]
    door.load(warm, [0, 1])
    engine = door.manager._service._engine
    sick = [("nvme", "ram")]
    monkeypatch.setattr(engine, "out_of_service", lambda: sick)
    door.step()
    assert door.lookup(keys, door.request()) == len(warm)
    sick.clear()
    door.step()
    assert door.lookup(keys, door.request()) == CHUNKS


def test_a_store_that_cannot_be_started_is_acknowledged_and_a_miss(
    open_direct: OpenDirect,
) -> None:
    door = open_direct()
    context = door.request()
    plan = door.manager.prepare_store([key(1)], context)
    two_blocks_for_one_chunk = GPULoadStoreSpec([1, 2], [2], [0])
    assert door.worker.submit_store(3, two_blocks_for_one_chunk, plan.store_spec)
    door.finish(3)
    door.manager.complete_store({key(1)}, context)
    assert door.manager.lookup(key(1), context) is MISS
    door.manager.reset_cache()
    door.step()
    assert not door.manager.has_pending_work(), "a slot is held for a job that never was"


def test_a_load_that_cannot_be_started_is_a_failed_load(open_direct: OpenDirect) -> None:
    door = open_direct()
    keys, context = ask_for(door, 1)
    spec = door.manager.prepare_load(keys, context)
    assert door.worker.submit_load(7, spec, GPULoadStoreSpec([1, 2], [2], [0]))
    ended = end_load(door, keys, context)
    assert (ended.is_whole, ended.lost_blocks) == (False, None)
    assert door.manager.lookup(keys[0], context) is MISS


def test_a_copy_that_breaks_is_a_failed_load_and_not_an_engines_end(
    open_direct: OpenDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = open_direct()
    keys, context = ask_for(door, 2)
    spec = door.manager.prepare_load(keys, context)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(door.worker._device._copier, "load", fail)
    assert door.worker.submit_load(7, spec, GPULoadStoreSpec([3, 4], [2], [0]))
    ended = end_load(door, keys, context)
    assert ended.lost_blocks == frozenset({3, 4})
    assert "the device is gone" in ended.error
    assert door.manager.lookup(keys[0], context) is MISS


@pytest.mark.interpreted
def test_a_load_that_cannot_be_planned_fails_and_its_request_goes_on_without(
    open_direct: OpenDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = open_direct()
    keys, context = ask_for(door, 2)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(door.manager._service._manager, "prepare_load", fail)
    spec = door.manager.prepare_load(keys, context)
    assert isinstance(spec, SlotLoadStoreSpec)
    assert door.worker.submit_load(7, spec, GPULoadStoreSpec([0, 1], [2], [0]))
    ended = end_load(door, keys, context)
    assert "no RAM slot" in ended.error
    assert door.manager.lookup(keys[0], context) is MISS
    assert door.manager.statistics().internal_errors == 1


def test_the_spec_refuses_direct_loads_and_chooses_staged_by_itself(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transfer.load_path = direct: .*--door connector"):
        KVTierOffloadingSpec(offloading_config(path))
    path.write_text(path.read_text().replace("direct", "auto"))
    spec = KVTierOffloadingSpec(offloading_config(path))
    assert spec._settings.transfer.load_path == "staged"
