"""What the manager's books say while a disk hangs, and that every slot comes back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.keys import ChunkKey
from kvtier.manager import ManagerLimits
from kvtier.testing.tier_harness import make_payload
from kvtier.types import Outcome, Purpose
from tests.support.fakes import FakeSlotStatus
from tests.support.workbench import Workbench, prefix
from tests.unit.stall_rig import CAPACITY, DONE, EXPIRED, HANG_S, RUNNING, SLOT, SOON_S, Rig

RAM_SLOTS = CAPACITY // 2
FIRST, SECOND, THIRD = (prefix(RAM_SLOTS, of=number) for number in (1, 2, 3))

OpenCache = Callable[[str], "Cache"]


class Cache:
    """A manager whose jobs a real engine runs on a real store, full of FIRST and SECOND."""

    def __init__(self, rig: Rig, slot_status: FakeSlotStatus) -> None:
        self.rig = rig
        limits = ManagerLimits(
            pin_budget=RAM_SLOTS,
            reserve=0.0,
            queue=1024,
        )
        self.bench = Workbench(RAM_SLOTS, CAPACITY, slot_status=slot_status, limits=limits)
        filled = [*zip(FIRST + SECOND, range(CAPACITY), strict=True)]
        for key, slot in filled:
            rig.ram.slot(slot)[:] = make_payload(key, SLOT)
        job = rig.submit(Purpose.STORE, FIRST + SECOND, range(CAPACITY), HANG_S)
        assert rig.settled(job) == {job.job_id: [DONE] * CAPACITY}
        self.bench.manager.recover(1, filled)

    def store(self, keys: Sequence[ChunkKey]) -> None:
        plan = self.bench.store(keys)
        assert plan is not None
        for key, slot in zip(plan.keys, plan.slots, strict=True):
            self.rig.ram.slot(slot)[:] = make_payload(key, SLOT)
        self.rig.control.set_generation(0, plan.slots, plan.generation)

    def run(self) -> None:
        """End a step and let the engine run what it planned."""
        (job,) = self.bench.step()
        self.rig.engine.submit(job)

    def apply(self) -> tuple[list[Outcome], bool]:
        """Tell the manager the next result, and check the books."""
        result = self.rig.result()
        self.bench.manager.apply(result)
        self.bench.check()
        return list(result.outcomes), result.settled

    def hang(self, call: str) -> threading.Event:
        """Let a job hang in ``call``: the promotion of FIRST, or the demotion of THIRD."""
        gate = self.rig.stall(call)
        if call == "preadv":
            assert self.bench.look(FIRST, "reader") is None
        else:
            self.store(THIRD)
        self.run()
        self.rig.expire()
        assert self.apply() == ([EXPIRED] * RAM_SLOTS, False)
        return gate

    def rooms(self) -> list[int]:
        """Return, tier by tier, the slots that are free or could be."""
        return [tier.available for tier in self.bench.tiers]

    def free(self) -> list[int]:
        return [tier.slots.free for tier in self.bench.tiers]


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[OpenCache]:
    with contextlib.ExitStack() as stack:

        def open_for(call: str) -> Cache:
            slot_status = FakeSlotStatus()
            return Cache(Rig(tmp_path, stack, slot_status, **RUNNING[call]), slot_status)

        yield open_for


@pytest.mark.parametrize("call", RUNNING)
def test_the_slots_of_a_job_that_hangs_are_held_until_it_is_done_and_free_then(
    open_cache: OpenCache, call: str
) -> None:
    cache = open_cache(call)
    gate = cache.hang(call)
    reads = call == "preadv"
    assert cache.bench.look(FIRST, "reader") == 0, "a waiting request gets a miss"
    assert cache.rooms() == [0, RAM_SLOTS], "a thread may still be in them"
    refused = cache.bench.store(prefix(1, of=4), "writer")
    assert refused is None or not refused.keys
    gate.set()
    assert cache.apply() == ([DONE] * RAM_SLOTS, True)
    cache.bench.manager.end_request("reader")
    cache.bench.step()
    assert cache.rooms() == [RAM_SLOTS, CAPACITY]
    assert [tier.dirty for tier in cache.bench.tiers] == [0, 0]
    assert cache.bench.resident(1) == set(FIRST + SECOND if reads else SECOND + THIRD)
    assert not cache.bench.manager.has_work()


@pytest.mark.parametrize("call", RUNNING)
def test_a_reset_while_a_job_hangs_is_a_miss_at_once_and_frees_all_when_it_is_done(
    open_cache: OpenCache, call: str
) -> None:
    cache = open_cache(call)
    gate = cache.hang(call)
    over = threading.Event()

    async def reset() -> None:
        await cache.rig.tier.reset()
        over.set()

    cache.bench.manager.reset()
    cache.bench.check()
    assert not cache.rig.engine.exclusively_each({"nvme": reset}, timeout_s=SOON_S)
    for keys in (FIRST, SECOND, THIRD):
        assert cache.bench.look(keys, f"reader of {keys[0]!r}") == 0
    assert cache.free() != [RAM_SLOTS, CAPACITY], "a thread may still be in some"
    gate.set()
    outcomes, is_settled = cache.apply()
    assert is_settled
    assert len(outcomes) == RAM_SLOTS
    cache.bench.step()
    assert cache.free() == [RAM_SLOTS, CAPACITY]
    assert over.wait(HANG_S)
    assert cache.rig.engine.close(timeout_s=HANG_S)
    assert cache.rig.found_again() == set()
