"""The fake's faults; that it is a tier is the contract's business."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator

import pytest

from kvtier.errors import CacheLockedError, ConfigError
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import TierHarness, make_keys
from kvtier.tiers import TierContext
from kvtier.types import LayoutFingerprint, Outcome
from tests.support.memory_tier import MemoryTier, MemoryTierConfig

DONE, FAILED, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT
KEYS = make_keys(range(3))
OPTIONS = MemoryTierConfig(capacity_bytes=4 * 4096)


@pytest.fixture
def context() -> Iterator[TierContext]:
    pool = IoPool(2, name="kvtier-test")
    yield TierContext(4096, LayoutFingerprint({}), pool)
    assert pool.close(timeout_s=10)


@pytest.fixture
async def harness(context: TierContext) -> AsyncIterator[TierHarness[MemoryTier]]:
    harness = TierHarness(lambda: MemoryTier.open(OPTIONS, context), context.pool)
    await harness.open()
    yield harness
    await harness.tier.aclose()


async def test_a_failing_slot_fails_alone_until_it_is_healed(
    harness: TierHarness[MemoryTier],
) -> None:
    harness.tier.medium.fail([1])
    assert await harness.put(KEYS, range(3)) == [DONE, FAILED, DONE]
    harness.tier.medium.heal()
    assert await harness.get(KEYS, range(3)) == [DONE, CORRUPT, DONE]
    harness.tier.medium.fail([0])
    assert await harness.get(KEYS[:1], [0]) == [FAILED]


async def test_a_corrupted_slot_is_found_out(harness: TierHarness[MemoryTier]) -> None:
    await harness.put(KEYS, range(3))
    harness.tier.medium.corrupt([2])
    assert await harness.get(KEYS, range(3)) == [DONE, DONE, CORRUPT]


async def test_a_stalled_slot_hangs_until_its_gate_opens(
    harness: TierHarness[MemoryTier],
) -> None:
    await harness.put(KEYS, range(3))
    gate = harness.tier.medium.stall([1])
    reading = asyncio.ensure_future(harness.get(KEYS[1:2], [1]))
    assert await harness.get(KEYS[:1], [0]) == [DONE]
    assert not reading.done()
    gate.set()
    assert await reading == [DONE]


async def test_a_medium_serves_one_tier_at_a_time(
    harness: TierHarness[MemoryTier], context: TierContext
) -> None:
    with pytest.raises(CacheLockedError):
        MemoryTier(OPTIONS, context, harness.tier.medium)


def test_a_capacity_below_one_slot_is_refused(context: TierContext) -> None:
    larger = dataclasses.replace(context, slot_nbytes=8192)
    with pytest.raises(ConfigError):
        MemoryTier.open(MemoryTierConfig(capacity_bytes=8191), larger)
