"""A process that forks engines to be killed, so that each costs a fork and not an interpreter.

It imports everything once and stays single-threaded, for only such a process may fork without
danger; the threads of an engine are started in its child. It reads an order per line from its
standard input and forks. The child says on the standard output what it is about to do and what
it has done, one JSON object per line, and goes on until somebody kills it; then the server says
how it ended, and reads the next order.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

os.putenv("OPENBLAS_NUM_THREADS", "1")  # read when numpy is loaded: no threads before the fork

from kvtier.config import NvmeTierConfig
from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_keys, make_sources
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome, Purpose

__all__ = ["CAPACITY", "SLOT", "STOCK", "open_tier"]

SLOT = 16 << 10
CAPACITY = 24
STOCK = 40
"""How many different chunks there are; they are numbered."""


def open_tier(order: dict[str, Any], pool: IoPool) -> SlabTier:
    """Open the store that an order is about."""
    options = NvmeTierConfig(
        path=Path(order["path"]),
        capacity_bytes=SLOT * CAPACITY,
        durability=order["durability"],
    )
    context = TierContext(SLOT, LayoutFingerprint({}), pool, piece_nbytes=4 * SLOT)
    return SlabTier.open(options, context)


def say(what: str, **details: object) -> None:
    """Write one line; whole, for it is shorter than what a pipe takes at once."""
    os.write(sys.stdout.fileno(), (json.dumps({"what": what, **details}) + "\n").encode())


class Engine:
    """What happens to a store between two kills."""

    def __init__(
        self, order: dict[str, Any], keys: list[ChunkKey], payloads: list[memoryview]
    ) -> None:
        self._order = order
        self._keys = keys
        self._payloads = payloads
        self._chance = random.Random(order["seed"])
        self._pool = IoPool(3, name="kvtier-victim")

    async def live(self) -> NoReturn:
        """Open, use, close, and again."""
        while True:
            say("open")
            self._tier = open_tier(self._order, self._pool)
            list(self._tier.recovered())
            for _ in range(self._chance.randint(1, 12)):
                await self._chance.choices(
                    [self._write_two_batches, self._forget, self._reset], [12, 3, 1]
                )[0]()
            say("close")
            await self._tier.aclose()

    async def _write_two_batches(self) -> None:
        slots = self._chance.sample(range(CAPACITY), self._chance.randint(2, 12))
        middle = self._chance.randint(1, len(slots) - 1)
        async with asyncio.TaskGroup() as group:
            # No chunk is in two batches at once: a manager would not store it twice.
            group.create_task(self._write(slots[:middle], range(0, STOCK, 2)))
            group.create_task(self._write(slots[middle:], range(1, STOCK, 2)))
        self._tier.touch(slots[:2])

    async def _write(self, slots: list[int], stock: range) -> None:
        chunks = self._chance.sample(stock, len(slots))
        say("write", slots=slots, chunks=chunks)
        result = await self._tier.write(
            [self._keys[chunk] for chunk in chunks],
            slots,
            [self._payloads[chunk] for chunk in chunks],
            purpose=Purpose.STORE,
        )
        if set(result.outcomes) != {Outcome.DONE}:
            raise OSError(result.error)
        say("written", slots=slots, chunks=chunks)

    async def _forget(self) -> None:
        slots = self._chance.sample(range(CAPACITY), 2)
        say("forget", slots=slots)
        self._tier.forget(slots)

    async def _reset(self) -> None:
        say("reset")
        await self._tier.reset()
        say("was reset")


def fork_engine(order: dict[str, Any], keys: list[ChunkKey], payloads: list[memoryview]) -> int:
    """Fork an engine and wait for its end; returns how it ended."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        say("born", pid=os.getpid())
        asyncio.run(Engine(order, keys, payloads).live())
    except BaseException:  # noqa: BLE001 - the top of a process; the test reports it
        say("failed", error=traceback.format_exc())
    finally:
        os._exit(1)


def main() -> None:
    """Serve until the standard input ends."""
    keys = make_keys(range(STOCK))
    payloads = make_sources(keys, SLOT)
    for line in sys.stdin:
        say("ended", status=fork_engine(json.loads(line), keys, payloads))


if __name__ == "__main__":
    main()
