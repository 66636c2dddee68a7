"""kvtier's scheduler side does what the one of vLLM 0.32's offloading connector does.

The streams are random, but what must have happened in them is asserted, and so is every
difference that docs/design/connector.md lists: seen, and no other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.engine_world import arrange
from tests.integration.scheduler_pair import PairedWorld, Reason
from tests.integration.scheduler_setup import Setup, random_tokens

if TYPE_CHECKING:
    from vllm.v1.request import Request

TALKS = 7
"""Conversations at a time; their requests share four prefixes."""

SETUPS = {
    "one group": Setup(engine_blocks=48),
    "asynchronous": Setup(asynchronous=True, store_decode=True, engine_blocks=48),
    "chunks of four blocks": Setup(blocks_per_chunk=4, engine_blocks=48, store_decode=True),
    "no room": Setup(store_decode=True, engine_blocks=40),
    "copies fail": Setup(engine_blocks=48, failing=0.2, store_decode=True),
    "window": Setup(groups=((16, None), (16, 48)), engine_blocks=72),
    "window, sparse": Setup(
        groups=((16, None), (16, 48)),
        engine_blocks=72,
        retention_tokens=0,
        asynchronous=True,
        failing=0.1,
    ),
    "windows only": Setup(groups=((16, 32), (16, 80)), engine_blocks=64, store_decode=True),
    "window of chunks": Setup(
        groups=((16, None), (16, 100), (16, 40)),
        blocks_per_chunk=4,
        engine_blocks=120,
        asynchronous=True,
        store_decode=True,
    ),
    "blocks of two sizes": Setup(
        groups=((32, None), (16, 60)),
        engine_blocks=64,
        asynchronous=True,
        store_decode=True,
    ),
    "large blocks for the window": Setup(
        groups=((16, None), (32, 50), (32, 100)), engine_blocks=72
    ),
    "chunks of two sizes": Setup(
        groups=((64, None), (16, 40)),
        blocks_per_chunk=2,
        engine_blocks=40,
        retention_tokens=128,
    ),
}


def transfer_params(draw: Random) -> dict[str, Any] | None:
    """Return what one request asks of the KV cache."""
    drawn = draw.random()
    if drawn < 0.12:
        return {"max_load_tokens": draw.randrange(200) | 1}  # vLLM leaves one out
    if drawn < 0.18:
        return {"max_offload_tokens": draw.randrange(200)}
    if drawn < 0.22:
        return {"kvtier": {"skip_store": True}}
    return {"max_load_tokens": "many"} if drawn < 0.24 else None


def run(world: PairedWorld, steps: int) -> None:
    """Hold conversations of several turns; abort and reset now and then."""
    draw = world.draw
    prefixes = [random_tokens(draw, 40, 200) for _ in range(4)]
    talks = [list(draw.choice(prefixes)) for _ in range(TALKS)]
    busy: dict[int, Request] = {}
    for _ in range(steps):
        at = draw.randrange(TALKS)
        if at not in busy and draw.random() < 0.4:
            talks[at] += random_tokens(draw, 1, 60)
            if len(talks[at]) > 380:
                talks[at] = list(draw.choice(prefixes)) + random_tokens(draw, 0, 20)
            busy[at] = world.submit(talks[at], draw.randint(1, 40), transfer_params(draw))
        if draw.random() < 0.03 and busy:
            world.abort(draw.choice(list(busy.values())))
        if draw.random() < 0.01:
            world.reset()
        world.step()
        for number, request in list(busy.items()):
            if request.is_finished():
                talks[number] = list(request.all_token_ids)
                del busy[number]
    world.settle()


@pytest.fixture(autouse=True)
def notes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    arrange(monkeypatch)
    caplog.set_level(logging.ERROR)  # what fails here is said often


@dataclass(frozen=True)
class Stream:
    """A seeded stream, and what is known to happen in it."""

    setup: str
    seed: int
    shows: frozenset[str] = frozenset()
    differs: frozenset[Reason] = frozenset()


STREAMS = [
    Stream("one group", 4, frozenset({"waits", "preemptions", "aborts while loading"})),
    Stream(
        "asynchronous",
        15,
        frozenset({"preemptions", "flushes"}),
        frozenset({Reason.LAST_TOKEN}),
    ),
    Stream("chunks of four blocks", 1),
    Stream("no room", 1, frozenset({"preemptions"})),
    Stream(
        "copies fail", 6, frozenset({"loads that failed"}), frozenset({Reason.COMPUTED_ANEW})
    ),
    Stream("window", 2, differs=frozenset({Reason.GONE})),
    Stream("window, sparse", 0, differs=frozenset({Reason.NO_END})),
    Stream("windows only", 0),
    Stream("window of chunks", 0),
    Stream(
        "blocks of two sizes",
        8,
        differs=frozenset({Reason.ENDS_IN_BLOCK, Reason.SHORT, Reason.DROPPED}),
    ),
    Stream("large blocks for the window", 1),
    Stream("chunks of two sizes", 5, frozenset({"flushes"})),
]


def compared(setup: Setup, model: Path, *, seed: int, steps: int) -> PairedWorld:
    """Run a stream and compare what both sides offered in it."""
    world = PairedWorld(setup, model, seed)
    try:
        run(world, steps)
        world.compare_offers()
    except BaseException as error:
        error.add_note(f"seed {seed}: {dict(world.seen)}, {dict(world.reasons)}")
        raise
    world.close()
    return world


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.setup)
def test_the_scheduler_differs_from_vllms_only_as_listed(
    stream: Stream, tmp_path: Path
) -> None:
    world = compared(SETUPS[stream.setup], tmp_path / "model", seed=stream.seed, steps=150)
    shows = stream.shows | {"loads", "stored", "aborts"}
    missing = {name for name in shows if not world.seen[name]}
    assert not missing, "another seed is needed: these did not happen"
    assert stream.differs <= set(world.reasons)


def test_the_streams_by_day_show_every_difference() -> None:
    assert set(Reason) == {reason for stream in STREAMS for reason in stream.differs}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
@pytest.mark.parametrize("name", SETUPS)
def test_the_scheduler_differs_from_vllms_only_as_listed_in_long_streams(
    name: str, seed: int, tmp_path: Path
) -> None:
    world = compared(SETUPS[name], tmp_path / "model", seed=seed, steps=400)
    assert world.seen["stored"]
