"""From one slower tier to another, through memory that no chunk lives in.

Storage tiers know nothing of each other, and a tier in a process of its own moves chunks only
to and from the memory it shares with the engine. So a chunk that leaves one for the next is
read, and verified, into a slot that is no part of the RAM tier, and written from there. The
manager counts no RAM for it, nothing has to leave RAM for it, and it cannot fail for want of
room there.

The relay has two lanes of one I/O piece each: while one is written the other is read. A job
takes a lane for each of its pieces, in turn with all other jobs, and a lane is free again when
neither tier touches it any more. A disk that hangs therefore holds up what goes through the
relay, which is never what a request waits for, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from typing_extensions import override

from kvtier.config import KvtierConfig
from kvtier.tiers.base import SlotOutcomes, StorageTier, check_outcomes
from kvtier.transfer.routes import Route, SlotMemory, all_of
from kvtier.types import Job, JobId, Outcome

__all__ = ["BetweenTiers", "Relay", "relay_slots"]

_LANES: Final = 2


def relay_slots(config: KvtierConfig, slot_nbytes: int) -> int:
    """Return how many slots of memory the tiers of ``config`` need between each other.

    Returns:
        0 where no chunk goes from one slower tier to another: where there is but one, and where
        RAM writes through to each of them.
    """
    placement = config.placement
    through = placement.policy == "ladder" and placement.write == "through"
    if through or len(config.tiers) <= 2:
        return 0
    return _LANES * max(1, config.transfer.piece_bytes // slot_nbytes)


class Relay:
    """The memory, shared by all pairs of tiers of an engine. For one event loop.

    Args:
        memory: Where its slots are.
        slots: Their numbers; at least one for each lane.
    """

    def __init__(self, memory: SlotMemory, slots: Sequence[int]) -> None:
        self.lane_slots = len(slots) // _LANES
        self._memory = memory
        self._free: asyncio.Queue[Sequence[int]] = asyncio.Queue()
        for lane in range(_LANES):
            start = lane * self.lane_slots
            self._free.put_nowait(slots[start : start + self.lane_slots])

    @asynccontextmanager
    async def lane(self, chunks: int) -> AsyncIterator[Sequence[memoryview]]:
        """Yield memory for some chunks, of which a lane has room, once a lane is free."""
        lane = await self._free.get()
        try:
            yield [self._memory.slot(number) for number in lane[:chunks]]
        finally:
            self._free.put_nowait(lane)


class _Part(NamedTuple):
    """Some chunks of a job."""

    keys: Sequence[bytes]
    source_slots: Sequence[int]
    destination_slots: Sequence[int]


class BetweenTiers(Route):
    """One storage tier to another, every byte verified as it leaves the first.

    A job that is abandoned is not read any further, and of what was read nothing more is
    written: when a reset is to follow, it would be there after it. Nor is one of which a tier
    raised something, as it was not to: it has failed as a whole.

    Args:
        source: The tier that chunks leave.
        destination: The tier they go to.
        relay: What they go through.
    """

    def __init__(self, source: StorageTier, destination: StorageTier, relay: Relay) -> None:
        self._source = source
        self._destination = destination
        self._relay = relay
        self._running: set[JobId] = set()

    @override
    async def run(self, job: Job) -> SlotOutcomes:
        self._running.add(job.job_id)
        try:
            return await all_of([self._move(job, part) for part in self._parts(job)])
        finally:
            self._running.discard(job.job_id)

    @override
    def abandon(self, job: Job) -> None:
        self._running.discard(job.job_id)

    def _parts(self, job: Job) -> list[_Part]:
        """Cut ``job`` into what a lane has room for."""
        step = self._relay.lane_slots
        return [
            _Part(
                job.keys[start : start + step],
                job.source_slots[start : start + step],
                job.destination_slots[start : start + step],
            )
            for start in range(0, len(job.keys), step)
        ]

    async def _move(self, job: Job, part: _Part) -> SlotOutcomes:
        """Take one part through a lane."""
        async with self._relay.lane(len(part.keys)) as views:
            try:
                return await self._carry(job, part, views)
            except BaseException:
                self.abandon(job)  # before the next part gets the lane
                raise

    async def _carry(self, job: Job, part: _Part, views: Sequence[memoryview]) -> SlotOutcomes:
        """Read one part into ``views`` and write what is whole from there."""
        if job.job_id not in self._running:
            return _given_up(part)
        reading = self._source.read(part.keys, part.source_slots, views, purpose=job.purpose)
        read = check_outcomes(await reading, len(part.keys))
        if job.job_id not in self._running:
            return _given_up(part)
        whole = [at for at, what in enumerate(read.outcomes) if what is Outcome.DONE]
        if not whole:
            return read
        writing = self._destination.write(
            [part.keys[at] for at in whole],
            [part.destination_slots[at] for at in whole],
            [views[at] for at in whole],
            purpose=job.purpose,
        )
        written = check_outcomes(await writing, len(whole))
        outcomes = list(read.outcomes)
        for at, what in zip(whole, written.outcomes, strict=True):
            outcomes[at] = what
        return SlotOutcomes(outcomes, read.error or written.error)


def _given_up(part: _Part) -> SlotOutcomes:
    return SlotOutcomes([Outcome.CANCELLED] * len(part.keys), "nobody needs it any more")
