"""A RAM slot that is reused while it is demoted leaves no chunk in the slower tier."""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from typing_extensions import override

from kvtier.memory import ControlBlock
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_buffers, make_keys
from kvtier.tiers.base import SlotOutcomes, TierContext
from kvtier.tiers.part_hashes import PartHashes
from kvtier.transfer import ToTier
from kvtier.types import Job, LayoutFingerprint, Outcome, Purpose
from tests.support.memory_tier import MemoryTier, MemoryTierConfig
from tests.support.workbench import Workbench, prefix
from tests.unit.stall_rig import DONE, HANG_S, Rig, keys_in

SLOT_NBYTES = 4096
OVERWRITTEN = Outcome.OVERWRITTEN
KEYS = make_keys(range(3))
JOB = Job(1, Purpose.DEMOTE, "ram", "nvme", KEYS, [4, 5, 6], [0, 1, 2], HANG_S, [21, 21, 22])


class Ram:
    def __init__(self) -> None:
        self._slots = make_buffers(8, SLOT_NBYTES)

    def slot(self, number: int) -> memoryview:
        return self._slots[number]


class Watched(MemoryTier):
    """Calls ``during`` once the bytes are written, before anybody learns that they are."""

    during: Callable[[], None] = staticmethod(lambda: None)
    writes = 0

    @override
    async def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        self.writes += 1
        written = await super().write(keys, slots, sources, purpose=purpose)
        self.during()
        return written


class Kept:
    """Takes part hashes from the control block, and keeps them by slot of the tier."""

    def __init__(self, control: ControlBlock) -> None:
        self._control = control
        self.by_slot: dict[int, list[int]] = {}

    def ram_part_hashes(self, slots: Sequence[int], generations: Sequence[int]) -> PartHashes:
        return self._control.part_hashes(slots, generations)

    def keep_part_hashes(self, slots: Sequence[int], part_hashes: PartHashes) -> None:
        self.by_slot.update(zip(slots, part_hashes.tolist(), strict=True))


class Demotion:
    """A job from RAM, whose slots have their generations in both ranks, to an empty tier."""

    def __init__(self, pool: IoPool) -> None:
        words = memoryview(bytearray(ControlBlock.nbytes(8, 2)))
        self.control = ControlBlock(words, slots=8, ranks=2)
        self.control.publish(JOB.source_slots, JOB.payload)
        options = MemoryTierConfig(name="nvme", capacity_bytes=8 * SLOT_NBYTES)
        self.tier = Watched(
            options, TierContext(SLOT_NBYTES, LayoutFingerprint({}), pool), None
        )
        self.kept = Kept(self.control)
        for rank in range(2):
            self.control.report_gds(rank, rank)
            self.control.set_hashes(rank, [4, 5], np.array([8, 9], np.uint64), 21)
            self.control.set_hashes(rank, [6], np.array([7], np.uint64), 22)
        self.route = ToTier(Ram(), self.tier, self.control, self.kept)

    def run(self) -> SlotOutcomes:
        return asyncio.run(self.route.run(JOB))

    def found(self) -> list[tuple[bytes, int]]:
        """Return what a restart would recover, by slot."""
        return sorted(self.tier.recovered(), key=operator.itemgetter(1))


@pytest.fixture
def demotion(pool: IoPool) -> Demotion:
    return Demotion(pool)


def test_a_demotion_of_slots_that_keep_their_generations_is_whole(demotion: Demotion) -> None:
    assert list(demotion.run().outcomes) == [DONE] * 3
    assert demotion.found() == [*zip(KEYS, [0, 1, 2], strict=True)]
    assert demotion.kept.by_slot == {0: [8, 8], 1: [9, 9], 2: [7, 7]}


def test_part_hashes_of_a_slot_that_was_reused_are_not_kept(demotion: Demotion) -> None:
    def reuse() -> None:
        demotion.control.set_hashes(1, [6], np.array([3], np.uint64), 23)
        demotion.control.set_generation(1, [6], 23)

    demotion.tier.during = reuse
    assert list(demotion.run().outcomes) == [DONE, DONE, OVERWRITTEN]
    assert demotion.kept.by_slot == {0: [8, 8], 1: [9, 9]}


def test_a_slot_that_is_reused_during_the_write_leaves_no_chunk(demotion: Demotion) -> None:
    demotion.tier.during = lambda: demotion.control.clear_generations([5])
    moved = demotion.run()
    assert list(moved.outcomes) == [DONE, OVERWRITTEN, DONE]
    assert "was reused" in moved.error
    assert demotion.found() == [(KEYS[0], 0), (KEYS[2], 2)]


def test_a_slot_that_one_rank_has_filled_for_another_chunk_leaves_no_chunk(
    demotion: Demotion,
) -> None:
    demotion.tier.during = lambda: demotion.control.set_generation(1, [6], 23)
    assert list(demotion.run().outcomes) == [DONE, DONE, OVERWRITTEN]
    assert demotion.found() == [(KEYS[0], 0), (KEYS[1], 1)]


def test_a_slot_that_was_reused_before_the_write_is_not_written(demotion: Demotion) -> None:
    demotion.control.publish([4], [30])
    demotion.tier.during = lambda: demotion.control.clear_generations([6])
    moved = demotion.run()
    assert list(moved.outcomes) == [OVERWRITTEN, DONE, OVERWRITTEN]
    assert "was reused" in moved.error
    assert demotion.found() == [(KEYS[1], 1)]


def test_a_job_whose_slots_were_all_reused_writes_nothing(demotion: Demotion) -> None:
    demotion.control.clear_generations(JOB.source_slots)
    assert list(demotion.run().outcomes) == [OVERWRITTEN] * 3
    assert demotion.tier.writes == 0


def test_no_restart_finds_a_chunk_whose_slot_was_reused_during_the_write(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        rig = Rig(tmp_path, stack)
        gate = rig.stall("sql INSERT")
        job = rig.store(0, 1)
        assert rig.io.wait_until_stalled(timeout_s=HANG_S)
        rig.control.clear_generations([1])
        gate.set()
        assert rig.settled(job) == {job.job_id: [DONE, OVERWRITTEN]}
        assert not rig.out_of_service(Purpose.STORE), "the disk is not to blame"
        assert rig.engine.close(timeout_s=HANG_S)
        assert rig.found_again() == set(keys_in([0], 0))


@pytest.mark.parametrize("write", ["through", "evict"])
def test_a_demotion_job_names_the_generations_of_its_ram_slots(
    write: Literal["through", "evict"],
) -> None:
    bench = Workbench(4, 8, write=write)
    plans = [bench.store(prefix(2, of=number)) for number in (1, 2)]
    bench.manager.flush()
    jobs = bench.manager.take_jobs()
    wanted = {
        slot: plan.generation for plan in plans if plan is not None for slot in plan.slots
    }
    named = [pair for job in jobs for pair in zip(job.source_slots, job.payload, strict=True)]
    assert dict(named) == wanted


def test_a_chunk_that_was_reused_is_resident_in_ram_only() -> None:
    bench = Workbench(4, 8)
    bench.store(prefix(2))
    (job,) = bench.step()
    bench.finish(job, DONE, OVERWRITTEN)
    assert bench.resident(1) == {*prefix(1)}
    assert bench.tiers[1].slots.free == 7
    assert bench.ram.counters.lost == 1
