"""A disk that does not answer: deadlines, the breaker, and what is true when it is back."""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.config import NvmeTierConfig
from kvtier.iopool import IoPool
from kvtier.keys import ChunkKey
from kvtier.testing.chunks import make_buffers, make_keys, make_payload
from kvtier.testing.fakes import RecordingTruth
from kvtier.testing.faulty_io import FaultyIo
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.transfer import EngineLimits, FromTier, ToTier, TransferEngine
from kvtier.types import Job, LayoutFingerprint, Outcome, Why

SLOT = 8192
CAPACITY = 8
KEYS = make_keys(range(8))
DONE, EXPIRED, FAILED, REFUSED = (
    Outcome.DONE,
    Outcome.EXPIRED,
    Outcome.FAILED,
    Outcome.REFUSED,
)
HANG_S = 10.0
SOON_S = 0.1  # a job that is to hang must have started by then
BACKOFF_S = 0.05


class Ram:
    """RAM slots of the test's own."""

    def __init__(self) -> None:
        self._slots = make_buffers(CAPACITY, SLOT)

    def slot(self, number: int) -> memoryview:
        return self._slots[number]


class Rig:
    """A slab on a disk that may hang, below a transfer engine."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.io = FaultyIo()
        self.ram = Ram()
        pool = IoPool(2, name="kvtier-rig")
        options = NvmeTierConfig(
            path=directory / "store", capacity_bytes=CAPACITY * SLOT, direct_io="off"
        )
        context = TierContext(SLOT, LayoutFingerprint({"model": "m"}), pool)
        self.tier = SlabTier.open(options, context, io=self.io)
        self.engine = TransferEngine(
            "rig",
            {
                ("ram", "nvme"): ToTier(self.ram, self.tier),
                ("nvme", "ram"): FromTier(self.ram, self.tier, RecordingTruth()),
            },
            chunk_nbytes=SLOT,
            limits=EngineLimits(
                queued_bytes=1 << 20,
                running_bytes=SLOT,
                breaker_failures=2,
                breaker_backoff_s=BACKOFF_S,
            ),
            closers=[self.tier.aclose],
        )
        self._ids = itertools.count()
        self._stack = stack
        stack.callback(self._close, pool)

    def _close(self, pool: IoPool) -> None:
        self.engine.close(timeout_s=HANG_S)
        assert pool.close(timeout_s=HANG_S)

    def stall(self) -> threading.Event:
        """Let the disk hang until the event is set."""
        gate = self.io.stall()
        self._stack.callback(gate.set)  # before the engine is closed, whatever the test did
        return gate

    def submit(
        self, why: Why, keys: Sequence[ChunkKey], slots: Sequence[int], timeout_s: float
    ) -> Job:
        source, destination = ("nvme", "ram") if why is Why.PROMOTE else ("ram", "nvme")
        number = next(self._ids)
        stamps = [number + 1] * len(keys)
        job = Job(number, why, source, destination, keys, slots, slots, timeout_s, stamps)
        self.engine.submit(job)
        return job

    def store(self, *numbers: int, timeout_s: float = HANG_S) -> Job:
        for number in numbers:
            self.ram.slot(number)[:] = make_payload(KEYS[number], SLOT)
        return self.submit(Why.STORE, [KEYS[n] for n in numbers], numbers, timeout_s)

    def promote(self, *numbers: int, timeout_s: float = HANG_S) -> Job:
        for number in numbers:
            self.ram.slot(number)[:] = bytes(SLOT)
        return self.submit(Why.PROMOTE, [KEYS[n] for n in numbers], numbers, timeout_s)

    def settled(self, *jobs: Job) -> dict[int, list[Outcome]]:
        """Wait for the settled results of ``jobs``; forgets all others."""
        assert self.engine.wait([job.job_id for job in jobs], timeout_s=HANG_S)
        results = [result for result in self.engine.poll() if result.settled]
        return {result.job_id: list(result.outcomes) for result in results}

    def next_result(self) -> tuple[int, list[Outcome], bool]:
        assert self.engine.wait_any(timeout_s=HANG_S)
        (result,) = self.engine.poll()
        return result.job_id, list(result.outcomes), result.settled

    def holds(self, number: int) -> bool:
        return self.ram.slot(number) == make_payload(KEYS[number], SLOT)

    def out_of_service(self) -> bool:
        return self.engine.statistics()["nvme", "ram"].out_of_service

    def back_in_service(self, number: int) -> bool:
        """Promote a chunk as soon as the breaker lets one through."""
        deadline_s = time.monotonic() + HANG_S
        while time.monotonic() < deadline_s:
            job = self.promote(number, timeout_s=HANG_S)
            outcomes = self.settled(job)[job.job_id]
            if outcomes != [REFUSED]:
                return outcomes == [DONE] and self.holds(number)
        return False


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        yield Rig(tmp_path, stack)


def test_a_disk_that_hangs_is_left_alone_and_used_again_when_it_answers(rig: Rig) -> None:
    first = rig.store(0, 1, 2)
    assert rig.settled(first) == {first.job_id: [DONE] * 3}
    gate = rig.stall()
    stuck = rig.promote(0, timeout_s=SOON_S)
    assert rig.next_result() == (stuck.job_id, [EXPIRED], False)
    behind = rig.promote(1, timeout_s=SOON_S)
    assert rig.next_result() == (behind.job_id, [EXPIRED], True)
    assert rig.out_of_service()
    refused = rig.promote(2)
    assert rig.settled(refused) == {refused.job_id: [REFUSED]}, "at once, not at its deadline"
    assert not rig.engine.wait([stuck.job_id], timeout_s=SOON_S), "a thread is still in it"
    assert rig.ram.slot(0) == bytes(SLOT)
    gate.set()
    assert rig.settled(stuck) == {stuck.job_id: [DONE]}
    assert rig.holds(0), "the slots were the job's until the call returned"
    assert rig.back_in_service(1)
    assert not rig.out_of_service()


def test_a_write_that_hangs_is_answered_late_and_is_whole(rig: Rig) -> None:
    gate = rig.stall()
    stuck = rig.store(0, timeout_s=SOON_S)
    assert rig.next_result() == (stuck.job_id, [EXPIRED], False)
    gate.set()
    assert rig.settled(stuck) == {stuck.job_id: [DONE]}
    again = rig.promote(0)
    assert rig.settled(again) == {again.job_id: [DONE]}
    assert rig.holds(0)


def test_a_probe_that_hangs_as_well_opens_the_breaker_again(rig: Rig) -> None:
    first = rig.store(0, 1)
    rig.settled(first)
    rig.io.fail("preadv", errno.EIO)
    for _ in range(2):
        failed = rig.promote(0)
        assert rig.settled(failed) == {failed.job_id: [FAILED]}
    rig.io.heal()
    gate = rig.stall()
    deadline_s = time.monotonic() + HANG_S
    probe_answer, is_settled = [REFUSED], True
    while probe_answer == [REFUSED]:
        assert time.monotonic() < deadline_s
        rig.promote(0, timeout_s=SOON_S)
        _, probe_answer, is_settled = rig.next_result()
    assert (probe_answer, is_settled) == ([EXPIRED], False)
    assert rig.out_of_service()
    gate.set()
    assert rig.back_in_service(1)


def test_closing_while_the_disk_hangs_gives_up_in_time_and_loses_nothing(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        rig = Rig(tmp_path, stack)
        rig.settled(rig.store(0))
        gate = rig.stall()
        stuck = rig.promote(0, timeout_s=SOON_S)
        assert rig.next_result() == (stuck.job_id, [EXPIRED], False)
        began_s = time.monotonic()
        assert not rig.engine.close(timeout_s=SOON_S)
        assert time.monotonic() - began_s < HANG_S
        gate.set()
        assert rig.settled(stuck) == {stuck.job_id: [DONE]}
        assert rig.holds(0)
