"""Models whose layers keep states, under vLLM's own scheduler, with both of its runners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig

from tests.integration.engine_world import EngineWorld, arrange
from tests.integration.scheduler_setup import Setup

MakeWorld = Callable[..., EngineWorld]


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWorld]:
    worlds: list[EngineWorld] = []
    arrange(monkeypatch)
    # It wants Triton, which its scheduler does not use.
    monkeypatch.setattr(VllmConfig, "_validate_v2_model_runner", lambda _: None)

    def make(*, second_runner: bool, seed: int, **setup: Any) -> EngineWorld:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(second_runner)))
        common: dict[str, Any] = {
            "groups": ((16, None), (16, None)),
            "states": (1,),
            "slots": (96, 400),
            "retention_tokens": 0,
            "store_decode": True,
        }
        worlds.append(EngineWorld(Setup(**(common | setup)), tmp_path / "model", seed))
        assert worlds[-1].scheduler.use_v2_model_runner is second_runner
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def drive(world: EngineWorld, steps: int, *, resets: float = 0.0) -> None:
    draw = world.draw
    prompts: list[list[int]] = []
    for _ in range(steps):
        if len(world.alive()) < 6 and draw.random() < 0.5:
            known = draw.choice(prompts) if prompts and draw.random() < 0.5 else []
            prompt = known + [draw.randrange(500) for _ in range(draw.randint(1, 90))]
            prompts.append(prompt[: draw.randint(1, 200)])
            world.submit(prompt[-200:], draw.randint(1, 60))
        if draw.random() < 0.02 and (alive := world.alive()):
            world.abort(draw.choice(alive))
        if resets and draw.random() < resets:
            world.reset()
        world.step()
    world.settle()


@pytest.mark.parametrize("second_runner", [False, True], ids=["first", "second"])
@pytest.mark.parametrize(("asynchronous", "guesses"), [(False, 0), (False, 3), (True, 3)])
@pytest.mark.parametrize("hash_tokens", [0, 4], ids=["whole", "parts"])
def test_stored_states_match_their_keys(
    make_world: MakeWorld,
    *,
    second_runner: bool,
    asynchronous: bool,
    guesses: int,
    hash_tokens: int,
) -> None:
    world = make_world(
        second_runner=second_runner,
        asynchronous=asynchronous,
        guesses=guesses,
        hash_tokens=hash_tokens,
        engine_blocks=40,
        seed=0,
    )
    drive(world, 150)
    assert world.seen["moves"] > 0
    assert world.seen["stored of group 0"] > 0
    assert world.seen["stored of group 1"] > 0


@pytest.mark.parametrize("second_runner", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_chunks_stored_between_resets_match_their_keys(
    make_world: MakeWorld, *, second_runner: bool, asynchronous: bool
) -> None:
    world = make_world(
        second_runner=second_runner,
        asynchronous=asynchronous,
        guesses=4 if asynchronous else 0,
        groups=((16, None), (16, 40), (16, None)),
        states=(2,),
        engine_blocks=80,
        seed=0,
    )
    drive(world, 300, resets=0.02)
    assert world.seen["stored of group 1"] > 0
    assert world.seen["stored of group 2"] > 0


@pytest.mark.parametrize("second_runner", [False, True], ids=["first", "second"])
def test_stores_end_before_free_blocks_are_cleared(
    make_world: MakeWorld, *, second_runner: bool
) -> None:
    for seed in range(10):
        world = make_world(
            second_runner=second_runner,
            asynchronous=True,
            guesses=4,
            engine_blocks=40,
            priorities=True,
            seed=seed,
        )
        drive(world, 300)
        if world.seen["cleared in vain"]:
            return
    raise AssertionError("it happened with no seed")


@pytest.mark.parametrize(
    ("asynchronous", "guesses", "states", "astray"),
    [
        (False, 0, (1,), False),
        (True, 0, (1,), True),
        (True, 3, (1,), True),
        (False, 3, (), True),
        (True, 3, (), False),
    ],
)
def test_nothing_is_stored_of_parts_that_go_astray(
    make_world: MakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
    guesses: int,
    states: tuple[int, ...],
    astray: bool,
) -> None:
    world = make_world(
        second_runner=False,
        asynchronous=asynchronous,
        guesses=guesses,
        groups=((16, None), (16, None)) if states else ((16, None),),
        states=states,
        engine_blocks=64,
        seed=0,
    )
    request = world.submit([world.draw.randrange(500) for _ in range(40)], 9, resumable=True)
    world.settle()
    first = world.seen["stored of group 0"]
    assert first > 0
    for part in (70, 20, 50):
        world.go_on(request, [world.draw.randrange(500) for _ in range(part)], 9)
        world.settle()
    world.end(request)
    world.settle()
    assert (world.seen["stored of group 0"] == first) is astray
