"""Chunks that go through a door and come back, from RAM, from disk and after a restart."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.memory.copy import BlockCopier
from kvtier.transfer import TransferEngine
from kvtier.vllm import worker as worker_module
from tests.integration.door.doors import DEADLINE_S, OpenDoor, Settings, fill_and_store, key


def test_a_chunk_comes_back_from_ram_and_from_nvme_bit_for_bit(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=4))
    first = fill_and_store(door, 10, 4)
    assert door.load(first, [20, 21, 22, 23]) == [CacheHitSource.HOST] * 4
    fill_and_store(door, 30, 4)
    door.settle()
    # RAM holds the second four now, so two of the first four fit the budget at a time.
    assert door.load(first, [12, 13, 14, 15]) == [CacheHitSource.DISK] * 2
    for block, content in zip([12, 13], [10, 11], strict=True):
        assert door.holds(block, content)
    assert door.figures(1).hit_tokens == 2 * 32
    assert door.figures(0).hit_chunks == 4


def test_a_request_says_what_of_its_chunks_to_keep_and_what_not_to_store(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=4, extra="placement:\n  retain_quota: 50%\n"))
    assert door.store([key(1)], [0], {"retain_s": 600}) == 1
    assert door.store([key(2)], [0], {"skip_store": True}) == 0
    assert door.manager.statistics().retained_chunks == 1
    for first in range(10, 30, 2):
        fill_and_store(door, first, 2)
    assert door.load([key(1)], [3]) == [CacheHitSource.HOST]
    assert door.load([key(2)], [3]) == []


def test_a_new_engine_on_the_store_loads_what_the_old_one_stored(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings(ram=16)
    door = open_door(path)
    keys = fill_and_store(door, 50, 8)
    door.close()
    again = open_door(path)
    assert again.load(keys, list(range(8))) == [CacheHitSource.DISK] * 8
    assert all(again.holds(block, 50 + block) for block in range(8))


@pytest.mark.parametrize("keeps", [False, True])
def test_after_a_reset_nothing_old_is_found_now_or_after_a_restart(
    keeps: bool, settings: Settings, open_door: OpenDoor
) -> None:
    path = settings(ram=16, extra="  keep_after_reset: true\n" if keeps else "")
    door = open_door(path)
    keys = fill_and_store(door, 50, 8)
    door.settle()
    door.manager.reset_cache()
    assert door.load(keys, list(range(8))) == []
    assert door.store(keys[:2], [0, 1]) == 2
    door.close()
    again = open_door(path)
    found = [CacheHitSource.DISK] * 2 if keeps else []
    assert again.load(keys, list(range(8))) == found


def test_chunks_of_several_blocks_and_partial_ends(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings(ram=64, nvme=256, extra="engine:\n  blocks_per_chunk: 4\n")
    door = open_door(path, cache=OffloadingCacheConfig(32, 4))
    for block in range(8):
        door.fill(block, 40 + block)
    context = door.request()
    plan = door.manager.prepare_store([key(1), key(2)], context)
    assert door.worker.submit_store(
        0, GPULoadStoreSpec(list(range(8)), [8], [0]), plan.store_spec
    )
    door.finish(0)
    door.manager.complete_store({key(1), key(2)}, context)
    spec = door.manager.prepare_load([key(1), key(2)], context)
    # Blocks 2 to 6 of the request: both chunks are partial.
    assert door.worker.submit_load(1, spec, GPULoadStoreSpec([10, 11, 12, 13, 14], [5], [2]))
    door.finish(1)
    assert all(door.holds(10 + i, 42 + i) for i in range(5))


def test_chunks_with_gaps_as_large_as_one_of_them_are_misses_and_one_line_in_the_log(
    settings: Settings, open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings(ram=64, nvme=256, extra="engine:\n  blocks_per_chunk: 2\n")
    door = open_door(path, cache=OffloadingCacheConfig(32, 2))
    keys, context = [key(1), key(2), key(3)], door.request()
    plan = door.manager.prepare_store(keys, context)
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(worker_module.logger, "handle", logged.append)
    assert door.worker.submit_store(
        0, GPULoadStoreSpec([3, 4, 7, 8], [4], [0]), plan.store_spec
    )
    door.finish(0)
    door.manager.complete_store({*keys}, context)
    assert [door.manager.lookup(each, context) for each in keys] == [LookupResult.MISS] * 3
    (record,) = logged
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert record.getMessage().startswith("store 0 was not started: some blocks of the chunks")


def test_dirty_chunks_are_brought_down_at_shutdown_when_written_on_evict(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings(ram=16, extra="placement:\n  write: evict\n")
    door = open_door(path)
    keys = fill_and_store(door, 50, 8)
    assert door.figures(1).stored_chunks == 0
    door.close()
    again = open_door(path)
    assert again.load(keys, list(range(8))) == [CacheHitSource.DISK] * 8


@pytest.mark.interpreted
def test_after_a_reset_no_store_reads_the_memory_that_an_engine_takes_away_when_it_sleeps(
    settings: Settings, open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = open_door(settings())
    waited_for, copied = threading.Event(), threading.Event()
    store, wait = BlockCopier.store, TransferEngine.wait

    def store_once_waited_for(*args: Any, **kwargs: Any) -> None:
        waited_for.wait(DEADLINE_S)
        store(*args, **kwargs)
        copied.set()

    def wait_and_tell(*args: Any, **kwargs: Any) -> bool:
        waited_for.set()
        return wait(*args, **kwargs)

    monkeypatch.setattr(BlockCopier, "store", store_once_waited_for)
    monkeypatch.setattr(TransferEngine, "wait", wait_and_tell)
    plan = door.until(lambda: door.manager.prepare_store([key(1)], door.request()))
    door.worker.submit_store(7, GPULoadStoreSpec([3], [1], [0]), plan.store_spec)
    assert not door.worker.get_finished(), "it began, and waits for the test"
    door.manager.reset_cache()
    ended = copied.is_set()
    waited_for.set()
    assert ended
