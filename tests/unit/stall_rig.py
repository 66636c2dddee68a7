"""A store on a disk that hangs where a test says so, below a transfer engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import NvmeTierConfig
from kvtier.keys import ChunkKey
from kvtier.memory import ControlBlock
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_buffers, make_keys, make_payload
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.transfer import EngineLimits, FromTier, ToTier, TransferEngine, engine, runner
from kvtier.types import Job, LayoutFingerprint, Outcome, Purpose, TransferResult
from tests.support.fakes import FakeSlotStatus
from tests.support.faulty_io import FaultyIo
from tests.support.threads import join_threads

SLOT = 8192
CAPACITY = 8
KEYS = make_keys(range(2 * CAPACITY))
DONE, EXPIRED, FAILED, REFUSED = (
    Outcome.DONE,
    Outcome.EXPIRED,
    Outcome.FAILED,
    Outcome.REFUSED,
)
HANG_S = 60.0
SOON_S = 0.1
BACKOFF_S = 3600.0  # which a test skips

WAYS = {Purpose.PROMOTE: ("nvme", "ram"), Purpose.STORE: ("ram", "nvme")}
RUNNING: dict[str, dict[str, str]] = {
    "preadv": {},
    "pwritev": {},
    "sync_data": {"durability": "power"},
    "sql BEGIN": {},
    "sql INSERT": {},
    "sql COMMIT": {},
}
"""What a job may hang in, and the options with which it is called."""


class Clock:
    """The time, which a test may move forward."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


class Ram:
    """RAM slots of the test's own."""

    def __init__(self) -> None:
        self._slots = make_buffers(CAPACITY, SLOT)

    def slot(self, number: int) -> memoryview:
        return self._slots[number]


class Rig:
    """A slab on a disk that may hang, below a transfer engine.

    Args:
        directory: Where the store is.
        stack: Closes the rig.
        slot_status: Where chunks that come up are announced.
        **options: Of the tier.
    """

    def __init__(
        self,
        directory: Path,
        stack: contextlib.ExitStack,
        slot_status: FakeSlotStatus | None = None,
        **options: Any,
    ) -> None:
        self.io = FaultyIo()
        self.ram = Ram()
        words = memoryview(bytearray(ControlBlock.nbytes(CAPACITY, 1)))
        self.control = ControlBlock(words, slots=CAPACITY, ranks=1)
        self._options = NvmeTierConfig(
            path=directory / "store",
            capacity_bytes=CAPACITY * SLOT,
            direct_io="off",
            **options,
        )
        self._pool = IoPool(2, name="kvtier-rig-io")
        self._clock = Clock()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module in (engine, runner):
            patch.setattr(module, "time", self._clock)
        self._loop: asyncio.AbstractEventLoop
        self.tier = SlabTier.open(self._options, self._context(), io=self.io)
        self.engine = TransferEngine(
            "rig",
            {
                ("ram", "nvme"): ToTier(self.ram, self.tier, self.control),
                ("nvme", "ram"): FromTier(self.ram, self.tier, slot_status or FakeSlotStatus()),
            },
            chunk_nbytes=SLOT,
            limits=EngineLimits(
                queued_bytes=1 << 20,
                running_bytes=SLOT,
                breaker_failures=2,
                breaker_backoff_s=BACKOFF_S,
            ),
            openers=[self._use_clock],
            closers=[self.tier.aclose],
        )
        self._ids = itertools.count()
        self._stack = stack
        stack.callback(self._close)

    async def _use_clock(self) -> None:
        """Let the engine's loop go by the clock, with the deadlines of jobs."""
        self._loop = asyncio.get_running_loop()
        vars(self._loop)["time"] = self._clock.monotonic

    def _context(self) -> TierContext:
        return TierContext(SLOT, LayoutFingerprint({"model": "m"}), self._pool)

    def _close(self) -> None:
        self.engine.close(timeout_s=HANG_S)
        self.ended()
        assert self._pool.close(timeout_s=HANG_S)

    def ended(self) -> None:
        """Wait until a closed engine's thread is gone, and with it the tier."""
        join_threads("kvtier-rig", timeout_s=HANG_S)

    def found_again(self) -> set[ChunkKey]:
        """Open the store as the next engine would; return what is there, which verifies."""
        self.ended()
        tier = SlabTier.open(self._options, self._context())
        return read_and_close(tier)

    def stall(self, *calls: str, after: int = 0) -> threading.Event:
        """Let calls hang until the event is set."""
        gate = self.io.stall(*calls, after=after)
        self._stack.callback(gate.set)  # before the engine is closed, whatever the test did
        return gate

    def submit(
        self, purpose: Purpose, keys: Sequence[ChunkKey], slots: Sequence[int], timeout_s: float
    ) -> Job:
        source, destination = WAYS[purpose]
        number = next(self._ids)
        generations = [number + 1] * len(keys)
        if purpose is Purpose.STORE:
            self.control.publish(slots, generations)
        job = Job(
            number, purpose, source, destination, keys, slots, slots, timeout_s, generations
        )
        self.engine.submit(job)
        return job

    def store(self, *slots: int, version: int = 0, timeout_s: float = HANG_S) -> Job:
        keys = keys_in(slots, version)
        for slot, key in zip(slots, keys, strict=True):
            self.ram.slot(slot)[:] = make_payload(key, SLOT)
        return self.submit(Purpose.STORE, keys, slots, timeout_s)

    def promote(self, *slots: int, version: int = 0, timeout_s: float = HANG_S) -> Job:
        for slot in slots:
            self.ram.slot(slot)[:] = bytes(SLOT)
        return self.submit(Purpose.PROMOTE, keys_in(slots, version), slots, timeout_s)

    def holds(self, slot: int, version: int = 0) -> bool:
        """Whether a RAM slot has its chunk."""
        (key,) = keys_in([slot], version)
        return self.ram.slot(slot) == make_payload(key, SLOT)

    def settled(self, *jobs: Job) -> dict[int, list[Outcome]]:
        """Wait for the settled results of ``jobs``; forgets all others."""
        assert self.engine.wait([job.job_id for job in jobs], timeout_s=HANG_S)
        results = [result for result in self.engine.poll() if result.settled]
        return {result.job_id: list(result.outcomes) for result in results}

    def result(self) -> TransferResult:
        assert self.engine.wait_any(timeout_s=HANG_S)
        (result,) = self.engine.poll()
        return result

    def next_result(self) -> tuple[int, list[Outcome], bool]:
        result = self.result()
        return result.job_id, list(result.outcomes), result.settled

    def expire(self) -> None:
        """Let the deadlines of jobs pass, of which one hangs however busy all is."""
        assert self.io.wait_until_stalled(timeout_s=HANG_S)
        self._clock.skip(HANG_S)
        self._loop.call_soon_threadsafe(lambda: None)  # the loop looks at the clock

    def end_backoff(self) -> None:
        """Let the time pass for which a sick disk is left alone."""
        self._clock.skip(BACKOFF_S)

    def out_of_service(self, purpose: Purpose = Purpose.PROMOTE) -> bool:
        return self.engine.statistics()[WAYS[purpose]].out_of_service

    def back_in_service(self, slot: int, purpose: Purpose = Purpose.PROMOTE) -> bool:
        """End the back-off, move a chunk, and see that it is whole."""
        self.end_backoff()
        job = (self.promote if purpose is Purpose.PROMOTE else self.store)(slot)
        return self.settled(job)[job.job_id] == [DONE] and self.holds(slot)


def keys_in(slots: Sequence[int], version: int = 0) -> list[ChunkKey]:
    """Return the keys that a test keeps in ``slots``: the first ones or those over them."""
    return [KEYS[slot + version * CAPACITY] for slot in slots]


def read_and_close(tier: SlabTier) -> set[ChunkKey]:
    """Return what a store that was opened again has, all of which verifies, and close it."""
    found = list(tier.recovered())

    async def read() -> list[Outcome]:
        buffers = make_buffers(len(found), SLOT)
        keys, slots = [key for key, _ in found], [slot for _, slot in found]
        moved = await tier.read(keys, slots, buffers, purpose=Purpose.LOAD)
        assert buffers == [make_payload(key, SLOT) for key in keys]
        await tier.aclose()
        return list(moved.outcomes)

    assert set(asyncio.run(read())) <= {DONE}
    return {key for key, _ in found}
