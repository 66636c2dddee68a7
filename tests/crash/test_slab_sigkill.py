"""A store whose engine is killed at any moment opens again, and what it serves is right."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import TierHarness, make_keys
from kvtier.types import Outcome
from tests.crash.fork_server import CAPACITY, SLOT, STOCK, open_tier
from tests.support.workbench import Workbench
from tests.unit.ram_directory import ram_directory

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
KEYS = make_keys(range(STOCK))
NUMBERS = {key: number for number, key in enumerate(KEYS)}
HANG_S = 120.0
# What the engine says just before it is killed, and the longest wait until then.
MOMENTS_S = {"open": 0.02, "write": 0.006, "written": 0.004, "reset": 0.006, "close": 0.006}
DURABILITIES = ("process", "power")

Event = dict[str, Any]


class Butcher:
    """Has engines forked, and kills each at a moment of its choice."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self._orders = server.stdin
        self._said = server.stdout.fileno()
        self._rest = b""

    def kill_one(self, order: Event, what: str, number: int, delay_s: float) -> list[Event]:
        """Kill an engine some time after it said ``what`` for the ``number``-th time.

        Returns:
            All it said in its life.
        """
        self._orders.write(json.dumps(order).encode() + b"\n")
        self._orders.flush()
        events: list[Event] = []
        while sum(event["what"] == what for event in events) < number:
            events += self._hear(HANG_S)
            assert events[-1]["what"] not in {"failed", "ended"}, events[-1]
        until_s = time.monotonic() + delay_s
        while (left_s := until_s - time.monotonic()) > 0:
            events += self._hear(left_s)
        os.kill(events[0]["pid"], signal.SIGKILL)
        while not events or events[-1]["what"] != "ended":
            events += self._hear(HANG_S)
        assert events[-1]["status"] == -signal.SIGKILL, events[-2:]
        return events

    def _hear(self, timeout_s: float) -> list[Event]:
        """Return what is said within ``timeout_s``; at most one read."""
        ready, _, _ = select.select([self._said], [], [], timeout_s)
        if not ready:
            assert timeout_s < HANG_S, "the engine hangs"
            return []
        *lines, self._rest = (self._rest + os.read(self._said, 1 << 16)).split(b"\n")
        return [json.loads(line) for line in lines]


class Store:
    """One store, what it must hold, and what it served."""

    def __init__(self, path: Path, pool: IoPool, durability: str) -> None:
        self.order: Event = {"path": str(path), "durability": durability}
        self.path = path
        self.harness = TierHarness(lambda: open_tier(self.order, pool), pool)
        self.certain: dict[int, int] = {}
        self.doubted: set[tuple[int, int]] = set()
        self.is_doubted = False
        self.served = 0

    def learn(self, events: list[Event]) -> None:
        """Follow a life: a chunk that was stored is certain until its slot is used otherwise.

        Or until it is stored somewhere else, for of two copies the newer comes back. What is
        stored between a reset and the next opening never comes back.
        """
        for event in events:
            slots, chunks = event.get("slots", []), event.get("chunks", [])
            match str(event["what"]):
                case "open":
                    self.is_doubted = False
                    self.doubted.clear()
                case "write" | "forget":
                    if self.is_doubted:
                        self.doubted.update(zip(slots, chunks, strict=False))
                    self.certain = {
                        slot: chunk
                        for slot, chunk in self.certain.items()
                        if slot not in slots and chunk not in chunks
                    }
                case "written" if not self.is_doubted:
                    self.certain.update(zip(slots, chunks, strict=True))
                case "reset":
                    self.certain.clear()
                    self.is_doubted = True
                case _:
                    pass

    async def check(self) -> None:
        """Open, recover as the engine's manager does, and read everything."""
        found = await self.harness.open()
        bench = Workbench(2, CAPACITY)
        assert bench.manager.recover(1, found) == len(found)
        bench.check()
        tier = bench.tiers[1]
        assert tier.snapshot().used == len(tier.copies) == len(found)
        assert tier.snapshot().used + tier.slots.free == tier.slots.capacity == CAPACITY
        nbytes = sum(path.stat().st_size for path in self.path.rglob("slots.bin"))
        assert nbytes <= CAPACITY * SLOT
        try:
            # Raises if any byte is wrong.
            outcomes = await self.harness.get(
                [key for key, _ in found], [slot for _, slot in found]
            )
        finally:
            await self.harness.tier.aclose()
        assert Outcome.FAILED not in outcomes
        held = {
            slot: NUMBERS[key]
            for (key, slot), outcome in zip(found, outcomes, strict=True)
            if outcome is Outcome.DONE
        }
        assert self.certain.items() <= held.items(), "what was stored is gone"
        assert not self.doubted & held.items(), "what was stored after a reset is served"
        self.is_doubted = False
        self.doubted.clear()
        self.certain = held
        self.served += len(held)


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(3, name="kvtier-test")
    yield pool
    assert pool.close(timeout_s=10)


@pytest.fixture
def butcher() -> Iterator[Butcher]:
    command = [sys.executable, "-m", "tests.crash.fork_server"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        yield Butcher(server)
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(timeout=HANG_S) == 0


def kill_often(butcher: Butcher, stores: list[Store], *, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    ends: Counter[str] = Counter()
    with asyncio.Runner() as runner:
        for number in range(rounds):
            store = stores[number % len(stores)]
            what = chance.choice(list(MOMENTS_S))
            times = 1 if what == "reset" else chance.randint(1, 4)
            # Most often soon: how long each takes differs from disk to disk.
            delay_s = MOMENTS_S[what] * chance.random() ** 3
            order = store.order | {"seed": chance.getrandbits(30)}
            try:
                events = butcher.kill_one(order, what, times, delay_s)
                ends[events[-2]["what"]] += 1
                store.learn(events)
                runner.run(store.check())
            except BaseException as error:
                error.add_note(
                    f"round {number} of seed {seed}, killed {delay_s:.4f} s after "
                    f"{what!r} number {times}: {order}"
                )
                raise
    logger.info("seed %d: %s chunks served", seed, [store.served for store in stores])
    logger.info("killed after they had said: %s", dict(ends))
    assert MOMENTS_S.keys() <= ends.keys(), "some moments were never met"


def open_stores(directory: Path, pool: IoPool) -> list[Store]:
    return [Store(directory / durability, pool, durability) for durability in DURABILITIES]


@pytest.mark.untraced
@pytest.mark.timeout(900)
def test_engines_killed_at_200_moments_leave_right_bytes_or_misses(
    pool: IoPool, butcher: Butcher
) -> None:
    """In RAM, where a sync is quick: to be killed is the same on every medium."""
    with ram_directory() as directory:
        stores = open_stores(directory, pool)
        kill_often(butcher, stores, rounds=200, seed=20)
    assert all(store.served > 100 for store in stores), "too little survived to prove anything"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_engines_killed_all_night_leave_right_bytes_or_misses(
    tmp_path: Path, pool: IoPool, butcher: Butcher, seed: int
) -> None:
    kill_often(butcher, open_stores(tmp_path, pool), rounds=400, seed=seed)
