"""A store whose engine is killed at any moment opens again, and what it serves is right."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest

from kvtier.config import NvmeTierConfig
from kvtier.iopool import IoPool
from kvtier.testing.shelf import Shelf
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome

SLOT = 64 << 10
CAPACITY = 64

WRITER = """
import asyncio, pathlib, random, sys
from kvtier.config import NvmeTierConfig
from kvtier.iopool import IoPool
from kvtier.testing.chunks import make_keys, make_sources
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Why

path, checksum, slot_nbytes, capacity, seed = sys.argv[1:]
options = NvmeTierConfig(
    path=pathlib.Path(path), capacity_bytes=int(slot_nbytes) * int(capacity), checksum=checksum
)
pool = IoPool(3, name="kvtier-writer")
context = TierContext(
    int(slot_nbytes), LayoutFingerprint({}), pool, piece_nbytes=4 * int(slot_nbytes)
)
tier = SlabTier.open(options, context)
chance = random.Random(int(seed))
# Made ahead, so that most of the time the process is writing and not making payloads.
stock = make_keys([chance.getrandbits(60) for _ in range(48)])
payloads = dict(zip(stock, make_sources(stock, int(slot_nbytes))))

async def fill(lane):
    slots = range(lane, int(capacity), 3)
    while True:
        some = chance.sample(slots, chance.randint(1, len(slots)))
        keys = [chance.choice(stock) for _ in some]
        result = await tier.write(keys, some, [payloads[key] for key in keys], why=Why.STORE)
        if result.error:
            sys.exit(result.error)
        tier.touch(some[:2])
        tier.forget(some[-1:])

async def main():
    async with asyncio.TaskGroup() as group:
        for lane in range(3):
            group.create_task(fill(lane))
        sys.stdout.write("writing\\n")
        sys.stdout.flush()

asyncio.run(main())
"""


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(3, name="kvtier-test")
    yield pool
    assert pool.close(timeout_s=10)


def write_until_killed(command: Sequence[str], after_s: float) -> None:
    """Start a writer and kill it ``after_s`` after its first write has begun."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(timeout=after_s)
        writer.kill()
        assert writer.wait() == -signal.SIGKILL


class Rounds:
    """Kill, reopen, read everything; again and again on one store."""

    def __init__(self, path: Path, pool: IoPool, checksum: Literal["xxh3", "off"]) -> None:
        self.path = path
        self.checksum = checksum
        options = NvmeTierConfig(path=path, capacity_bytes=SLOT * CAPACITY, checksum=checksum)
        context = TierContext(SLOT, LayoutFingerprint({}), pool)
        self.shelf = Shelf(lambda: SlabTier.open(options, context), pool)
        self.served = 0

    def run(self, *, rounds: int, seed: int) -> None:
        chance = random.Random(seed)
        for number in range(rounds):
            after_s = chance.uniform(0, 0.15)
            arguments = [str(self.path), self.checksum, SLOT, CAPACITY, chance.getrandbits(30)]
            command = [sys.executable, "-c", WRITER, *map(str, arguments)]
            write_until_killed(command, after_s)
            where = f"round {number} of seed {seed}, killed after {after_s:.4f} s"
            asyncio.run(self.check(where))

    async def check(self, where: str) -> None:
        found = await self.shelf.open()
        keys = [key for key, _ in found]
        slots = [slot for _, slot in found]
        assert len(set(keys)) == len(keys), where
        assert len(set(slots)) == len(slots), where
        outcomes = await self.shelf.get(keys, slots)  # raises if any byte is wrong
        await self.shelf.tier.aclose()
        assert Outcome.FAILED not in outcomes, where
        self.served += outcomes.count(Outcome.DONE)


@pytest.mark.parametrize("checksum", ["xxh3", "off"])
def test_a_killed_engine_leaves_right_bytes_or_misses(
    tmp_path: Path, pool: IoPool, checksum: Literal["xxh3", "off"]
) -> None:
    rounds = Rounds(tmp_path / "store", pool, checksum)
    rounds.run(rounds=5, seed=20)
    assert rounds.served > 0, "nothing survived: the test proves nothing"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("checksum", ["xxh3", "off"])
@pytest.mark.parametrize("seed", range(5))
def test_an_engine_killed_all_night_leaves_right_bytes_or_misses(
    tmp_path: Path, pool: IoPool, checksum: Literal["xxh3", "off"], seed: int
) -> None:
    rounds = Rounds(tmp_path / "store", pool, checksum)
    rounds.run(rounds=40, seed=seed)
    assert rounds.served > 0
