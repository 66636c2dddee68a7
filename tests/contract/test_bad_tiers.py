"""The contract refuses tiers that break the rules which are easy to break."""

from __future__ import annotations

import asyncio
import functools
import os
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier.config import TierConfig
from kvtier.errors import CacheLockedError, ConfigError
from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.testing.file_tier import FileTier, FileTierConfig
from kvtier.testing.tier_contract import StorageTierContract
from kvtier.testing.tier_harness import Arena, TierHarness
from kvtier.tiers import SlotOutcomes, StorageTier
from kvtier.types import Outcome, Purpose

pytest_plugins = ["pytester"]

NOT_BLOCKING = "test_nothing_blocks_the_loop"
ONE_CALL = "test_a_batch_is_one_call"
READ_WAITS = "test_a_cancelled_read_waits_for_the_threads_that_fill_its_buffers"
WRITE_WAITS = "test_a_cancelled_write_waits_for_the_threads_that_read_its_sources"
ONE_ENGINE = "test_a_store_has_one_engine_at_a_time"
KILLED = "test_a_killed_engine_leaves_what_it_stored_and_not_what_it_forgot"
FORGETS = "test_a_forgotten_slot_does_not_come_back"


class ReadsOnTheLoop(FileTier):
    """Reads without a thread."""

    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        self._check(keys, slots, into)
        outcomes = self.load(keys, slots, into, [self._row(slot) for slot in slots])
        return SlotOutcomes(outcomes, "" if {*outcomes} <= {Outcome.DONE} else "not read")


class WritesOnTheLoop(FileTier):
    """Writes its payloads in a thread and a note of it without one."""

    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        os.truncate(self._payloads, self.capacity_slots * self.slot_nbytes)
        return await super().write(keys, slots, sources, purpose=purpose)


class SyncsOnTheLoop(FileTier):
    """Forgets for good, and waits for the disk."""

    def forget(self, slots: Sequence[int]) -> None:
        super().forget(slots)
        self._table.flush()


class QueriesOnTheLoop(FileTier):
    """Runs SQL in the way of the loop."""

    def touch(self, slots: Sequence[int]) -> None:
        super().touch(slots)
        with sqlite3.connect(":memory:") as database:
            database.execute("SELECT 1")
        database.close()


class SleepsOnTheLoop(FileTier):
    """Waits a moment before it goes on."""

    async def reset(self) -> None:
        time.sleep(0)  # noqa: ASYNC251 - that is what is wrong with it
        await super().reset()


class WaitsForAThread(FileTier):
    """Has a thread do the work, and does nothing else until it is done."""

    def forget(self, slots: Sequence[int]) -> None:
        threading.Event().wait(0)
        super().forget(slots)


class ChunkByChunk(FileTier):
    """Has a call of its own for each chunk."""

    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        read = super().read
        moved = [
            await read([key], [slot], [view], purpose=purpose)
            for key, slot, view in zip(keys, slots, into, strict=True)
        ]
        outcomes = [outcome for each in moved for outcome in each.outcomes]
        return SlotOutcomes(outcomes, next((each.error for each in moved if each.error), ""))


class AbandonsThreads(FileTier):
    """Uses the threads of the loop, which a cancellation abandons."""

    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        rows = [self._row(slot) for slot in slots]
        call = functools.partial(self.load, keys, slots, into, rows)
        return SlotOutcomes(await asyncio.get_running_loop().run_in_executor(None, call))


class ShieldsReads(FileTier):
    """Uses the threads that it is given, and does not wait for them."""

    async def read(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        into: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        return await asyncio.shield(super().read(keys, slots, into, purpose=purpose))


class ShieldsWrites(FileTier):
    """Stores what its sources hold when a thread comes to it."""

    async def write(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[memoryview],
        *,
        purpose: Purpose,
    ) -> SlotOutcomes:
        return await asyncio.shield(super().write(keys, slots, sources, purpose=purpose))


class KeepsNoLock(FileTier):
    """Lets any number of engines in."""

    def lock(self, directory: Path) -> None:
        pass


class LocksOutThreads(FileTier):
    """Keeps a list of open stores that other processes do not have."""

    _open: ClassVar[set[Path]] = set()

    def lock(self, directory: Path) -> None:
        if directory in self._open:
            raise CacheLockedError(self.name, directory, "another thread")
        self._open.add(directory)


class LocksForEver(FileTier):
    """Leaves a file behind that nobody removes for an engine that was killed."""

    def lock(self, directory: Path) -> None:
        try:
            (directory / "pid").open("x").close()
        except FileExistsError as error:
            raise CacheLockedError(self.name, directory, "another engine") from error


class RetainsEmptySlots(FileTier):
    """Retains slots without asking which of them hold a chunk."""

    def retained(self) -> Mapping[int, int]:
        return dict.fromkeys(range(self.capacity_slots), 1 << 40)


# The next two tiers differ from FileTier in when its table changes, and the table has no public
# accessors: they override the private ones.


class ForgetsWhenClosed(FileTier):
    """Collects what is to be forgotten until it is closed."""

    def __init__(self, *args: Any) -> None:
        self._forgotten: set[int] = set()
        super().__init__(*args)

    def forget(self, slots: Sequence[int]) -> None:
        self._forgotten.update(slots)

    async def aclose(self) -> None:
        if not self._closed:
            super().forget([*self._forgotten])
        await super().aclose()

    def _row(self, slot: int) -> Any:
        row = super()._row(slot)
        return type(row)() if slot in self._forgotten else row

    def _put(self, slot: int, row: Any) -> None:
        self._forgotten.discard(slot)
        super()._put(slot, row)


class StoresWhenClosed(FileTier):
    """Writes its table when it is closed."""

    def __init__(self, *args: Any) -> None:
        self._changed: dict[int, Any] = {}
        super().__init__(*args)

    async def aclose(self) -> None:
        for slot, row in self._changed.items():
            super()._put(slot, row)
        self._changed.clear()
        await super().aclose()

    def _row(self, slot: int) -> Any:
        return self._changed.get(slot) or super()._row(slot)

    def _put(self, slot: int, row: Any) -> None:
        self._changed[slot] = row


class OptionsOfCode(FileTierConfig):
    """Has a key that no file can give."""

    steps: frozenset[complex]


class TakesCode(FileTier):
    Options: ClassVar[type[TierConfig]] = OptionsOfCode


@pytest.fixture
def _nothing_blocks_the_loop() -> None:
    """The contract is to find out, and not the fixture of this name that all tests have."""


class Bench(StorageTierContract):
    """What the contract needs to run one of its tests on a tier."""

    vars().update({name: None for name in vars(StorageTierContract) if "test_" in name})

    @pytest.fixture(autouse=True)
    def _tier(self, tier: type[StorageTier]) -> None:
        vars(self)["tier_class"] = tier


BAD_TIERS: list[tuple[type[StorageTier], str]] = [
    (ReadsOnTheLoop, NOT_BLOCKING),
    (WritesOnTheLoop, NOT_BLOCKING),
    (SyncsOnTheLoop, NOT_BLOCKING),
    (QueriesOnTheLoop, NOT_BLOCKING),
    (SleepsOnTheLoop, NOT_BLOCKING),
    (WaitsForAThread, NOT_BLOCKING),
    (ChunkByChunk, ONE_CALL),
    (AbandonsThreads, READ_WAITS),
    (ShieldsReads, READ_WAITS),
    (ShieldsWrites, WRITE_WAITS),
    (RetainsEmptySlots, "test_only_recovered_chunks_are_retained"),
]
BAD_STORES: list[tuple[type[StorageTier], str]] = [
    (KeepsNoLock, ONE_ENGINE),
    (LocksOutThreads, ONE_ENGINE),
    (LocksForEver, ONE_ENGINE),
    (ForgetsWhenClosed, KILLED),
    (StoresWhenClosed, KILLED),
]


class TestBadTiers(Bench):
    @pytest.mark.parametrize(("tier", "test"), BAD_TIERS)
    async def test_a_bad_tier_fails(
        self, test: str, harness: TierHarness[StorageTier], pool: IoPool
    ) -> None:
        needs_pool = {"pool": pool} if test in {ONE_CALL, READ_WAITS, WRITE_WAITS} else {}
        with pytest.raises(AssertionError):
            await getattr(StorageTierContract, test)(self, harness, **needs_pool)

    @pytest.mark.parametrize(("tier", "test"), BAD_STORES)
    def test_a_bad_store_fails(self, test: str, options: TierConfig, arena: Arena) -> None:
        with pytest.raises((AssertionError, CacheLockedError)):
            getattr(StorageTierContract, test)(self, options, arena)

    @pytest.mark.parametrize("tier", [ForgetsWhenClosed, StoresWhenClosed])
    async def test_a_tier_that_commits_only_at_its_close_passes_if_it_is_closed(
        self, harness: TierHarness[StorageTier]
    ) -> None:
        await getattr(StorageTierContract, FORGETS)(self, harness)

    @pytest.mark.parametrize("tier", [TakesCode])
    def test_options_that_no_file_can_give_are_refused(
        self, request: pytest.FixtureRequest
    ) -> None:
        with pytest.raises(ConfigError, match=r"TestBadTiers\.section.*: steps: missing"):
            request.getfixturevalue("options")


def test_a_failure_shows_the_section_of_the_tier(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from kvtier.testing.file_tier import FileTier
        from kvtier.testing.tier_contract import StorageTierContract


        class TestTier(StorageTierContract):
            tier_class = FileTier
            slot_nbytes = 4096

            def test_it(self, options):
                assert False
        """
    )
    options = ["--asyncio-mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    ran = pytester.runpytest_inprocess("-k", "test_it", *options)
    ran.stdout.fnmatch_lines(
        ["*Captured section of FileTier setup*", "kind: file", "capacity: 98304B", "path: /*"]
    )
