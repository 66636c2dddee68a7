"""The worker-side route that reads chunks from an NVMe tier's slot file into KV blocks.

Such reads are called *GDS reads*. A load may also have chunks in RAM slots. The route for RAM
slots loads these chunks at the same time.

The chunks are read in the order of their slots in the file, one staging buffer after the other.
While one buffer is filled, the other is verified and copied to blocks. Only an empty buffer is
filled again. All loads share the buffers, so one load runs at a time.

**If a read hangs**, its load fails at the deadline, and so do later loads. The rank then
reports that it cannot do GDS reads any more, and the scheduler side plans no more GDS reads.
The late read may still write to its buffer. All reads use one thread, so the next read starts
after the late read has ended, and the next load awaits both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Final, NamedTuple

from typing_extensions import override

from kvtier.errors import ClosedError, KvtierError
from kvtier.logs import get_logger
from kvtier.memory import ControlBlock
from kvtier.os.iopool import IoPool
from kvtier.tiers.base import SlotOutcomes
from kvtier.transfer.device import DeviceLoadRoute, LoadPayload
from kvtier.transfer.routes import Route, all_of
from kvtier.types import GdsReads, Job, Outcome

if TYPE_CHECKING:
    from kvtier.memory.gds_staging import GdsStaging

__all__ = ["GdsLoadRoute"]

logger = get_logger(__name__)

_MOST_FAILURES: Final = 5
"""Number of consecutive loads with failed reads after which a rank stops GDS reads."""
_LATE: Final = "the deadline of a GDS read passed"


class _Batch(NamedTuple):
    """Chunks that fit a staging buffer, in the order of their slots.

    Attributes:
        indices: Indices of the chunks in the load's GDS reads.
        slots: Slots of the chunks in the tier.
    """

    indices: Sequence[int]
    slots: Sequence[int]


@dataclass(slots=True)
class _Load:
    """The GDS reads of one job, and their results so far.

    Attributes:
        payload: The job's payload.
        gds: The chunks to read.
        groups: KV cache group of each chunk.
        hashes: Hash of this rank's part of each chunk.
        deadline_s: Time at which the load fails.
        outcomes: Outcome of each chunk.
        error: The first error.
    """

    payload: LoadPayload
    gds: GdsReads
    groups: Sequence[int]
    hashes: Sequence[int]
    deadline_s: float
    outcomes: list[Outcome]
    error: str = ""

    def record(self, indices: Sequence[int], outcome: Outcome, error: str = "") -> None:
        """Record the outcome of the chunks at ``indices``, and the first error."""
        for index in indices:
            self.outcomes[index] = outcome
        if indices:
            self.error = self.error or error


class GdsLoadRoute(Route):
    """Loads chunks into KV blocks: those in ``gds`` from a tier's slot file, others from RAM.

    Args:
        staging: Reads chunks into staging buffers, verifies them and copies them to blocks.
        ram: Loads the chunks in RAM slots.
        control: Gets the report that this rank cannot do GDS reads any more.
        rank: This rank.
        reader: A pool with one thread, for reads of the slot file.
        pool: The thread pool of ``ram``, for the other blocking calls.
    """

    def __init__(
        self,
        staging: GdsStaging,
        ram: DeviceLoadRoute,
        control: ControlBlock,
        *,
        rank: int,
        reader: IoPool,
        pool: IoPool,
    ) -> None:
        self._staging = staging
        self._ram = ram
        self._control = control
        self._rank = rank
        self._reader = reader
        self._pool = pool
        self._turn = asyncio.Lock()
        self._late: list[asyncio.Task[list[str]]] = []  # reads that outlasted their loads
        self._waits = True
        self._failures = 0

    def wait_no_more(self) -> None:
        """Start no further read, so that all unread chunks fail."""
        self._waits = False

    @override
    def abandon(self, job: Job) -> None:
        """Do nothing, because no other worker waits for this rank's reads."""

    @override
    async def run(self, job: Job) -> SlotOutcomes:
        payload: LoadPayload = job.payload
        gds = payload.gds
        assert gds is not None
        is_gds = [False] * len(payload.plan.slots)
        for position in gds.positions:
            is_gds[position] = True
        is_ram = [not each for each in is_gds]
        moved = await all_of([self._load_ram(job, is_ram), self._load_gds(payload, gds)])
        outcomes = [Outcome.CANCELLED] * len(is_gds)
        positions = [*compress(range(len(is_ram)), is_ram), *gds.positions]
        for position, outcome in zip(positions, moved.outcomes, strict=True):
            outcomes[position] = outcome
        return SlotOutcomes(outcomes, moved.error)

    async def _load_ram(self, job: Job, is_ram: Sequence[bool]) -> SlotOutcomes:
        """Load the chunks that are in RAM slots."""
        payload: LoadPayload = job.payload
        slots = list(compress(payload.plan.slots, is_ram))
        if not slots:
            return SlotOutcomes(())
        part = replace(
            payload,
            plan=payload.plan.restricted_to(slots),
            generations=list(compress(payload.generations, is_ram)),
        )
        return await self._ram.run(job._replace(payload=part))

    async def _load_gds(self, payload: LoadPayload, gds: GdsReads) -> SlotOutcomes:
        """Load the chunks that are read from the tier."""
        load = _Load(
            payload,
            gds,
            _groups(payload, gds),
            gds.hashes_of(self._staging.part),
            time.monotonic() + payload.wait_s,
            [Outcome.EXPIRED] * len(gds.slots),
        )
        try:
            async with asyncio.timeout(payload.wait_s):
                await self._turn.acquire()
        except TimeoutError:
            return SlotOutcomes(load.outcomes, _LATE)
        try:
            await self._run(load)
        finally:
            self._turn.release()
        self._count_failures(load)
        late = _LATE if Outcome.EXPIRED in load.outcomes else ""
        return SlotOutcomes(load.outcomes, load.error or late)

    async def _run(self, load: _Load) -> None:
        """Read the batches until the deadline, and copy their chunks to blocks."""
        emptying: list[asyncio.Task[None] | None] = [None] * self._staging.buffer_count
        try:
            for number, batch in enumerate(self._batches(load.gds.slots)):
                buffer = number % self._staging.buffer_count
                if (previous := emptying[buffer]) is not None:
                    await previous
                staged = self._staging.staged_slots(buffer)[: len(batch.slots)]
                errors = await self._read_in_time(load, batch, staged)
                if errors is None:
                    break
                emptying[buffer] = asyncio.create_task(self._empty(load, batch, staged, errors))
        finally:  # no copy may outlast the load
            for task in filter(None, emptying):
                await task

    async def _read_in_time(
        self, load: _Load, batch: _Batch, staged: range
    ) -> Sequence[str] | None:
        """Read a batch; return the error of each chunk, or None after the load's deadline."""
        left_s = load.deadline_s - time.monotonic()
        if left_s <= 0 or not self._waits:
            return None
        reading = asyncio.create_task(self._read(load, batch, staged))
        await asyncio.wait((*self._late, reading), timeout=left_s)
        if reading.done():
            self._late.clear()  # they ended before, on the same thread
            return reading.result()
        self._late.append(reading)
        self._withdraw("a read has hung until its deadline")
        return None

    def _batches(self, slots: Sequence[int]) -> list[_Batch]:
        """Divide the chunks in ``slots`` into batches, in the order of their slots."""
        order = sorted(range(len(slots)), key=slots.__getitem__)
        step = self._staging.slots_per_buffer
        parts = [order[at : at + step] for at in range(0, len(order), step)]
        return [_Batch(part, [slots[index] for index in part]) for part in parts]

    async def _read(self, load: _Load, batch: _Batch, staged: range) -> list[str]:
        """Read a batch; return the error of each chunk."""
        groups = [load.groups[index] for index in batch.indices]
        try:
            return await self._reader.run(
                lambda: self._staging.read(staged, load.gds.file, batch.slots, groups),
                priority=0,
            )
        except ClosedError:
            return []
        except (KvtierError, OSError, RuntimeError) as error:
            self._withdraw(str(error))
            load.record(batch.indices, Outcome.REFUSED, str(error))
            return []

    async def _empty(
        self, load: _Load, batch: _Batch, staged: range, errors: Sequence[str]
    ) -> None:
        """Verify a staging buffer, copy its correct chunks to their blocks; never raise."""
        if not errors:
            return
        try:
            await self._pool.run(lambda: self._deliver(load, batch, staged, errors), priority=0)
        except Exception as error:
            logger.exception("a batch of GDS reads was not copied to its blocks")
            load.record(batch.indices, Outcome.REFUSED, f"{type(error).__name__}: {error}")

    def _deliver(
        self, load: _Load, batch: _Batch, staged: range, errors: Sequence[str]
    ) -> None:
        """Verify a batch in its staging slots, and copy its correct chunks to their blocks."""
        groups = [load.groups[index] for index in batch.indices]
        expected = [load.hashes[index] for index in batch.indices]
        verified = self._staging.verify(staged, groups, expected)
        whole = [good and not error for good, error in zip(verified, errors, strict=True)]
        if any(whole):
            indices = list(compress(batch.indices, whole))
            plan = load.payload.plan
            slots = [plan.slots[load.gds.positions[index]] for index in indices]
            part = plan.restricted_to(slots).with_slots(list(compress(staged, whole)))
            self._staging.copy(part, after=load.payload.after)
            load.record(indices, Outcome.DONE)
        _record_failures(load, batch, errors, verified)

    def _count_failures(self, load: _Load) -> None:
        self._failures = self._failures + 1 if Outcome.FAILED in load.outcomes else 0
        if self._failures == _MOST_FAILURES:
            self._withdraw(f"{_MOST_FAILURES} loads in a row had failed reads")

    def _withdraw(self, reason: str) -> None:
        """Report that this rank cannot do GDS reads any more, and log the reason."""
        logger.warning("no GDS reads any more, chunks are loaded through RAM: %s", reason)
        self._control.withdraw_gds(self._rank)


def _record_failures(
    load: _Load, batch: _Batch, errors: Sequence[str], verified: Sequence[bool]
) -> None:
    """Record the chunks of a batch that were not read or have wrong bytes."""
    for index, slot, error, good in zip(*batch, errors, verified, strict=True):
        if error:
            load.record([index], Outcome.FAILED, f"slot {slot}: {error}")
        elif not good:
            load.record([index], Outcome.CORRUPT, f"slot {slot}: hash mismatch")


def _groups(payload: LoadPayload, gds: GdsReads) -> list[int]:
    """Return the KV cache group of each chunk that is read from the tier."""
    indices = {payload.plan.slots[at]: index for index, at in enumerate(gds.positions)}
    groups = [0] * len(indices)
    for copy in payload.plan.groups:
        for slot in set(copy.slots.tolist()).intersection(indices):
            groups[indices[slot]] = copy.group
    return groups
