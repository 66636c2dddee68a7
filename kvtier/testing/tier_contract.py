"""The contract of storage tiers, as a test class to inherit.

::

    class TestMyTier(StorageTierContract):
        tier_class = MyTier

        def section(self, directory):
            return f"path: {directory}"

The tests need pytest-asyncio in auto mode. A thread of the pool opens each tier, so opening may
block. Two tests fork a process that opens the tier, and kill this process.
"""

# ruff: noqa: D102 - a test is documented by its name

from __future__ import annotations

import asyncio
import functools
import random
from abc import ABC
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final, TypeVar

import pytest
from typing_extensions import override

from kvtier.config import TierConfig, parse_tier
from kvtier.errors import CacheLockedError, CapacityError, ClosedError, ConfigError
from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import (
    Arena,
    TierHarness,
    make_keys,
    make_sources,
    tier_section,
)
from kvtier.testing.tier_probes import (
    blocking_calls,
    cancel_after,
    cancel_with_held_threads,
    clear_buffers,
    run_and_kill,
)
from kvtier.tiers.base import StorageTier, TierContext
from kvtier.types import LayoutFingerprint, Outcome, Purpose

__all__ = ["StorageTierContract"]

T = TypeVar("T")
AnyHarness = TierHarness[StorageTier]
_ARENA_SLOTS: Final = 2048
"""Size of the memory for buffers. A test uses at most some hundred slots."""
_FAR_FUTURE: Final = 1 << 40
"""A time in the far future, in seconds since 1970."""
DONE, CORRUPT = Outcome.DONE, Outcome.CORRUPT


class _CountingPool(IoPool):
    """A thread pool that counts the calls of ``run_all``."""

    rounds = 0

    @override
    async def run_all(self, calls: Sequence[Callable[[], T]], *, priority: int) -> list[T]:
        self.rounds += 1
        return await super().run_all(calls, priority=priority)


class StorageTierContract(ABC):
    """Tests that every storage tier must pass.

    Inherit as ``TestX``, set :attr:`tier_class` and implement :meth:`section`.

    Attributes:
        tier_class: Class of the tier to test.
        persistent: Whether chunks survive when the tier is closed. If False, restart tests are
            skipped.
        outlives_process: Whether chunks survive when the process ends.
        slot_nbytes: Size in bytes of a slot in the tests.
        capacity_slots: Number of slots of a tier in the tests.
    """

    tier_class: ClassVar[type[StorageTier]]
    persistent: ClassVar[bool] = True
    outlives_process: ClassVar[bool] = True
    slot_nbytes: ClassVar[int] = 8192
    capacity_slots: ClassVar[int] = 24

    def section(self, directory: Path) -> str:
        """Return the tier's section of a YAML file, without ``kind`` and ``capacity``.

        Each key is on its own line.

        Args:
            directory: Directory for the tier's files. It does not exist yet.
        """
        return f"path: {directory}" if "path" in self.tier_class.Options.model_fields else ""

    def open_tier(self, options: TierConfig, context: TierContext) -> StorageTier:
        """Open the tier. Override this method if :attr:`tier_class` needs other arguments."""
        return self.tier_class.open(options, context)

    def retain(self, options: TierConfig, slots: Sequence[int], until: int) -> bool:  # noqa: ARG002
        """Retain chunks of the closed tier until the time ``until``.

        Override this method if the tier implements :meth:`StorageTier.retained`. The method may
        block.

        Returns:
            Whether the tier can retain chunks. If False, tests of retention are skipped.
        """
        return False

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        """The directory of the tier's files."""
        return tmp_path / "store"

    @pytest.fixture
    def pool(self) -> Iterator[_CountingPool]:
        """Threads for the tier."""
        pool = _CountingPool(3, name="kvtier-contract")
        yield pool
        assert pool.close(timeout_s=10)

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        """Memory for the buffers."""
        arena = Arena(_ARENA_SLOTS * self.slot_nbytes)
        yield arena
        arena.close()

    @pytest.fixture
    def options(self, directory: Path, request: pytest.FixtureRequest) -> TierConfig:
        """The tier's parsed configuration section; pytest shows its text if a test fails."""
        capacity = f"capacity: {self.capacity_slots * self.slot_nbytes}B"
        text = tier_section(self.tier_class, request, capacity, self.section(directory))
        return parse_tier(
            text, self.tier_class.Options, source=f"{type(self).__name__}.section"
        )

    @pytest.fixture
    async def harness(
        self, options: TierConfig, pool: IoPool, arena: Arena
    ) -> AsyncIterator[AnyHarness]:
        """An open, empty tier."""
        harness = self._make_harness(options, pool, arena)
        await harness.open()
        yield harness
        await harness.tier.aclose()

    def _make_harness(self, options: TierConfig, pool: IoPool, arena: Arena) -> AnyHarness:
        context = TierContext(
            slot_nbytes=self.slot_nbytes,
            fingerprint=LayoutFingerprint({"model": "contract"}),
            pool=pool,
            piece_nbytes=4 * self.slot_nbytes,
            memory=arena.shared,
        )
        return TierHarness(functools.partial(self.open_tier, options, context), pool, arena)

    async def restart(self, harness: AnyHarness) -> list[tuple[ChunkKey, int]]:
        """Reopen the tier and return its chunks; if it is not persistent, skip the test."""
        if not self.persistent:
            pytest.skip("keeps nothing across restarts")
        return await harness.reopen()

    async def test_what_was_written_reads_back_bit_for_bit(self, harness: AnyHarness) -> None:
        keys, slots = make_keys(range(10)), range(3, 13)
        assert await harness.put(keys, slots) == [DONE] * 10
        assert await harness.get(keys, slots) == [DONE] * 10

    async def test_scattered_and_shuffled_batches_read_back(self, harness: AnyHarness) -> None:
        chance = random.Random(7)
        slots = chance.sample(range(self.capacity_slots), 14)
        keys = make_keys(range(14))
        assert await harness.put(keys, slots) == [DONE] * 14
        order = chance.sample(range(14), 14)
        got = await harness.get([keys[n] for n in order], [slots[n] for n in order])
        assert got == [DONE] * 14

    async def test_one_slot_may_be_read_twice_in_a_batch(self, harness: AnyHarness) -> None:
        keys = make_keys([1, 2])
        await harness.put(keys, [4, 5])
        assert await harness.get([*keys, keys[0]], [4, 5, 4]) == [DONE] * 3

    async def test_an_empty_batch_is_no_work(self, harness: AnyHarness) -> None:
        assert await harness.put([], []) == []
        assert await harness.get([], []) == []

    async def test_a_slot_never_written_spoils_no_neighbour(self, harness: AnyHarness) -> None:
        keys = make_keys(range(3))
        await harness.put([keys[0], keys[2]], [0, 2])
        assert await harness.get(keys, [0, 1, 2]) == [DONE, CORRUPT, DONE]

    async def test_a_slot_read_under_another_key_is_corrupt(self, harness: AnyHarness) -> None:
        mine, other = make_keys([1, 2])
        await harness.put([mine], [5])
        assert await harness.get([other], [5]) == [CORRUPT]
        assert await harness.get([mine], [5]) == [DONE]

    async def test_overwriting_a_slot_replaces_its_chunk(self, harness: AnyHarness) -> None:
        old, new = make_keys([1, 2])
        await harness.put([old], [5])
        await harness.put([new], [5])
        assert await harness.get([old, new], [5, 5]) == [CORRUPT, DONE]

    async def test_a_restart_brings_everything_back(self, harness: AnyHarness) -> None:
        keys, slots = make_keys(range(9)), [8, 1, 7, 0, 6, 2, 5, 3, 4]
        await harness.put(keys, slots)
        assert await self.restart(harness) == list(zip(keys, slots, strict=True))
        assert await harness.get(keys, slots) == [DONE] * 9

    async def test_an_overwritten_chunk_does_not_come_back(self, harness: AnyHarness) -> None:
        old, new = make_keys([1, 2])
        await harness.put([old], [5])
        await harness.put([new], [5])
        assert await self.restart(harness) == [(new, 5)]

    async def test_of_two_copies_the_newer_comes_back(self, harness: AnyHarness) -> None:
        [key] = make_keys([1])
        await harness.put([key], [9])
        await harness.put([key], [2])
        assert await self.restart(harness) == [(key, 2)]
        assert await harness.get([key], [2]) == [DONE]

    async def test_recovery_starts_with_the_least_recently_used(
        self, harness: AnyHarness
    ) -> None:
        keys = make_keys(range(4))
        await harness.put(keys, range(4))
        harness.tier.touch([2, 0])
        found = await self.restart(harness)
        assert [slot for _, slot in found] == [1, 3, 2, 0]
        harness.tier.touch([1])
        found = await self.restart(harness)
        assert [slot for _, slot in found] == [3, 2, 0, 1]

    async def test_a_forgotten_slot_does_not_come_back(self, harness: AnyHarness) -> None:
        keys = make_keys(range(3))
        await harness.put(keys, range(3))
        harness.tier.forget([1])
        assert await harness.get(keys, range(3)) == [DONE, CORRUPT, DONE]
        assert await self.restart(harness) == [(keys[0], 0), (keys[2], 2)]
        assert await harness.get(keys, range(3)) == [DONE, CORRUPT, DONE]

    async def test_a_slot_written_after_forget_comes_back(self, harness: AnyHarness) -> None:
        old, new = make_keys([1, 2])
        await harness.put([old], [3])
        harness.tier.forget([3])
        await harness.put([new], [3])
        assert await self.restart(harness) == [(new, 3)]

    async def test_touching_an_empty_slot_brings_nothing_back(
        self, harness: AnyHarness
    ) -> None:
        harness.tier.touch([0])
        assert await self.restart(harness) == []

    async def test_only_recovered_chunks_are_retained(self, harness: AnyHarness) -> None:
        await harness.put(make_keys(range(4)), range(4))
        harness.tier.forget([1])
        found = await self.restart(harness)
        assert harness.tier.retained().keys() <= {slot for _, slot in found}

    async def test_retained_chunks_stay_retained_over_restarts(
        self, harness: AnyHarness, options: TierConfig, pool: IoPool
    ) -> None:
        await self._fill_and_retain(harness, options, pool, slots=[1, 3])
        assert harness.tier.retained() == {1: _FAR_FUTURE, 3: _FAR_FUTURE}
        await self.restart(harness)
        assert harness.tier.retained() == {1: _FAR_FUTURE, 3: _FAR_FUTURE}

    async def test_overwritten_and_forgotten_chunks_are_no_longer_retained(
        self, harness: AnyHarness, options: TierConfig, pool: IoPool
    ) -> None:
        await self._fill_and_retain(harness, options, pool, slots=[0, 1, 2])
        await harness.put(make_keys([9]), [0])
        harness.tier.forget([1])
        await self.restart(harness)
        assert harness.tier.retained() == {2: _FAR_FUTURE}

    async def test_no_chunk_is_retained_after_a_reset(
        self, harness: AnyHarness, options: TierConfig, pool: IoPool
    ) -> None:
        await self._fill_and_retain(harness, options, pool, slots=[1, 3])
        await harness.tier.reset()
        await self.restart(harness)
        assert not harness.tier.retained()

    async def _fill_and_retain(
        self, harness: AnyHarness, options: TierConfig, pool: IoPool, *, slots: Sequence[int]
    ) -> None:
        """Store chunks in four slots, retain those in ``slots``, and reopen the tier."""
        await harness.put(make_keys(range(4)), range(4))
        await harness.tier.aclose()
        call = functools.partial(self.retain, options, slots, _FAR_FUTURE)
        retains = await pool.run(call, priority=0)
        await harness.open()
        if not retains:
            pytest.skip("retains no chunks")

    async def test_reset_forgets_everything_for_good(self, harness: AnyHarness) -> None:
        keys = make_keys(range(4))
        await harness.put(keys, range(4))
        await harness.tier.reset()
        assert await harness.get(keys, range(4)) == [CORRUPT] * 4
        assert await self.restart(harness) == []

    async def test_what_is_stored_after_a_reset_comes_back_right_or_not_at_all(
        self, harness: AnyHarness
    ) -> None:
        """A restart may drop chunks stored after a reset, because weights may have changed."""
        keys = make_keys(range(4))
        await harness.put(keys, range(4))
        await harness.tier.reset()
        assert await harness.put(keys[:1], [3]) == [DONE]
        assert await harness.get(keys[:1], [3]) == [DONE]
        assert await self.restart(harness) in ([], [(keys[0], 3)])
        assert await harness.put(keys[1:2], [3]) == [DONE]
        assert await self.restart(harness) == [(keys[1], 3)]

    async def test_a_write_that_a_reset_overtakes_never_comes_back_wrong(
        self, harness: AnyHarness
    ) -> None:
        keys = make_keys(range(8))
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(harness.put(keys, range(8)))
            await asyncio.sleep(0)
            group.create_task(harness.tier.reset())
        kept = [
            (key, slot)
            for key, slot, outcome in zip(keys, range(8), writing.result(), strict=True)
            if outcome is DONE
        ]
        assert set(await self.restart(harness)) <= set(kept)

    async def test_a_closed_tier_says_so(self, harness: AnyHarness) -> None:
        keys = make_keys([1])
        await harness.tier.aclose()
        await harness.tier.aclose()
        with pytest.raises(ClosedError):
            await harness.put(keys, [0])
        with pytest.raises(ClosedError):
            await harness.get(keys, [0])
        with pytest.raises(ClosedError):
            await harness.tier.reset()

    @pytest.mark.parametrize("slot", [-1, capacity_slots])
    async def test_a_slot_the_tier_does_not_have_is_refused(
        self, harness: AnyHarness, slot: int
    ) -> None:
        keys = make_keys([1, 2])
        with pytest.raises(CapacityError):
            await harness.put(keys, [0, slot])
        with pytest.raises(CapacityError):
            await harness.get(keys, [0, slot])
        assert await harness.get(keys[:1], [0]) == [CORRUPT]

    async def test_a_buffer_of_another_size_is_refused(self, harness: AnyHarness) -> None:
        keys = make_keys([1])
        half = make_sources(keys, self.slot_nbytes // 2)
        with pytest.raises(CapacityError):
            await harness.tier.write(keys, [0], half, purpose=Purpose.STORE)

    async def test_a_cancelled_write_is_the_chunk_or_a_miss(self, harness: AnyHarness) -> None:
        """Like an engine, this test overwrites the source buffers once ``write`` has raised."""
        keys, slots = make_keys(range(12)), range(12)
        for turns in range(12):
            sources = harness.sources(keys)
            writing = harness.tier.write(keys, slots, sources, purpose=Purpose.STORE)
            await cancel_after(turns, writing)
            clear_buffers(sources)
            assert set(await harness.get(keys, slots)) <= {DONE, CORRUPT}

    @pytest.mark.parametrize("method", ["read", "begin_read"])
    async def test_a_cancelled_read_leaves_the_buffers_alone(
        self, harness: AnyHarness, method: str
    ) -> None:
        keys, slots = make_keys(range(12)), range(12)
        await harness.put(keys, slots)
        for turns in range(1, 4):
            buffers = harness.buffers(12)
            read = getattr(harness.tier, method)
            await cancel_after(turns, read(keys, slots, buffers, purpose=Purpose.LOAD))
            clear_buffers(buffers)
            assert await harness.get(keys, slots) == [DONE] * 12
            assert all(buffer == bytes(self.slot_nbytes) for buffer in buffers)

    async def test_what_was_begun_early_is_what_was_asked_for(
        self, harness: AnyHarness
    ) -> None:
        keys, slots = make_keys(range(12)), range(12)
        writing = harness.tier.begin_write(
            keys, slots, harness.sources(keys), purpose=Purpose.STORE
        )
        assert list((await writing).outcomes) == [DONE] * 12
        assert await harness.get(keys, slots) == [DONE] * 12
        buffers = harness.buffers(12)
        reading = harness.tier.begin_read(keys, slots, buffers, purpose=Purpose.LOAD)
        assert list((await reading).outcomes) == [DONE] * 12
        assert buffers == harness.sources(keys)

    async def test_a_cancelled_read_waits_for_the_threads_that_fill_its_buffers(
        self, harness: AnyHarness, pool: IoPool
    ) -> None:
        keys, slots, buffers = make_keys(range(12)), range(12), harness.buffers(12)
        await harness.put(keys, slots)
        reading = harness.tier.read(keys, slots, buffers, purpose=Purpose.LOAD)
        await cancel_with_held_threads(reading, buffers, pool)
        untouched = all(buffer == bytes(self.slot_nbytes) for buffer in buffers)
        assert untouched, "a thread filled a buffer after the call was over"

    async def test_a_cancelled_write_waits_for_the_threads_that_read_its_sources(
        self, harness: AnyHarness, pool: IoPool
    ) -> None:
        keys, slots = make_keys(range(12)), range(12)
        sources = harness.sources(keys)
        writing = harness.tier.write(keys, slots, sources, purpose=Purpose.STORE)
        await cancel_with_held_threads(writing, sources, pool)
        assert set(await harness.get(keys, slots)) <= {DONE, CORRUPT}

    async def test_nothing_blocks_the_loop(self, harness: AnyHarness) -> None:
        keys, slots = make_keys(range(8)), range(8)
        await harness.tier.aopen()
        with blocking_calls() as found:
            await harness.put(keys, slots)
            await harness.get(keys, slots)
            harness.tier.touch(slots)
            harness.tier.forget(slots)
            await harness.tier.reset()
        assert not found, f"on the loop's thread it called {', '.join(sorted({*found}))}"

    async def test_a_batch_is_one_call(self, harness: AnyHarness, pool: _CountingPool) -> None:
        rounds = []
        for chunks in (2, 16):
            keys, slots = make_keys(range(chunks)), range(chunks)
            before = pool.rounds
            await harness.put(keys, slots)
            await harness.get(keys, slots)
            rounds.append(pool.rounds - before)
        assert rounds[1] <= rounds[0], "the pool was awaited more often for more chunks"

    async def test_without_shared_memory_it_moves_the_bytes_itself_or_refuses(
        self, options: TierConfig, pool: IoPool
    ) -> None:
        context = TierContext(self.slot_nbytes, LayoutFingerprint({"model": "contract"}), pool)
        try:
            tier = await pool.run(lambda: self.open_tier(options, context), priority=0)
        except ConfigError:
            return
        await tier.aclose()
        assert tier.moves_in_process, "no other process can reach the buffers"

    async def test_the_local_directory_of_its_options_is_where_it_keeps_chunks(
        self, harness: AnyHarness, options: TierConfig, pool: IoPool
    ) -> None:
        await harness.put(make_keys([1]), [1])
        if store := options.local_directory():
            files = await pool.run(lambda: list(store.path.iterdir()), priority=0)
            assert files, "metrics and commands name a directory that the tier does not fill"

    def test_a_store_has_one_engine_at_a_time(self, options: TierConfig, arena: Arena) -> None:
        self._require_survival()

        async def second() -> None:
            with _a_pool() as pool:
                harness = self._make_harness(options, pool, arena)
                try:
                    await harness.open()
                except CacheLockedError:
                    return
                await harness.tier.aclose()
                raise AssertionError("two processes have the cache open at once")

        run_and_kill(
            functools.partial(self._fill, options, arena, make_keys([1])),
            meanwhile=lambda: asyncio.run(second()),
        )
        assert len(self._recover(options, arena)) == 1

    def test_a_killed_engine_leaves_what_it_stored_and_not_what_it_forgot(
        self, options: TierConfig, arena: Arena
    ) -> None:
        self._require_survival()
        keys = make_keys(range(5))

        async def work() -> None:
            harness = await self._fill(options, arena, keys[:4])
            harness.tier.forget([1])
            assert await harness.put(keys[4:], [4]) == [DONE]

        run_and_kill(work)
        found = self._recover(options, arena)
        assert sorted(found, key=lambda chunk: chunk[1]) == [
            (keys[slot], slot) for slot in (0, 2, 3, 4)
        ]

    def _require_survival(self) -> None:
        if not (self.persistent and self.outlives_process):
            pytest.skip("keeps nothing when its process ends")

    async def _fill(
        self, options: TierConfig, arena: Arena, keys: Sequence[ChunkKey]
    ) -> AnyHarness:
        """Open the tier and store ``keys``. A process that will be killed calls this method."""
        harness = self._make_harness(options, IoPool(3, name="kvtier-killed"), arena)
        await harness.open()
        assert await harness.put(keys, range(len(keys))) == [DONE] * len(keys)
        return harness

    def _recover(self, options: TierConfig, arena: Arena) -> list[tuple[ChunkKey, int]]:
        """Open the tier after its process was killed, and return the recovered chunks."""

        async def recover() -> list[tuple[ChunkKey, int]]:
            with _a_pool() as pool:
                harness = self._make_harness(options, pool, arena)
                found = await harness.open()
                keys, slots = [key for key, _ in found], [slot for _, slot in found]
                assert await harness.get(keys, slots) == [DONE] * len(found)
                await harness.tier.aclose()
                return found

        return asyncio.run(recover())

    async def test_many_batches_at_once_do_not_mix(self, harness: AnyHarness) -> None:
        async def use(number: int) -> None:
            slots = range(number, self.capacity_slots, 4)
            for round_ in range(3):
                keys = make_keys([1000 * number + 100 * round_ + slot for slot in slots])
                assert await harness.put(keys, slots) == [DONE] * len(keys)
                assert await harness.get(keys, slots) == [DONE] * len(keys)

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(use(number))


@contextmanager
def _a_pool() -> Iterator[IoPool]:
    pool = IoPool(3, name="kvtier-contract")
    try:
        yield pool
    finally:
        assert pool.close(timeout_s=10)
