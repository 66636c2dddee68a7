"""What a bad disk does to the slab tier: a chunk is right, failed or a miss, never wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import NvmeTierConfig
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.os.block_io import PAGE_NBYTES, BlockIo, read_fully, write_fully
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import (
    TierHarness,
    make_buffers,
    make_keys,
    make_payload,
    make_sources,
)
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.tiers.slab import tier as slab
from kvtier.tiers.slab.slots import SlotFile
from kvtier.types import LayoutFingerprint, Outcome, Purpose
from tests.support.faulty_io import Fault, FaultyIo
from tests.unit.warned import warnings_in

SLOT = 8192
CAPACITY = 16
FINGERPRINT = LayoutFingerprint({"model": "m"})
DONE, FAILED, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT
KEYS = make_keys(range(8))

OpenHarness = Callable[..., Any]


@pytest.fixture
def io() -> FaultyIo:
    return FaultyIo()


@pytest.fixture
def slots_path(tmp_path: Path) -> Path:
    return tmp_path / "store" / FINGERPRINT.namespace() / "slots.bin"


@pytest.fixture
async def open_harness(
    tmp_path: Path, pool: IoPool, io: FaultyIo
) -> AsyncIterator[OpenHarness]:
    context = TierContext(SLOT, FINGERPRINT, pool, piece_nbytes=4 * SLOT)
    async with contextlib.AsyncExitStack() as stack:

        async def open_harness(**options: Any) -> TierHarness[SlabTier]:
            config = NvmeTierConfig(
                **{
                    "path": tmp_path / "store",
                    "capacity_bytes": CAPACITY * SLOT,
                    "direct_io": "off",
                    **options,
                }
            )
            harness = TierHarness(lambda: SlabTier.open(config, context, io=io), pool)
            await harness.open()
            stack.push_async_callback(close, harness)
            return harness

        yield open_harness


async def close(harness: TierHarness[SlabTier]) -> None:
    await harness.tier.aclose()  # whichever tier is open by then


async def overwrite(pool: IoPool, path: Path, offset: int, content: bytes) -> None:
    """Change the file behind the tier's back."""

    def change() -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(content)

    await pool.run(change, priority=0)


async def test_an_unreadable_sector_fails_its_chunk_alone(
    open_harness: OpenHarness, io: FaultyIo
) -> None:
    harness = await open_harness()
    await harness.put(KEYS, range(8))
    io.fail("preadv", errno.EIO, offsets=range(2 * SLOT + 100, 2 * SLOT + 101))
    assert await harness.get(KEYS, range(8)) == [DONE, DONE, FAILED, *[DONE] * 5]
    assert "slot 2" in harness.error
    io.heal()
    assert await harness.get(KEYS, range(8)) == [DONE] * 8


async def test_an_unwritable_sector_fails_its_chunk_alone(
    open_harness: OpenHarness, io: FaultyIo
) -> None:
    harness = await open_harness()
    io.fail("pwritev", errno.EIO, offsets=range(5 * SLOT, 5 * SLOT + 1))
    expected = [*[DONE] * 5, FAILED, DONE, DONE]
    assert await harness.put(KEYS, range(8)) == expected
    io.heal()
    assert await harness.get(KEYS, range(8)) == [*[DONE] * 5, CORRUPT, DONE, DONE]
    assert {slot for _, slot in await harness.reopen()} == {0, 1, 2, 3, 4, 6, 7}


@pytest.mark.parametrize("longest_nbytes", [4096, 12288, 5000, 100])
async def test_short_transfers_are_carried_on(
    open_harness: OpenHarness, io: FaultyIo, longest_nbytes: int
) -> None:
    harness = await open_harness()
    io.longest_transfer_nbytes = longest_nbytes
    assert await harness.put(KEYS, range(8)) == [DONE] * 8
    assert await harness.get(KEYS, range(8)) == [DONE] * 8


async def test_a_failed_overwrite_makes_the_old_chunk_a_miss(
    open_harness: OpenHarness, io: FaultyIo
) -> None:
    harness = await open_harness()
    await harness.put(KEYS[:1], [0])
    io.fail("pwritev", errno.EIO)
    assert await harness.put(KEYS[1:2], [0]) == [FAILED]
    io.heal()
    assert await harness.get(KEYS[:2], [0, 0]) == [CORRUPT] * 2


async def test_a_flipped_bit_is_a_miss_for_its_chunk_alone(
    open_harness: OpenHarness, pool: IoPool, slots_path: Path
) -> None:
    harness = await open_harness()
    await harness.put(KEYS, range(8))
    last = make_payload(KEYS[3], SLOT)[-1]
    await overwrite(pool, slots_path, 4 * SLOT - 1, bytes([last ^ 0x80]))
    assert await harness.get(KEYS, range(8)) == [*[DONE] * 3, CORRUPT, *[DONE] * 4]


async def test_a_healthy_payload_in_the_wrong_slot_is_a_miss(
    open_harness: OpenHarness, pool: IoPool, slots_path: Path
) -> None:
    harness = await open_harness()
    await harness.put(KEYS[:2], [0, 1])
    await overwrite(pool, slots_path, 0, make_payload(KEYS[1], SLOT))
    assert await harness.get(KEYS[:2], [0, 1]) == [CORRUPT, DONE]


async def test_a_file_cut_short_behind_our_back_is_a_miss(
    open_harness: OpenHarness, pool: IoPool, slots_path: Path
) -> None:
    harness = await open_harness()
    await harness.put(KEYS, range(8))
    await pool.run(lambda: os.truncate(slots_path, 2 * SLOT + 5000), priority=0)
    assert await harness.get(KEYS, range(8)) == [DONE, DONE, *[CORRUPT] * 6]


async def test_a_torn_write_is_a_miss_after_a_restart(
    open_harness: OpenHarness, io: FaultyIo
) -> None:
    harness = await open_harness()
    io.tear_writes(after_nbytes=3 * SLOT + 4096)
    assert await harness.put(KEYS[:4], range(4)) == [DONE] * 4
    io.heal()
    await harness.reopen()
    assert await harness.get(KEYS[:4], range(4)) == [DONE, DONE, DONE, CORRUPT]


async def test_a_row_that_outlived_its_payload_is_a_miss(
    open_harness: OpenHarness, pool: IoPool, tmp_path: Path, slots_path: Path
) -> None:
    """The state a crash leaves between the payload's write and its row's commit."""
    harness = await open_harness()
    await harness.put(KEYS[:2], [0, 1])
    await harness.tier.aclose()
    await pool.run(
        lambda: shutil.copy(slots_path.parent / "index.sqlite", tmp_path), priority=0
    )
    await harness.open()
    await harness.put(KEYS[2:3], [1])
    await harness.tier.aclose()
    await pool.run(
        lambda: shutil.copy(tmp_path / "index.sqlite", slots_path.parent), priority=0
    )
    assert await harness.open() == [(KEYS[0], 0), (KEYS[1], 1)]
    assert await harness.get(KEYS[:2], [0, 1]) == [DONE, CORRUPT]


async def test_neighbouring_slots_move_in_one_call(
    open_harness: OpenHarness, io: FaultyIo
) -> None:
    harness = await open_harness()
    io.calls.clear()
    await harness.put(KEYS, [7, 3, 0, 5, 1, 6, 2, 4])
    await harness.get(KEYS, [7, 3, 0, 5, 1, 6, 2, 4])
    assert io.calls.count("pwritev") == io.calls.count("preadv") == 2  # pieces of four slots


async def test_all_threads_share_a_read_that_is_worth_it(
    open_harness: OpenHarness, io: FaultyIo, pool: IoPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab, "_LEAST_PIECE_NBYTES", 2 * SLOT)
    harness = await open_harness()
    await harness.put(KEYS, list(range(8)))
    assert pool.threads >= 2
    for chunks, calls in ((8, 2), (4, 2), (3, 2), (1, 1)):  # pieces of four slots at most
        io.calls.clear()
        await harness.get(KEYS[:chunks], list(range(chunks)))
        assert io.calls.count("preadv") == calls


async def test_an_absent_chunk_costs_no_read(open_harness: OpenHarness, io: FaultyIo) -> None:
    harness = await open_harness()
    await harness.put(KEYS[:1], [0])
    io.calls.clear()
    assert await harness.get(KEYS[1:3], [0, 1]) == [CORRUPT] * 2
    assert io.calls == []


def replace(slots_path: Path) -> None:
    shutil.copy(slots_path, slots_path.with_name("copy"))
    slots_path.with_name("copy").replace(slots_path)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda slots: shutil.rmtree(slots.parent), id="removed"),
        pytest.param(lambda slots: slots.parent.rename(slots.parents[2] / "away"), id="moved"),
        pytest.param(replace, id="replaced"),
    ],
)
async def test_a_store_that_a_restart_would_miss_serves_on_and_warns_at_the_end(
    open_harness: OpenHarness,
    pool: IoPool,
    slots_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], object],
) -> None:
    harness = await open_harness()
    await harness.put(KEYS[:2], [0, 1])
    await pool.run(lambda: change(slots_path), priority=0)
    assert await harness.put(KEYS[2:3], [2]) == [DONE]
    assert await harness.get(KEYS[:3], [0, 1, 2]) == [DONE] * 3
    await harness.tier.aclose()
    (warning,) = warnings_in(caplog)
    assert f"{slots_path} was moved, replaced or removed while in use" in warning


async def test_a_store_that_is_put_back_is_found_again_without_a_warning(
    open_harness: OpenHarness,
    pool: IoPool,
    slots_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = await open_harness()
    root, moved = slots_path.parent.parent, slots_path.parent.parent.with_name("moved")
    await harness.put(KEYS[:1], [0])
    await pool.run(lambda: root.rename(moved), priority=0)
    assert await harness.put(KEYS[1:2], [1]) == [DONE]
    await pool.run(lambda: moved.rename(root), priority=0)
    assert await harness.reopen() == [(KEYS[0], 0), (KEYS[1], 1)]
    assert warnings_in(caplog) == []


async def test_a_disk_that_fails_at_the_end_warns_of_nothing(
    open_harness: OpenHarness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await open_harness()

    def fail(_: Path) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(Path, "stat", fail)
        await harness.tier.aclose()
    assert warnings_in(caplog) == []


async def test_a_full_index_fails_the_chunks_and_nothing_else(
    open_harness: OpenHarness, io: FaultyIo, caplog: pytest.LogCaptureFixture
) -> None:
    harness = await open_harness()
    await harness.put(KEYS[:2], [0, 1])
    io.fill_index()
    assert await harness.put(KEYS[2:4], [1, 2]) == [FAILED] * 2
    assert await harness.put(KEYS[2:4], [1, 2]) == [FAILED] * 2
    assert "full" in harness.error
    assert await harness.get(KEYS[:4], [0, 1, 1, 2]) == [DONE, CORRUPT, CORRUPT, CORRUPT]
    io.fill_index(full=False)
    assert await harness.put(KEYS[4:5], [2]) == [DONE]
    assert len(warnings_in(caplog)) == 2  # stopped once, resumed once, however often it tried
    assert await harness.reopen() == [(KEYS[0], 0), (KEYS[1], 1), (KEYS[4], 2)]
    assert await harness.get(KEYS[:2], [0, 1]) == [DONE, CORRUPT]


async def test_forgetting_is_tried_again_when_the_index_was_full(
    open_harness: OpenHarness, io: FaultyIo
) -> None:
    harness = await open_harness()
    await harness.put(KEYS[:2], [0, 1])
    io.fill_index()
    harness.tier.forget([0])
    assert await harness.put(KEYS[2:3], [2]) == [FAILED]  # by now the deletion has failed
    io.fill_index(full=False)
    assert await harness.reopen() == [(KEYS[1], 1)]


async def test_a_reset_that_cannot_clear_the_index_moves_it_out_of_a_restarts_way(
    open_harness: OpenHarness,
    io: FaultyIo,
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = await open_harness()
    await harness.put(KEYS[:2], [0, 1])
    io.fill_index()
    await harness.tier.reset()
    assert "not survive a restart" in "".join(warnings_in(caplog))
    assert await harness.get(KEYS[:2], [0, 1]) == [CORRUPT] * 2
    io.fill_index(full=False)
    assert await harness.put(KEYS[2:3], [5]) == [DONE]
    assert await harness.get(KEYS[2:3], [5]) == [DONE]
    assert await harness.reopen() == []
    assert "while in use" not in "".join(warnings_in(caplog))


async def test_a_reset_that_fails_serves_no_old_chunk(
    open_harness: OpenHarness, io: FaultyIo
) -> None:
    harness = await open_harness()
    await harness.put(KEYS[:2], [0, 1])
    io.fill_index()
    io.fail("rename", errno.EIO)
    with pytest.raises(
        TierUnavailableError, match=r"neither cleared .* remove /.* before an engine opens it"
    ):
        await harness.tier.reset()
    assert await harness.get(KEYS[:2], [0, 1]) == [CORRUPT] * 2
    io.fill_index(full=False)
    assert await harness.put(KEYS[2:3], [5]) == [DONE]
    assert await harness.reopen() == []


async def test_many_uses_are_recorded_without_waiting_for_a_write(
    open_harness: OpenHarness, io: FaultyIo, pool: IoPool, slots_path: Path
) -> None:
    slots = 4100
    harness = await open_harness(capacity_bytes=slots * SLOT)
    await harness.put(KEYS[:2], [0, 1])
    harness.tier.touch([*range(1, slots), 0])

    def last_uses() -> list[int]:
        with contextlib.closing(sqlite3.connect(slots_path.parent / "index.sqlite")) as index:
            return [row[0] for row in index.execute("SELECT last_use FROM chunks")]

    deadline_s = time.monotonic() + 10
    while (uses := await pool.run(last_uses, priority=0)) == [1, 2]:
        assert time.monotonic() < deadline_s
    assert uses[0] - uses[1] == slots - 1


async def test_a_close_that_fails_still_releases_the_store(
    open_harness: OpenHarness, io: FaultyIo, caplog: pytest.LogCaptureFixture
) -> None:
    harness = await open_harness()
    await harness.put(KEYS[:1], [0])
    io.fail("sql close", sqlite3.SQLITE_IOERR)
    await harness.tier.aclose()
    io.heal()
    assert "not closed cleanly" in warnings_in(caplog)[0]
    assert await harness.open() == [(KEYS[0], 0)]


async def test_power_safety_syncs_payloads_before_their_rows(
    open_harness: OpenHarness, io: FaultyIo
) -> None:
    harness = await open_harness(durability="power")
    io.fail("sync_data", errno.EIO)
    assert await harness.put(KEYS[:1], [0]) == [FAILED]
    io.heal()
    assert await harness.reopen() == []


async def test_cancelling_waits_for_the_thread_that_fills_the_buffer(
    open_harness: OpenHarness, io: FaultyIo, pool: IoPool
) -> None:
    harness = await open_harness()
    await harness.put(KEYS[:1], [0])
    gate = io.stall()
    buffers = make_buffers(1, SLOT)
    reading = asyncio.ensure_future(
        harness.tier.read(KEYS[:1], [0], buffers, purpose=Purpose.LOAD)
    )
    assert await pool.run(lambda: io.wait_until_stalled(timeout_s=10), priority=0)
    reading.cancel()
    await asyncio.wait([reading], timeout=0.05)
    assert not reading.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert buffers[0] == make_payload(KEYS[0], SLOT)


@pytest.mark.parametrize("read_only", [False, True])
async def test_unaligned_buffers_never_reach_o_direct(
    open_harness: OpenHarness, read_only: bool
) -> None:
    harness = await open_harness(direct_io="require")
    sources = make_sources(KEYS, SLOT)
    memory = memoryview(mmap.mmap(-1, 9 * SLOT))[8:]
    views = [memory[start : start + SLOT] for start in range(0, 8 * SLOT, SLOT)]
    for view, source in zip(views, sources, strict=True):
        view[:] = source
    stored = [view.toreadonly() for view in views] if read_only else views
    result = await harness.tier.write(KEYS, range(8), stored, purpose=Purpose.STORE)
    assert list(result.outcomes) == [DONE] * 8
    assert await harness.get(KEYS, range(8)) == [DONE] * 8
    memory[:] = bytes(len(memory))
    result = await harness.tier.read(KEYS, range(8), views, purpose=Purpose.LOAD)
    assert list(result.outcomes) == [DONE] * 8
    assert views == sources


async def test_without_o_direct_auto_warns_once_and_works(
    open_harness: OpenHarness, io: FaultyIo, caplog: pytest.LogCaptureFixture
) -> None:
    io.fail("open_direct", errno.EINVAL)
    harness = await open_harness(direct_io="auto")
    assert len(warnings_in(caplog)) == 1
    assert await harness.put(KEYS, range(8)) == [DONE] * 8
    assert await harness.get(KEYS, range(8)) == [DONE] * 8


async def test_o_direct_that_opens_but_refuses_io_is_found_out(
    open_harness: OpenHarness, io: FaultyIo
) -> None:
    io.fail("preadv", errno.EINVAL)
    with pytest.raises(ConfigError, match="no O_DIRECT"):
        await open_harness(direct_io="require")


async def test_a_disk_that_fills_up_while_allocating_is_a_configuration_error(
    open_harness: OpenHarness, io: FaultyIo, pool: IoPool, slots_path: Path
) -> None:
    io.strike("allocate", 0, Fault(errno.ENOSPC, late=True))  # it keeps what it got
    with pytest.raises(ConfigError, match=r"capacity of 128 KiB does not fit: .* free"):
        await open_harness()
    assert (await pool.run(slots_path.stat, priority=0)).st_size == 0
    io.heal()
    harness = await open_harness()  # and the lock was released
    assert await harness.put(KEYS, range(8)) == [DONE] * 8


def test_a_file_without_status_is_closed_again(
    io: FaultyIo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> os.stat_result:
        raise OSError(errno.EIO, "broken")

    path = tmp_path / "slots.bin"
    path.write_bytes(bytes(SLOT))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        with pytest.raises(OSError, match="broken"):
            SlotFile.open_to_read(path, SLOT, io)
    assert io.calls == ["open", "close"]


class Short(BlockIo):
    """A device whose first transfer falls short."""

    def __init__(self, first_nbytes: int) -> None:
        self._first_nbytes = first_nbytes
        self.offsets: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        return self._first_nbytes if len(self.offsets) == 1 else sum(map(len, buffers))

    pwritev = preadv


@pytest.mark.parametrize(
    ("first_nbytes", "next_at"),
    [
        pytest.param(PAGE_NBYTES, PAGE_NBYTES, id="a page"),
        # O_DIRECT takes no other places, and what was moved of the second page is moved again.
        pytest.param(PAGE_NBYTES + 512, PAGE_NBYTES, id="more than a page"),
        pytest.param(100, 100, id="less, as only the page cache does it"),
    ],
)
def test_a_transfer_that_fell_short_goes_on_where_o_direct_may(
    first_nbytes: int, next_at: int
) -> None:
    slots = [memoryview(bytearray(SLOT)) for _ in range(2)]
    reading, writing = Short(first_nbytes), Short(first_nbytes)
    assert read_fully(reading, 0, slots, SLOT) == 2 * SLOT
    write_fully(writing, 0, slots, SLOT)
    for io in (reading, writing):
        assert io.offsets[:2] == [SLOT, SLOT + next_at]


async def test_a_slot_file_with_holes_is_given_its_room_before_anything_is_stored(
    open_harness: OpenHarness, pool: IoPool, slots_path: Path
) -> None:
    """As a copy that leaves out zeros has; a full disk would show when one is filled."""

    def make_holes() -> None:
        os.truncate(slots_path, 0)
        os.truncate(slots_path, CAPACITY * SLOT)

    harness = await open_harness()
    await harness.tier.aclose()
    await pool.run(make_holes, priority=0)
    await harness.open()
    status = await pool.run(slots_path.stat, priority=0)
    assert status.st_blocks * 512 >= status.st_size == CAPACITY * SLOT


async def test_too_small_a_disk_is_not_filled_to_find_out(
    open_harness: OpenHarness, io: FaultyIo
) -> None:
    io.offer(free_nbytes=CAPACITY * SLOT - 1)
    with pytest.raises(ConfigError, match=r"has 128 KiB free; lower capacity"):
        await open_harness()
    assert "allocate" not in io.calls


@pytest.mark.parametrize("call", ["open", "lock", "truncate", "sync", "rename", "allocate"])
async def test_an_open_that_fails_leaves_nothing_locked(
    open_harness: OpenHarness, io: FaultyIo, call: str
) -> None:
    io.fail(call, errno.EIO)
    with pytest.raises(TierUnavailableError):
        await open_harness()
    io.heal()
    harness = await open_harness()
    assert await harness.put(KEYS, range(8)) == [DONE] * 8


async def test_a_failed_sync_fails_every_batch_it_may_have_been_about(
    open_harness: OpenHarness, io: FaultyIo
) -> None:
    """The kernel reports a lost write to one caller of fsync only."""
    harness = await open_harness(durability="power")
    first, second, third = make_keys(range(3))
    io.strike("sync_data", 0, Fault(errno.EIO))
    async with asyncio.TaskGroup() as group:
        one = group.create_task(harness.put([first], [0]))
        other = group.create_task(harness.put([second], [1]))
    assert one.result() == other.result() == [Outcome.FAILED]
    assert await harness.put([third], [2]) == [Outcome.DONE]
    assert await harness.reopen() == [(third, 2)]
