"""A storage tier with a test's hands on it: opened, filled, checked, restarted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.testing.chunks import Arena, make_buffers, make_payload, make_sources
from kvtier.tiers.base import StorageTier
from kvtier.types import Outcome, Purpose

__all__ = ["Shelf"]

T = TypeVar("T", bound=StorageTier)


class Shelf(Generic[T]):
    """One tier under test, opened as often as a test restarts it.

    Args:
        opener: Opens the tier; it may block.
        pool: The threads the tier uses.
        arena: Where buffers come from; private memory when omitted.

    Attributes:
        tier: The tier as it is open now.
        error: What the last :meth:`put` or :meth:`get` said went wrong.
    """

    tier: T

    def __init__(
        self, opener: Callable[[], T], pool: IoPool, arena: Arena | None = None
    ) -> None:
        self._opener = opener
        self._pool = pool
        self._arena = arena
        self.error = ""

    async def open(self) -> list[tuple[ChunkKey, int]]:
        """Open the tier and return what it recovered."""

        def opened() -> tuple[T, list[tuple[ChunkKey, int]]]:
            tier = self._opener()
            return tier, list(tier.recovered())

        self.tier, found = await self._pool.run(opened, priority=0)
        return found

    async def reopen(self) -> list[tuple[ChunkKey, int]]:
        """Close the tier, open it again and return what it recovered."""
        await self.tier.aclose()
        return await self.open()

    def buffers(self, count: int) -> list[memoryview]:
        """Return zeroed buffers of the tier's slot size."""
        return make_buffers(count, self.tier.slot_nbytes, self._arena)

    def sources(self, keys: Sequence[ChunkKey]) -> list[memoryview]:
        """Return buffers that hold the payloads of ``keys``."""
        return make_sources(keys, self.tier.slot_nbytes, self._arena)

    async def put(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> list[Outcome]:
        """Write the payloads of ``keys``."""
        sources = self.sources(keys)
        result = await self.tier.write(keys, slots, sources, purpose=Purpose.STORE)
        self.error = result.error
        return list(result.outcomes)

    async def get(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> list[Outcome]:
        """Read ``slots``.

        Raises:
            AssertionError: A chunk is said to be DONE and has other bytes than its own, or
                something went wrong without words.
        """
        buffers = self.buffers(len(keys))
        result = await self.tier.read(keys, slots, buffers, purpose=Purpose.PROMOTE)
        for key, buffer, outcome in zip(keys, buffers, result.outcomes, strict=True):
            if outcome is Outcome.DONE and buffer != make_payload(key, self.tier.slot_nbytes):
                raise AssertionError(f"wrong bytes under key {key.hex()}")
        if bool(result.error) != any(what is not Outcome.DONE for what in result.outcomes):
            raise AssertionError(f"{result.outcomes} with error {result.error!r}")
        self.error = result.error
        return list(result.outcomes)
