"""How chunks get from one kind of place to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from kvtier.tiers.base import SlotOutcomes, StorageTier
from kvtier.types import Job

__all__ = ["FromTier", "Route", "SlotMemory", "ToTier"]


class SlotMemory(Protocol):
    """RAM slots as buffers."""

    def slot(self, number: int) -> memoryview:
        """Return the writable bytes of a slot."""


class Route(ABC):
    """Moves the chunks of one job; one object per (source, destination) pair."""

    @abstractmethod
    async def run(self, job: Job) -> SlotOutcomes:
        """Move every chunk of ``job`` and say what became of each.

        Cancellation:
            Deferred until no thread touches the job's slots.
        """


class ToTier(Route):
    """RAM slots to a storage tier."""

    def __init__(self, memory: SlotMemory, tier: StorageTier) -> None:
        self._memory = memory
        self._tier = tier

    @override
    async def run(self, job: Job) -> SlotOutcomes:
        return await self._tier.write(
            job.keys,
            job.destination_slots,
            _views(self._memory, job.source_slots),
            why=job.why,
        )


class FromTier(Route):
    """A storage tier to RAM slots, every byte verified by the tier."""

    def __init__(self, memory: SlotMemory, tier: StorageTier) -> None:
        self._memory = memory
        self._tier = tier

    @override
    async def run(self, job: Job) -> SlotOutcomes:
        outcomes = await self._tier.read(
            job.keys,
            job.source_slots,
            _views(self._memory, job.destination_slots),
            why=job.why,
        )
        self._tier.touch(job.source_slots)
        return outcomes


def _views(memory: SlotMemory, slots: Sequence[int]) -> list[memoryview]:
    return [memory.slot(number) for number in slots]
