"""Moves chunks from one slower tier to another through a bounce buffer in RAM.

A tier's host moves chunks only to and from the host region. So a chunk that moves between two
storage tiers is first read into a bounce slot and verified, then written from there. Bounce
slots are separate from the RAM tier. So such a move evicts no chunk, and succeeds even if the
RAM tier is full.

The buffer has two halves. A job is split into parts that fit a half, so one part is written
while the next is read. A part uses a half until neither tier accesses the half any more. A
hanging disk therefore blocks only moves between storage tiers, for which no request waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from typing_extensions import override

from kvtier.config import KvtierConfig
from kvtier.tiers.base import SlotOutcomes, StorageTier, check_outcomes
from kvtier.transfer.routes import Route, SlotMemory, all_of, part_of
from kvtier.types import Job, JobId, Outcome

__all__ = ["BetweenTiers", "BounceBuffer", "bounce_slots_for"]


def bounce_slots_for(config: KvtierConfig, slot_nbytes: int) -> int:
    """Return how many bounce slots the tiers of ``config`` need.

    Returns:
        The number of slots. 0 if no chunk moves between storage tiers: there is at most one
        storage tier, or RAM writes through to all storage tiers.
    """
    if config.placement.writes_through or len(config.tiers) <= 2:
        return 0
    return 2 * max(1, config.transfer.piece_bytes // slot_nbytes)


class BounceBuffer:
    """The bounce slots, divided into two halves; one copy at a time uses each half.

    Only one event loop may use a buffer.

    Args:
        memory: The memory that has the slots.
        slots: Slot numbers; at least two.
    """

    def __init__(self, memory: SlotMemory, slots: Sequence[int]) -> None:
        self.half_slots = len(slots) // 2
        self._memory = memory
        self._free: asyncio.Queue[Sequence[int]] = asyncio.Queue()
        for start in (0, self.half_slots):
            self._free.put_nowait(slots[start : start + self.half_slots])

    @asynccontextmanager
    async def half(self, chunks: int) -> AsyncIterator[Sequence[memoryview]]:
        """Wait until a half is free, then yield the memory of its first ``chunks`` slots."""
        half = await self._free.get()
        try:
            yield [self._memory.slot(number) for number in half[:chunks]]
        finally:
            self._free.put_nowait(half)


class BetweenTiers(Route):
    """Moves chunks from one storage tier to another; the source tier verifies every byte.

    After a job is abandoned or a tier raises, the route starts no further read or write for the
    job. The reason is that a reset may follow, and no chunk may be written after a reset.

    Args:
        source: The tier to read from.
        destination: The tier to write to.
        buffer: The bounce buffer.
    """

    def __init__(
        self, source: StorageTier, destination: StorageTier, buffer: BounceBuffer
    ) -> None:
        self._source = source
        self._destination = destination
        self._buffer = buffer
        self._running: set[JobId] = set()

    @override
    async def run(self, job: Job) -> SlotOutcomes:
        self._running.add(job.job_id)
        try:
            return await all_of([self._move(part) for part in self._parts(job)])
        finally:
            self._running.discard(job.job_id)

    @override
    def abandon(self, job: Job) -> None:
        self._running.discard(job.job_id)

    def _parts(self, job: Job) -> list[Job]:
        """Split ``job`` into smaller jobs that fit a half of the buffer."""
        step = self._buffer.half_slots
        return [part_of(job, slice(at, at + step)) for at in range(0, len(job.keys), step)]

    async def _move(self, part: Job) -> SlotOutcomes:
        """Wait for a free half of the buffer, then move the chunks of ``part`` through it."""
        async with self._buffer.half(len(part.keys)) as views:
            try:
                return await self._copy(part, views)
            except BaseException:
                self.abandon(part)  # before the next part gets the half
                raise

    async def _copy(self, part: Job, views: Sequence[memoryview]) -> SlotOutcomes:
        """Read the chunks of ``part`` into ``views`` and write the successfully read chunks."""
        if part.job_id not in self._running:
            return _cancelled(part)
        reading = self._source.read(part.keys, part.source_slots, views, purpose=part.purpose)
        read = check_outcomes(await reading, len(part.keys), mover=f"tier {part.source}")
        if part.job_id not in self._running:
            return _cancelled(part)
        whole = [at for at, what in enumerate(read.outcomes) if what is Outcome.DONE]
        if not whole:
            return read
        writing = self._destination.write(
            [part.keys[at] for at in whole],
            [part.destination_slots[at] for at in whole],
            [views[at] for at in whole],
            purpose=part.purpose,
        )
        mover = f"tier {part.destination}"
        written = check_outcomes(await writing, len(whole), mover=mover)
        outcomes = list(read.outcomes)
        for at, what in zip(whole, written.outcomes, strict=True):
            outcomes[at] = what
        return SlotOutcomes(outcomes, read.error or written.error)


def _cancelled(part: Job) -> SlotOutcomes:
    return SlotOutcomes([Outcome.CANCELLED] * len(part.keys), "no longer needed")
