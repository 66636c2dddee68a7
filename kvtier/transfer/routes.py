"""How chunks get from one kind of place to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from itertools import compress
from typing import Any, Protocol

from typing_extensions import override

from kvtier.tiers.base import SlotOutcomes, StorageTier, check_outcomes
from kvtier.types import Job, Outcome

__all__ = ["FromTier", "Route", "SlotMemory", "Stamps", "ToTier"]


class SlotMemory(Protocol):
    """RAM slots as buffers."""

    def slot(self, number: int) -> memoryview:
        """Return the writable bytes of a slot."""


class Route(ABC):
    """Moves the chunks of one job; one object per (source, destination) pair."""

    @abstractmethod
    def run(self, job: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        """Move every chunk of ``job`` and say what became of each.

        A coroutine function, or a function that begins at once and returns the rest as a
        coroutine, which the engine awaits in a task that nobody cancels.

        Cancellation:
            Deferred until no thread touches the job's slots.
        """

    def abandon(self, job: Job) -> None:  # noqa: B027 - most jobs have no such audience
        """Tell whoever waits for a chunk of ``job``, other than its submitter, not to.

        Called when a job ends without having run, when its deadline passes, and when an
        exclusive action is to follow it. In any thread, never while :meth:`run` is past its
        last await; must not block. Nobody waits unless a route says otherwise.
        """


class Stamps(Protocol):
    """Where workers see what became of a RAM slot: the control block."""

    def publish(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Say that the bytes of these stamps are whole."""

    def poison(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Say that the bytes of these stamps will not come."""


class ToTier(Route):
    """RAM slots to a storage tier."""

    def __init__(self, memory: SlotMemory, tier: StorageTier) -> None:
        self._memory = memory
        self._tier = tier

    @override
    def run(self, job: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        return self._tier.begin_write(
            job.keys,
            job.destination_slots,
            _views(self._memory, job.source_slots),
            why=job.why,
        )


class FromTier(Route):
    """A storage tier to RAM slots, every byte verified by the tier.

    The job's payload is the stamp of each slot. What arrived is published and what did not is
    poisoned before the job's result is posted: a worker may wait for the chunk already.
    """

    def __init__(self, memory: SlotMemory, tier: StorageTier, stamps: Stamps) -> None:
        self._memory = memory
        self._tier = tier
        self._stamps = stamps

    @override
    def run(self, job: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        return self._finish(
            job,
            self._tier.begin_read(
                job.keys,
                job.source_slots,
                _views(self._memory, job.destination_slots),
                why=job.why,
            ),
        )

    async def _finish(
        self, job: Job, reading: Coroutine[Any, Any, SlotOutcomes]
    ) -> SlotOutcomes:
        try:
            moved = check_outcomes(await reading, len(job.source_slots))
        except BaseException:
            self.abandon(job)
            raise
        self._announce(job, moved.outcomes)
        return moved

    @override
    def abandon(self, job: Job) -> None:
        self._stamps.poison(job.destination_slots, job.payload)

    def _announce(self, job: Job, outcomes: Sequence[Outcome]) -> None:
        """Tell workers what became of each chunk, and the tier which slots were of use."""
        if outcomes.count(Outcome.DONE) == len(outcomes):
            self._stamps.publish(job.destination_slots, job.payload)
            self._tier.touch(job.source_slots)
            return
        whole = [outcome is Outcome.DONE for outcome in outcomes]
        lost = [not arrived for arrived in whole]
        slots, generations = job.destination_slots, job.payload
        self._stamps.publish(_those(slots, whole), _those(generations, whole))
        self._stamps.poison(_those(slots, lost), _those(generations, lost))
        self._tier.touch(_those(job.source_slots, whole))


def _those(numbers: Sequence[int], chosen: Sequence[bool]) -> list[int]:
    return list(compress(numbers, chosen))


def _views(memory: SlotMemory, slots: Sequence[int]) -> list[memoryview]:
    return [memory.slot(number) for number in slots]
