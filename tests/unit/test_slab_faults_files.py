"""What may have happened to a store's files while nobody looked, and to the machine's clock."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from kvtier.config import NvmeTierConfig
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import TierHarness, make_keys
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.tiers.slab.namespace import INDEX
from kvtier.types import LayoutFingerprint, Outcome
from tests.support.faulty_io import Fault, FaultyIo
from tests.unit.ram_directory import ram_directory

SLOT = 4096
CAPACITY = 8
KEYS = make_keys(range(CAPACITY))
FINGERPRINT = LayoutFingerprint({"model": "m"})
DONE, CORRUPT = Outcome.DONE, Outcome.CORRUPT
NOBODY = 65534


class Store:
    """A store that is opened, looked at and closed; each call leaves it closed."""

    def __init__(self, root: Path, pool: IoPool, runner: asyncio.Runner) -> None:
        self.root = root
        self.own = root / FINGERPRINT.namespace()
        self.io = FaultyIo()
        self._pool = pool
        self.runner = runner

    def harness(self, model: str = "m", **options: Any) -> TierHarness[SlabTier]:
        sized = {"capacity_bytes": CAPACITY * SLOT, **options}
        config = NvmeTierConfig(path=self.root, direct_io="off", on_mismatch="remove", **sized)
        context = TierContext(SLOT, LayoutFingerprint({"model": model}), self._pool)
        return TierHarness(lambda: SlabTier.open(config, context, io=self.io), self._pool)

    def fill(self, **options: Any) -> None:
        async def fill() -> None:
            harness = self.harness(**options)
            await harness.open()
            try:
                assert set(await harness.put(KEYS, range(CAPACITY))) == {DONE}
            finally:
                await harness.tier.aclose()

        self.runner.run(fill())

    def fill_and_crash(self, keys: list[ChunkKey]) -> bytes:
        """Store ``keys`` one by one; return the index's log as a killed engine leaves it."""

        async def fill() -> bytes:
            harness = self.harness()
            await harness.open()
            try:
                for slot, key in enumerate(keys):
                    assert await harness.put([key], [slot]) == [DONE]
                return (self.own / f"{INDEX}-wal").read_bytes()
            finally:
                await harness.tier.aclose()

        return self.runner.run(fill())

    def served(self, **options: Any) -> set[int]:
        """Open the store; return the slots whose chunks are served, with the right bytes."""

        async def look() -> set[int]:
            harness = self.harness(**options)
            found = await harness.open()
            try:
                outcomes = await harness.get([key for key, _ in found], [at for _, at in found])
            finally:
                await harness.tier.aclose()
            assert set(outcomes) <= {DONE, CORRUPT}
            return {at for (_, at), what in zip(found, outcomes, strict=True) if what is DONE}

        return self.runner.run(look())


@pytest.fixture
def store() -> Iterator[Store]:
    pool = IoPool(1, name="kvtier-test")
    with ram_directory() as directory, asyncio.Runner() as runner:
        yield Store(directory / "store", pool, runner)
    assert pool.close(timeout_s=10)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def flip_bits_of_the_index(store: Store, *, flips: int, seed: int) -> None:
    store.fill()
    healthy = (store.own / "index.sqlite").read_bytes()
    chance = random.Random(seed)
    kept = 0
    for _ in range(flips):
        bit = chance.randrange(8 * len(healthy))
        (store.own / "index.sqlite").write_bytes(healthy)
        flip(store.own / "index.sqlite", bit)
        try:
            kept += len(store.served())
        except TierUnavailableError as error:
            # SQLite takes a flipped header for a file of another kind that it may not write.
            assert "without index.sqlite the cache starts empty" in str(error)  # noqa: PT017
            assert bit < 8 * 100, bit
        except BaseException as error:
            error.add_note(f"bit {bit} of the index, seed {seed}")
            raise
    assert kept, "every flip emptied the cache: the test proves nothing"


def test_a_flipped_bit_anywhere_in_the_index_costs_chunks_and_serves_no_wrong_one(
    store: Store,
) -> None:
    flip_bits_of_the_index(store, flips=150, seed=20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_many_flipped_bits_in_the_index(store: Store, seed: int) -> None:
    flip_bits_of_the_index(store, flips=5000, seed=seed)


class Crashed:
    """A store whose engine was killed: all its chunks are newer than the index's last fold.

    Each chunk was stored over one of an earlier run, whose row is still in the database, so a
    row that is lost brings back one that its payload outlived.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index, self._log = (store.own / name for name in (INDEX, f"{INDEX}-wal"))
        store.fill()
        self._folded = self._index.read_bytes()
        self.log = store.fill_and_crash(make_keys(range(CAPACITY, 2 * CAPACITY)))

    def reopen(self, log: bytes) -> set[int]:
        """Let the next engine find ``log``; return the slots it serves."""
        self._index.write_bytes(self._folded)
        self._log.write_bytes(log)
        return self._store.served()


def test_a_flipped_bit_anywhere_in_the_log_of_a_killed_engine_serves_no_wrong_chunk(
    store: Store,
) -> None:
    crashed = Crashed(store)
    assert crashed.reopen(crashed.log) == {*range(CAPACITY)}
    assert crashed.reopen(b"") == set(), "the older rows are there, and their payloads are not"
    chance = random.Random(20)
    stride = 8 * len(crashed.log) // 40  # less than what one commit appends
    served = []
    for start in range(0, 40 * stride, stride):
        bit = start + chance.randrange(stride)
        log = bytearray(crashed.log)
        log[bit // 8] ^= 1 << bit % 8
        try:
            served.append(len(crashed.reopen(bytes(log))))
        except BaseException as error:
            error.add_note(f"bit {bit} of the log")
            raise
    assert {0, 1, CAPACITY - 1} <= {*served}, "not every row of the log was tried"


def test_a_flipped_bit_anywhere_in_a_payload_is_a_miss(store: Store) -> None:
    store.fill()
    chance = random.Random(20)
    for _ in range(40):
        bit = chance.randrange(8 * SLOT * CAPACITY)
        flip(store.own / "slots.bin", bit)
        assert store.served() == {*range(CAPACITY)} - {bit // 8 // SLOT}, f"bit {bit}"
        flip(store.own / "slots.bin", bit)


@pytest.mark.parametrize("name", ["index.sqlite", "slots.bin"])
def test_a_file_that_was_deleted_costs_the_cache_and_not_the_start(
    store: Store, name: str
) -> None:
    store.fill()
    (store.own / name).unlink()
    assert store.served() == set()
    store.fill()
    assert store.served() == {*range(CAPACITY)}


def test_a_slot_file_cut_short_costs_what_was_cut_off(store: Store) -> None:
    store.fill()
    os.truncate(store.own / "slots.bin", 2 * SLOT + 100)
    assert store.served() == {0, 1}
    assert (store.own / "slots.bin").stat().st_size == CAPACITY * SLOT
    store.fill()
    assert store.served() == {*range(CAPACITY)}


def set_version(path: Path, version: int) -> None:
    with contextlib.closing(sqlite3.connect(path)) as index:
        index.execute(f"PRAGMA user_version={version}")


def test_an_index_of_an_unknown_older_format_costs_at_most_the_cache(store: Store) -> None:
    store.fill()
    set_version(store.own / "index.sqlite", 0)
    assert store.served() in (set(), {*range(CAPACITY)})
    store.fill()
    assert store.served() == {*range(CAPACITY)}


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "make_directory"])
def test_a_disk_one_may_not_write_is_a_configuration_error(
    store: Store, code: int, call: str
) -> None:
    store.io.fail(call, code)
    with pytest.raises(ConfigError, match="give the tier a directory of a local disk") as error:
        store.served()
    assert str(store.root) in str(error.value)
    store.io.heal()
    store.fill()


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EMFILE, r"more open files \(ulimit -n\)"),
        (errno.ENFILE, "the machine more open files"),
        (errno.ENOSPC, "make room on that disk"),
        (errno.EDQUOT, "raise this user's quota"),
    ],
)
def test_a_start_that_is_short_of_files_or_room_names_the_remedy(
    store: Store, code: int, remedy: str
) -> None:
    store.io.fail("make_directory", code)
    with pytest.raises(ConfigError, match=remedy):
        store.served()
    store.io.heal()
    store.fill()


def test_a_directory_of_another_user_is_a_configuration_error(store: Store) -> None:
    store.fill()
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    else:
        store.own.chmod(0)
    try:
        with pytest.raises(ConfigError, match="that this user may write"):
            store.served()
    finally:
        if root:
            os.seteuid(0)
        else:
            store.own.chmod(0o700)
    assert store.served() == {*range(CAPACITY)}


@pytest.mark.parametrize("loss", ["removed", "cut short"])
def test_a_start_that_fails_does_not_make_empty_slots_of_lost_ones(
    store: Store, loss: str
) -> None:
    """The size of the slot file says which slots were written: the index hears of it first."""
    store.fill()
    slots = store.own / "slots.bin"
    if loss == "removed":
        slots.unlink()
    else:
        os.truncate(slots, CAPACITY // 2 * SLOT)
    store.io.fail("sql connect", errno.EIO)
    with pytest.raises((TierUnavailableError, OSError)):
        store.served()
    store.io.heal()
    assert store.served() == {*range(0 if loss == "removed" else CAPACITY // 2)}


def test_a_disk_without_room_for_the_indexs_shared_memory_does_not_cost_the_cache(
    store: Store,
) -> None:
    store.fill()
    store.io = FaultyIo()
    store.io.strike("sql SELECT", 0, Fault(sqlite3.SQLITE_IOERR_SHMSIZE))
    assert store.served() == {*range(CAPACITY)}
    assert store.io.struck
    assert store.served() == {*range(CAPACITY)}


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_full_disk_keeps_no_store_from_opening_and_its_chunks_are_served(
    store: Store, durability: str
) -> None:
    async def look() -> tuple[list[Outcome], list[Outcome], list[Outcome]]:
        harness = store.harness(durability=durability)
        store.io.strike("sql INSERT", 0, Fault(sqlite3.SQLITE_FULL, lasting=True))
        found = await harness.open()
        try:
            read = await harness.get([key for key, _ in found], [at for _, at in found])
            full = await harness.put(KEYS[:1], [0])
            store.io.heal()
            stored = await harness.put(KEYS[:1], [0])
        finally:
            await harness.tier.aclose()
        return read, full, stored

    store.fill(durability=durability)
    read, full, stored = store.runner.run(look())
    assert (read, full, stored) == ([DONE] * CAPACITY, [Outcome.FAILED], [DONE])


class FullUntilCut(FaultyIo):
    """A disk without room to delete rows in until a file is cut to ``nbytes``, or ever."""

    def __init__(self, nbytes: int | None) -> None:
        super().__init__()
        self._nbytes = nbytes
        self.strike("sql DELETE", 0, Fault(sqlite3.SQLITE_FULL, lasting=True))

    @override
    def truncate(self, fd: int, nbytes: int) -> None:
        super().truncate(fd, nbytes)
        if nbytes == self._nbytes:
            self.heal()


@pytest.mark.parametrize("enough", [True, False])
def test_a_lower_capacity_makes_room_on_a_full_disk_and_what_it_cut_off_stays_away(
    store: Store, enough: bool
) -> None:
    store.fill()
    half, kept = CAPACITY // 2 * SLOT, {*range(CAPACITY // 2)}
    store.io = FullUntilCut(half if enough else None)
    if enough:
        assert store.served(capacity_bytes=half) == kept
    else:
        with pytest.raises(TierUnavailableError, match="index cannot be opened"):
            store.served(capacity_bytes=half)
    assert (store.own / "slots.bin").stat().st_size == half
    store.io.heal()
    assert store.served() == kept


def test_an_index_that_is_set_aside_stays_there_after_a_power_cut(store: Store) -> None:
    async def reset_with_a_full_index() -> list[str]:
        harness = store.harness()
        await harness.open()
        try:
            await harness.put(KEYS[:1], [0])
            store.io.fill_index()
            store.io.calls.clear()
            await harness.tier.reset()
            return list(store.io.calls)
        finally:
            store.io.heal()
            await harness.tier.aclose()

    calls = store.runner.run(reset_with_a_full_index())
    last_rename = len(calls) - 1 - calls[::-1].index("rename")
    assert "sync" in calls[last_rename:]


class Clock:
    """Wall-clock time that runs backwards, a day per call."""

    def __init__(self) -> None:
        self._now_s = 2e9

    def time(self) -> float:
        self._now_s -= 86400
        return self._now_s

    def time_ns(self) -> int:
        return int(self.time() * 1e9)


def test_a_wall_clock_that_runs_backwards_changes_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock.time)
    monkeypatch.setattr(time, "time_ns", clock.time_ns)

    async def live() -> list[int]:
        harness = store.harness()
        await harness.open()
        for slot in (3, 1, 2):
            assert await harness.put([KEYS[slot]], [slot]) == [DONE]
        harness.tier.touch([3])
        found = await harness.reopen()
        await harness.tier.aclose()
        return [slot for _, slot in found]

    assert store.runner.run(live()) == [1, 2, 3], "least recently used first"
    assert store.served() == {1, 2, 3}


@pytest.mark.parametrize("opened_s", [0, 2**33], ids=["long-ago", "in-the-future"])
def test_files_from_another_time_are_used_and_stay_within_the_cap(
    store: Store, opened_s: int
) -> None:
    store.fill(model="older")
    store.fill()
    for path in store.root.rglob("*"):
        os.utime(path, (opened_s, opened_s))
    assert store.served() == {*range(CAPACITY)}
    assert sum(path.stat().st_size for path in store.root.rglob("slots.bin")) <= CAPACITY * SLOT
    store.fill(model="newer")
    assert sum(path.stat().st_size for path in store.root.rglob("slots.bin")) <= CAPACITY * SLOT


def test_uses_from_the_future_order_before_those_that_follow(store: Store) -> None:
    """The index counts time in ticks of its own; a jump ahead is kept up with."""
    store.fill()
    with contextlib.closing(sqlite3.connect(store.own / "index.sqlite")) as index:
        index.execute(f"UPDATE chunks SET last_use = {2**61} WHERE slot = 5")
        index.commit()

    async def live() -> list[int]:
        harness = store.harness()
        await harness.open()
        harness.tier.touch([2])
        found = await harness.reopen()
        await harness.tier.aclose()
        return [slot for _, slot in found]

    assert store.runner.run(live()) == [0, 1, 3, 4, 6, 7, 5, 2]
    assert store.served() == {*range(CAPACITY)}
