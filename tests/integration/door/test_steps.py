"""A door that is asked step by step, as vLLM's scheduler asks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    ReqContext,
    ScheduleEndContext,
)

from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm.metrics import metric_definitions
from kvtier.vllm.spec import KVTierConnectorSpec
from kvtier.vllm.specs import SlotLoadStoreSpec
from tests.integration.door.doors import (
    DEADLINE_S,
    Door,
    OpenDoor,
    Settings,
    fill_and_store,
    key,
)


def test_removals_are_announced_before_the_stores_that_use_their_room(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=2))
    first = fill_and_store(door, 10, 2)
    door.settle()
    list(door.manager.take_events())
    second = fill_and_store(door, 30, 2)
    events = [event for event in door.manager.take_events() if event.medium.name == "CPU"]
    assert [(sorted(event.keys), event.removed) for event in events] == [
        (first, True),
        (second, False),
    ]


def test_every_number_that_is_reported_was_declared(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=4))
    fill_and_store(door, 10, 4)
    fill_and_store(door, 30, 4)
    door.settle()
    stats = door.manager.get_stats()
    declared = metric_definitions()
    for name, values in stats.data["data"].items():
        for labels in values:
            assert len(labels) == len(declared[name].labelnames)
    assert stats.reduce()["kvtier_evicted_chunks:('ram',)"] == 4
    assert stats.reduce()["kvtier_kv_offload_total_bytes:('ram_to_nvme',)"] > 0
    assert door.manager.get_stats() is None


def test_figures_are_due_at_once_when_no_step_may_follow_and_seldom_before(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=4))
    fill_and_store(door, 10, 4)
    door.settle()
    door.manager.get_stats()
    assert door.manager.has_stats()
    context = ReqContext(req_id="running")
    door.manager.on_new_request(context)
    door.manager.get_stats()
    assert not door.manager.has_stats()
    door.manager.on_request_finished(context)
    assert door.manager.has_stats()


def test_behind_vllms_half_a_request_that_is_new_twice_stores_nothing_more(
    settings: Settings, open_door: OpenDoor
) -> None:
    manager = open_door(settings(ram=8)).manager
    context = ReqContext(req_id="in parts")
    manager.on_new_request(context)

    def stored(number: int, *, new: bool = False, preempted: bool = False) -> int:
        names = [context.req_id]
        step = ScheduleEndContext(names if new else (), names if preempted else ())
        manager.on_schedule_end(step)
        plan = manager.prepare_store([key(number)], context)
        assert plan is not None
        return len(plan.keys_to_store)

    assert stored(0, new=True) == 1
    assert stored(1) == 1
    assert stored(2, preempted=True) == 1, "and scheduled again as one that was resumed"
    assert stored(3, preempted=True, new=True) == 1, "and scheduled again as a new one"
    assert stored(4, new=True) == 0
    assert stored(5) == 0
    assert stored(6, preempted=True) == 1, "the half has forgotten its blocks"
    manager.on_request_finished(context)


@dataclass(frozen=True)
class Asker:
    """A request for a prefix whose first chunk is filled with ``content``, and so on."""

    keys: list[bytes]
    content: int
    context: ReqContext


def schedule(door: Door, waiting: list[Asker], loaded: list[Asker]) -> list[Asker]:
    """Take one step as vLLM does: plan the loads of all requests, then do them at once.

    Args:
        door: The engine's halves.
        waiting: Requests that wait; those that wait no longer are taken out.
        loaded: What the step before returned: they run in this one.

    Returns:
        Requests that were loaded.
    """
    running = list(loaded)
    loads: dict[int, tuple[Asker, SlotLoadStoreSpec, range]] = {}
    used = 0
    for asker in list(waiting):
        hits = door.lookup(asker.keys, asker.context)
        if hits is None:
            continue
        waiting.remove(asker)
        if hits:
            source = door.manager.prepare_load(asker.keys[:hits], asker.context)
            loads[next(door.jobs)] = asker, source, range(used, used + hits)
            used += hits
        else:
            running.append(asker)
    names = [asker.context.req_id for asker in running]
    door.manager.on_schedule_end(ScheduleEndContext(names, ()))
    for job_id, (_, source, blocks) in loads.items():
        destination = GPULoadStoreSpec(list(blocks), [len(blocks)], [0])
        assert door.worker.submit_load(job_id, source, destination)
    door.worker.wait(set(loads))
    assert {result.job_id for result in door.worker.get_finished()} == set(loads)
    for asker, _, blocks in loads.values():
        assert all(door.holds(block, asker.content + at) for at, block in enumerate(blocks))
        door.manager.complete_load(set(asker.keys[: len(blocks)]), asker.context)
    return [asker for asker, _, _ in loads.values()]


@pytest.mark.parametrize(
    ("kind", "load_path"),
    [
        pytest.param(KVTierOffloadingSpec, "staged", id="spec"),
        pytest.param(KVTierConnectorSpec, "staged", id="staged"),
        pytest.param(KVTierConnectorSpec, "direct", id="direct"),
    ],
)
@pytest.mark.parametrize("ram", [4, 2, 1])
@pytest.mark.parametrize("requests", [1, 4])
def test_a_prefix_larger_than_ram_makes_progress_within_five_steps(
    settings: Settings,
    open_door: OpenDoor,
    kind: type[KVTierOffloadingSpec],
    load_path: str,
    ram: int,
    requests: int,
) -> None:
    extra = f"transfer:\n  load_path: {load_path}\n"
    door = open_door(settings(ram=16, extra=extra), kind)
    contents = [10 + 8 * number for number in range(requests)]
    prefixes = [fill_and_store(door, content, 8) for content in contents]
    door.settle()
    door.close()
    door = open_door(settings(ram=ram, extra=extra), kind)
    waiting = [
        Asker(keys, content, door.request())
        for keys, content in zip(prefixes, contents, strict=True)
    ]
    loaded: list[Asker] = []
    for _ in range(5):
        loaded = schedule(door, waiting, loaded)
        # A step of a real model takes longer than the disk: let it catch up.
        assert door.manager._service._engine.wait(range(1 << 10), timeout_s=DEADLINE_S)
    assert (waiting, loaded) == ([], []), "not all were scheduled"
    assert door.figures(1).hit_chunks > 0


def test_a_hit_stays_a_hit_until_the_step_ends_although_its_demotion_has_finished(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(
        settings(ram=8, extra="placement:\n  write: evict\n  clean_reserve: 50%\n")
    )
    keys = fill_and_store(door, 50, 8)
    # The step above began to send the oldest chunks down; let them arrive unseen.
    assert door.manager._service._engine.wait(range(1 << 10), timeout_s=DEADLINE_S)
    context = door.request()
    door.manager._service._step_begins = False  # another request was looked up before
    assert door.lookup(keys, context) == 8
    spec = door.manager.prepare_load(keys, context)
    assert door.worker.submit_load(9, spec, GPULoadStoreSpec(list(range(8)), [8], [0]))
    door.finish(9)
    assert all(door.holds(block, 50 + block) for block in range(8))
    door.manager.complete_load(set(keys), context)
