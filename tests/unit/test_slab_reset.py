"""What is stored after a reset is this engine's alone, unless the operator says otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import NvmeTierConfig
from kvtier.errors import TierUnavailableError
from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import TierHarness, make_keys
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome
from tests.support.faulty_io import Fault, FaultyIo

SLOT = 8192
CAPACITY = 8
FINGERPRINT = LayoutFingerprint({"model": "m"})
DONE, FAILED, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT
KEYS = make_keys(range(8))
INDEX = f"{FINGERPRINT.namespace()}/index.sqlite"

Started = tuple[TierHarness[SlabTier], list[tuple[ChunkKey, int]]]
"""An engine's tier, and what it found."""

Start = Callable[..., Coroutine[Any, Any, Started]]


@pytest.fixture
def io() -> FaultyIo:
    return FaultyIo()


@pytest.fixture
async def start(tmp_path: Path, pool: IoPool, io: FaultyIo) -> AsyncIterator[Start]:
    """Start an engine; ``was_reset`` for one whose process died."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*, was_reset: bool = False, **options: Any) -> Started:
            config = NvmeTierConfig(
                path=tmp_path / "store",
                capacity_bytes=CAPACITY * SLOT,
                direct_io="off",
                **options,
            )
            context = TierContext(SLOT, FINGERPRINT, pool, was_reset=was_reset)
            harness = TierHarness(lambda: SlabTier.open(config, context, io=io), pool)
            found = await harness.open()
            stack.push_async_callback(harness.tier.aclose)
            return harness, found

        yield start


async def stopped_after_a_reset(start: Start, *, resets: int = 1, **options: Any) -> None:
    """Let an engine live that has stored KEYS[1] in slot 1 since its last reset."""
    harness, _ = await start(**options)
    await harness.put(KEYS[:1], [0])
    for _ in range(resets):
        await harness.tier.reset()
        assert await harness.put(KEYS[1:2], [1]) == [DONE]
    assert await harness.get(KEYS[1:2], [1]) == [DONE]
    await harness.tier.aclose()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if "kvtier" in record.name]
    caplog.clear()
    return [record.getMessage() for record in found if record.levelname == "WARNING"]


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("resets", [1, 2])
async def test_chunks_stored_after_a_reset_are_dropped_at_the_next_start_only(
    start: Start,
    caplog: pytest.LogCaptureFixture,
    durability: str,
    resets: int,
) -> None:
    options = {"durability": durability}
    await stopped_after_a_reset(start, resets=resets, **options)
    [warning] = warnings_in(caplog)
    assert "not survive a restart" in warning
    assert "set keep_after_reset: true" in warning

    harness, found = await start(**options)
    [warning] = warnings_in(caplog)
    assert "starting with an empty cache: the last engine had its cache reset" in warning
    assert found == []
    assert await harness.get(KEYS[1:2], [1]) == [CORRUPT]
    assert await harness.put(KEYS[2:], range(2, 8)) == [DONE] * 6

    assert len(await harness.reopen()) == 6, "the note went with what it was about"
    assert warnings_in(caplog) == []
    await harness.tier.aclose()


async def test_chunks_stored_after_a_reset_can_be_kept(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    await stopped_after_a_reset(start, keep_after_reset=True)
    _, found = await start(keep_after_reset=True)
    assert found == [(KEYS[1], 1)]
    assert warnings_in(caplog) == []


async def test_chunks_that_are_written_during_a_reset_are_dropped(
    start: Start, io: FaultyIo, pool: IoPool
) -> None:
    harness, _ = await start(keep_after_reset=True)
    gate = io.stall("pwritev")
    writing = asyncio.ensure_future(harness.put(KEYS[:1], [0]))
    assert await pool.run(lambda: io.wait_until_stalled(timeout_s=10), priority=0)
    await harness.tier.reset()
    gate.set()
    assert await writing == [FAILED]
    assert await harness.get(KEYS[:1], [0]) == [CORRUPT]
    assert await harness.reopen() == []
    await harness.tier.aclose()


async def test_the_option_at_the_time_of_the_reset_decides(start: Start) -> None:
    await stopped_after_a_reset(start)
    _, found = await start(keep_after_reset=True)
    assert found == []


async def test_a_process_that_replaces_another_of_the_engine_keeps_rows_and_note(
    start: Start,
) -> None:
    await stopped_after_a_reset(start)
    harness, found = await start(was_reset=True)
    assert found == [(KEYS[1], 1)]
    await harness.tier.aclose()
    _, found = await start()
    assert found == []


async def test_a_process_records_an_earlier_reset_in_a_new_index(
    start: Start, tmp_path: Path
) -> None:
    await stopped_after_a_reset(start)
    (tmp_path / "store" / INDEX).unlink()
    harness, found = await start(was_reset=True)
    await harness.put(KEYS[:1], [0])
    await harness.tier.aclose()
    _, found = await start()
    assert found == []


async def test_after_a_reset_nothing_is_stored_before_the_reset_is_recorded(
    start: Start, io: FaultyIo, tmp_path: Path
) -> None:
    harness, _ = await start()
    await harness.tier.aclose()
    io.strike("sql INSERT", io.calls.count("sql INSERT"), _full())
    harness, found = await start(was_reset=True)
    assert await harness.put(KEYS[:1], [0]) == [FAILED]
    io.heal()
    assert await harness.put(KEYS[:1], [0]) == [DONE]
    await harness.tier.aclose()
    _, found = await start()
    assert found == []


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("call", ["sql BEGIN", "sql DELETE", "sql INSERT"])
async def test_an_engine_starts_on_a_full_disk_without_untrusted_chunks(
    start: Start, io: FaultyIo, call: str, number: int
) -> None:
    await stopped_after_a_reset(start)
    io.strike(call, io.calls.count(call) + number, _full())
    harness, found = await start()
    assert found == []
    assert await harness.get(KEYS[1:2], [1]) == [CORRUPT]
    await harness.put(KEYS[2:3], [2])
    io.heal()
    assert await harness.put(KEYS[3:4], [3]) == [DONE]
    assert (KEYS[1], 1) not in await harness.reopen()
    assert await harness.get(KEYS[3:4], [3]) == [DONE], "what came later was never doubted"
    await harness.tier.aclose()


async def test_a_start_after_a_reset_on_a_disk_that_is_still_full_asks_for_room(
    start: Start, io: FaultyIo
) -> None:
    harness, _ = await start()
    await harness.put(KEYS[:1], [0])
    io.fill_index()
    await harness.tier.reset()
    await harness.tier.aclose()
    io.strike("sql PRAGMA", io.calls.count("sql PRAGMA"), _full())
    with pytest.raises(TierUnavailableError, match=r"opened: .*; make room on that disk$"):
        await start()
    io.heal()
    _, found = await start()
    assert found == []


async def test_an_index_that_is_set_aside_takes_its_log_along(
    start: Start, io: FaultyIo, pool: IoPool, tmp_path: Path
) -> None:
    """Or the next engine, should this one be killed, would find the old rows in the log."""
    harness, _ = await start()
    await harness.put(KEYS[:1], [0])
    io.fill_index()
    await harness.tier.reset()
    own = (tmp_path / "store" / INDEX).parent
    found = await pool.run(lambda: {path.name for path in own.glob("index*")}, priority=0)
    io.heal()
    assert found == {f"index.sqlite.damaged{side}" for side in ("", "-wal", "-shm")}
    await harness.tier.aclose()


async def test_a_reset_that_the_index_takes_only_later_is_noted_before_anything_is_stored(
    start: Start, io: FaultyIo
) -> None:
    harness, _ = await start()
    await harness.put(KEYS[:1], [0])
    io.fill_index()
    io.fail("rename", 5)
    with pytest.raises(TierUnavailableError):
        await harness.tier.reset()
    io.heal()
    assert await harness.put(KEYS[1:2], [1]) == [DONE]
    assert await harness.reopen() == []
    await harness.tier.aclose()


def _full() -> Fault:
    return Fault(sqlite3.SQLITE_FULL, lasting=True)
