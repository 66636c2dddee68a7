"""From one slower tier to another."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from kvtier.config import parse_config
from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.tiers.base import SlotOutcomes, TierContext
from kvtier.transfer import (
    BetweenTiers,
    BounceBuffer,
    EngineLimits,
    TransferEngine,
    bounce_slots_for,
)
from kvtier.types import Job, LayoutFingerprint, Outcome, Purpose
from tests.support.memory_tier import MemoryMedium, MemoryTier, MemoryTierConfig

SLOT_NBYTES = 4096
CHUNKS = 5
KEYS = [ChunkKey(bytes([number]) * 32 + bytes(4)) for number in range(CHUNKS)]
DONE = Outcome.DONE


class Memory:
    """Two bounce slots behind as many that are RAM's, which nobody may touch."""

    def __init__(self) -> None:
        self.slots = [bytearray(SLOT_NBYTES) for _ in range(4)]

    def slot(self, number: int) -> memoryview:
        return memoryview(self.slots[number])


class Watched(MemoryTier):
    """Counts reads, and calls ``at_write`` before each write."""

    at_write: Callable[[], None] = staticmethod(lambda: None)
    reads = 0

    @override
    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        self.reads += 1
        return await super().read(keys, slots, into, purpose=purpose)

    @override
    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        self.at_write()
        return await super().write(keys, slots, sources, purpose=purpose)


class Way:
    """Two tiers, of which the upper one holds ``KEYS`` in slots 0 to 4."""

    def __init__(self) -> None:
        self.pool = IoPool(2, name="test")
        context = TierContext(
            slot_nbytes=SLOT_NBYTES, fingerprint=LayoutFingerprint({}), pool=self.pool
        )
        self.memory = Memory()
        self.upper, self.lower = (
            Watched(
                MemoryTierConfig(name=name, capacity_bytes=8 * SLOT_NBYTES),
                context,
                MemoryMedium(),
            )
            for name in ("upper", "lower")
        )
        self.route = BetweenTiers(
            self.upper, self.lower, BounceBuffer(self.memory, range(2, 4))
        )

    async def fill(self) -> None:
        payloads = [memoryview(bytearray(key[:1] * SLOT_NBYTES)) for key in KEYS]
        filled = await self.upper.write(KEYS, range(CHUNKS), payloads, purpose=Purpose.STORE)
        assert set(filled.outcomes) == {DONE}

    async def below(self, key: ChunkKey, slot: int) -> bytes | None:
        """Return what the lower tier has for ``key``."""
        into = bytearray(SLOT_NBYTES)
        found = await self.lower.read([key], [slot], [memoryview(into)], purpose=Purpose.LOAD)
        return bytes(into) if found.outcomes == (DONE,) else None


JOB = Job(1, Purpose.DEMOTE, "upper", "lower", KEYS, [*range(CHUNKS)], [7, 6, 5, 4, 3], 1.0)


def run(*steps: Callable[[Way], object]) -> tuple[Way, SlotOutcomes, list[bytes | None]]:
    """Move ``JOB``, after each of ``steps``; returns also what arrived."""
    way = Way()

    async def go() -> tuple[SlotOutcomes, list[bytes | None]]:
        await way.fill()
        for step in steps:
            step(way)
        moved = await way.route.run(JOB)
        slots = JOB.destination_slots
        return moved, [
            await way.below(key, slot) for key, slot in zip(KEYS, slots, strict=True)
        ]

    try:
        return way, *asyncio.run(go())
    finally:
        assert way.pool.close(timeout_s=5)


def whole(number: int) -> bytes:
    return bytes([number]) * SLOT_NBYTES


def test_chunks_go_through_the_bounce_buffer_half_by_half_and_touch_no_ram() -> None:
    way, moved, arrived = run()
    assert moved == SlotOutcomes([DONE] * CHUNKS, "")
    assert arrived == [whole(number) for number in range(CHUNKS)]
    assert not any(map(any, way.memory.slots[:2]))


def test_chunks_that_the_upper_tier_cannot_read_are_not_written_and_the_rest_are() -> None:
    def harm(way: Way) -> None:
        way.upper.medium.corrupt([1])
        way.upper.medium.fail([3])

    _, moved, arrived = run(harm)
    assert moved.outcomes == [DONE, Outcome.CORRUPT, DONE, Outcome.FAILED, DONE]
    assert moved.error
    assert arrived == [whole(0), None, whole(2), None, whole(4)]


def test_chunks_that_the_lower_tier_cannot_write_have_failed() -> None:
    _, moved, arrived = run(lambda way: way.lower.medium.fail([5]))
    assert moved.outcomes == [DONE, DONE, Outcome.FAILED, DONE, DONE]
    assert arrived[2] is None


def test_after_it_is_abandoned_nothing_more_is_read_or_written() -> None:
    def give_up_at_the_first_write(way: Way) -> None:
        way.lower.at_write = lambda: way.route.abandon(JOB)

    way, moved, arrived = run(give_up_at_the_first_write)
    # Two halves: the second part may have been read, and is not written.
    assert way.upper.reads <= 2
    assert moved.outcomes == [DONE, *[Outcome.CANCELLED] * (CHUNKS - 1)]
    assert arrived == [whole(0), *[None] * (CHUNKS - 1)]


def test_a_job_that_never_ran_can_be_abandoned() -> None:
    _, moved, _ = run(lambda way: way.route.abandon(JOB))
    assert set(moved.outcomes) == {DONE}


def test_a_disk_that_hangs_holds_up_a_half_and_no_more() -> None:
    gates: list[threading.Event] = []

    def hang(way: Way) -> None:
        gates.append(way.upper.medium.stall([0]))
        writes = itertools.count(1)

        def release_at_the_last() -> None:
            if next(writes) == CHUNKS - 1:
                gates[0].set()

        way.lower.at_write = release_at_the_last

    _, moved, arrived = run(hang)
    assert set(moved.outcomes) == {DONE}
    assert None not in arrived


@pytest.mark.parametrize("error", [OSError(5, "no"), SystemExit(3)], ids=type)
def test_an_error_of_a_tier_fails_its_job_and_the_next_job_works(
    error: BaseException,
) -> None:
    way = Way()
    asyncio.run(way.fill())
    writes: list[int] = []

    def refuse() -> None:
        writes.append(1)
        raise error

    way.lower.at_write = refuse
    limits = EngineLimits(queued_bytes=1 << 20, running_bytes=1 << 20)
    engine = TransferEngine(
        "test", {("upper", "lower"): way.route}, chunk_nbytes=SLOT_NBYTES, limits=limits
    )
    try:
        engine.submit(JOB._replace(timeout_s=10.0))
        assert engine.wait([JOB.job_id], timeout_s=10)
        (failed,) = engine.poll()
        assert failed.outcomes == [Outcome.FAILED] * CHUNKS
        assert failed.error == f"{type(error).__name__}: {error}"
        assert len(writes) == 1, "the other parts are of no use"
        way.lower.at_write = lambda: None
        engine.submit(JOB._replace(job_id=2, timeout_s=10.0))
        assert engine.wait([2], timeout_s=10)
        (done,) = engine.poll()
        assert done.outcomes == [DONE] * CHUNKS
    finally:
        assert engine.close(timeout_s=5)
        assert way.pool.close(timeout_s=5)


@pytest.mark.parametrize(
    ("tiers", "placement", "slots"),
    [
        (1, "write: evict", 0),
        (2, "write: through", 0),
        (2, "write: evict", 4),
        (3, "write: evict", 4),
    ],
)
def test_memory_for_it_is_taken_where_chunks_go_from_tier_to_tier(
    tmp_path: Path, tiers: int, placement: str, slots: int
) -> None:
    nvmes = [
        f"- {{kind: nvme, name: n{number}, path: {tmp_path / str(number)}, capacity: 1GiB}}\n"
        for number in range(tiers)
    ]
    config = parse_config(
        "tiers:\n- {kind: ram, capacity: 1GiB}\n"
        + "".join(nvmes)
        + f"placement: {{{placement}}}\ntransfer: {{piece: 8MiB}}\n",
        source="test",
    )
    assert bounce_slots_for(config, 4 << 20) == slots
    assert bounce_slots_for(config, 64 << 20) == min(slots, 2)
