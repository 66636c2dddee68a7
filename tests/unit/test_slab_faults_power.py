"""After a power cut a store opens, and what it serves is right, whatever reached the drive."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import shutil
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.config import NvmeTierConfig
from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import TierHarness, make_keys
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome
from tests.support.disk_state import PowerCut
from tests.support.power_cut import PowerCutDisk
from tests.unit.ram_directory import ram_directory

logger = logging.getLogger(__name__)

SLOT = 8192
CAPACITY = 3
KEYS = make_keys(range(40))
DONE, CORRUPT = Outcome.DONE, Outcome.CORRUPT
Stored = tuple[ChunkKey, int]


Durability = Literal["process", "power"]
DURABILITIES: tuple[Durability, ...] = ("process", "power")


@dataclass
class Promise:
    """What is true of a slot from one moment to another."""

    slot: int
    key: ChunkKey
    since: int
    until: float = float("inf")


@dataclass
class History:
    """What was done to a store, by the disk's moments."""

    attempted: list[tuple[int, Stored]] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    resets: list[tuple[int, int]] = field(default_factory=list)
    """When each reset began and ended."""

    def end_promises(self, slots: Sequence[int], moment: int) -> None:
        for promise in self.promises:
            if promise.slot in slots:
                promise.until = min(promise.until, moment)

    def promised(self, moment: int) -> set[Stored]:
        return {(p.key, p.slot) for p in self.promises if p.since <= moment <= p.until}

    def possible(self, moment: int) -> set[Stored]:
        """Return what may be found: all that was begun before, and not before a reset."""
        reset = max((begun for begun, ended in self.resets if ended <= moment), default=-1)
        return {stored for begun, stored in self.attempted if reset <= begun < moment}


class Machine:
    """A store on a disk that can lose power, and another place to look at what is left."""

    def __init__(
        self, directory: Path, pool: IoPool, durability: Durability, disk: PowerCutDisk
    ) -> None:
        self.durability = durability
        self.disk = disk
        self.history = History()
        self.pool = pool
        self.looked_at = directory / "looked-at"
        self.is_doubted = False
        self.live = self.harness(disk.root, disk)

    def harness(
        self, root: Path, disk: PowerCutDisk | None, model: str = "m"
    ) -> TierHarness[SlabTier]:
        options = NvmeTierConfig(
            path=root,
            capacity_bytes=CAPACITY * SLOT,
            direct_io="off",
            durability=self.durability,
            on_mismatch="remove",
        )
        fingerprint = LayoutFingerprint({"model": model})
        context = TierContext(SLOT, fingerprint, self.pool, piece_nbytes=2 * SLOT)
        return TierHarness(lambda: SlabTier.open(options, context, io=disk), self.pool)

    async def put(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        begun = self.disk.moment
        self.history.end_promises(slots, begun)
        stored = list(zip(keys, slots, strict=True))
        if self.is_doubted:  # by whoever opens it next
            assert set(await self.live.put(keys, slots)) == {DONE}
            return
        self.history.attempted += [(begun, each) for each in stored]
        assert set(await self.live.put(keys, slots)) == {DONE}
        self.history.promises += [Promise(slot, key, self.disk.moment) for key, slot in stored]

    def forget(self, slot: int) -> None:
        self.history.end_promises([slot], self.disk.moment)
        self.live.tier.forget([slot])

    async def reset(self) -> None:
        begun = self.disk.moment
        self.history.end_promises(range(CAPACITY), begun)
        await self.live.tier.reset()
        self.history.resets.append((begun, self.disk.moment))
        self.is_doubted = True

    async def reopen(self) -> None:
        await self.live.reopen()
        self.is_doubted = False

    def expected(self, moment: int) -> object:
        """Return all that the verdict on a state depends on besides the state."""
        return frozenset(self.history.promised(moment)), frozenset(
            self.history.possible(moment)
        )

    async def judge(self, cut: PowerCut, pick: Sequence[int], moment: int) -> int:
        """Open what a cut left; returns how many chunks it serves."""
        cut.restore(pick, self.looked_at)
        harness = self.harness(self.looked_at, None)
        try:
            found = await harness.open()
            try:
                outcomes = await harness.get(
                    [key for key, _ in found], [slot for _, slot in found]
                )
            finally:
                await harness.tier.aclose()
            nbytes = sum(path.stat().st_size for path in self.looked_at.rglob("slots.bin"))
        finally:
            shutil.rmtree(self.looked_at, ignore_errors=True)
        assert nbytes <= CAPACITY * SLOT
        assert len({slot for _, slot in found}) == len({key for key, _ in found}) == len(found)
        assert set(found) <= self.history.possible(moment)
        assert set(outcomes) <= {DONE, CORRUPT}
        served = {each for each, what in zip(found, outcomes, strict=True) if what is DONE}
        if self.durability == "power":
            assert served >= self.history.promised(moment)
        return len(served)


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(1, name="kvtier-test")
    yield pool
    assert pool.close(timeout_s=10)


Scenario = Callable[[Machine], Coroutine[object, object, int]]
"""Lives, and returns the first moment worth a look."""


async def one_of_each(machine: Machine) -> int:
    """Every kind of change, to as few sectors as possible."""
    await machine.live.open()
    machine.disk.settle()
    first = machine.disk.moment
    await machine.put(KEYS[:1], [0])
    await machine.put(KEYS[1:2], [0])
    machine.forget(0)
    await machine.reset()
    await machine.put(KEYS[2:3], [0])
    await machine.reopen()
    await machine.put(KEYS[3:4], [0])
    await machine.live.tier.aclose()
    return first


async def use_again(machine: Machine) -> int:
    """What a closed store holds is replaced by the next engine."""
    await machine.live.open()
    await machine.put(KEYS[:1], [0])
    await machine.live.tier.aclose()
    machine.disk.settle()
    first = machine.disk.moment
    await machine.live.open()
    await machine.put(KEYS[1:2], [0])
    await machine.live.tier.aclose()
    return first


async def upgrade(machine: Machine) -> int:
    """The store was full of another model's chunks, which give way to this one's."""
    older = machine.harness(machine.disk.root, machine.disk, "older")
    await older.open()
    await older.put(KEYS[10 : 10 + CAPACITY], range(CAPACITY))
    await older.tier.aclose()
    machine.disk.settle()
    first = machine.disk.moment
    await machine.live.open()
    await machine.put(KEYS[:2], [0, 1])
    await machine.live.tier.aclose()
    await machine.live.open()
    await machine.put(KEYS[2:3], [1])
    await machine.live.tier.aclose()
    return first


def judge_every_state(scenario: Scenario, durability: Durability, pool: IoPool) -> int:
    """Judge each state of each moment once; returns how many chunks were served in all."""
    with ram_directory() as directory, asyncio.Runner() as runner:
        # The step divides no frame of SQLite's log, so each frame is cut somewhere else.
        disk = PowerCutDisk(directory / "store", sector_nbytes=4096, log_step_nbytes=4096)
        machine = Machine(directory, pool, durability, disk)
        first = runner.run(scenario(machine))
        served = 0
        seen: set[object] = set()
        for moment in range(first, disk.moment + 1):
            cut = disk.cut(moment)
            for pick in cut.every_pick():
                state = (machine.expected(moment), frozenset(cut.files(pick).items()))
                if state not in seen:
                    seen.add(state)
                    served += runner.run(machine.judge(cut, pick, moment))
    logger.info("%d states, %d chunks served", len(seen), served)
    return served


@pytest.mark.untraced
@pytest.mark.parametrize("scenario", [one_of_each, use_again], ids=lambda each: each.__name__)
@pytest.mark.parametrize("durability", DURABILITIES)
def test_every_state_of_a_store_in_use(
    durability: Durability, scenario: Scenario, pool: IoPool
) -> None:
    served = judge_every_state(scenario, durability, pool)
    # Between 5 and 21, by the scenario and by how the writer groups its commits.
    assert served >= 3, "too little survived to prove anything"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("durability", DURABILITIES)
def test_every_state_of_a_store_that_replaces_another_models(
    durability: Durability, pool: IoPool
) -> None:
    assert judge_every_state(upgrade, durability, pool) > 10


class Step(NamedTuple):
    """One thing a random life does."""

    what: Literal["put", "forget", "reset", "reopen", "settle"]
    slots: list[int]


SLOTS = st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=CAPACITY, unique=True)
STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["put", "put", "put", "put", "forget", "reset", "reopen", "settle"]),
        SLOTS,
    ),
    min_size=1,
    max_size=8,
)


async def live(machine: Machine, steps: list[Step]) -> None:
    numbers = itertools.count()
    await machine.live.open()
    for step in steps:
        match step.what:
            case "put":
                await machine.put([KEYS[next(numbers)] for _ in step.slots], step.slots)
            case "forget":
                machine.forget(step.slots[0])
            case "reset":
                await machine.reset()
            case "reopen":
                await machine.reopen()
            case "settle":
                machine.disk.settle()
    await machine.live.tier.aclose()


class Look(NamedTuple):
    """Which moment, and which of its states. Neither may depend on how threads took turns."""

    permille: int
    seed: int

    def pick(self, cut: PowerCut) -> list[int]:
        chance = random.Random(self.seed)
        newest = chance.choice([0.0, 0.2, 0.8])
        return [
            0 if chance.random() < newest else chance.randrange(options)
            for options in cut.choices
        ]


LOOKS = st.lists(
    st.builds(Look, st.integers(0, 1000), st.integers(0, 2**32)), min_size=4, max_size=4
)


@pytest.mark.untraced
@settings(
    max_examples=settings().max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(durability=st.sampled_from(DURABILITIES), steps=STEPS, looks=LOOKS)
def test_some_states_of_any_life(
    pool: IoPool, durability: Durability, steps: list[Step], looks: list[Look]
) -> None:
    """With sectors of 512 bytes, and the index cut at any byte."""
    with ram_directory() as directory, asyncio.Runner() as runner:
        disk = PowerCutDisk(directory / "store")
        machine = Machine(directory, pool, durability, disk)
        runner.run(live(machine, steps))
        for look in looks:
            moment = disk.moment * look.permille // 1000
            cut = disk.cut(moment)
            runner.run(machine.judge(cut, look.pick(cut), moment))
