"""A file server that fails, hangs or vanishes costs misses, and never a wrong byte."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.config import SharedDirTierConfig
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.os.iopool import IoPool
from kvtier.testing.shared_tier_harness import SharedTierHarness
from kvtier.testing.tier_harness import Arena
from kvtier.tiers.shared import SharedContext
from kvtier.tiers.shared.shared_dir import SharedDirTier
from kvtier.types import Outcome
from tests.support.faulty_dir import FaultyDirIo
from tests.support.faulty_io import Fault
from tests.support.open_files import assert_closed_again, descriptors
from tests.unit.ram_directory import ram_directory
from tests.unit.shared_dir.conftest import FILE, PAYLOAD, Directory

logger = logging.getLogger(__name__)

DONE, FAILED, MISSING, REFUSED = (
    Outcome.DONE,
    Outcome.FAILED,
    Outcome.MISSING,
    Outcome.REFUSED,
)
CAPACITY = 8
BUDGET_S = 4.0
SEED = 24


def errors(*codes: int, late: bool = False) -> list[Fault]:
    """Each error, once and from then on, and after the effect if the call can do that."""
    return [
        Fault(code, late=is_late, lasting=lasting)
        for code in codes
        for is_late in ([False, True] if late else [False])
        for lasting in (False, True)
    ]


SHORT = [
    Fault(longest_nbytes=nbytes, lasting=lasting)
    for nbytes in (4096, 100, 0)
    for lasting in (False, True)
]
BROKEN = (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOENT)
FULL = (errno.ENOSPC, errno.EDQUOT)
WAYS = {
    "open": errors(*BROKEN, *FULL, errno.EMFILE, late=True),
    "open_direct": errors(errno.EINVAL, *BROKEN, late=True),
    "close": [
        Fault(code, late=True, lasting=lasting)
        for code in (errno.EIO, *FULL)
        for lasting in (False, True)
    ],
    "preadv": [*errors(*BROKEN), *SHORT],
    "pwritev": [*errors(*BROKEN, *FULL, late=True), *SHORT],
    "make_directory": errors(*BROKEN, *FULL, errno.EROFS, late=True),
    "read_bytes": errors(*BROKEN),
    "rename": errors(*BROKEN, *FULL, late=True),
    "unlink": errors(*BROKEN, errno.EROFS, late=True),
    "status": errors(*BROKEN),
    "status_of": errors(*BROKEN),
    "touch": errors(*BROKEN, errno.EPERM),
    "link": errors(*BROKEN, *FULL, errno.EEXIST, errno.EPERM, late=True),
    "list_files": errors(*BROKEN),
}


@dataclass(frozen=True)
class Point:
    """One way in which one run goes wrong."""

    call: str
    number: int
    fault: Fault


class Life:
    """One run of a scenario in a new directory."""

    def __init__(self, path: Path, pool: IoPool, arena: Arena) -> None:
        self.path = path
        self.io = FaultyDirIo()
        self._options = SharedDirTierConfig(path=path, capacity_bytes=CAPACITY * FILE)
        self._context = SharedContext(PAYLOAD, pool)
        self._arena = arena
        self._harness = self._make()

    async def run(self) -> None:
        """Use the directory while something fails, and see that it is well afterwards."""
        try:
            await self._harness.open()
        except ConfigError:
            self.io.heal()
            await self._harness.open()
        keys = self._harness.keys(range(20))
        await self._use(keys)
        await self._harness.aclose()
        self.io.heal()
        await self._use_again(keys)

    async def _use(self, keys: list[str]) -> None:
        await self._put(keys[:3], 0)
        await self._put(keys[2:4], 1)
        for file in self.path.rglob("*.kv"):
            os.utime(file, (0, 0))
        await self._get(keys[:5])
        await self._contains(keys[:5])
        for key in keys[4:14]:
            await self._put([key], 0)
        await self._get(keys)

    async def _put(self, keys: list[str], version: int) -> None:
        try:
            outcomes = await self._harness.put(keys, version=version)
        except (TierUnavailableError, OSError):
            assert self.io.struck
            return
        assert {*outcomes} <= {DONE, REFUSED} | ({FAILED} if self.io.struck else set())

    async def _get(self, keys: list[str]) -> None:
        try:
            found = await self._harness.get(keys, client=self._harness.other)
        except TierUnavailableError:
            assert self.io.struck
            return
        assert {*found} <= {0, 1, MISSING} | ({FAILED} if self.io.struck else set())

    async def _contains(self, keys: list[str]) -> None:
        for ask in (self._harness.tier.contains, self._harness.tier.contains_leading):
            try:
                assert len(await ask(keys)) == len(keys)
            except (TierUnavailableError, OSError):
                assert self.io.struck

    async def _use_again(self, keys: list[str]) -> None:
        self._harness = self._make()
        await self._harness.open()
        assert {*await self._harness.get(keys)} <= {0, 1, MISSING}
        outcomes = [REFUSED]
        while outcomes == [REFUSED]:
            await asyncio.sleep(0)  # the eviction takes a turn of the loop
            outcomes = await self._harness.put(keys[:1], version=2)
        assert await self._harness.get(keys[:1], client=self._harness.other) == [2]
        await self._harness.aclose()
        assert len(list(self.path.rglob("*.kv"))) <= CAPACITY + 2

    def _make(self) -> SharedTierHarness:
        pool = self._context.pool
        return SharedTierHarness(self._open, pool, self._arena, payload_nbytes=PAYLOAD)

    def _open(self, _: int) -> SharedDirTier:
        tier = SharedDirTier(self._options, self._context, self.io)
        tier.prepare()
        return tier


class Bench:
    """Runs points, one directory after the other."""

    def __init__(self, root: Path, pool: IoPool, runner: asyncio.Runner) -> None:
        self._root = root
        self._pool = pool
        self._runner = runner

    def points(self) -> list[Point]:
        """Return every way in which the scenario can go wrong."""
        calls = Counter(self._live(None).calls)
        return [
            Point(call, number, fault)
            for call, count in sorted(calls.items())
            for number in range(count)
            for fault in WAYS[call]
        ]

    def run(self, point: Point) -> None:
        """Run one point."""
        try:
            self._live(point)
        except BaseException as error:
            error.add_note(f"at {point}")
            raise

    def _live(self, point: Point | None) -> FaultyDirIo:
        before = descriptors()
        arena = Arena(4 << 20)
        life = Life(self._root / "shared", self._pool, arena)
        if point is not None:
            life.io.strike(point.call, point.number, point.fault)
        try:
            self._runner.run(asyncio.wait_for(life.run(), 60))
        finally:
            shutil.rmtree(life.path, ignore_errors=True)
        arena.close()
        assert_closed_again(before, "by the shared directory")
        return life.io


@pytest.fixture
def bench() -> Iterator[Bench]:
    pool = IoPool(1, name="kvtier-test")
    with ram_directory() as root, asyncio.Runner() as runner:
        yield Bench(root, pool, runner)
    assert pool.close(timeout_s=10)


@pytest.mark.untraced
def test_faults_at_every_call_and_as_many_of_their_kinds_as_time_allows(bench: Bench) -> None:
    points = bench.points()
    shuffled = random.Random(SEED).sample(points, len(points))
    first = {(point.call, point.fault.lasting): point for point in reversed(shuffled)}
    shuffled.sort(key=lambda point: point is not first[point.call, point.fault.lasting])
    until, done = time.monotonic() + BUDGET_S, 0
    for point in shuffled:
        if done >= len(first) and time.monotonic() > until:
            break
        bench.run(point)
        done += 1
    logger.info("%d of %d points, seed %d", done, len(points), SEED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_fault_at_every_call(bench: Bench) -> None:
    for point in bench.points():
        bench.run(point)


@pytest.mark.parametrize("code", FULL)
async def test_a_full_file_system_refuses_values_and_keeps_its_files(
    directory: Directory, io: FaultyDirIo, code: int
) -> None:
    harness = await directory.harness(io)
    keys = harness.keys(range(6))
    await harness.put(keys[:2])
    io.fail("close", code)  # as on NFS, which writes when a file is closed
    assert await harness.put(keys[2:]) == [REFUSED] * 4
    io.heal()
    assert await harness.get(keys) == [0, 0, *[MISSING] * 4]
    assert not directory.temporaries()


async def test_a_value_that_cannot_be_read_has_failed(
    directory: Directory, io: FaultyDirIo
) -> None:
    harness = await directory.harness(io)
    keys = harness.keys(range(3))
    await harness.put(keys)
    io.strike("preadv", 1, Fault(errno.EIO))
    assert sorted(map(str, await harness.get(keys))) == ["0", "0", str(FAILED)]


async def test_a_value_that_another_host_removed_is_missing(
    directory: Directory, io: FaultyDirIo
) -> None:
    harness = await directory.harness(io)
    keys = harness.keys(range(3))
    await harness.put(keys)
    io.fail("preadv", errno.ESTALE)
    assert await harness.get(keys) == [MISSING] * 3


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, FILE - 1, FILE + 1, 3 * FILE])
async def test_a_value_of_any_other_length_is_missing_until_it_is_put_again(
    directory: Directory, nbytes: int
) -> None:
    harness = await directory.harness()
    keys = harness.keys(range(3))
    await harness.put(keys[1:2])
    [file] = directory.values()
    os.truncate(file, nbytes)
    await harness.put(keys[::2])
    assert list(await harness.tier.contains(keys)) == [True, False, True]
    assert list(await harness.tier.contains_leading(keys)) == [True, False, False]
    assert await harness.get(keys) == [0, MISSING, 0]
    assert await harness.put(keys[1:2]) == [DONE]
    assert await harness.get(keys) == [0] * 3


async def test_a_link_or_a_directory_in_the_place_of_a_value_is_no_value(
    directory: Directory,
) -> None:
    harness = await directory.harness()
    keys = harness.keys(range(2))
    await harness.put(keys)
    first, second = directory.values()
    target = first.rename(directory.path / "elsewhere")
    first.symlink_to(target)
    second.unlink()
    second.mkdir()
    assert not {*await harness.get(keys)} & {0}


@pytest.mark.parametrize("is_mount_point", [False, True])
async def test_an_unmounted_directory_has_failed_and_is_used_when_it_is_back(
    directory: Directory, *, is_mount_point: bool
) -> None:
    harness = await directory.harness()
    keys = harness.keys(range(3))
    await harness.put(keys)
    away = directory.path.rename(directory.path.with_name("away"))
    if is_mount_point:
        directory.path.mkdir()
    for call in (
        harness.tier.contains,
        harness.tier.contains_leading,
        harness.get,
        harness.put,
    ):
        with pytest.raises(TierUnavailableError, match=str(directory.path)):
            await call(keys)
    assert not directory.path.exists() or not any(directory.path.iterdir())
    if is_mount_point:
        directory.path.rmdir()
    away.rename(directory.path)
    assert await harness.get(keys) == [0] * 3
    assert list(await harness.tier.contains(keys)) == [True] * 3
    assert await harness.put(harness.keys([7])) == [DONE]


async def test_a_directory_that_was_emptied_is_filled_again(directory: Directory) -> None:
    harness = await directory.harness()
    keys = harness.keys(range(3))
    await harness.put(keys)
    for entry in directory.path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    assert await harness.get(keys) == [MISSING] * 3
    assert await harness.put(keys) == [DONE] * 3
    assert await harness.get(keys, client=harness.other) == [0] * 3


@pytest.mark.parametrize("call", ["status", "open", "preadv"])
async def test_closing_and_cancelled_callers_wait_only_for_the_threads_that_hang(
    directory: Directory, io: FaultyDirIo, call: str
) -> None:
    """A caller's buffers are in use until the system call returns; closing waits for none."""
    harness = await directory.harness(io)
    keys = harness.keys([1])
    await harness.put(keys)
    released = io.stall(call)
    use = harness.tier.contains(keys) if call == "status" else harness.get(keys)
    task = asyncio.ensure_future(use)
    await harness.run(lambda: io.wait_until_stalled(timeout_s=60))
    task.cancel()
    await harness.tier.aclose()
    assert not task.done()
    released.set()
    await asyncio.wait([task])
