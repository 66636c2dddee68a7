"""Chunks that were computed with an adapter: found by the same content, and by no other."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext

from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm.adapters import DIGEST_NBYTES, AdapterContent
from kvtier.vllm.spec import KVTierConnectorSpec
from tests.integration.door.doors import Door, OpenDoor, Settings, fill_and_store, key

if TYPE_CHECKING:
    import pytest
    from vllm.v1.kv_offload.base import OffloadingEvent

RED, BLUE = (
    AdapterContent(colour * DIGEST_NBYTES, lambda: True) for colour in (b"\x01", b"\x02")
)


def told(events: Iterable[OffloadingEvent]) -> set[bytes]:
    return {each for event in events for each in event.keys}


def arrive(door: Door, req_id: str, content: AdapterContent | None = None) -> ReqContext:
    context = ReqContext(req_id)
    if content is None:
        door.manager.on_new_request(context)
    else:
        with door.manager.adapting(content):
            door.manager.on_new_request(context)
    return context


def submit(door: Door, keys: list[bytes], context: ReqContext) -> int:
    """Store ``keys``, but do not say that it is done."""
    plan = door.manager.prepare_store(keys, context)
    blocks = GPULoadStoreSpec(list(range(len(keys))), [len(keys)], [0])
    job_id = next(door.jobs)
    assert door.worker.submit_store(job_id, blocks, plan.store_spec)
    door.finish(job_id)
    return len(plan.keys_to_store)


def test_chunks_are_found_with_what_they_were_computed_with_only(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=16), KVTierConnectorSpec)
    with door.manager.adapting(RED):
        keys = fill_and_store(door, 10, 4)
    assert door.load(keys, [20, 21, 22, 23]) == []
    with door.manager.adapting(BLUE):
        assert door.load(keys, [20, 21, 22, 23]) == []
        assert fill_and_store(door, 10, 4) == keys
    for block in range(4):
        door.fill(block, 50 + block)
    door.settle()
    assert door.store(keys, list(range(4))) == 4
    for content in (RED, BLUE):
        with door.manager.adapting(content):
            assert len(door.load(keys, [20, 21, 22, 23])) == 4
        assert all(door.holds(20 + place, 10 + place) for place in range(4))
    assert len(door.load(keys, [20, 21, 22, 23])) == 4
    assert all(door.holds(20 + place, 50 + place) for place in range(4))


def test_vllm_is_told_of_chunks_by_its_own_keys(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=4), KVTierConnectorSpec)
    with door.manager.adapting(RED):
        first = fill_and_store(door, 10, 4)
    door.settle()
    assert told(door.manager.take_events()) == set(first)
    context = arrive(door, "another", BLUE)
    more = [key(number) for number in range(30, 34)]
    plan = door.until(lambda: door.manager.prepare_store(more, context))
    assert plan.keys_to_store == more
    assert set(plan.evicted_keys) == set(first)
    assert told(door.manager.take_events()) == set(first)


def test_the_same_content_is_found_after_a_restart_and_another_is_not(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings(ram=16)
    door = open_door(path, KVTierConnectorSpec)
    with door.manager.adapting(RED):
        keys = fill_and_store(door, 10, 4)
    door.close()
    again = open_door(path, KVTierConnectorSpec)
    assert again.load(keys, [20, 21, 22, 23]) == []
    with again.manager.adapting(BLUE):
        assert again.load(keys, [20, 21, 22, 23]) == []
    with again.manager.adapting(RED):
        assert len(again.load(keys, [20, 21, 22, 23])) > 0
    assert again.holds(20, 10)


def test_a_store_that_ends_after_its_request_is_of_that_requests_adapter(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=8), KVTierConnectorSpec)
    old = arrive(door, "one-id", RED)
    assert submit(door, [key(1), key(2)], old) == 2
    door.manager.on_request_finished(old)
    # Its id is taken again before, by requests that have another adapter, or none.
    new = arrive(door, "one-id", BLUE)
    door.manager.complete_store({key(1), key(2)}, old)
    assert door.lookup([key(1)], new) == 0
    door.manager.on_request_finished(new)
    plain = arrive(door, "one-id")
    assert door.lookup([key(1)], plain) == 0
    door.manager.on_request_finished(plain)
    same = arrive(door, "one-id", RED)
    assert door.lookup([key(1), key(2)], same) == 2
    assert door.manager.in_ram([key(1), key(2)], same)
    assert not door.manager.in_ram([key(1)], plain)
    door.manager.on_request_finished(same)


def test_nothing_more_is_stored_of_a_request_whose_adapter_changed(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=8), KVTierConnectorSpec)
    current = [True]
    context = arrive(door, "r", AdapterContent(RED.digest, lambda: current[0]))
    assert submit(door, [key(1)], context) == 1
    current.clear()
    current.append(False)
    plan = door.manager.prepare_store([key(2)], context)
    assert (plan.keys_to_store, plan.store_spec.slots, plan.evicted_keys) == ([], [], [])
    door.manager.complete_store({key(1)}, context)
    assert door.manager.lookup(key(1), context) is LookupResult.HIT
    door.manager.on_request_finished(context)


def test_the_specification_begins_empty_where_there_are_adapters(
    settings: Settings, open_door: OpenDoor, caplog: pytest.LogCaptureFixture
) -> None:
    path, lora_config = settings(ram=8), object()
    keys = [key(number) for number in range(10, 14)]
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            door = open_door(path, KVTierOffloadingSpec, lora_config=lora_config)
        (warning,) = [each for each in caplog.messages if "LoRA" in each]
        assert "use KVTierConnector" in warning
        assert door.load(keys, [20, 21, 22, 23]) == []
        assert fill_and_store(door, 10, 4) == keys
        assert len(door.load(keys, [20, 21, 22, 23])) == 4
        door.close()
    # What is stored so is nobody else's.
    other = open_door(path, KVTierConnectorSpec, lora_config=lora_config)
    assert other.load(keys, [20, 21, 22, 23]) == []


def test_without_adapters_the_specification_keeps_what_it_has(
    settings: Settings, open_door: OpenDoor, caplog: pytest.LogCaptureFixture
) -> None:
    path = settings(ram=8)
    door = open_door(path)
    keys = fill_and_store(door, 10, 4)
    door.close()
    assert len(open_door(path).load(keys, [20, 21, 22, 23])) > 0
    assert "LoRA" not in caplog.text
