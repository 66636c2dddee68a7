"""What a keyed tier asks, adds and puts in a shared tier."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence

import pytest

from kvtier.config import parse_tier
from kvtier.errors import TierUnavailableError
from kvtier.keys import make_key
from kvtier.os.iopool import IoPool
from kvtier.tiers.base import TierContext
from kvtier.tiers.shared import KeyedTier
from kvtier.types import LayoutFingerprint, Outcome, Purpose
from tests.support.memory_shared_tier import MemoryService, MemorySharedTier

CHUNK_NBYTES = 4096
DONE, MISSING, CORRUPT = Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT


class Engine:
    """One engine's tier.

    Attributes:
        service: The service that all engines of a test share.
        shared: The client.
    """

    def __init__(self, pool: IoPool, service: str) -> None:
        text = f"kind: {MemorySharedTier.__module__}:MemorySharedTier\nservice: {service}\n"
        options = parse_tier(text, MemorySharedTier.Options, source="test")
        self.service = MemoryService.named(service)
        self.shared = MemorySharedTier(self.service)
        context = TierContext(CHUNK_NBYTES, LayoutFingerprint({}), pool)
        scratch = memoryview(bytearray(CHUNK_NBYTES))
        self.tier = KeyedTier(options, context, self.shared, scratch)

    async def store(self, numbers: Sequence[int]) -> list[Outcome]:
        return await self._move("write", numbers)

    async def load(self, numbers: Sequence[int]) -> list[Outcome]:
        return await self._move("read", numbers)

    async def _move(self, name: str, numbers: Sequence[int]) -> list[Outcome]:
        keys = [make_key(number.to_bytes(32, "big"), 0) for number in numbers]
        buffers = [memoryview(bytearray(CHUNK_NBYTES))] * len(numbers)  # all are equal
        move = getattr(self.tier, name)
        return list((await move(keys, numbers, buffers, purpose=Purpose.DEMOTE)).outcomes)

    def calls(self) -> list[tuple[str, int]]:
        """Return the method and the number of keys of each call since the last time."""
        calls = [(call.method, len(call.keys)) for call in self.service.calls]
        self.service.calls.clear()
        return calls


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    pool = IoPool(2, name="kvtier-test")
    service = f"test-{secrets.token_hex(6)}"  # never a number in YAML
    yield Engine(pool, service), Engine(pool, service)
    assert pool.close(timeout_s=10)


async def store_and_damage(engine: Engine) -> None:
    """Store the chunk 0 as the only value, and replace the value's bytes."""
    assert await engine.store([0]) == [DONE]
    [key] = engine.service.values
    engine.service.values[key] = b"short"


async def test_a_new_chunk_is_asked_for_once_and_added(engines: tuple[Engine, Engine]) -> None:
    engine, _ = engines
    assert await engine.store(range(3)) == [DONE] * 3
    assert engine.calls() == [("contains", 3), ("add", 3)]
    assert await engine.store(range(2)) == [DONE] * 2
    assert engine.calls() == [("contains", 2)]


async def test_a_tier_that_need_not_be_asked_is_not_asked(
    engines: tuple[Engine, Engine],
) -> None:
    engine, _ = engines
    engine.shared.asks_before_adding = False
    assert await engine.store(range(3)) == [DONE] * 3
    assert engine.calls() == [("add", 3)]


async def test_a_store_that_a_reset_overtakes_uses_no_keys_of_the_new_epoch(
    engines: tuple[Engine, Engine],
) -> None:
    engine, other = engines
    engine.service.hang()
    async with asyncio.TaskGroup() as group:
        storing = group.create_task(engine.store([0]))
        await asyncio.sleep(0)  # runs the task until the service hangs
        await engine.tier.reset()
        engine.service.release()
    assert storing.result() == [DONE]
    assert await engine.load([0]) == [MISSING]
    assert await other.load([0]) == [DONE]


async def test_a_chunk_that_was_missing_never_replaces_one_that_another_engine_stored(
    engines: tuple[Engine, Engine],
) -> None:
    engine, other = engines
    assert await engine.load([0]) == [MISSING]
    assert await other.store([0]) == [DONE]
    engine.calls()
    assert await engine.store([0]) == [DONE]
    assert engine.calls() == [("contains", 1), ("add", 1)]
    assert await engine.load([0]) == [DONE]


async def test_only_values_with_wrong_bytes_are_replaced(
    engines: tuple[Engine, Engine],
) -> None:
    engine, _ = engines
    await engine.store(range(3))
    keys = list(engine.service.values)
    engine.service.values[keys[0]] = bytes(CHUNK_NBYTES + 64)
    engine.service.values[keys[1]] = b"short"
    assert await engine.load(range(3)) == [CORRUPT, CORRUPT, DONE]
    engine.calls()
    assert await engine.store(range(4)) == [DONE] * 4
    again = [("get", 1)] * 2
    assert engine.calls() == [("contains", 4), *again, ("add", 1), ("put", 2)]
    assert await engine.load(range(4)) == [DONE] * 4


async def test_a_value_that_another_engine_has_repaired_is_not_stored_again(
    engines: tuple[Engine, Engine],
) -> None:
    engine, other = engines
    await store_and_damage(engine)
    assert await engine.load([0]) == await other.load([0]) == [CORRUPT]
    assert await other.store([0]) == [DONE]
    engine.calls()
    for calls in ([("contains", 1), ("get", 1)], [("contains", 1)]):
        assert await engine.store([0]) == [DONE]
        assert engine.calls() == calls


async def test_a_value_with_wrong_bytes_that_is_gone_is_added(
    engines: tuple[Engine, Engine],
) -> None:
    engine, _ = engines
    await store_and_damage(engine)
    assert await engine.load([0]) == [CORRUPT]
    engine.service.evict()
    engine.calls()
    assert await engine.store([0]) == [DONE]
    assert engine.calls() == [("contains", 1), ("get", 1), ("add", 1)]


async def test_a_wrong_value_is_replaced_after_any_number_of_misses(
    engines: tuple[Engine, Engine],
) -> None:
    engine, _ = engines
    await store_and_damage(engine)
    missing = range(1, (1 << 16) + 2)
    assert await engine.load(missing) == [MISSING] * len(missing)
    assert await engine.load([0]) == [CORRUPT]
    engine.calls()
    assert await engine.store([0]) == [DONE]
    assert engine.calls() == [("contains", 1), ("get", 1), ("put", 1)]


async def test_a_service_that_fails_before_a_repair_keeps_its_value(
    engines: tuple[Engine, Engine],
) -> None:
    engine, _ = engines
    engine.shared.asks_before_adding = False
    await store_and_damage(engine)
    assert await engine.load([0]) == [CORRUPT]
    engine.service.error = OSError("no answer")
    engine.calls()
    with pytest.raises(TierUnavailableError, match="no answer"):
        await engine.store([0])
    assert engine.calls() == [("get", 1)]
    engine.service.error = None
    assert await engine.store([0]) == [DONE]
    assert engine.calls() == [("get", 1), ("put", 1)]
