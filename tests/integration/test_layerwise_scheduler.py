"""Loads within the forward pass, and their failures, under vLLM's scheduler without a model.

Each of the corrections that :mod:`kvtier.vllm.in_step` makes is needed here: without any one of
them a request reads, or stores, what a failed load left behind, or vLLM's half gives up.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvtier.keys import make_key
from tests.integration.layerwise_world import LayerwiseWorld, arrange
from tests.integration.odd_models import write_adapter
from tests.integration.scheduler_setup import Setup, random_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

TALKS = 7
PREFIXES = 8

SETUPS = {
    "all is well": Setup(engine_blocks=48),
    "loads fail": Setup(engine_blocks=48, failing=0.4, store_decode=True),
    "loads fail, prefills are cut": Setup(
        engine_blocks=48, failing=0.4, store_decode=True, long_prefill_tokens=32
    ),
    "loads fail, and their requests": Setup(
        engine_blocks=48, failing=0.4, store_decode=True, load_failures="fail"
    ),
    "chunks of four blocks": Setup(
        blocks_per_chunk=4, engine_blocks=48, slots=(24, 96), failing=0.3, store_decode=True
    ),
    "no room": Setup(engine_blocks=36, slots=(12, 48), failing=0.2, store_decode=True),
}


def traffic(world: LayerwiseWorld, *, steps: int, resets: bool) -> None:
    """Hold conversations with a few common prefixes, aborting some, also amid a step."""
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
        if resets and draw.random() < 0.01:
            world.reset()
        world.step(abort=draw.random() < 0.2)
    world.settle()


def assert_right(world: LayerwiseWorld, request: Request) -> None:
    prompt = request.num_prompt_tokens
    answer = list(request.output_token_ids)
    assert answer == [
        world.token_at(request, place) for place in range(prompt, prompt + len(answer))
    ]


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", range(2))
def test_no_block_of_a_failed_load_is_read_shared_or_stored(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange(monkeypatch)
    setup = SETUPS[name]
    world = LayerwiseWorld(setup, tmp_path / "model", seed)
    traffic(world, steps=300, resets=name == "no room")
    for request in world.requests.values():
        assert_right(world, request)
    seen = world.seen
    assert seen["loads in step"] > 0
    assert seen["stored"] > 0
    assert seen["aborts within a step"] > 0
    assert (seen["wrong passes"] > 0) == (setup.failing > 0)
    assert world.cache.service.statistics().internal_errors == 0
    world.cache.service.shutdown()


def test_requests_with_adapters_load_and_store_as_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange(monkeypatch)
    adapters: list[LoRARequest | None] = [None]
    for number, name in enumerate(("red", "blue"), start=1):
        write_adapter(tmp_path / name, number)
        adapters.append(LoRARequest(name, number, str(tmp_path / name)))
    setup = Setup(engine_blocks=36, slots=(24, 96), failing=0.1, store_decode=True)
    world = LayerwiseWorld(setup, tmp_path / "model", 0, adapters)
    traffic(world, steps=250, resets=False)
    for request in world.requests.values():
        assert_right(world, request)
    assert world.seen["loads in step"] > 0
    loaded = {len(key) for key in world.loaded}
    assert {size & 1 for size in loaded} == {0, 1}
    assert world.cache.service.statistics().internal_errors == 0
    world.cache.service.shutdown()


def test_what_a_failed_load_left_to_an_aborted_request_is_not_shared_or_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange(monkeypatch)
    setup = Setup(engine_blocks=48, failing=1.0)
    world = LayerwiseWorld(setup, tmp_path / "model", seed=0)
    prompt = random_tokens(world.draw, 100, 100)
    world.submit(prompt, 1)
    world.settle()
    world.scheduler.reset_prefix_cache()
    longer = prompt + random_tokens(world.draw, 60, 60)
    world.submit(longer, 8)
    world.step(abort=True)
    assert world.seen["loads in step"] == world.seen["wrong passes"] == 1
    request = world.submit(longer, 8)
    world.settle()
    assert_right(world, request)
    assert len(request.output_token_ids) == 8
    world.cache.service.shutdown()


@pytest.mark.parametrize(
    ("mode", "setup"),
    [
        ("layerwise", Setup()),
        ("layerwise", Setup(blocks_per_chunk=2)),
        ("layerwise", Setup(long_prefill_tokens=32)),
        ("ahead", Setup()),
        ("ahead", Setup(groups=((16, None), (16, 40)), retention_tokens=0)),
        ("ahead", Setup(groups=((16, 40),))),
    ],
    ids=[
        "layerwise",
        "chunks of two blocks",
        "prefills are cut",
        "ahead",
        "two groups",
        "one group with a window",
    ],
)
def test_what_is_computed_after_a_failed_load_is_stored(
    mode: str, setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange(monkeypatch, mode)
    setup = dataclasses.replace(setup, engine_blocks=48, failing=1.0)
    world = LayerwiseWorld(setup, tmp_path / "model", seed=0)
    prompt = random_tokens(world.draw, 96, 96)
    world.submit(prompt, 1)
    world.settle()
    world.scheduler.reset_prefix_cache()
    longer = prompt + random_tokens(world.draw, 64, 64)
    request = world.submit(longer, 8)
    world.settle()
    assert world.seen["loads that failed"] == 1
    assert_right(world, request)
    in_ram = set(world.cache.bench.ram.copies)
    whole = range(setup.blocks_per_chunk - 1, 10, setup.blocks_per_chunk)
    keys = {make_key(request.block_hashes[number], 0) for number in whole}
    assert keys <= in_ram
    world.cache.service.shutdown()


def test_what_each_rank_lacks_of_a_load_is_offered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange(monkeypatch, "ahead")
    world = LayerwiseWorld(Setup(engine_blocks=48), tmp_path / "model", seed=0)
    prompt = random_tokens(world.draw, 96, 96)
    world.submit(prompt, 1)
    world.settle()
    world.scheduler.reset_prefix_cache()
    request = world.submit(prompt + random_tokens(world.draw, 64, 64), 1)
    monkeypatch.setattr(world.notes, "get_finished", list)  # not by the last rank
    world.step()
    connector = world.scheduler.connector
    blocks = world._blocks(request.request_id, 0)
    (state,) = connector.connector_scheduler._req_status[request.request_id].group_states
    offered_from = [state.next_stored_chunk_idx]
    for bad in (4, 1, 3):
        connector.update_connector_output(KVConnectorOutput(invalid_block_ids={blocks[bad]}))
        offered_from.append(state.next_stored_chunk_idx)
    assert offered_from == [6, 4, 1, 1]
    world.cache.service.shutdown()


def test_an_aborted_request_stores_nothing_more_after_its_load_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange(monkeypatch)
    world = LayerwiseWorld(Setup(engine_blocks=48, failing=1.0), tmp_path / "model", seed=0)
    prompt = random_tokens(world.draw, 100, 100)
    world.submit(prompt, 1)
    world.settle()
    world.scheduler.reset_prefix_cache()
    stored = world.seen["stored"]
    world.submit(prompt + random_tokens(world.draw, 60, 60), 8)
    with monkeypatch.context() as patch:
        # So what the pass computes from nothing is still to be offered when it is over.
        patch.setattr(world.spied, "prepare_store", lambda keys, req_id: None)
        world.step(abort=True)
    assert world.seen["wrong passes"] == world.seen["aborts within a step"] == 1
    world.settle()
    assert world.seen["stored"] == stored
    world.cache.service.shutdown()


def test_a_request_loads_ahead_what_has_media_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are not sent what lies before that which they compute, should the load fail."""
    arrange(monkeypatch)
    world = LayerwiseWorld(Setup(engine_blocks=48), tmp_path / "model", seed=0)
    prompt = random_tokens(world.draw, 160, 160)
    world.submit(prompt, 1)
    world.settle()
    medium = MultiModalFeatureSpec(
        data=MultiModalKwargsItem({}),
        modality="image",
        identifier="a",
        mm_position=PlaceholderRange(offset=10, length=40),
    )
    loads = []
    for media in ([medium], []):
        world.scheduler.reset_prefix_cache()
        request = world.submit(prompt, 1)
        request.mm_features = media  # the key is that of the same tokens
        world.settle()
        assert_right(world, request)
        loads.append((world.seen["loads ahead"], world.seen["loads in step"]))
    assert loads == [(1, 0), (1, 1)]
    world.cache.service.shutdown()


def test_an_offer_that_is_not_taken_is_forgotten_with_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange(monkeypatch)
    world = LayerwiseWorld(Setup(engine_blocks=24), tmp_path / "model", seed=0)
    prompt = random_tokens(world.draw, 160, 160)
    world.submit(prompt, 1)
    world.settle()
    world.scheduler.reset_prefix_cache()
    world.submit(random_tokens(world.draw, 250, 250), 60)
    while world.scheduler.running == [] or world.scheduler.running[0].is_prefill_chunk:
        world.step()
    unlucky = world.submit(prompt, 1)
    offers = world.scheduler.connector._in_step
    offered: list[int] = []
    offer = offers.offer

    def noted(request: Request, local_tokens: int, hit_tokens: int) -> int:
        offered.append(offer(request, local_tokens, hit_tokens))
        return offered[-1]

    monkeypatch.setattr(offers, "offer", noted)
    world.step()
    assert unlucky.status is RequestStatus.WAITING, "it has no room"
    assert [tokens > 0 for tokens in offered] == [True]
    assert not offers._offered
    world.abort(unlucky)
    world.settle()
    world.cache.service.shutdown()


@pytest.mark.parametrize("mode", ["ahead", "layerwise"])
def test_a_request_that_is_preempted_by_a_reset_may_load_at_once(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange(monkeypatch, mode)
    world = LayerwiseWorld(Setup(engine_blocks=48), tmp_path / "model", seed=0)
    request = world.submit(random_tokens(world.draw, 100, 100), 40)
    while request.num_tokens < 120:
        world.step()
    world.scheduler.reset_prefix_cache(reset_running_requests=True)
    world.step()
    assert world.seen["loads ahead"] + world.seen["loads in step"] == 1
    world.settle()
    assert_right(world, request)
    world.cache.service.shutdown()


def test_the_stores_of_a_step_are_handed_over_before_the_next_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange(monkeypatch, "ahead")
    world = LayerwiseWorld(Setup(engine_blocks=48), tmp_path / "model", seed=0)
    stored: list[int] = []
    forward = world._forward

    def noted(output: SchedulerOutput) -> set[str]:
        stored.append(world.seen["stored"])
        return forward(output)

    monkeypatch.setattr(world, "_forward", noted)
    world.submit(random_tokens(world.draw, 100, 100), 4)
    world.step()
    world.step()
    assert stored == [0, 6]
    world.settle()
    world.cache.service.shutdown()
