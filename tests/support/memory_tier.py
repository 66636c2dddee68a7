"""A storage tier in memory that passes the tier contract and fails on request."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import xxhash

from kvtier.config import TierConfig
from kvtier.errors import CacheLockedError, CapacityError, ClosedError, ConfigError
from kvtier.keys import ChunkKey
from kvtier.tiers.base import (
    SlotOutcomes,
    StorageTier,
    TierContext,
)
from kvtier.types import Outcome, Purpose

__all__ = ["MemoryMedium", "MemoryTier", "MemoryTierConfig"]


class MemoryTierConfig(TierConfig):
    """A tier in memory."""

    kind: str = "memory"
    """A tier in memory."""


@dataclass(slots=True)
class _Held:
    """The content of a slot."""

    key: ChunkKey
    payload: bytearray
    checksum: int
    generation: int
    last_use: int


@dataclass(slots=True)
class MemoryMedium:
    """The content of a :class:`MemoryTier`: pass it to the next one to simulate a restart.

    Faults belong to the medium, as they do on a disk. All methods are thread-safe.
    """

    held: dict[int, _Held] = field(default_factory=dict)
    """Content of each slot that was written."""
    failing: set[int] = field(default_factory=set)
    """Slots that cannot be read or written."""
    gates: dict[int, threading.Event] = field(default_factory=dict)
    """Slots whose I/O hangs until the event is set."""
    clock: int = 0
    """Ticks with each write and use."""
    tiers_open: int = 0
    """Open tiers on this medium; at most one."""

    def fail(self, slots: Iterable[int]) -> None:
        """Make I/O on ``slots`` fail until :meth:`heal`."""
        self.failing.update(slots)

    def heal(self) -> None:
        """Remove all failures."""
        self.failing.clear()

    def corrupt(self, slots: Iterable[int]) -> None:
        """Flip a bit in what each of ``slots`` holds."""
        for slot in slots:
            self.held[slot].payload[0] ^= 1

    def stall(self, slots: Iterable[int]) -> threading.Event:
        """Make I/O on ``slots`` hang until the returned event is set."""
        gate = threading.Event()
        self.gates.update(dict.fromkeys(slots, gate))
        return gate

    def tick(self) -> int:
        """Return a time later than any before."""
        self.clock += 1
        return self.clock


class MemoryTier(StorageTier):
    """Chunks in a dictionary.

    Args:
        options: The tier's section of the configuration.
        context: Geometry, meaning and threads.
        medium: Where the chunks are; a fresh one if not given.

    Attributes:
        medium: Where the chunks are, and where faults are set.
    """

    Options: ClassVar[type[TierConfig]] = MemoryTierConfig

    def __init__(
        self, options: TierConfig, context: TierContext, medium: MemoryMedium | None = None
    ) -> None:
        self.name = options.name
        self.slot_nbytes = context.slot_nbytes
        self.capacity_slots = options.capacity_bytes // context.slot_nbytes
        if self.capacity_slots == 0:
            raise ConfigError(f"tier {self.name}: capacity is less than one slot")
        self.medium = MemoryMedium() if medium is None else medium
        if self.medium.tiers_open:
            raise CacheLockedError(self.name, "the medium", "another tier of this test")
        self.medium.tiers_open += 1
        self._pool = context.pool
        self._epoch = 0
        self._closed = False

    @classmethod
    def open(cls, options: TierConfig, context: TierContext) -> Self:
        """Open a tier on a fresh medium."""
        return cls(options, context)

    def recovered(self) -> Iterator[tuple[ChunkKey, int]]:
        newest: dict[ChunkKey, int] = {}
        for slot, held in sorted(self.medium.held.items(), key=lambda item: item[1].generation):
            newest[held.key] = slot
        for slot in sorted(newest.values(), key=lambda slot: self.medium.held[slot].last_use):
            yield self.medium.held[slot].key, slot

    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        self._check(keys, slots, sources)
        for slot in slots:
            self.medium.held.pop(slot, None)
        epoch = self._epoch
        payloads = await self._pool.run(
            lambda: list(map(self._take, slots, sources)), priority=int(purpose)
        )
        outcomes: list[Outcome] = []
        for key, slot, payload in zip(keys, slots, payloads, strict=True):
            if payload is None or epoch != self._epoch:
                outcomes.append(Outcome.FAILED)
                continue
            now = self.medium.tick()
            self.medium.held[slot] = _Held(key, payload, _checksum(key, payload), now, now)
            outcomes.append(Outcome.DONE)
        return _report(outcomes)

    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        self._check(keys, slots, into)
        outcomes = await self._pool.run(
            lambda: list(map(self._give, keys, slots, into)), priority=int(purpose)
        )
        return _report(outcomes)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.medium.held.pop(slot, None)

    def touch(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if held := self.medium.held.get(slot):
                held.last_use = self.medium.tick()

    async def reset(self) -> None:
        self._require_open()
        self._epoch += 1
        self.medium.held.clear()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self.medium.tiers_open -= 1

    def _take(self, slot: int, source: memoryview) -> bytearray | None:
        self._pass_gate(slot)
        return None if slot in self.medium.failing else bytearray(source)

    def _give(self, key: ChunkKey, slot: int, into: memoryview) -> Outcome:
        self._pass_gate(slot)
        if slot in self.medium.failing:
            return Outcome.FAILED
        held = self.medium.held.get(slot)
        if held is None or held.key != key:
            return Outcome.CORRUPT
        into[:] = held.payload
        return Outcome.DONE if _checksum(key, into) == held.checksum else Outcome.CORRUPT

    def _pass_gate(self, slot: int) -> None:
        if gate := self.medium.gates.get(slot):
            gate.wait()

    def _check(
        self, keys: Sequence[ChunkKey], slots: Sequence[int], views: Sequence[memoryview]
    ) -> None:
        self._require_open()
        fits = all(0 <= slot < self.capacity_slots for slot in slots)
        whole = all(view.nbytes == self.slot_nbytes for view in views)
        if not (fits and whole and len(keys) == len(slots) == len(views)):
            raise CapacityError(f"tier {self.name}: slots or buffers are not this tier's")

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self.name} is closed")


def _checksum(key: ChunkKey, payload: bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(key))


def _report(outcomes: list[Outcome]) -> SlotOutcomes:
    bad = [outcome.value for outcome in outcomes if outcome is not Outcome.DONE]
    return SlotOutcomes(tuple(outcomes), f"a slot is {bad[0]}" if bad else "")
