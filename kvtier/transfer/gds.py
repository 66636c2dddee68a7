"""The worker-side route that reads chunks from an NVMe tier's slot file into KV blocks.

Such reads are called *GDS reads*. A load may also have chunks in RAM slots. The route for RAM
slots loads these chunks at the same time.

The chunks are read in the order of their slots in the file, one staging buffer after the other.
While one buffer is filled, the other is verified and copied to blocks. Only an empty buffer is
filled again. All loads share the buffers, so one load runs at a time.

**If a read hangs**, its load fails at the deadline, and so do later loads. The rank then
reports that it cannot do GDS reads any more, and the scheduler side plans no more GDS reads.
The late read may still write to its buffer. All reads use one thread, so the next read starts
after the late read has ended.
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
from kvtier.transfer.device import DeviceLoad, LoadRequest
from kvtier.transfer.routes import Route, all_of
from kvtier.types import GdsReads, Job, Outcome

if TYPE_CHECKING:
    from kvtier.memory.gds import GdsLoader

__all__ = ["GdsLoad"]

logger = get_logger(__name__)

_MOST_FAILURES: Final = 5
"""Number of consecutive loads with failed reads after which a rank stops GDS reads."""
_LATE: Final = "the deadline of a GDS read passed"


class _Piece(NamedTuple):
    """Chunks that fit a staging buffer, in the order of their slots.

    Attributes:
        places: Positions of the chunks in the request's GDS reads.
        slots: Slots of the chunks in the tier.
    """

    places: Sequence[int]
    slots: Sequence[int]


@dataclass(slots=True)
class _Load:
    """The GDS reads of one job, and their results so far.

    Attributes:
        request: The load.
        gds: The chunks to read.
        groups: KV cache group of each chunk.
        hashes: Hash of this rank's part of each chunk.
        deadline_s: Time at which the load fails.
        outcomes: Outcome of each chunk.
        error: The first error.
    """

    request: LoadRequest
    gds: GdsReads
    groups: Sequence[int]
    hashes: Sequence[int]
    deadline_s: float
    outcomes: list[Outcome]
    error: str = ""

    def record(self, places: Sequence[int], outcome: Outcome, error: str = "") -> None:
        """Record the outcome of the chunks at the positions ``places``, and the first error."""
        for place in places:
            self.outcomes[place] = outcome
        if places:
            self.error = self.error or error


class GdsLoad(Route):
    """Reads the chunks in a load's ``gds`` from a tier's slot file into KV blocks.

    Args:
        loader: Reads chunks into staging buffers, verifies them and copies them to blocks.
        ram: Loads the chunks in RAM slots.
        control: Gets the report that this rank cannot do GDS reads any more.
        rank: This rank.
        reader: A pool with one thread, for reads of the slot file.
        pool: The thread pool of ``ram``, for the other blocking calls.
    """

    def __init__(
        self,
        loader: GdsLoader,
        ram: DeviceLoad,
        control: ControlBlock,
        *,
        rank: int,
        reader: IoPool,
        pool: IoPool,
    ) -> None:
        self._loader = loader
        self._ram = ram
        self._control = control
        self._rank = rank
        self._reader = reader
        self._pool = pool
        self._turn = asyncio.Lock()
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
        request: LoadRequest = job.payload
        gds = request.gds
        assert gds is not None
        is_gds = [False] * len(request.plan.slots)
        for position in gds.positions:
            is_gds[position] = True
        is_ram = [not each for each in is_gds]
        moved = await all_of([self._load_ram(job, is_ram), self._load_gds(request, gds)])
        outcomes = [Outcome.CANCELLED] * len(is_gds)
        positions = [*compress(range(len(is_ram)), is_ram), *gds.positions]
        for position, outcome in zip(positions, moved.outcomes, strict=True):
            outcomes[position] = outcome
        return SlotOutcomes(outcomes, moved.error)

    async def _load_ram(self, job: Job, is_ram: Sequence[bool]) -> SlotOutcomes:
        """Load the chunks that are in RAM slots."""
        request: LoadRequest = job.payload
        slots = list(compress(request.plan.slots, is_ram))
        if not slots:
            return SlotOutcomes(())
        part = replace(
            request,
            plan=request.plan.restricted_to(slots),
            generations=list(compress(request.generations, is_ram)),
        )
        return await self._ram.run(job._replace(payload=part))

    async def _load_gds(self, request: LoadRequest, gds: GdsReads) -> SlotOutcomes:
        """Load the chunks that are read from the tier."""
        load = _Load(
            request,
            gds,
            _groups(request, gds),
            gds.hashes_of(self._loader.part),
            time.monotonic() + request.wait_s,
            [Outcome.EXPIRED] * len(gds.slots),
        )
        try:
            async with asyncio.timeout(request.wait_s):
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
        """Read all pieces, and wait until the chunks are copied to blocks."""
        emptying: list[asyncio.Task[None] | None] = [None] * self._loader.buffers
        try:
            for number, piece in enumerate(self._pieces(load)):
                buffer = number % self._loader.buffers
                if (previous := emptying[buffer]) is not None:
                    await previous
                left_s = load.deadline_s - time.monotonic()
                if left_s <= 0 or not self._waits:
                    break
                staged = self._loader.staged_slots(buffer)[: len(piece.slots)]
                reading = asyncio.create_task(self._read(load, piece, staged))
                await asyncio.wait((reading,), timeout=left_s)
                if not reading.done():
                    self._withdraw("a read has hung until its deadline")
                    break
                errors = reading.result()
                emptying[buffer] = asyncio.create_task(self._empty(load, piece, staged, errors))
        finally:
            for task in emptying:
                if task is not None:
                    await task

    def _pieces(self, load: _Load) -> list[_Piece]:
        gds = load.gds
        order = sorted(range(len(gds.slots)), key=gds.slots.__getitem__)
        step = self._loader.slots_per_buffer
        parts = [order[at : at + step] for at in range(0, len(order), step)]
        return [_Piece(part, [gds.slots[place] for place in part]) for part in parts]

    async def _read(self, load: _Load, piece: _Piece, staged: range) -> list[str]:
        """Read a piece; return the error of each chunk."""
        try:
            return await self._reader.run(
                lambda: self._loader.read(
                    staged,
                    load.gds.file,
                    piece.slots,
                    [load.groups[place] for place in piece.places],
                ),
                priority=0,
            )
        except ClosedError:
            return []
        except (KvtierError, OSError, RuntimeError) as error:
            self._withdraw(str(error))
            load.record(piece.places, Outcome.REFUSED, str(error))
            return []

    async def _empty(
        self, load: _Load, piece: _Piece, staged: range, errors: Sequence[str]
    ) -> None:
        """Verify a staging buffer, and copy its correct chunks to their blocks."""
        if not errors:
            return
        try:
            await self._pool.run(lambda: self._deliver(load, piece, staged, errors), priority=0)
        except (KvtierError, RuntimeError) as error:
            load.record(piece.places, Outcome.REFUSED, f"{type(error).__name__}: {error}")

    def _deliver(
        self, load: _Load, piece: _Piece, staged: range, errors: Sequence[str]
    ) -> None:
        gds = load.gds
        groups = [load.groups[place] for place in piece.places]
        expected = [load.hashes[place] for place in piece.places]
        verified = self._loader.verify(staged, groups, expected)
        whole = [good and not error for good, error in zip(verified, errors, strict=True)]
        if any(whole):
            places = list(compress(piece.places, whole))
            plan = load.request.plan
            slots = [plan.slots[gds.positions[place]] for place in places]
            part = plan.restricted_to(slots).with_slots(list(compress(staged, whole)))
            self._loader.copy(part, after=load.request.after)
            load.record(places, Outcome.DONE)
        for place, slot, error, good in zip(
            piece.places, piece.slots, errors, verified, strict=True
        ):
            if error:
                load.record([place], Outcome.FAILED, f"slot {slot}: {error}")
            elif not good:
                load.record([place], Outcome.CORRUPT, f"slot {slot}: hash mismatch")

    def _count_failures(self, load: _Load) -> None:
        self._failures = self._failures + 1 if Outcome.FAILED in load.outcomes else 0
        if self._failures == _MOST_FAILURES:
            self._withdraw(f"{_MOST_FAILURES} loads in a row had failed reads")

    def _withdraw(self, reason: str) -> None:
        """Report that this rank cannot do GDS reads any more, and log the reason."""
        logger.warning("no GDS reads any more, chunks are loaded through RAM: %s", reason)
        self._control.withdraw_gds(self._rank)


def _groups(request: LoadRequest, gds: GdsReads) -> list[int]:
    """Return the KV cache group of each chunk that is read from the tier."""
    slots = {request.plan.slots[at]: place for place, at in enumerate(gds.positions)}
    groups = [0] * len(slots)
    for copy in request.plan.groups:
        for slot in set(copy.slots.tolist()).intersection(slots):
            groups[slots[slot]] = copy.group
    return groups
