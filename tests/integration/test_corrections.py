"""What kvtier's connector corrects in vLLM's scheduler half, under vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from kvtier.errors import UnsupportedError
from kvtier.keys import make_key
from kvtier.manager import Lookup
from kvtier.vllm import compat
from kvtier.vllm.late_flushes import LateFlushes
from tests.integration.layerwise_world import LayerwiseWorld, arrange
from tests.integration.scheduler_setup import Setup, make_request

MakeWorld = Callable[..., LayerwiseWorld]


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWorld]:
    worlds: list[LayerwiseWorld] = []
    arrange(monkeypatch, "ahead")

    def make(**setup: Any) -> LayerwiseWorld:
        seed = setup.pop("seed", 0)
        setup = {"engine_blocks": 48, "store_decode": True} | setup
        worlds.append(LayerwiseWorld(Setup(**setup), tmp_path / "model", seed))
        return worlds[-1]

    yield make
    for world in worlds:
        assert world.cache.service.statistics().internal_errors == 0
        world.cache.service.shutdown()


def tokens(world: LayerwiseWorld, count: int) -> list[int]:
    return [world.draw.randrange(500) for _ in range(count)]


def test_a_block_that_a_failed_request_filled_in_part_is_not_stored(
    make_world: MakeWorld,
) -> None:
    world = make_world(long_prefill_tokens=24)
    request = world.submit(tokens(world, 100), 4)
    world.submit(tokens(world, 10), 1)  # or there would be no limit to the first one's step
    world.step()
    assert request.num_computed_tokens == 24
    world.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
    world.settle()
    assert world.seen["stored"] == 1


def chunks_found(world: LayerwiseWorld, request: Request, group: int) -> list[int]:
    """Return which chunks of a request another one would find, by their place in it."""
    service = world.cache.service
    asks = SimpleNamespace(req_id="asks", kv_transfer_params=None)
    service.begin_request(asks)
    step = world.setup.groups[group][0] // world.setup.tokens_per_hash
    keys = [make_key(last, group) for last in request.block_hashes[step - 1 :: step]]
    found = [at for at, key in enumerate(keys) if service.lookup(key, "asks") is Lookup.HIT]
    service.end_request(asks)
    return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("within", [False, True], ids=["between steps", "within a step"])
def test_an_aborted_request_stores_the_tail_of_the_window_it_got_to(
    make_world: MakeWorld, asynchronous: bool, within: bool
) -> None:
    world = make_world(groups=((48, None), (16, 32)), asynchronous=asynchronous)
    request = world.submit(tokens(world, 300), 4)
    world.step(abort=within)
    assert request.num_computed_tokens == 128
    if not within:
        world.abort(request)
    world.settle()
    assert chunks_found(world, request, 0) == [0, 1], "96 of 128 tokens"
    # A window is two chunks: those before each third one, and before the end.
    assert chunks_found(world, request, 1) == [1, 2, 4, 5, 6, 7]


def test_blocks_that_a_request_lost_before_it_ended_are_not_stored(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    request = world.submit(tokens(world, 100), 40)
    with monkeypatch.context() as patch:
        # So what it computed is still to be offered when it ends.
        patch.setattr(world.spied, "prepare_store", lambda keys, req_id: None)
        world.step()
        assert world.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status is RequestStatus.PREEMPTED
    world.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
    world.settle()
    assert world.seen["stored"] == 0


def test_a_request_that_ends_well_stores_all_it_computed(make_world: MakeWorld) -> None:
    world = make_world()
    world.submit(tokens(world, 100), 13)
    world.settle()
    assert world.seen["stored"] == 7, "112 tokens of 16 each"


@pytest.mark.parametrize(
    "groups", [((16, None),), ((16, None), (16, 40))], ids=["full", "with a window"]
)
def test_a_prompt_that_comes_in_parts_is_stored_from_its_own_blocks(
    make_world: MakeWorld, groups: tuple[tuple[int, int | None], ...]
) -> None:
    world = make_world(groups=groups)
    request = world.submit(tokens(world, 40), 9, resumable=True)
    world.settle()
    for part in (70, 3, 50):
        assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        world.go_on(request, tokens(world, part), 9)
        world.settle()
    whole = list(request.all_token_ids)
    world.end(request)
    world.settle()
    assert len(whole) == 40 + 70 + 3 + 50 + 3 * 8 + 9, "a part follows all but the last token"
    assert world.seen["stored"] >= len(whole) // 16
    world.scheduler.reset_prefix_cache()
    world.submit([*whole, 7], 3)
    world.settle()
    assert world.seen["loads ahead"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_stored_late_from_a_block_that_a_window_left_behind(
    make_world: MakeWorld, seed: int
) -> None:
    # Chunks of two lengths, so that of the window not all are worth storing.
    world = make_world(groups=((64, None), (16, 40)), slots=(96, 400), seed=seed)
    draw = world.draw
    for _ in range(300):
        if len(world.alive()) < 6 and draw.random() < 0.5:
            world.submit(tokens(world, draw.randint(20, 150)), draw.randint(1, 90))
        if draw.random() < 0.02 and (alive := world.alive()):
            world.abort(draw.choice(alive))
        world.step()
    world.settle()
    assert world.seen["stored"] > 0


def test_corrections_are_idle_but_for_what_the_next_step_is_to_be_corrected_for(
    make_world: MakeWorld,
) -> None:
    world = make_world(groups=((64, None), (16, 40)), slots=(96, 400))
    corrections = world.scheduler.connector._corrections
    stays, ends = (world.submit(tokens(world, 40), 40) for _ in range(2))
    world.step()
    assert corrections.is_idle
    world.abort(ends)
    assert not corrections.is_idle, "blocks that it held may be given away"
    world.step()
    assert corrections.is_idle
    blocks = world.scheduler.kv_cache_manager.get_blocks(stays.request_id)
    corrections.note_blocks(stays, blocks)
    assert not corrections.is_idle, "it may not be scheduled"
    world.settle()
    assert corrections.is_idle


def test_a_half_that_makes_late_stores_and_cannot_be_corrected_is_refused_at_start(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "blocks_can_be_struck_out", lambda half: False)
    late, level = ((64, None), (16, 40)), ((16, None), (16, 40))
    with pytest.raises(UnsupportedError, match=r"interval 0, its default$"):
        make_world(groups=late, slots=(96, 400))
    make_world(groups=late, slots=(96, 400), retention_tokens=0)
    make_world(groups=level, slots=(96, 400))


class Evicting(FullAttentionSpec):
    """A plugin's kind of full attention, whose manager gives blocks away amid a prompt."""


def test_groups_of_a_kind_that_nobody_has_read_are_refused_at_start(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Evicting(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    monkeypatch.setattr(Setup, "spec_of", lambda self, number: odd)
    with pytest.raises(UnsupportedError, match=r"layer0 keeps .*Evicting, which is no kind"):
        make_world()


class Router:
    """Keeps, as a router does, the blocks that are in each medium."""

    def __init__(self, world: LayerwiseWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: dict[str | None, set[Any]] = {}
        connector = world.scheduler.connector
        monkeypatch.setattr(connector, "_listens", True)
        tracker = connector.connector_scheduler._events_tracker
        monkeypatch.setattr(tracker, "self_describing_enabled", True)
        take = connector.take_events

        def listen() -> tuple[()]:
            for event in take():
                self._hear(event)
            return ()

        monkeypatch.setattr(connector, "take_events", listen)

    def _hear(self, event: KVCacheEvent) -> None:
        if isinstance(event, BlockStored):
            assert event.block_size == 16, "of a chunk that nothing is known of"
            self.blocks.setdefault(event.medium, set()).update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            assert self.blocks[event.medium].issuperset(event.block_hashes)
            self.blocks[event.medium].difference_update(event.block_hashes)

    def counts(self) -> list[int]:
        return [len(blocks) for _, blocks in sorted(self.blocks.items())]


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
def test_after_a_reset_a_router_keeps_no_block_that_no_tier_has(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, blocks_per_chunk: int
) -> None:
    world = make_world(blocks_per_chunk=blocks_per_chunk, slots=(32, 64))
    router = Router(world, monkeypatch)
    world.submit(tokens(world, 128), 3)
    world.settle()
    assert router.counts() == [8, 8]
    world.reset()
    assert world.scheduler.has_requests(), "the engine rests before its events are taken"
    world.settle()
    assert router.counts() == [0, 0]


def test_what_is_stored_again_after_a_reset_is_described(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(blocks_per_chunk=2, slots=(32, 64))
    router = Router(world, monkeypatch)
    prompt = tokens(world, 128)
    world.submit(prompt, 3)
    world.settle()
    world.reset()
    world.submit(prompt, 3)
    world.settle()
    assert router.counts() == [8, 8]


@pytest.mark.parametrize("is_over", [True, False])
def test_vllm_calls_a_reset_a_success_only_when_a_restart_brings_nothing_back(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    world = make_world(slots=(32, 64))
    with monkeypatch.context() as patch:
        patch.setattr(world.cache.engine, "exclusively_each", lambda *_, **__: is_over)
        assert world.scheduler.reset_prefix_cache(reset_connector=True) is is_over
    assert world.scheduler.reset_prefix_cache(reset_connector=True), "it may be tried again"


def test_stores_end_before_another_connector_loads_into_their_blocks(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(engine_blocks=9)
    world.submit(tokens(world, 96), 1)
    world.step()
    connector = world.scheduler.connector
    plan = connector.update_state_after_alloc
    # What MultiConnector does with a connector that is not the one that loads.
    monkeypatch.setattr(connector, "get_num_new_matched_tokens", lambda *_: (80, True))
    monkeypatch.setattr(
        connector,
        "update_state_after_alloc",
        lambda request, blocks, _: plan(request, blocks, 0),
    )
    late = world.submit(tokens(world, 96), 1)
    output = world.scheduler.schedule()
    assert late.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert output.kv_connector_metadata.jobs_to_flush == {0}


def test_a_reset_may_follow_another_before_any_step(make_world: MakeWorld) -> None:
    world = make_world()
    world.submit(tokens(world, 100), 4)
    world.step()
    for _ in range(2):
        world.reset()
    output = world.scheduler.schedule()
    assert output.kv_connector_metadata.jobs_to_flush == {0}


def test_a_request_that_wants_little_stored_does_not_end_the_engine(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    connector = world.scheduler.connector
    half = connector.connector_scheduler
    # As with a group of states in blocks of four hashes each.
    monkeypatch.setattr(half, "config", half.config._replace(supports_partial_tail=True))
    monkeypatch.setattr(half, "_partial_tail_block_size", 64)
    monkeypatch.setattr(half, "_cow_source_groups", frozenset({0}))
    stored: list[list[bytes]] = []

    def take(keys: list[bytes], req_id: str) -> None:
        stored.append(keys)

    monkeypatch.setattr(world.spied, "prepare_store", take)
    prompt = tokens(world, 100)
    for limit in (8, 96):
        stored.clear()
        extra = {"kv_transfer_params": {"max_offload_tokens": limit}}
        request = make_request(len(world.requests), prompt, 1, world._hasher, extra)
        world.requests[request.request_id] = request
        world.scheduler.add_request(request)
        monkeypatch.setattr(
            world.scheduler.kv_cache_manager,
            "take_boundary_state_offloads",
            lambda request=request: {request.request_id: [(0, 1, 96)]},
        )
        world.scheduler.schedule()
        tail = make_key(request.block_hashes[5], 0)
        assert ([tail] in stored) == (limit == 96)
        world.abort(request)


def clear_blocks_first(world: LayerwiseWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have new blocks cleared as Model Runner V2 clears those of a hybrid model."""
    scheduler = world.scheduler
    monkeypatch.setattr(scheduler, "needs_kv_cache_zeroing", True)
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        monkeypatch.setattr(manager, "_record_new_block_ids", True)
    connector = scheduler.connector
    monkeypatch.setattr(connector, "_late", LateFlushes(connector.connector_scheduler, {}))


@pytest.mark.parametrize("groups", [((16, None),), ((16, None), (16, 40))])
def test_nothing_is_stored_from_blocks_that_are_cleared_before_the_stores_end(
    make_world: MakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    groups: tuple[tuple[int, int | None], ...],
) -> None:
    world = make_world(groups=groups, engine_blocks=32, slots=(96, 400), retention_tokens=0)
    clear_blocks_first(world, monkeypatch)
    draw = world.draw
    for _ in range(200):
        if len(world.alive()) < 6:
            world.submit(tokens(world, draw.randint(40, 120)), draw.randint(1, 60))
        world.step()
    world.settle()
    assert world.seen["preemptions"] > 0
    assert world.seen["stores spoiled"] > 0
    assert world.seen["stored"] > 0
