"""``python -m tests.bench.shared_object URL``: an object tier beside obstore driven alone.

In each round both sides put the same number of new chunks and get them, one after the other and
in alternating order, with equal numbers of connections and equal settings of the client. The
first side is :class:`~kvtier.tiers.shared.KeyedTier`: it asks which chunks are there, makes and
verifies proofs, and delivers the bytes in the caller's memory. The other side sends the same
bytes and leaves what it gets in obstore's own memory.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import statistics
import time
from abc import ABC, abstractmethod
from typing import Any, Final

import obstore
from obstore.store import ObjectStore, from_url
from typing_extensions import override

from kvtier.config import ObjectTierConfig
from kvtier.keys import make_key
from kvtier.os.iopool import IoPool
from kvtier.tiers.base import TierContext
from kvtier.tiers.shared import KeyedTier
from kvtier.tiers.shared.object_store import ObjectTier
from kvtier.types import LayoutFingerprint, Outcome, Purpose

BAR: Final = 0.9
_THREADS: Final = 4


class Side(ABC):
    """A client of the store."""

    @abstractmethod
    async def put(self, first: int, sources: list[memoryview]) -> None: ...

    @abstractmethod
    async def get(self, first: int, into: list[memoryview]) -> None: ...


class KvtierSide(Side):
    """The tier, as an engine uses it."""

    def __init__(self, tier: KeyedTier) -> None:
        self._tier = tier

    @override
    async def put(self, first: int, sources: list[memoryview]) -> None:
        keys = _keys(first, len(sources))
        done = await self._tier.write(keys, range(len(keys)), sources, purpose=Purpose.STORE)
        assert set(done.outcomes) == {Outcome.DONE}, done

    @override
    async def get(self, first: int, into: list[memoryview]) -> None:
        keys = _keys(first, len(into))
        done = await self._tier.read(keys, range(len(keys)), into, purpose=Purpose.LOAD)
        assert set(done.outcomes) == {Outcome.DONE}, done


class ObstoreSide(Side):
    """obstore alone."""

    def __init__(self, store: ObjectStore, connections: int) -> None:
        self._store = store
        self._connections = connections

    @override
    async def put(self, first: int, sources: list[memoryview]) -> None:
        async def one(number: int) -> None:
            name = f"alone/{first + number}"
            await obstore.put_async(self._store, name, sources[number], use_multipart=False)

        await self._all(len(sources), one)

    @override
    async def get(self, first: int, into: list[memoryview]) -> None:
        async def one(number: int) -> None:
            found = await obstore.get_async(self._store, f"alone/{first + number}")
            assert len(await found.bytes_async()) == into[number].nbytes

        await self._all(len(into), one)

    async def _all(self, count: int, one: Any) -> None:
        numbers = iter(range(count))

        async def work() -> None:
            for number in numbers:
                await one(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(count, self._connections)):
                group.create_task(work())


async def measure(
    options: ObjectTierConfig, *, chunk_nbytes: int, chunks: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the rates of both sides, in bytes per second, in each round.

    Args:
        options: The store.
        chunk_nbytes: Bytes of a chunk.
        chunks: Chunks of one batch.
        rounds: Number of batches in each direction.
    """
    pool = IoPool(_THREADS, name="bench")
    fingerprint = LayoutFingerprint({"bench": secrets.token_hex(8)})
    context = TierContext(slot_nbytes=chunk_nbytes, fingerprint=fingerprint, pool=pool)
    tier = await pool.run(lambda: KeyedTier.over(ObjectTier, options, context), priority=0)
    sides = [KvtierSide(tier), ObstoreSide(_client(options), options.connections)]
    content = memoryview(bytearray(random.Random(5).randbytes(chunk_nbytes * chunks)))
    room = memoryview(bytearray(chunk_nbytes * chunks))
    rates: dict[str, list[tuple[float, float]]] = {"put": [], "get": []}
    for number in range(rounds + 1):
        order = sides if number % 2 else sides[::-1]
        puts = {side: await _time(side.put, number * chunks, content, chunks) for side in order}
        gets = {side: await _time(side.get, number * chunks, room, chunks) for side in order}
        assert room == content
        if number:  # the first round makes connections and touches memory
            for name, seconds in (("put", puts), ("get", gets)):
                ours, theirs = (content.nbytes / seconds[side] for side in sides)
                rates[name].append((ours, theirs))
    await tier.aclose()
    pool.close(timeout_s=10)
    return rates


async def _time(call: Any, first: int, memory: memoryview, chunks: int) -> float:
    nbytes = memory.nbytes // chunks
    parts = [memory[at : at + nbytes] for at in range(0, memory.nbytes, nbytes)]
    start_s = time.perf_counter()
    await call(first, parts)
    return time.perf_counter() - start_s


def _client(options: ObjectTierConfig) -> ObjectStore:
    settings: dict[str, Any] = dict(options.settings)
    settings |= (
        {"unsigned_payload": "true"} if options.url.startswith("s3:") else {"mkdir": True}
    )
    return from_url(options.url, client_options={"allow_http": True}, **settings)


def _keys(first: int, count: int) -> list[bytes]:
    return [
        make_key(number.to_bytes(32, "little"), 0) for number in range(first, first + count)
    ]


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="s3://bucket/prefix or file:///directory")
    parser.add_argument("--setting", action="append", default=[], help="such as endpoint=URL")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--chunk-kib", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    options = ObjectTierConfig(
        url=given.url,
        settings=dict(each.split("=", 1) for each in given.setting),
        connections=given.connections,
        request_timeout_s=120,
    )
    rates = asyncio.run(
        measure(
            options,
            chunk_nbytes=given.chunk_kib << 10,
            chunks=given.chunks,
            rounds=given.rounds,
        )
    )
    for name, pairs in rates.items():
        ours, theirs = (sorted(side) for side in zip(*pairs, strict=True))
        ratios = sorted(one / other for one, other in pairs)
        print(  # noqa: T201
            f"{name}: kvtier {statistics.median(ours) / 1e6:.0f} MB/s, "
            f"obstore {statistics.median(theirs) / 1e6:.0f} MB/s, "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"bar {BAR}"
        )


if __name__ == "__main__":
    main()
