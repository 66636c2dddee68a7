"""Routes: how a transfer engine moves the chunks of one job between two tiers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from typing_extensions import override

from kvtier.errors import TierUnavailableError
from kvtier.tiers.base import KeyFinder, SlotOutcomes, StorageTier, check_outcomes
from kvtier.types import Job, JobId, Outcome

if TYPE_CHECKING:
    from kvtier.tiers.part_hashes import PartHashes

__all__ = [
    "AskTier",
    "FromTier",
    "Generations",
    "PartHashStore",
    "Route",
    "SlotMemory",
    "ToTier",
    "all_of",
    "part_of",
    "raise_later",
]

_MOST_PARTS: Final = 4
_LEAST_PART_NBYTES: Final = 2 << 20
"""Smallest number of bytes in a part of a split job. A disk reads 2 MiB in about a
millisecond."""
_MOST_NBYTES_IN_PARTS: Final = 16 << 20
"""Largest number of bytes of a job that is read in parts. Reading in parts took more processor
time: 0.19 instead of 0.17 core-seconds per GiB."""
_REUSED: Final = "a RAM slot was reused before its chunk was written"


class SlotMemory(Protocol):
    """Gives access to the bytes of RAM slots."""

    def slot(self, number: int) -> memoryview:
        """Return the writable bytes of a slot."""


class Route(ABC):
    """Moves the chunks of jobs. Each (source, destination) pair has one route."""

    @abstractmethod
    def run(self, job: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        """Move every chunk of ``job``; return the outcome of each chunk.

        This is a coroutine function, or a function that starts the move at once and returns a
        coroutine for the rest. The engine awaits the coroutine in a task that is never
        cancelled.

        Cancellation:
            Deferred until no thread touches the job's slots.
        """

    @abstractmethod
    def abandon(self, job: Job) -> None:
        """Release workers that wait for chunks of ``job``; must not block.

        Any thread may call this method: when a job ends before it started, at a job's deadline,
        and before an exclusive action. This method is never called after the last await of
        :meth:`run`.
        """


class Generations(Protocol):
    """The methods of the control block that set and check generations of RAM slots."""

    def publish(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Set the generations of ``slots``, because all bytes of the slots arrived."""

    def mark_lost(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Set the generations of ``slots``, and flag that their chunks will never arrive."""

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> Sequence[bool]:
        """Return for each slot whether it has the given generation in all ranks."""


class PartHashStore(Protocol):
    """Gives access to the part hashes of chunks; ranks verify GDS reads by these hashes."""

    def ram_part_hashes(self, slots: Sequence[int], generations: Sequence[int]) -> PartHashes:
        """Return the part hashes of the chunks in RAM slots, one row for each slot."""

    def keep_part_hashes(self, slots: Sequence[int], part_hashes: PartHashes) -> None:
        """Record the part hashes of the chunks that were written to ``slots`` of the tier."""


class ToTier(Route):
    """Writes RAM slots to a storage tier.

    The job's payload has the generation of each RAM slot. The job pins its slots, so nothing
    should overwrite them. As a safeguard against a lost pin, the generations are checked before
    and after the write. A slot with another generation holds another chunk. Then the job's
    chunk counts as overwritten, and the tier forgets the written bytes.

    Args:
        memory: The RAM slots.
        tier: The tier.
        generations: Generations of the RAM slots.
        part_hashes: Keeps the part hashes of written chunks; None if GDS reads are not used.
    """

    def __init__(
        self,
        memory: SlotMemory,
        tier: StorageTier,
        generations: Generations,
        part_hashes: PartHashStore | None = None,
    ) -> None:
        self._memory = memory
        self._tier = tier
        self._generations = generations
        self._part_hashes = part_hashes

    @override
    def run(self, job: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        intact = self._intact(job)
        if all(intact):
            return self._finish(job, self._begin(job))
        return self._write_intact(job, intact)

    def _intact(self, job: Job) -> Sequence[bool]:
        """Return for each chunk whether its RAM slot has the job's generation."""
        return self._generations.stored(job.source_slots, job.payload)

    def _begin(self, job: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        views = [self._memory.slot(number) for number in job.source_slots]
        return self._tier.begin_write(
            job.keys, job.destination_slots, views, purpose=job.purpose
        )

    async def _finish(
        self, job: Job, writing: Coroutine[Any, Any, SlotOutcomes]
    ) -> SlotOutcomes:
        """Await the write; make the tier forget chunks whose RAM slot was reused meanwhile."""
        chunks = len(job.source_slots)
        moved = check_outcomes(await writing, chunks, mover=f"tier {job.destination}")
        keeps = self._part_hashes
        # Get the hashes before the check, so that the check covers the hashes as well.
        hashes = keeps.ram_part_hashes(job.source_slots, job.payload) if keeps else None
        intact = self._intact(job)
        if keeps is not None and hashes is not None:
            whole = [
                outcome is Outcome.DONE and is_intact
                for outcome, is_intact in zip(moved.outcomes, intact, strict=True)
            ]
            keeps.keep_part_hashes(_select(job.destination_slots, whole), hashes[whole])
        if all(intact):
            return moved
        reused = [not is_intact for is_intact in intact]
        self._tier.forget(_select(job.destination_slots, reused))
        outcomes = [
            outcome if is_intact else Outcome.OVERWRITTEN
            for outcome, is_intact in zip(moved.outcomes, intact, strict=True)
        ]
        return SlotOutcomes(outcomes, _REUSED)

    async def _write_intact(self, job: Job, intact: Sequence[bool]) -> SlotOutcomes:
        """Write only the chunks that ``intact`` marks."""
        written = SlotOutcomes(())
        if any(intact):
            part = job._replace(
                keys=list(compress(job.keys, intact)),
                source_slots=_select(job.source_slots, intact),
                destination_slots=_select(job.destination_slots, intact),
                payload=_select(job.payload, intact),
            )
            written = await self._finish(part, self._begin(part))
        outcomes = iter(written.outcomes)
        every = [next(outcomes) if is_intact else Outcome.OVERWRITTEN for is_intact in intact]
        return SlotOutcomes(every, _REUSED)

    @override
    def abandon(self, job: Job) -> None:
        """Do nothing, because no worker waits for chunks on their way to a storage tier."""


@dataclass(slots=True)
class _EndedParts:
    """The parts of a running job that have been read.

    Attributes:
        parts: The parts in the order in which they ended, each with a success flag per chunk.
        lost: Number of ``parts`` that :meth:`FromTier.abandon` marked lost later.
    """

    parts: list[tuple[Job, Sequence[bool]]] = field(default_factory=list)
    lost: int = 0


class FromTier(Route):
    """Reads chunks of a storage tier into RAM slots. The tier verifies every byte.

    The job's payload has the generation of each slot. Workers may already wait for the chunks.
    So whole chunks are published, and lost chunks are marked, before the job's result is
    posted.

    A job of some MiB is read in a few parts, which are published one by one. So a worker copies
    the first parts while the last ones are still being read. :meth:`abandon` marks all parts
    lost; the whole chunks are published again at the end.
    """

    def __init__(self, memory: SlotMemory, tier: StorageTier, generations: Generations) -> None:
        self._memory = memory
        self._tier = tier
        self._generations = generations
        self._ended: dict[JobId, _EndedParts] = {}

    @override
    def run(self, job: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        chunks = len(job.source_slots)
        least = -(-_LEAST_PART_NBYTES // self._tier.slot_nbytes)
        step = max(-(-chunks // _MOST_PARTS), least)
        if chunks <= step or chunks * self._tier.slot_nbytes > _MOST_NBYTES_IN_PARTS:
            return self._finish(job, self._begin(job))
        parts = [part_of(job, slice(at, at + step)) for at in range(0, chunks, step)]
        return self._join(job, [self._begin_part(part) for part in parts])

    def _begin(self, job: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        views = [self._memory.slot(number) for number in job.destination_slots]
        return self._tier.begin_read(job.keys, job.source_slots, views, purpose=job.purpose)

    def _begin_part(self, part: Job) -> Coroutine[Any, Any, SlotOutcomes]:
        """Start to read a part. An error is raised only when the result is awaited."""
        try:
            return self._finish(part, self._begin(part))
        except Exception as raised:  # noqa: BLE001 - earlier parts have started
            self._mark_lost(part)
            return raise_later(raised)

    async def _join(
        self, job: Job, parts: Sequence[Coroutine[Any, Any, SlotOutcomes]]
    ) -> SlotOutcomes:
        ended = self._ended[job.job_id] = _EndedParts()
        try:
            moved = await all_of(parts)
        finally:
            del self._ended[job.job_id]
        for part, whole in ended.parts[: ended.lost]:
            self._publish(part, whole)
        return moved

    async def _finish(
        self, job: Job, reading: Coroutine[Any, Any, SlotOutcomes]
    ) -> SlotOutcomes:
        try:
            chunks = len(job.source_slots)
            moved = check_outcomes(await reading, chunks, mover=f"tier {job.source}")
        except BaseException:
            self._mark_lost(job)
            raise
        whole = [outcome is Outcome.DONE for outcome in moved.outcomes]
        self._publish(job, whole)
        self._tier.touch(_select(job.source_slots, whole))
        if job.job_id in self._ended:
            self._ended[job.job_id].parts.append((job, whole))
        return moved

    @override
    def abandon(self, job: Job) -> None:
        self._mark_lost(job)
        if job.job_id in self._ended:
            ended = self._ended[job.job_id]
            ended.lost = len(ended.parts)

    def _mark_lost(self, job: Job) -> None:
        self._generations.mark_lost(job.destination_slots, job.payload)

    def _publish(self, job: Job, whole: Sequence[bool]) -> None:
        """Publish the slots of arrived chunks, and mark all other slots as lost."""
        slots, generations = job.destination_slots, job.payload
        if all(whole):
            self._generations.publish(slots, generations)
            return
        lost = [not arrived for arrived in whole]
        self._generations.publish(_select(slots, whole), _select(generations, whole))
        self._generations.mark_lost(_select(slots, lost), _select(generations, lost))


class AskTier(Route):
    """Asks a shared tier which chunks it has.

    Such a job uses no slots. Both sequences of slots have a meaningless number for each key.
    """

    def __init__(self, tier: KeyFinder) -> None:
        self._tier = tier

    @override
    async def run(self, job: Job) -> SlotOutcomes:
        try:
            return await self._tier.find(job.keys, job.payload)
        except TierUnavailableError as error:
            return SlotOutcomes([Outcome.FAILED] * len(job.keys), str(error))

    @override
    def abandon(self, job: Job) -> None:
        """Do nothing, because no worker waits for the answer."""


def part_of(job: Job, part: slice) -> Job:
    """Return a copy of ``job`` that moves only the chunks in the slice ``part``."""
    return job._replace(
        keys=job.keys[part],
        source_slots=job.source_slots[part],
        destination_slots=job.destination_slots[part],
        payload=None if job.payload is None else job.payload[part],
    )


async def all_of(parts: Sequence[Coroutine[Any, Any, SlotOutcomes]]) -> SlotOutcomes:
    """Await all parts of a job concurrently; return the outcomes of their chunks in order.

    Raises:
        BaseException: The error of the first failed part. It is raised after all parts have
            ended, because threads may use the slots of running parts.
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
    # A SystemExit raised in a task would end the event loop and with it every other job.
    except BaseException as raised:  # noqa: BLE001 - raised again where the job ends
        return raised


async def raise_later(error: Exception) -> NoReturn:
    """Return a coroutine that raises ``error`` when it is awaited."""
    raise error


def _select(numbers: Sequence[int], chosen: Sequence[bool]) -> list[int]:
    return list(compress(numbers, chosen))
