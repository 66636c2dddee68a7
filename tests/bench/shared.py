"""``python -m tests.bench.shared --tier KIND``: a shared tier beside its service's own client.

Both move the same chunks between the same memory and the same service, in turn, in batches that
run concurrently. The tier is driven through :class:`~kvtier.tiers.shared.KeyedTier`, so it asks
which chunks are stored, makes a proof of each chunk that it puts, and verifies each that it
gets. The service's own client does neither. The bar is a ratio of throughputs, because other
programs on the machine slow down both sides of a round alike.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Self

from rich.console import Console
from rich.table import Table
from typing_extensions import override

from kvtier.config import parse_tier
from kvtier.keys import ChunkKey, make_key
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import Arena
from kvtier.tiers.base import TierContext
from kvtier.tiers.shared import KeyedTier, SharedTier
from kvtier.types import LayoutFingerprint, Outcome, Purpose

CHUNK_NBYTES: Final = 2 << 20
BATCH_CHUNKS: Final = 16
THREADS: Final = 4


class Service(ABC):
    """A running service with its own client, which the benchmark compares a tier with.

    Attributes:
        tier_class: The tier.
        bar: Least ratio of the tier's throughput to the client's.
        calls: Calls of the client at the same time, as many as the tier makes.
    """

    tier_class: ClassVar[type[SharedTier]]
    bar: ClassVar[float] = 0.9
    calls: ClassVar[int] = THREADS

    @classmethod
    @abstractmethod
    @contextmanager
    def run(cls, directory: Path, memory: memoryview) -> Iterator[Self]:
        """Start the service, with room for 1 GiB, and its client.

        Args:
            directory: An empty directory.
            memory: The memory that contains all payloads.
        """

    @abstractmethod
    def section(self) -> str:
        """Return the tier's section of a YAML file."""

    @abstractmethod
    def put(self, names: Sequence[str], payloads: Sequence[memoryview]) -> None:
        """Store a batch. This call blocks, in one of :attr:`calls` threads.

        Raises:
            Exception: A chunk was not stored.
        """

    @abstractmethod
    def get(self, names: Sequence[str], payloads: Sequence[memoryview]) -> None:
        """Read a batch. This call blocks, in one of :attr:`calls` threads.

        Raises:
            Exception: A chunk was not read.
        """

    @abstractmethod
    def clear(self) -> None:
        """Remove all that both sides stored. This call blocks."""


class Mooncake(Service):
    """A master and another host over TCP; the client's transfers of many values at a time."""

    calls = 2

    def __init__(self, address: str, store: Any, library: Any) -> None:
        self._address = address
        self._store = store
        self._library = library

    @classmethod
    @override
    @contextmanager
    def run(cls, directory: Path, memory: memoryview) -> Iterator[Self]:
        from mooncake import store as library  # noqa: PLC0415 - one of several services

        from kvtier.tiers.shared.mooncake import MooncakeTier  # noqa: PLC0415
        from kvtier.tiers.shared.mooncake_client import address_of  # noqa: PLC0415
        from tests.support.mooncake_service import running_service  # noqa: PLC0415

        cls.tier_class = MooncakeTier
        with running_service(directory, lent_nbytes=1 << 30) as service:
            store = library.MooncakeDistributedStore()
            code = store.setup(
                "127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", service.address
            ) or store.register_buffer(address_of(memory), memory.nbytes)
            if code:
                raise RuntimeError(f"Mooncake's client returned {code}")
            with closing(store):
                yield cls(service.address, store, library)

    @override
    def section(self) -> str:
        return f"kind: mooncake\nmaster: {self._address}"

    @override
    def put(self, names: Sequence[str], payloads: Sequence[memoryview]) -> None:
        codes = self._store.batch_put_from_multi_buffers(
            list(names), *self._buffers(payloads), self._library.ReplicateConfig()
        )
        if any(codes):
            raise RuntimeError(f"put returned {codes}")

    @override
    def get(self, names: Sequence[str], payloads: Sequence[memoryview]) -> None:
        codes = self._store.batch_get_into_multi_buffers(list(names), *self._buffers(payloads))
        if {*codes} != {CHUNK_NBYTES}:
            raise RuntimeError(f"get returned {codes}")

    @override
    def clear(self) -> None:
        self._store.remove_all(force=True)

    @staticmethod
    def _buffers(payloads: Sequence[memoryview]) -> tuple[list[list[int]], list[list[int]]]:
        from kvtier.tiers.shared.mooncake_client import address_of  # noqa: PLC0415

        return [[address_of(payload)] for payload in payloads], [
            [payload.nbytes] for payload in payloads
        ]


SERVICES: Final[dict[str, type[Service]]] = {"mooncake": Mooncake}


class Batch(NamedTuple):
    """Chunks that are moved together."""

    numbers: range
    payloads: list[memoryview]


class Round(NamedTuple):
    """Bytes per second of both sides in one round."""

    kvtier: float
    own: float


Mover = Callable[[Batch], Awaitable[None]]


class Bench:
    """Moves chunks through a tier and through the service's own client.

    Args:
        service: The running service.
        tier: The tier.
        pool: The threads of the service's own client.
        batches: The chunks.
    """

    def __init__(
        self, service: Service, tier: KeyedTier, pool: IoPool, batches: Sequence[Batch]
    ) -> None:
        self._service = service
        self._tier = tier
        self._pool = pool
        self._batches = batches
        self._round = 0

    async def run(self, rounds: int) -> dict[str, list[Round]]:
        """Return the throughputs of puts and gets; the sides take turns in going first."""
        figures: dict[str, list[Round]] = {"put": [], "get": []}
        for number in range(rounds + 1):
            self._round = number
            await self._pool.run(self._service.clear, priority=0)
            for name, ours, own in (
                ("put", self._tier_put, self._own_put),
                ("get", self._tier_get, self._own_get),
            ):
                movers = (ours, own) if number % 2 else (own, ours)
                speeds = {mover: await self._timed(mover) for mover in movers}
                if number:  # the first round only warms up
                    figures[name].append(Round(speeds[ours], speeds[own]))
        return figures

    async def _timed(self, move: Mover) -> float:
        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for batch in self._batches:
                group.create_task(_awaited(move(batch)))
        seconds = time.perf_counter() - begun_s
        return sum(len(batch.payloads) for batch in self._batches) * CHUNK_NBYTES / seconds

    async def _tier_put(self, batch: Batch) -> None:
        moved = await self._tier.write(
            self._keys(batch), batch.numbers, batch.payloads, purpose=Purpose.STORE
        )
        _require_done(moved.outcomes)

    async def _tier_get(self, batch: Batch) -> None:
        moved = await self._tier.read(
            self._keys(batch), batch.numbers, batch.payloads, purpose=Purpose.LOAD
        )
        _require_done(moved.outcomes)

    async def _own_put(self, batch: Batch) -> None:
        names = self._names(batch)
        await self._pool.run(lambda: self._service.put(names, batch.payloads), priority=0)

    async def _own_get(self, batch: Batch) -> None:
        names = self._names(batch)
        await self._pool.run(lambda: self._service.get(names, batch.payloads), priority=0)

    def _keys(self, batch: Batch) -> list[ChunkKey]:
        return [make_key(f"{self._round}-{at}".encode(), group=0) for at in batch.numbers]

    def _names(self, batch: Batch) -> list[str]:
        return [f"own/{self._round}-{at}" for at in batch.numbers]


async def _awaited(move: Awaitable[None]) -> None:
    await move


def _require_done(outcomes: Sequence[Outcome]) -> None:
    if {*outcomes} != {Outcome.DONE}:
        raise RuntimeError(f"outcomes {outcomes}")


def _fill(arena: Arena, chunks: int) -> list[Batch]:
    """Return batches of random chunks."""
    payloads = [arena.take(CHUNK_NBYTES) for _ in range(chunks)]
    for payload in payloads:
        payload[:] = secrets.token_bytes(CHUNK_NBYTES)
    return [
        Batch(range(at, at + BATCH_CHUNKS), payloads[at : at + BATCH_CHUNKS])
        for at in range(0, chunks, BATCH_CHUNKS)
    ]


async def measure(
    kind: str, *, rounds: int, chunks: int, calls: int | None = None
) -> dict[str, list[Round]]:
    """Run a service and return the throughputs of both sides.

    Args:
        kind: The tier's kind.
        rounds: Number of rounds.
        chunks: Number of chunks of a round.
        calls: Calls of the service's own client at the same time.
    """
    arena = Arena(chunks * CHUNK_NBYTES)
    batches = _fill(arena, chunks)
    pools = [
        IoPool(THREADS, name="bench-kvtier"),
        IoPool(calls or SERVICES[kind].calls, name="bench-own"),
    ]
    with (
        tempfile.TemporaryDirectory() as directory,
        SERVICES[kind].run(Path(directory), arena.view) as service,
    ):
        options = parse_tier(service.section(), service.tier_class.Options, source="bench")
        context = TierContext(
            CHUNK_NBYTES, LayoutFingerprint({"bench": kind}), pools[0], memory=arena.shared
        )
        tier = await pools[1].run(lambda: KeyedTier.open(options, context), priority=0)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(tier.aclose)
            return await Bench(service, tier, pools[1], batches).run(rounds)


def report(console: Console, kind: str, figures: dict[str, list[Round]]) -> bool:
    """Print the medians and the spreads, and return whether the bar holds."""
    bar = SERVICES[kind].bar
    table = Table("chunks of 2 MiB", "kvtier", "own client", "ratio", "bar")
    held = True
    for name, rounds in figures.items():
        ratios = sorted(one.kvtier / one.own for one in rounds)
        ratio = statistics.median(ratios)
        held &= ratio >= bar
        table.add_row(
            f"{name}, {kind}",
            _speeds([one.kvtier for one in rounds]),
            _speeds([one.own for one in rounds]),
            f"{ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            f">= {bar}",
        )
    console.print(table)
    return held


def _speeds(values: Sequence[float]) -> str:
    low, high = min(values) / 1e9, max(values) / 1e9
    return f"{statistics.median(values) / 1e9:.2f} GB/s ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.shared", description=__doc__)
    parser.add_argument("--tier", choices=SERVICES, required=True)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--calls", type=int, help="calls of the own client at the same time")
    given = parser.parse_args()
    figures = asyncio.run(
        measure(given.tier, rounds=given.rounds, chunks=given.chunks, calls=given.calls)
    )
    if not report(Console(width=110), given.tier, figures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
