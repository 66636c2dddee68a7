"""kvtier's connector under vLLM's own scheduler, without a model.

Nothing but a block's own KV is read, shared or stored, whatever fails, ends or is reset.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from kvtier.errors import UnsupportedError
from kvtier.keys import group_of, make_key
from kvtier.vllm import connector
from tests.integration.engine_world import EngineWorld, arrange
from tests.integration.odd_models import write_adapter
from tests.integration.scheduler_setup import Setup, random_tokens

MakeWorld = Callable[..., EngineWorld]

TALKS = 7
PREFIXES = 8

SETUPS = {
    "one group": Setup(engine_blocks=48),
    "copies fail": Setup(engine_blocks=48, failing=0.3, store_decode=True),
    "copies fail, prefills are cut": Setup(
        engine_blocks=48, failing=0.3, store_decode=True, long_prefill_tokens=32
    ),
    "copies fail, and their requests": Setup(
        engine_blocks=48, failing=0.3, store_decode=True, load_failures="fail"
    ),
    "chunks of four blocks": Setup(
        blocks_per_chunk=4, engine_blocks=48, slots=(24, 96), failing=0.2, store_decode=True
    ),
    "asynchronous": Setup(
        engine_blocks=48, asynchronous=True, store_decode=True, priorities=True, failing=0.2
    ),
    "no room": Setup(engine_blocks=36, slots=(12, 48), failing=0.2, store_decode=True),
    "window": Setup(
        groups=((16, None), (16, 48)), engine_blocks=72, slots=(96, 400), failing=0.1
    ),
    "window of chunks": Setup(
        groups=((16, None), (16, 100), (16, 40)),
        blocks_per_chunk=4,
        engine_blocks=120,
        slots=(64, 300),
        asynchronous=True,
        store_decode=True,
    ),
    "window, sparse": Setup(
        groups=((16, None), (16, 48)),
        engine_blocks=72,
        slots=(96, 512),
        retention_tokens=0,
        asynchronous=True,
        failing=0.1,
    ),
    "windows only": Setup(
        groups=((16, 32), (16, 80)), engine_blocks=64, slots=(40, 90), store_decode=True
    ),
    "chunks of two sizes": Setup(
        groups=((64, None), (16, 40)), engine_blocks=64, slots=(96, 400), store_decode=True
    ),
    "large blocks for the window": Setup(
        groups=((16, None), (32, 50), (32, 100)), engine_blocks=72, slots=(60, 300)
    ),
    "local attention": Setup(
        groups=((16, None), (16, 64)),
        local=(1,),
        engine_blocks=72,
        slots=(96, 400),
        store_decode=True,
        failing=0.1,
    ),
}


@pytest.fixture
def make_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[MakeWorld]:
    worlds: list[EngineWorld] = []
    arrange(monkeypatch)
    caplog.set_level(logging.ERROR)  # what fails here is said often

    def make(setup: Setup | None = None, *, seed: int = 0, **changes: Any) -> EngineWorld:
        setup = setup or Setup(**{"engine_blocks": 48, "store_decode": True, **changes})
        worlds.append(EngineWorld(setup, tmp_path / "model", seed))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def tokens(world: EngineWorld, count: int) -> list[int]:
    return random_tokens(world.draw, count, count)


def traffic(world: EngineWorld, *, steps: int, resets: float = 0.005) -> None:
    """Hold conversations with a few common prefixes, aborting some."""
    draw = world.draw
    prefixes = [random_tokens(draw, 64, 160) for _ in range(PREFIXES)]
    for _ in range(steps):
        if len(world.alive()) < TALKS and draw.random() < 0.5:
            prompt = draw.choice(prefixes) + random_tokens(draw, 0, 60)
            # Some prompts end with a block, so that the hit is all of them.
            if draw.random() < 0.3:
                prompt = prompt[: len(prompt) // 16 * 16]
            world.submit(prompt, draw.randint(1, 24))
        if draw.random() < 0.03 and (alive := world.alive()):
            world.abort(draw.choice(alive))
        if draw.random() < resets:
            world.reset()
        world.step()
    world.settle()


def assert_right(world: EngineWorld, request: Request) -> None:
    prompt = request.num_prompt_tokens
    answer = list(request.output_token_ids)
    assert answer == [
        world.token_at(request, place) for place in range(prompt, prompt + len(answer))
    ]


@pytest.mark.parametrize("name", SETUPS)
def test_only_a_blocks_own_kv_is_read_shared_or_stored(
    name: str, make_world: MakeWorld
) -> None:
    world = make_world(SETUPS[name])
    traffic(world, steps=250)
    for request in world.requests.values():
        assert_right(world, request)
    assert world.seen["loads"] > 0
    assert world.seen["stored"] > 0
    assert (world.seen["loads that failed"] > 0) == (world.setup.failing > 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
@pytest.mark.parametrize("name", SETUPS)
def test_only_a_blocks_own_kv_is_read_shared_or_stored_in_long_streams(
    name: str, seed: int, make_world: MakeWorld
) -> None:
    world = make_world(SETUPS[name], seed=seed)
    traffic(world, steps=400)
    for request in world.requests.values():
        assert_right(world, request)
    assert world.seen["stored"] > 0


def test_requests_with_adapters_load_and_store_as_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange(monkeypatch)
    adapters: list[LoRARequest | None] = [None]
    for number, name in enumerate(("red", "blue"), start=1):
        write_adapter(tmp_path / name, number)
        adapters.append(LoRARequest(name, number, str(tmp_path / name)))
    setup = Setup(engine_blocks=36, slots=(24, 96), failing=0.1, store_decode=True)
    world = EngineWorld(setup, tmp_path / "model", 0, adapters)
    traffic(world, steps=250)
    for request in world.requests.values():
        assert_right(world, request)
    assert len({len(key) for key in world.loaded}) == 2, "with a digest, and without"
    world.close()


def test_jobs_are_acknowledged_even_if_results_are_fetched_twice_in_a_step(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(SETUPS["copies fail"])
    fetch = world.worker.get_transfer_results

    def fetch_twice(finished: set[str]) -> KVConnectorTransferResults:
        one, other = fetch(finished), fetch(finished)
        return KVConnectorTransferResults(
            finished_recving=one.finished_recving | other.finished_recving,
            failed_recving=one.failed_recving | other.failed_recving,
        )

    monkeypatch.setattr(world.worker, "get_transfer_results", fetch_twice)
    traffic(world, steps=200)
    for request in world.requests.values():
        assert_right(world, request)
    assert world.seen["loads that failed"] > 0


def test_metadata_of_another_connector_is_refused(make_world: MakeWorld) -> None:
    class Foreign(KVConnectorMetadata):
        pass

    worker = make_world().worker
    for take in (worker.bind_connector_metadata, worker.handle_preemptions):
        with pytest.raises(UnsupportedError, match="a Foreign, which kvtier"):
            take(Foreign())


# -- what is stored ----------------------------------------------------------------------------


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


def test_blocks_that_a_request_lost_before_it_ended_are_not_stored(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    request = world.submit(tokens(world, 100), 40)
    with monkeypatch.context() as patch:
        # So what it computed is still to be offered when it ends.
        patch.setattr(world.known, "prepare_store", lambda *_, **__: None)
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


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_request_aborted_amid_its_prompt_leaves_a_window_that_can_be_loaded(
    make_world: MakeWorld, asynchronous: bool
) -> None:
    groups = ((16, None), (16, 40))
    world = make_world(groups=groups, long_prefill_tokens=32, asynchronous=asynchronous)
    prompt = tokens(world, 160)
    request = world.submit(prompt, 4)
    world.submit(tokens(world, 10), 8)  # or there would be no limit to the first one's step
    while request.num_computed_tokens < 96:
        world.step()
    world.abort(request)
    world.settle()
    world.scheduler.reset_prefix_cache()
    whole = request.num_computed_tokens // 16
    world.submit(prompt, 4)
    world.settle()
    loaded = Counter(group_of(key) for key in world.loaded)
    assert loaded == {0: whole, 1: 3}, "40 tokens of the window are in three blocks"


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
    assert world.seen["loads"] == 1


@pytest.mark.parametrize("limit", [8, 96])
def test_a_request_may_bound_what_is_stored_of_it(make_world: MakeWorld, limit: int) -> None:
    world = make_world(groups=((16, None), (16, None)), states=(1,), retention_tokens=0)
    world.submit(tokens(world, 100), 1, {"max_offload_tokens": limit})
    world.settle()
    assert world.seen["stored of group 0"] == limit // 16
    assert world.seen["stored of group 1"] <= limit // 16


@pytest.mark.parametrize(
    "setup",
    [
        Setup(),
        Setup(blocks_per_chunk=2),
        Setup(long_prefill_tokens=32),
        Setup(groups=((16, None), (16, 40)), retention_tokens=0),
        Setup(groups=((16, 40),)),
    ],
    ids=[
        "one group",
        "chunks of two blocks",
        "prefills are cut",
        "two groups",
        "one group with a window",
    ],
)
def test_chunks_computed_after_a_failed_load_are_stored(
    setup: Setup, make_world: MakeWorld
) -> None:
    world = make_world(dataclasses.replace(setup, engine_blocks=48))
    prompt = tokens(world, 96)
    world.submit(prompt, 1)
    world.settle()
    world.scheduler.reset_prefix_cache()
    world.setup = dataclasses.replace(world.setup, failing=1.0)  # of loads alone, from now on
    longer = prompt + tokens(world, 64)
    request = world.submit(longer, 8)
    while not world.seen["loads that failed"]:
        world.step()
    world.setup = dataclasses.replace(world.setup, failing=0.0)
    world.settle()
    assert world.seen["loads that failed"] == 1
    assert_right(world, request)
    whole = range(setup.blocks_per_chunk - 1, 10, setup.blocks_per_chunk)
    keys = {make_key(request.block_hashes[number], 0) for number in whole}
    assert keys <= set(world.cache.bench.ram.copies)


def test_the_stores_of_a_step_are_handed_over_before_the_next_pass(
    make_world: MakeWorld,
) -> None:
    world = make_world(engine_blocks=9)
    world.submit(tokens(world, 96), 1)
    world.step()
    assert world.seen["stored"] == 0, "tokens are sampled and sent first"
    world.submit(tokens(world, 120), 1)
    world.settle()
    assert world.seen["flushes"] == 1, "its blocks were given away"
    assert world.seen["stored"] == 6 + 7


# -- with others -------------------------------------------------------------------------------


class Evicting(FullAttentionSpec):
    """A plugin's kind of full attention, whose manager gives blocks away amid a prompt."""


def test_groups_of_an_unknown_kind_are_refused_at_start(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Evicting(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    monkeypatch.setattr(Setup, "spec_of", lambda self, number: odd)
    with pytest.raises(UnsupportedError, match=r"layer0 keeps .*Evicting, a kind of KV cache"):
        make_world()


@pytest.mark.parametrize(
    "part",
    ["ConnectorScheduler", "StepReader", "AdapterContents", "Reporter", "warn_of_restarts"],
)
def test_a_scheduler_side_that_cannot_start_closes_its_cache(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    closed: list[str] = []
    open_cache = EngineWorld.open_cache

    def open_watched(world: EngineWorld, groups: Any) -> Any:
        cache: Any = open_cache(world, groups)
        cache.shutdown = lambda: closed.append("cache")
        return cache

    def fail(*_: object) -> NoReturn:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(EngineWorld, "open_cache", open_watched)
    monkeypatch.setattr(connector, part, fail)
    with pytest.raises(ZeroDivisionError):
        make_world()
    assert closed == ["cache"]


def test_a_worker_that_cannot_shut_down_lets_its_engine_go_on(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine in one process shuts its scheduler down, which unlocks the cache, next."""
    world = make_world()

    def fail() -> NoReturn:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(world.device, "close", fail)
    world.worker.shutdown()
    assert "a worker's memory may not be freed" in caplog.text


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
    assert output.kv_connector_metadata.jobs.jobs_to_flush == {0}


# -- resets ------------------------------------------------------------------------------------


def test_a_request_that_is_preempted_by_a_reset_loads_what_it_stored(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    request = world.submit(tokens(world, 100), 40)
    while request.num_tokens < 120:
        world.step()
    world.scheduler.reset_prefix_cache(reset_running_requests=True)
    world.settle()
    assert world.seen["loads"] == 1
    assert_right(world, request)


def test_a_reset_may_follow_another_before_any_step(make_world: MakeWorld) -> None:
    world = make_world()
    request = world.submit(tokens(world, 100), 4)
    world.step()
    for _ in range(2):
        world.reset()
    world.settle()
    assert_right(world, request)


@pytest.mark.parametrize("is_over", [True, False])
def test_vllm_calls_a_reset_a_success_only_when_a_restart_brings_nothing_back(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    world = make_world(slots=(32, 64))
    with monkeypatch.context() as patch:
        patch.setattr(world.cache.engine, "exclusively_each", lambda *_, **__: is_over)
        assert world.scheduler.reset_prefix_cache(reset_connector=True) is is_over
    assert world.scheduler.reset_prefix_cache(reset_connector=True), "it may be tried again"


def test_vllm_frees_no_blocks_that_a_store_still_reads(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    with monkeypatch.context() as patch:
        patch.setattr(world.device, "wait_for_stores", lambda: False)
        assert not world.scheduler.reset_prefix_cache(reset_connector=True)
    assert world.scheduler.reset_prefix_cache(reset_connector=True)


def test_a_reset_waits_for_the_stores_of_its_own_engine_only(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, other = make_world(), make_world()
    with monkeypatch.context() as patch:
        patch.setattr(other.device, "wait_for_stores", lambda: False)
        assert world.scheduler.reset_prefix_cache(reset_connector=True)
        assert not other.scheduler.reset_prefix_cache(reset_connector=True)


class Router:
    """Keeps, as a router does, the chunks that are in each medium."""

    def __init__(self, world: EngineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks: dict[str | None, set[Any]] = {}
        connector = world.scheduler.connector
        take = connector.take_events

        def listen() -> tuple[()]:
            for event in take():
                self._hear(event)
            return ()

        monkeypatch.setattr(connector, "take_events", listen)

    def _hear(self, event: KVCacheEvent) -> None:
        if isinstance(event, BlockStored):
            self.chunks.setdefault(event.medium, set()).update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            assert self.chunks[event.medium].issuperset(event.block_hashes)
            self.chunks[event.medium].difference_update(event.block_hashes)

    def counts(self) -> list[int]:
        return [len(chunks) for _, chunks in sorted(self.chunks.items())]


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
def test_after_a_reset_a_router_keeps_no_chunk_that_no_tier_has(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, blocks_per_chunk: int
) -> None:
    world = make_world(blocks_per_chunk=blocks_per_chunk, slots=(32, 64), events=True)
    router = Router(world, monkeypatch)
    prompt = tokens(world, 128)
    world.submit(prompt, 3)
    world.settle()
    chunks = 8 // blocks_per_chunk
    assert router.counts() == [chunks, chunks]
    world.reset()
    assert world.scheduler.has_requests(), "the engine rests before its events are taken"
    world.settle()
    assert router.counts() == [0, 0]
    world.submit(prompt, 3)
    world.settle()
    assert router.counts() == [chunks, chunks]
