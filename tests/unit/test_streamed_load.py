"""Direct loads: the worker copies each chunk to the GPU when the disk has published it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, cast

import pytest
from typing_extensions import override

from kvtier.errors import KvtierError
from kvtier.memory import ControlBlock
from kvtier.memory.copy import BlockCopier
from kvtier.memory.copy_plan import BlockCopyPlan, plan_copy
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_buffers, make_keys
from kvtier.tiers.base import SlotOutcomes, StorageTier
from kvtier.transfer import EngineLimits, FromTier, TransferEngine
from kvtier.transfer.device import DeviceLoadRoute, LoadPayload
from kvtier.types import Job, Outcome, Purpose
from tests.support.fakes import FakeSlotStatus
from tests.support.threads import loop_of

DONE, FAILED, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT
OVERWRITTEN = Outcome.OVERWRITTEN
SLOTS = [2, 3, 5, 7]
GENERATIONS = [11, 11, 12, 12]
SOON_S = 30.0

Event = Callable[["Scripted"], None]


class Scripted(ControlBlock):
    """A control block on which something happens each time a worker looks."""

    def __init__(self, script: Sequence[Event]) -> None:
        super().__init__(memoryview(bytearray(ControlBlock.nbytes(8, 1))), slots=8, ranks=1)
        self.script = deque(script)
        self.looks = 0
        self.issue(SLOTS)

    @override
    def arrivals(
        self, rank: int, slots: Sequence[int], generations: Sequence[int]
    ) -> tuple[list[bool], list[bool]]:
        self.looks += 1
        if self.script:
            self.script.popleft()(self)
        return super().arrivals(rank, slots, generations)


class Copier:
    """Notes which slots are copied, batch by batch; may fail, or be too late."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.during: Callable[[], None] = lambda: None

    def load(self, plan: BlockCopyPlan, *, after: object) -> None:
        assert after is None
        assert sorted({int(slot) for part in plan.groups for slot in part.slots}) == sorted(
            plan.slots
        )
        self.during()
        self.batches.append(list(plan.slots))


def comes(*places: int) -> Event:
    return lambda control: control.publish(
        [SLOTS[at] for at in places], [GENERATIONS[at] for at in places]
    )


def fails(*places: int) -> Event:
    return lambda control: control.mark_lost(
        [SLOTS[at] for at in places], [GENERATIONS[at] for at in places]
    )


def nothing(_: object) -> None:
    """A look at which nothing has happened."""


@pytest.fixture
def copier() -> Copier:
    return Copier()


Load = Callable[..., SlotOutcomes]


@pytest.fixture
def load(pool: IoPool, copier: Copier) -> Load:
    """Run one load of four chunks to its end."""

    def run(
        control: ControlBlock,
        *,
        slots: Sequence[int] = SLOTS,
        generations: Sequence[int] = GENERATIONS,
        wait_s: float = SOON_S,
    ) -> SlotOutcomes:
        count = len(slots)
        plan = plan_copy(list(range(count)), [count], [0], slots, blocks_per_chunk=1)
        route = DeviceLoadRoute(cast("BlockCopier", copier), control, rank=0, pool=pool)
        payload = LoadPayload(plan, None, generations, wait_s)
        job = Job(1, Purpose.LOAD, "ram", "gpu", (), slots, slots, SOON_S, payload)
        return asyncio.run(route.run(job))

    return run


def test_chunks_are_copied_as_they_arrive(load: Load, copier: Copier) -> None:
    control = Scripted([nothing, comes(1), nothing, comes(0, 3), comes(2)])
    assert load(control).outcomes == [DONE] * 4
    assert copier.batches == [[3], [2, 7], [5]]
    assert control.all_acknowledged(SLOTS) == [True] * 4
    assert control.loaded(SLOTS, GENERATIONS) == [True] * 4


def test_chunks_that_are_there_at_once_are_one_copy(load: Load, copier: Copier) -> None:
    control = Scripted([comes(0, 1, 2, 3)])
    assert load(control, wait_s=0.0).outcomes == [DONE] * 4
    assert (copier.batches, control.looks) == ([SLOTS], 1)


@pytest.mark.parametrize(
    ("arrived", "copied"), [(1500, [1024, 476]), (700, [700]), (300, [300]), (256, [256])]
)
def test_many_chunks_are_copied_in_few_copies(
    load: Load, copier: Copier, arrived: int, copied: list[int]
) -> None:
    count = 1500
    memory = memoryview(bytearray(ControlBlock.nbytes(count, 1)))
    control = ControlBlock(memory, slots=count, ranks=1)
    slots, generations = list(range(count)), [11] * count
    control.issue(slots)
    control.publish(slots[:arrived], generations[:arrived])
    ended = load(control, slots=slots, generations=generations, wait_s=0.0)
    assert ended.outcomes == [DONE] * arrived + [FAILED] * (count - arrived)
    assert [len(each) for each in copier.batches] == copied


def test_a_chunk_that_will_not_come_ends_the_wait_for_those_behind_it(
    load: Load, copier: Copier
) -> None:
    control = Scripted([comes(0), fails(2), nothing, comes(1)])
    moved = load(control)
    assert moved.outcomes == [DONE, DONE, FAILED, Outcome.CANCELLED]
    assert "was not promoted" in moved.error
    assert copier.batches == [[2], [3]]
    assert control.loaded(SLOTS, GENERATIONS) == [True, True, False, True]
    assert control.all_acknowledged(SLOTS) == [True] * 4


def test_the_first_of_several_bad_chunks_decides(load: Load, copier: Copier) -> None:
    control = Scripted([fails(3), comes(0), fails(1)])
    assert load(control).outcomes == [DONE, FAILED, Outcome.CANCELLED, FAILED]
    assert copier.batches == [[2]]


def test_no_wait_exceeds_its_timeout(load: Load, copier: Copier) -> None:
    control = Scripted([comes(0, 1)])
    assert load(control, wait_s=0.01).outcomes == [DONE, DONE, FAILED, FAILED]
    assert control.loaded(SLOTS, GENERATIONS) == [True, True, False, False]


def test_a_load_that_need_not_wait_does_not(load: Load) -> None:
    control = Scripted([comes(0, 1, 2)])
    moved = load(control, wait_s=0.0)
    assert moved.outcomes == [DONE, DONE, DONE, FAILED]
    assert "another generation than expected" in moved.error
    assert control.looks == 2


def test_a_slot_that_is_anothers_by_now_is_not_waited_for(load: Load) -> None:
    control = Scripted([comes(0, 1, 2), lambda each: each.publish([7], [99])])
    assert load(control).outcomes == [DONE, DONE, DONE, FAILED]


def test_a_slot_that_is_given_away_while_it_is_read_does_not_count(
    load: Load, copier: Copier
) -> None:
    control = Scripted([comes(0, 1, 2, 3)])
    copier.during = lambda: control.clear_generations([3])
    moved = load(control)
    assert moved.outcomes == [OVERWRITTEN] * 4
    assert "was reused" in moved.error
    assert control.loaded(SLOTS, GENERATIONS) == [False] * 4


def test_a_copy_that_breaks_is_acknowledged_and_never_whole(load: Load, copier: Copier) -> None:
    control = Scripted([comes(0, 1), comes(2, 3)])

    def break_at_the_second() -> None:
        if copier.batches:
            raise RuntimeError("the device is gone")

    copier.during = break_at_the_second
    with pytest.raises(RuntimeError, match="device is gone"):
        load(control)
    assert control.loaded(SLOTS, GENERATIONS) == [True, True, False, False]
    assert control.all_acknowledged(SLOTS) == [True] * 4


def test_a_chunk_without_a_slot_fails_and_touches_no_other(load: Load, copier: Copier) -> None:
    control = Scripted([comes(0, 1)])
    control.issue([5, 7])  # jobs of others, still running
    moved = load(control, slots=[2, 3, -1, -1], generations=[11, 11, 0, 0])
    assert moved.outcomes == [DONE, DONE, FAILED, FAILED]
    assert "no RAM slot" in moved.error
    assert copier.batches == [[2, 3]]
    assert control.all_acknowledged([2, 3]) == [True, True]


# -- the transfer engine's end


class Disk:
    """A tier whose reads end as the test says."""

    name = "nvme"
    slot_nbytes = 4096

    def __init__(self, *outcomes: Outcome | BaseException) -> None:
        self._outcomes = outcomes
        self.gate = asyncio.Event()
        self.used: list[int] = []

    async def begin_read(self, *_: object, **__: object) -> SlotOutcomes:
        await self.gate.wait()
        outcomes = []
        for outcome in self._outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            outcomes.append(outcome)
        return SlotOutcomes(outcomes)

    def touch(self, slots: Sequence[int]) -> None:
        self.used.extend(slots)


class Ram:
    def __init__(self) -> None:
        self._slots = make_buffers(8, 4096)

    def slot(self, number: int) -> memoryview:
        return self._slots[number]


def rise(job_id: int = 0, *, timeout_s: float = SOON_S) -> Job:
    keys = make_keys(range(3))
    return Job(
        job_id,
        Purpose.PROMOTE,
        "nvme",
        "ram",
        keys,
        [0, 1, 2],
        [4, 5, 6],
        timeout_s,
        [21, 21, 22],
    )


def route_of(disk: Disk) -> tuple[FromTier, FakeSlotStatus]:
    slot_status = FakeSlotStatus()
    return FromTier(Ram(), cast("StorageTier", disk), slot_status), slot_status


def test_chunks_that_arrived_are_published_and_the_others_marked_lost() -> None:
    disk = Disk(DONE, CORRUPT, DONE)
    disk.gate.set()
    route, slot_status = route_of(disk)
    asyncio.run(route.run(rise()))
    assert slot_status.published == [(4, 21), (6, 22)]
    assert slot_status.lost == {(5, 21)}
    assert disk.used == [0, 2]


def test_chunks_that_all_arrived_were_all_of_use() -> None:
    disk = Disk(DONE, DONE, DONE)
    disk.gate.set()
    route, slot_status = route_of(disk)
    asyncio.run(route.run(rise()))
    assert slot_status.published == [(4, 21), (5, 21), (6, 22)]
    assert disk.used == [0, 1, 2]


def test_a_read_that_raises_marks_all_chunks_lost() -> None:
    disk = Disk(OSError(5, "gone"))
    disk.gate.set()
    route, slot_status = route_of(disk)
    with pytest.raises(OSError, match="gone"):
        asyncio.run(route.run(rise()))
    assert slot_status.lost == {(4, 21), (5, 21), (6, 22)}


@pytest.mark.parametrize("outcomes", [[], [DONE], [DONE] * 4], ids=len)
def test_a_read_that_does_not_answer_for_each_chunk_marks_all_lost(
    outcomes: list[Outcome],
) -> None:
    disk = Disk(*outcomes)
    disk.gate.set()
    route, slot_status = route_of(disk)
    with pytest.raises(TypeError, match=f"tier nvme returned {len(outcomes)} outcomes for 3"):
        asyncio.run(route.run(rise()))
    assert slot_status.published == []
    assert slot_status.lost == {(4, 21), (5, 21), (6, 22)}
    assert disk.used == []


class LargeSlots(Disk):
    """A tier of slots so large that a job has a part for each; each is read on request."""

    slot_nbytes = 4 << 20

    def __init__(self, *ends: Outcome | BaseException, refuses: int | None = None) -> None:
        super().__init__()
        self.gates = [asyncio.Event() for _ in ends]
        self._ends = ends
        self._refuses = refuses

    @override
    def begin_read(  # type: ignore[override]
        self, keys: object, slots: Sequence[int], *_: object, **__: object
    ) -> Coroutine[Any, Any, SlotOutcomes]:
        (slot,) = slots
        if slot == self._refuses:
            raise KvtierError("closed")
        return self._read(slot)

    async def _read(self, slot: int) -> SlotOutcomes:
        await self.gates[slot].wait()
        end = self._ends[slot]
        if isinstance(end, BaseException):
            raise end
        return SlotOutcomes([end], "" if end is DONE else f"slot {slot} is lost")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - a generation wakes nobody
            await asyncio.sleep(0)


def test_the_parts_of_a_large_job_are_published_as_they_arrive() -> None:
    disk = LargeSlots(DONE, CORRUPT, DONE)
    route, slot_status = route_of(disk)

    async def read() -> SlotOutcomes:
        moving = asyncio.create_task(route.run(rise()))
        disk.gates[2].set()
        await until(lambda: slot_status.published == [(6, 22)])
        disk.gates[1].set()
        await until(lambda: slot_status.lost == {(5, 21)})
        assert not moving.done()
        disk.gates[0].set()
        return await moving

    moved = asyncio.run(read())
    assert moved.outcomes == [DONE, CORRUPT, DONE]
    assert moved.error == "slot 1 is lost"
    assert slot_status.published == [(6, 22), (4, 21)]
    assert slot_status.lost == {(5, 21)}
    assert disk.used == [2, 0]


def test_chunks_published_before_a_deadline_are_whole_once_the_job_is_over() -> None:
    """The deadline marks it lost, and the manager then has it as a hit for others."""
    disk = LargeSlots(DONE, DONE, DONE)
    control = ControlBlock(memoryview(bytearray(ControlBlock.nbytes(8, 1))), slots=8, ranks=1)
    route = FromTier(Ram(), cast("StorageTier", disk), control)
    job = rise()

    async def read() -> SlotOutcomes:
        moving = asyncio.create_task(route.run(job))
        disk.gates[0].set()
        await until(lambda: control.stored([4], [21]) == [True])
        route.abandon(job)
        assert control.stored([4], [21]) == [False], "nobody waits any longer"
        for gate in disk.gates:
            gate.set()
        return await moving

    assert asyncio.run(read()).outcomes == [DONE] * 3
    assert control.stored(job.destination_slots, job.payload) == [True] * 3
    assert disk.used == [0, 1, 2]


def test_a_long_job_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(DONE, DONE, DONE)
    disk.gate.set()
    monkeypatch.setattr(disk, "slot_nbytes", 6 << 20)
    route, slot_status = route_of(disk)
    assert asyncio.run(route.run(rise())).outcomes == [DONE] * 3
    assert slot_status.published == [(4, 21), (5, 21), (6, 22)]


@pytest.mark.parametrize("error", [OSError(5, "gone"), SystemExit(3)], ids=type)
def test_a_part_that_raises_is_waited_for_with_the_others(error: BaseException) -> None:
    disk = LargeSlots(error, DONE, DONE)
    route, slot_status = route_of(disk)

    async def read() -> None:
        moving = asyncio.create_task(_caught(route.run(rise())))
        disk.gates[0].set()
        await until(lambda: slot_status.lost == {(4, 21)})
        assert not moving.done(), "threads touch the slots of the others"
        for gate in disk.gates:
            gate.set()
        assert await moving is error

    asyncio.run(read())
    assert slot_status.published == [(5, 21), (6, 22)]
    assert slot_status.lost == {(4, 21)}


def test_a_part_that_cannot_begin_does_not_keep_the_others_from_it() -> None:
    disk = LargeSlots(DONE, DONE, DONE, refuses=1)
    route, slot_status = route_of(disk)

    async def read() -> BaseException | None:
        for gate in disk.gates:
            gate.set()
        return await _caught(route.run(rise()))

    assert isinstance(asyncio.run(read()), KvtierError)
    assert slot_status.published == [(4, 21), (6, 22)]
    assert slot_status.lost == {(5, 21)}


async def _caught(moving: Awaitable[object]) -> BaseException | None:
    try:
        await moving
    except BaseException as raised:  # noqa: BLE001 - an exit is among what is raised
        return raised
    return None


@contextlib.contextmanager
def engine_over(disk: Disk, **limits: Any) -> Iterator[tuple[TransferEngine, FakeSlotStatus]]:
    route, slot_status = route_of(disk)
    bounds = EngineLimits(**{"queued_bytes": 1 << 30, "running_bytes": 1} | limits)
    engine = TransferEngine("streams", {("nvme", "ram"): route}, chunk_nbytes=1, limits=bounds)
    try:
        yield engine, slot_status
    finally:
        loop_of(engine).call_soon_threadsafe(disk.gate.set)
        assert engine.close(timeout_s=SOON_S)


def test_a_job_that_never_ran_is_marked_lost_before_its_result_is_posted() -> None:
    with engine_over(Disk(DONE, DONE, DONE), queued_bytes=3) as (engine, slot_status):
        engine.submit(rise(0))
        engine.submit(rise(1))  # the queue is full
        assert engine.wait_any(timeout_s=SOON_S)
        (refused,) = engine.poll()
        assert list(refused.outcomes) == [Outcome.REFUSED] * 3
        assert slot_status.lost == {(4, 21), (5, 21), (6, 22)}


def test_a_deadline_marks_chunks_lost_while_the_read_goes_on() -> None:
    disk = Disk(DONE, DONE, DONE)
    with engine_over(disk) as (engine, slot_status):
        engine.submit(rise(0, timeout_s=0.01))
        assert engine.wait_any(timeout_s=SOON_S)
        (expired,) = engine.poll()
        assert not expired.settled
        assert slot_status.lost == {(4, 21), (5, 21), (6, 22)}
        assert slot_status.published == []


def test_an_open_breaker_is_seen_from_outside() -> None:
    disk = Disk(FAILED, FAILED, FAILED)
    disk.gate.set()
    with engine_over(disk, breaker_failures=1, breaker_backoff_s=SOON_S) as (engine, _):
        assert engine.out_of_service() == []
        engine.submit(rise(0))
        assert engine.wait([0], timeout_s=SOON_S)
        assert engine.out_of_service() == [("nvme", "ram")]
