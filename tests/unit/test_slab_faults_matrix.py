"""Every error at every system call and every statement of a store's life.

A scenario is run once to record what it calls: opening, writing, overwriting, reading,
forgetting, touching, resetting or not, closing, opening again. Then it is run again for each
call and each way in which that call can fail, once and from then on, before and after it had
its effect, and an oracle judges each run: an operation ends in outcomes or in an error with
words that help; what was reported as stored is there unless the log says that the cache starts
empty; no byte is wrong; no descriptor, lock or slot is lost; the file is within its cap.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import re
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from kvtier.config import NvmeTierConfig
from kvtier.errors import (
    CacheDamagedError,
    CacheLockedError,
    ConfigError,
    KvtierError,
    TierUnavailableError,
)
from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import TierHarness, make_keys
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome
from tests.support.faulty_io import Fault, FaultyIo
from tests.support.open_files import assert_closed_again, descriptors
from tests.unit.ram_directory import ram_directory

logger = logging.getLogger(__name__)

SLOT = 8192
CAPACITY = 6
FINGERPRINT = LayoutFingerprint({"model": "m"})
KEYS = make_keys(range(8))
FRESH = make_keys(range(100, 100 + CAPACITY))
DONE, FAILED, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT
HANG_S = 60.0
BUDGET_S = 4.0
SEED = 20
REMEDY = re.compile(r"\b(allow|check|create|give|lower|make|mount|move|remove|stop|use)\b")
LOUD = (ConfigError, CacheDamagedError, CacheLockedError, TierUnavailableError)


@dataclass(frozen=True)
class Setting:
    durability: Literal["process", "power"]
    ending: Literal["close", "reset"]


SETTINGS = [
    Setting("process", "close"),
    Setting("process", "reset"),
    Setting("power", "close"),
    Setting("power", "reset"),
]


@dataclass(frozen=True)
class Point:
    """One way in which one run goes wrong."""

    setting: Setting
    call: str
    number: int
    fault: Fault


def errors(*codes: int, late: bool = False) -> list[Fault]:
    """Each error, once and from then on, and after the effect if the call can do that."""
    return [
        Fault(code, late=is_late, lasting=lasting)
        for code in codes
        for is_late in ([False, True] if late else [False])
        for lasting in (False, True)
    ]


SHORT = [
    Fault(longest_nbytes=n, lasting=lasting) for n in (4096, 0) for lasting in (False, True)
]
STATEMENT = (
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOMEM,
)
# EINTR is not among them: Python repeats a call that a signal interrupted.
WAYS = {
    "open": errors(errno.EIO, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EMFILE, late=True),
    "open_direct": errors(errno.EINVAL, errno.EIO, late=True),
    "close": [Fault(errno.EIO, late=True, lasting=lasting) for lasting in (False, True)],
    "preadv": [*errors(errno.EIO), *SHORT],
    "pwritev": [*errors(errno.EIO, errno.ENOSPC, errno.EROFS, late=True), *SHORT],
    "allocate": errors(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, late=True),
    "truncate": errors(errno.EIO, errno.EROFS, late=True),
    "sync_data": errors(errno.EIO, errno.ENOSPC, errno.EROFS),
    "sync": errors(errno.EIO, errno.ENOSPC, errno.EROFS),
    "lock": errors(errno.ENOLCK, errno.EIO),
    "make_directory": errors(errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO, late=True),
    "read_bytes": errors(errno.EIO, errno.EACCES),
    "rename": errors(errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, late=True),
    "unlink": errors(errno.EIO, errno.EACCES, errno.EROFS, late=True),
    "free_nbytes": errors(errno.EIO),
    "sql connect": errors(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM, late=True),
    "sql script": errors(*STATEMENT),
    "sql SELECT": errors(*STATEMENT),
    "sql PRAGMA": errors(*STATEMENT),
    "sql BEGIN": errors(*STATEMENT),
    # SQLite may fail to sync what it has written, and find it again when it recovers.
    **{f"sql {word}": errors(*STATEMENT, late=True) for word in ("INSERT", "DELETE", "UPDATE")},
    "sql COMMIT": errors(*STATEMENT, late=True),
    # However it fails, SQLite has ended the transaction.
    "sql ROLLBACK": [Fault(sqlite3.SQLITE_IOERR, late=True)],
    "sql close": [Fault(sqlite3.SQLITE_IOERR, late=True)],
}


class Log(logging.Handler):
    """Knows whether kvtier said that the cache starts empty, this time or the next."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.emptied = False

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        self.emptied |= "an empty cache" in said or "not survive a restart" in said


@pytest.fixture
def log() -> Iterator[Log]:
    handler = Log()
    kvtier = logging.getLogger("vllm.kvtier")
    kvtier.addHandler(handler)
    yield handler
    kvtier.removeHandler(handler)


class Life:
    """One run of the scenario on one store, and what may be found in it."""

    def __init__(self, root: Path, pool: IoPool, log: Log, setting: Setting) -> None:
        self.root = root
        self.io = self.first_io = FaultyIo()
        self.blind = False  # whether reads go on failing
        self.log = log
        self.setting = setting
        options = NvmeTierConfig(
            path=root,
            capacity_bytes=CAPACITY * SLOT,
            durability=setting.durability,
        )
        context = TierContext(SLOT, FINGERPRINT, pool, piece_nbytes=2 * SLOT)
        self.harness = TierHarness(lambda: SlabTier.open(options, context, io=self.io), pool)
        self.attempted: set[tuple[ChunkKey, int]] = set()
        self.certain: dict[int, ChunkKey] = {}
        self.gone: set[tuple[ChunkKey, int]] = set()
        self.forgotten: set[tuple[ChunkKey, int]] = set()
        self.doubted: set[tuple[ChunkKey, int]] | None = None
        """What was stored since a reset; None if there was none."""

    async def run(self) -> None:
        """Live through it all; heal; and see that nothing was lost for good."""
        await self.open()
        await self.put(KEYS[:4], [0, 1, 2, 3])
        await self.put(KEYS[4:6], [1, 4])
        await self.read()
        await self.forget(2)
        self.harness.tier.touch([0])
        await self.put(KEYS[6:7], [2])
        await self.forget(3)
        if self.setting.ending == "reset":
            await self.reset()
            await self.put(KEYS[7:8], [5])
        await self.read()
        await self.harness.tier.aclose()
        await self.open()
        await self.read()
        await self.harness.tier.aclose()
        await self.use_it_all()

    async def open(self) -> None:
        """Open the store, at the second attempt if the first fails loudly."""
        self.gone |= self.doubted or set()
        self.certain = {
            slot: key for slot, key in self.certain.items() if (key, slot) not in self.gone
        }
        self.doubted = None
        try:
            found = await self.harness.open()
        except LOUD as error:
            self.judge_words(error)
            self.io.heal()
            found = await self.harness.open()
        assert len({slot for _, slot in found}) == len({key for key, _ in found}) == len(found)
        assert set(found) <= self.attempted - self.gone
        # Deleting the row of a chunk that was forgotten is tried again until the tier closes.
        assert self.first_io.struck or not self.forgotten & set(found)
        if self.log.emptied:
            self.certain.clear()
        self.log.emptied = False
        assert {(key, slot) for slot, key in self.certain.items()} <= set(found)
        nbytes = sum(path.stat().st_size for path in self.root.rglob("slots.bin"))
        assert nbytes <= CAPACITY * SLOT
        outcomes = await self.harness.get(
            [key for key, _ in found], [slot for _, slot in found]
        )
        for (_, slot), outcome in zip(found, outcomes, strict=True):
            assert outcome is DONE or slot not in self.certain or self.io.struck

    async def put(self, keys: list[ChunkKey], slots: list[int]) -> None:
        for slot in slots:
            self.certain.pop(slot, None)
        self.attempted.update(zip(keys, slots, strict=True))
        self.gone -= set(zip(keys, slots, strict=True))
        self.forgotten -= set(zip(keys, slots, strict=True))
        if self.doubted is not None:
            self.doubted.update(zip(keys, slots, strict=True))
        outcomes = await self.harness.put(keys, slots)
        assert set(outcomes) == {DONE} or self.io.struck
        for key, slot, outcome in zip(keys, slots, outcomes, strict=True):
            if outcome is DONE:
                self.certain[slot] = key

    async def read(self) -> None:
        """Read everything that must be there; only a fault that strikes now excuses it."""
        struck = self.io.struck
        keys, slots = list(self.certain.values()), list(self.certain)
        outcomes = await self.harness.get(keys, slots)
        assert set(outcomes) <= {DONE, FAILED, CORRUPT}
        assert set(outcomes) <= {DONE} or (self.io.struck and (not struck or self.blind))

    async def forget(self, slot: int) -> None:
        key = self.certain.pop(slot, None)
        self.harness.tier.forget([slot])
        if key is not None:
            assert await self.harness.get([key], [slot]) == [CORRUPT]
            self.forgotten.add((key, slot))

    async def reset(self) -> None:
        before = set(self.attempted)
        self.certain.clear()
        self.doubted = set()
        try:
            await self.harness.tier.reset()
        except TierUnavailableError as error:
            self.judge_words(error)
        else:
            self.gone |= before
        for key, slot in before:
            assert await self.harness.get([key], [slot]) == [CORRUPT]

    async def use_it_all(self) -> None:
        """On a disk that is well again every slot can be written, read and kept."""
        self.io = FaultyIo()
        await self.open()
        await self.put(FRESH, list(range(CAPACITY)))
        await self.harness.tier.aclose()
        await self.open()
        assert len(self.certain) == CAPACITY
        await self.harness.tier.aclose()

    def judge_words(self, error: KvtierError) -> None:
        assert str(self.root.parent) in str(error), f"which path? {error}"
        assert REMEDY.search(str(error)), f"and what now? {error}"


class Bench:
    """Runs points, one store after the other."""

    def __init__(self, directory: Path, pool: IoPool, log: Log, runner: asyncio.Runner) -> None:
        self._directory = directory
        self._pool = pool
        self._log = log
        self._runner = runner

    def points(self, setting: Setting) -> list[Point]:
        """Return every way in which this scenario can go wrong."""
        life = Life(self._directory / "recorded", self._pool, self._log, setting)
        self._live(life)
        return [
            Point(setting, call, number, fault)
            for call, count in sorted(Counter(life.first_io.calls).items())
            for number in range(count)
            for fault in WAYS[call]
        ]

    def run(self, point: Point) -> None:
        """Run one point."""
        self._log.emptied = False
        life = Life(self._directory / "store", self._pool, self._log, point.setting)
        life.io.strike(point.call, point.number, point.fault)
        life.blind = point.call == "preadv" and point.fault.lasting
        try:
            self._live(life)
        except BaseException as error:
            error.add_note(f"at {point}")
            raise

    def _live(self, life: Life) -> None:
        before = descriptors()
        try:
            self._runner.run(asyncio.wait_for(life.run(), HANG_S))
        finally:
            shutil.rmtree(life.root, ignore_errors=True)
        assert_closed_again(before, "by the tier")


@pytest.fixture
def bench(log: Log) -> Iterator[Bench]:
    pool = IoPool(1, name="kvtier-test")
    with ram_directory() as directory, asyncio.Runner() as runner:
        yield Bench(directory, pool, log, runner)
    assert pool.close(timeout_s=10)


def in_random_order(points: list[Point], seed: int) -> list[Point]:
    """Shuffle ``points``; one with every kind of fault comes first, then the rest."""
    shuffled = random.Random(seed).sample(points, len(points))
    first = {(point.call, point.fault): point for point in reversed(shuffled)}
    return sorted(shuffled, key=lambda p: p is not first[p.call, p.fault])


def test_every_kind_of_fault_and_as_many_of_its_places_as_time_allows(bench: Bench) -> None:
    points = [point for setting in SETTINGS for point in bench.points(setting)]
    kinds = len({(point.call, point.fault) for point in points})
    until = time.monotonic() + BUDGET_S
    done = 0
    for point in in_random_order(points, SEED):
        if done >= kinds and time.monotonic() > until:
            break
        bench.run(point)
        done += 1
    logger.info("%d of %d points, %d kinds, seed %d", done, len(points), kinds, SEED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "setting", SETTINGS, ids=lambda each: f"{each.durability}-{each.ending}"
)
def test_every_fault_at_every_call(bench: Bench, setting: Setting) -> None:
    for point in bench.points(setting):
        bench.run(point)
