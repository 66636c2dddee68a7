"""A harness for tests of a storage tier, with buffers and a distinct payload for each key."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kvtier.keys import ChunkKey, make_key
from kvtier.os.iopool import IoPool
from kvtier.os.memory import open_anonymous
from kvtier.tiers.base import StorageTier
from kvtier.types import Outcome, Purpose, SharedMemory

if TYPE_CHECKING:
    import pytest

    from kvtier.tiers.shared import SharedTier

__all__ = [
    "Arena",
    "TierHarness",
    "make_buffers",
    "make_keys",
    "make_payload",
    "make_sources",
    "tier_section",
]

T = TypeVar("T", bound=StorageTier)

_NO_ERRORS: Final = frozenset([Outcome.DONE, Outcome.MISSING, Outcome.REFUSED])
"""Outcomes that occur without a failure of the medium."""


def tier_section(
    tier_class: type[StorageTier | SharedTier], request: pytest.FixtureRequest, *lines: str
) -> str:
    """Return a tier's section of a YAML file; pytest shows it if a test fails.

    ``lines`` are the section without ``kind``.
    """
    kind = tier_class.Options.model_fields["kind"]
    first = f"kind: {'contract' if kind.is_required() else kind.default}"
    text = "".join(f"{line}\n" for line in (first, *lines))
    request.node.add_report_section("setup", f"section of {tier_class.__name__}", text)
    return text


def make_keys(numbers: Sequence[int]) -> list[ChunkKey]:
    """Return one key per number, in the form of an engine's keys."""
    return [make_key(random.Random(number).randbytes(32), 0) for number in numbers]


def make_payload(key: ChunkKey, nbytes: int) -> bytes:
    """Return the content of the chunk ``key``: pseudo-random bytes."""
    return random.Random(key).randbytes(nbytes)


class Arena:
    """Shared memory for buffers. No buffer is reused until the arena is closed.

    Untouched pages take no memory.
    """

    def __init__(self, nbytes: int = 1 << 30) -> None:
        self._descriptor = open_anonymous("kvtier-arena")
        os.ftruncate(self._descriptor, nbytes)
        self._view = memoryview(mmap.mmap(self._descriptor, nbytes))
        self._used_nbytes = 0

    @property
    def shared(self) -> SharedMemory:
        """The arena's memory, for a :class:`~kvtier.tiers.base.TierContext`."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._view))
        return SharedMemory(self._descriptor, address, self._view.nbytes)

    @property
    def view(self) -> memoryview:
        """This process's mapping of the memory, for a client that registers memory."""
        return self._view

    def take(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` zeroed bytes at a page boundary."""
        start = self._used_nbytes
        self._used_nbytes += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._used_nbytes > self._view.nbytes:
            raise MemoryError(f"the arena has {self._view.nbytes} bytes only")
        return self._view[start : start + nbytes]

    def close(self) -> None:
        """Free the memory once its last view is released."""
        os.close(self._descriptor)
        self._view.release()


def make_buffers(count: int, nbytes: int, arena: Arena | None = None) -> list[memoryview]:
    """Return ``count`` page-aligned, zeroed, adjacent buffers of one mapping."""
    if count == 0:
        return []
    if arena is None:
        whole = memoryview(mmap.mmap(-1, count * nbytes))
    else:
        whole = arena.take(count * nbytes)
    return [whole[start : start + nbytes] for start in range(0, count * nbytes, nbytes)]


def make_sources(
    keys: Sequence[ChunkKey], nbytes: int, arena: Arena | None = None
) -> list[memoryview]:
    """Return page-aligned buffers with the payloads of ``keys``."""
    buffers = make_buffers(len(keys), nbytes, arena)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[:] = make_payload(key, nbytes)
    return buffers


class TierHarness(Generic[T]):
    """Opens a tier, writes and verifies chunks, and restarts the tier.

    Without an ``arena``, the buffers are memory of this process only.

    Attributes:
        tier: The open tier.
        error: Error text of the last :meth:`put` or :meth:`get`.
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
        """Open the tier and return the recovered chunks as (key, slot) pairs."""

        def opened() -> tuple[T, list[tuple[ChunkKey, int]]]:
            tier = self._opener()
            return tier, list(tier.recovered())

        self.tier, found = await self._pool.run(opened, priority=0)
        return found

    async def reopen(self) -> list[tuple[ChunkKey, int]]:
        """Close the tier, open it again and return the recovered chunks."""
        await self.tier.aclose()
        return await self.open()

    def buffers(self, count: int) -> list[memoryview]:
        """Return zeroed buffers of the tier's slot size."""
        return make_buffers(count, self.tier.slot_nbytes, self._arena)

    def sources(self, keys: Sequence[ChunkKey]) -> list[memoryview]:
        """Return buffers with the payloads of ``keys``."""
        return make_sources(keys, self.tier.slot_nbytes, self._arena)

    async def put(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> list[Outcome]:
        """Write the payloads of ``keys`` to ``slots`` and return the outcomes."""
        sources = self.sources(keys)
        result = await self.tier.write(keys, slots, sources, purpose=Purpose.STORE)
        self.error = result.error
        return list(result.outcomes)

    async def get(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> list[Outcome]:
        """Read ``slots``, verify the payloads of ``keys`` and return the outcomes.

        A chunk that is DONE must have its bytes, and the error text must fit the outcomes.
        """
        buffers = self.buffers(len(keys))
        result = await self.tier.read(keys, slots, buffers, purpose=Purpose.PROMOTE)
        for key, buffer, outcome in zip(keys, buffers, result.outcomes, strict=True):
            if outcome is Outcome.DONE and buffer != make_payload(key, self.tier.slot_nbytes):
                raise AssertionError(f"wrong bytes under key {key.hex()}")
        if bool(result.error) != (not _NO_ERRORS.issuperset(result.outcomes)):
            raise AssertionError(f"{result.outcomes} with error {result.error!r}")
        self.error = result.error
        return list(result.outcomes)
