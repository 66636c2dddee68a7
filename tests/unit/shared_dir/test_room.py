"""The files of all engines stay within the capacity."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.testing.shared_tier_harness import SharedTierHarness
from kvtier.tiers.shared import SharedTier
from kvtier.types import Outcome
from tests.support.faulty_dir import FaultyDirIo
from tests.support.faulty_io import Fault
from tests.unit.shared_dir.conftest import FILE, Directory

DONE, REFUSED, MISSING = Outcome.DONE, Outcome.REFUSED, Outcome.MISSING
CAPACITY = 20
HOUR_S = 3600


async def put_each(
    harness: SharedTierHarness, keys: Sequence[str], client: SharedTier | None = None
) -> None:
    """Put values one by one, each as soon as there is room."""
    for key in keys:
        outcomes = [REFUSED]
        while outcomes == [REFUSED]:
            await asyncio.sleep(0)  # the eviction takes a turn of the loop
            outcomes = await harness.put([key], client=client)


def set_age(file: Path, seconds: int) -> None:
    then = file.stat().st_mtime - seconds
    os.utime(file, (then, then))


def file_of(directory: Directory, key: str) -> Path:
    [file] = directory.path.rglob(f"{key.replace('/', '_')}.kv")
    return file


async def test_the_capacity_counts_the_files_of_all_engines(directory: Directory) -> None:
    harness = await directory.harness()
    for number in range(60):
        client = (harness.tier, harness.other)[number % 2]
        await put_each(harness, harness.keys([number]), client)
        assert len(directory.values()) <= CAPACITY + 1
    assert len(directory.values()) >= CAPACITY // 2


async def test_engines_that_write_at_once_stay_near_the_capacity(directory: Directory) -> None:
    harness = await directory.harness(capacity_bytes=200 * FILE)
    more = [harness.tier, harness.other, await harness.client(), await harness.client()]
    async with asyncio.TaskGroup() as group:
        for number, client in enumerate(more):
            keys = harness.keys(range(1000 * number, 1000 * number + 200))
            group.create_task(put_each(harness, keys, client))
    assert 100 <= len(directory.values()) <= 230


async def test_a_capacity_of_one_chunk_holds_the_latest_at_most(directory: Directory) -> None:
    harness = await directory.harness(capacity_bytes=FILE)
    keys = harness.keys(range(4))
    await put_each(harness, keys)
    found = await harness.get(keys)
    assert found[:3] == [MISSING] * 3
    assert found[3] in {0, MISSING}


async def test_the_least_recently_used_values_are_evicted(directory: Directory) -> None:
    harness = await directory.harness()
    keys = harness.keys(range(CAPACITY + 4))
    await put_each(harness, keys[:16])
    for number, key in enumerate(keys[:16]):
        set_age(file_of(directory, key), HOUR_S - number)
    directory.now_s += 61
    await harness.get(keys[:3])
    await put_each(harness, keys[16:])
    found = await harness.get(keys)
    assert found[:3] == [0] * 3
    assert found[3:5] == [MISSING] * 2
    assert found[12:] == [0] * 12


async def test_values_are_evicted_before_puts_are_refused(directory: Directory) -> None:
    harness = await directory.harness()
    assert await harness.put(harness.keys(range(18))) == [DONE] * 18
    async with asyncio.timeout(10):
        while len(directory.values()) > 16:  # noqa: ASYNC110 - a thread removes files
            await asyncio.sleep(0)
    assert await harness.put(harness.keys([18])) == [DONE]


async def test_values_that_replace_others_take_no_more_room(
    directory: Directory, io: FaultyDirIo
) -> None:
    harness = await directory.harness(io)
    keys = harness.keys(range(8))
    await harness.put(keys)
    released = io.stall("list_files")
    for version in range(1, 6):
        assert await harness.put(keys, version=version) == [DONE] * 8
    released.set()


async def test_several_folders_are_listed_at_a_time(
    directory: Directory, io: FaultyDirIo
) -> None:
    harness = await directory.harness(io, capacity_bytes=1024 * FILE)  # four folders
    released = io.stall("list_files")
    putting = asyncio.ensure_future(harness.put(harness.keys(range(40))))
    try:
        async with asyncio.timeout(4):
            while io.calls.count("list_files") < 4:  # noqa: ASYNC110 - threads list folders
                await asyncio.sleep(0)
    finally:
        released.set()
    assert await putting == [DONE] * 40


@pytest.mark.parametrize("ahead_s", [-2 * HOUR_S, 0, 2 * HOUR_S])
async def test_a_read_renews_a_value_once_a_minute_whatever_the_servers_clock(
    directory: Directory, io: FaultyDirIo, ahead_s: int
) -> None:
    harness = await directory.harness(io)
    keys = harness.keys([1])
    await harness.put(keys)
    for minute in range(3):
        for _ in range(2):
            set_age(file_of(directory, keys[0]), -ahead_s)
            await harness.get(keys)
            assert io.calls.count("touch") == minute
        directory.now_s += 61


async def test_a_read_renews_what_another_engine_put(
    directory: Directory, io: FaultyDirIo
) -> None:
    harness = await directory.harness(io)
    keys = harness.keys([1])
    await harness.put(keys)
    await harness.get(keys, client=harness.other)
    await harness.get(keys, client=harness.other)
    assert io.calls.count("touch") == 1


async def test_a_value_that_cannot_be_renewed_is_read_all_the_same(
    directory: Directory, io: FaultyDirIo
) -> None:
    harness = await directory.harness(io)
    keys = harness.keys([1])
    await harness.put(keys)
    io.fail("touch", errno.EPERM)
    assert await harness.get(keys, client=harness.other) == [0]
    assert io.calls.count("touch") == 1


async def test_a_put_over_the_capacity_is_refused_until_there_is_room(
    directory: Directory, io: FaultyDirIo
) -> None:
    harness = await directory.harness(io)
    await harness.put(harness.keys([0]))
    released = io.stall("list_files")
    keys = harness.keys(range(1, 30))
    assert await harness.put(keys) == [DONE] * 19 + [REFUSED] * 10
    assert len(directory.values()) == CAPACITY
    released.set()
    await put_each(harness, keys[19:])
    assert len(directory.values()) <= CAPACITY


async def test_a_batch_larger_than_the_capacity_is_stored_in_part(directory: Directory) -> None:
    harness = await directory.harness()
    outcomes = await harness.put(harness.keys(range(50)))
    assert outcomes == [DONE] * CAPACITY + [REFUSED] * 30


async def test_failed_puts_take_no_room(directory: Directory, io: FaultyDirIo) -> None:
    harness = await directory.harness(io)
    io.fail("rename", errno.EIO)
    for number in range(5):
        keys = harness.keys(range(10 * number, 10 * number + 10))
        assert await harness.put(keys) == [Outcome.FAILED] * 10
    assert not directory.temporaries()


async def test_files_of_dead_writers_are_removed_after_an_hour(directory: Directory) -> None:
    harness = await directory.harness()
    await harness.put(harness.keys([0]))
    [value] = directory.values()
    old, new = (value.parent / f".{name}.tmp" for name in ("old", "new"))
    old.write_bytes(bytes(FILE))
    new.write_bytes(bytes(FILE))
    set_age(old, HOUR_S + 60)
    set_age(new, HOUR_S - 60)
    await put_each(harness, harness.keys(range(1, 30)))
    assert directory.temporaries() == [new]


async def test_other_files_are_left_alone(directory: Directory) -> None:
    harness = await directory.harness()
    await harness.put(harness.keys([0]))
    [value] = directory.values()
    other = value.parent / "notes.txt"
    other.write_text("mine")
    set_age(other, 10 * HOUR_S)
    await put_each(harness, harness.keys(range(1, 50)))
    assert other.read_text() == "mine"


async def test_two_engines_may_evict_the_same_values(
    directory: Directory, io: FaultyDirIo
) -> None:
    """Both list the folder before either removes a file."""
    slow = await directory.harness(io)
    fast = await directory.harness()
    keys = slow.keys(range(60))
    await slow.put(keys[:1])
    await fast.put(keys[1:2])
    released = io.stall("unlink")
    await slow.put(keys[2:20])
    others = itertools.count(100)
    while not io.wait_until_stalled(timeout_s=0):
        await slow.put(slow.keys([next(others)]))
        await asyncio.sleep(0)
    await put_each(fast, keys[21:40])
    released.set()
    await put_each(slow, keys[40:])
    found = await fast.get(keys)
    assert found[-1] == 0
    assert set(found) == {0, MISSING}
    assert len(directory.values()) <= CAPACITY


@pytest.mark.parametrize("call", ["list_files", "unlink"])
async def test_eviction_that_fails_is_tried_again(
    directory: Directory, io: FaultyDirIo, call: str
) -> None:
    harness = await directory.harness(io)
    keys = harness.keys(range(40))
    await harness.put(keys[:1])
    io.fail(call, errno.EIO)
    outcomes = await harness.put(keys[1:30])
    assert outcomes[-1] is REFUSED
    assert await harness.put(keys[30:31]) == [REFUSED]
    io.heal()
    await put_each(harness, keys[30:])
    assert len(directory.values()) <= CAPACITY


async def test_a_folder_that_cannot_be_listed_takes_no_values(
    directory: Directory, io: FaultyDirIo
) -> None:
    harness = await directory.harness(io)
    keys = harness.keys([1])
    io.fail("list_files", errno.EIO)
    with pytest.raises(OSError, match="cannot list"):
        await harness.put(keys)
    io.heal()
    assert await harness.put(keys) == [DONE]


async def test_values_of_other_folders_are_put_when_one_folder_cannot_be_listed(
    directory: Directory, io: FaultyDirIo
) -> None:
    harness = await directory.harness(io, capacity_bytes=1024 * FILE)  # four folders
    io.strike("list_files", 1, Fault(errno.EIO))
    keys = harness.keys(range(40))
    outcomes = await harness.put(keys)
    assert set(outcomes) == {DONE, REFUSED}
    lacking = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is REFUSED]
    assert len({file.parent for file in directory.values()}) == 3
    assert await harness.put(lacking) == [DONE] * len(lacking)


async def test_closing_does_not_wait_for_an_eviction_that_hangs(
    directory: Directory, io: FaultyDirIo
) -> None:
    harness = await directory.harness(io)
    await harness.put(harness.keys([0]))
    released = io.stall("list_files")
    await harness.put(harness.keys(range(1, 30)))
    await harness.tier.aclose()
    released.set()
