"""How chunks get from one kind of place to another."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, Final, NoReturn, Protocol

from typing_extensions import override

from kvtier.tiers.base import SlotOutcomes, StorageTier, check_outcomes
from kvtier.types import Job, JobId, Outcome

__all__ = ["FromTier", "Route", "SlotMemory", "Stamps", "ToTier", "all_of", "raising"]

_MOST_PARTS: Final = 4
_LEAST_PART_NBYTES: Final = 2 << 20
"""What a disk reads in about a millisecond: less is hardly worth a call of its own."""
_MOST_NBYTES_IN_PARTS: Final = 16 << 20
"""Of a longer job most is read by the time a part arrives, and its parts' calls were measured
to cost a sixth of the processor's time: 0.19 in place of 0.17 core-seconds per GiB."""


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
            [self._memory.slot(number) for number in job.source_slots],
            purpose=job.purpose,
        )


@dataclass(slots=True)
class _Announced:
    """The parts of a job that are over, and which of their chunks are whole.

    Attributes:
        parts: In the order in which they were announced.
        poisoned: How many of them were poisoned since, with all of the job.
    """

    parts: list[tuple[Job, Sequence[bool]]] = field(default_factory=list)
    poisoned: int = 0


class FromTier(Route):
    """A storage tier to RAM slots, every byte verified by the tier.

    The job's payload is the stamp of each slot. What arrived is published and what did not is
    poisoned before the job's result is posted: a worker may wait for the chunk already.

    A job of some MiB is read in a few parts that are published one by one, so that such a
    worker copies the first while the last are still being read. If nobody is to wait any more,
    the first are poisoned too; but they are whole, so in the end they are published again.
    """

    def __init__(self, memory: SlotMemory, tier: StorageTier, stamps: Stamps) -> None:
        self._memory = memory
        self._tier = tier
        self._stamps = stamps
        self._announced: dict[JobId, _Announced] = {}

    @override
    def run(self, job: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        chunks = len(job.source_slots)
        least = -(-_LEAST_PART_NBYTES // self._tier.slot_nbytes)
        step = max(-(-chunks // _MOST_PARTS), least)
        if chunks <= step or chunks * self._tier.slot_nbytes > _MOST_NBYTES_IN_PARTS:
            return self._finish(job, self._begin(job))
        parts = [_part_of(job, slice(at, at + step)) for at in range(0, chunks, step)]
        return self._join(job, [self._begin_part(part) for part in parts])

    def _begin(self, job: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        views = [self._memory.slot(number) for number in job.destination_slots]
        return self._tier.begin_read(job.keys, job.source_slots, views, purpose=job.purpose)

    def _begin_part(self, part: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        """Begin to read a part; never raises."""
        try:
            return self._finish(part, self._begin(part))
        except Exception as raised:  # noqa: BLE001 - the parts before it have begun
            self._poison(part)
            return raising(raised)

    async def _join(
        self, job: Job, parts: Sequence[Coroutine[Any, Any, SlotOutcomes]]
    ) -> SlotOutcomes:
        announced = self._announced[job.job_id] = _Announced()
        try:
            moved = await all_of(parts)
        finally:
            del self._announced[job.job_id]
        for part, whole in announced.parts[: announced.poisoned]:
            self._stamp(part, whole)
        return moved

    async def _finish(
        self, job: Job, reading: Coroutine[Any, Any, SlotOutcomes]
    ) -> SlotOutcomes:
        try:
            moved = check_outcomes(await reading, len(job.source_slots))
        except BaseException:
            self._poison(job)
            raise
        whole = [outcome is Outcome.DONE for outcome in moved.outcomes]
        self._stamp(job, whole)
        self._tier.touch(_those(job.source_slots, whole))
        if job.job_id in self._announced:
            self._announced[job.job_id].parts.append((job, whole))
        return moved

    @override
    def abandon(self, job: Job) -> None:
        self._poison(job)
        if job.job_id in self._announced:
            announced = self._announced[job.job_id]
            announced.poisoned = len(announced.parts)

    def _poison(self, job: Job) -> None:
        self._stamps.poison(job.destination_slots, job.payload)

    def _stamp(self, job: Job, whole: Sequence[bool]) -> None:
        """Tell workers which chunks are whole, and that the others will not come."""
        slots, generations = job.destination_slots, job.payload
        if all(whole):
            self._stamps.publish(slots, generations)
            return
        lost = [not arrived for arrived in whole]
        self._stamps.publish(_those(slots, whole), _those(generations, whole))
        self._stamps.poison(_those(slots, lost), _those(generations, lost))


def _part_of(job: Job, part: slice) -> Job:
    """Return some of the chunks of ``job`` as a job."""
    return job._replace(
        keys=job.keys[part],
        source_slots=job.source_slots[part],
        destination_slots=job.destination_slots[part],
        payload=job.payload[part],
    )


async def all_of(parts: Sequence[Coroutine[Any, Any, SlotOutcomes]]) -> SlotOutcomes:
    """Await all parts of a job, side by side; return what became of their chunks, in order.

    Raises:
        BaseException: The first, in that order, that a part raised; all have ended, for a
            thread may touch the slots of each.
    """
    tasks = [asyncio.create_task(_returning(part)) for part in parts]
    ended = [await task for task in tasks]
    moved: list[SlotOutcomes] = []
    for part in ended:
        if isinstance(part, BaseException):
            raise part
        moved.append(part)
    outcomes = list(chain.from_iterable(part.outcomes for part in moved))
    return SlotOutcomes(outcomes, next((part.error for part in moved if part.error), ""))


async def _returning(
    moving: Coroutine[Any, Any, SlotOutcomes],
) -> SlotOutcomes | BaseException:
    try:
        return await moving
    # In a task of its own an exit would end the event loop, and with it every other job.
    except BaseException as raised:  # noqa: BLE001 - raised again where the job ends
        return raised


async def raising(error: Exception) -> NoReturn:
    """Raise ``error`` to whoever awaits what could not begin."""
    raise error


def _those(numbers: Sequence[int], chosen: Sequence[bool]) -> list[int]:
    return list(compress(numbers, chosen))
