"""What every storage tier must do; a backend's tests inherit it.

::

    class TestMyTier(StorageTierContract):
        def open_tier(self, directory, context, capacity_slots):
            options = MyTierConfig(path=directory, capacity_bytes=...)
            return MyTier.open(options, context)

It needs pytest-asyncio in its auto mode. Tiers are opened on a thread of the pool, so opening
may block.
"""

# ruff: noqa: D102 - a test is documented by its name

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier.errors import CapacityError, ClosedError
from kvtier.iopool import IoPool
from kvtier.keys import ChunkKey
from kvtier.testing.chunks import Arena, make_keys, make_sources
from kvtier.testing.shelf import Shelf
from kvtier.tiers.base import SlotOutcomes, StorageTier, TierContext
from kvtier.types import LayoutFingerprint, Outcome, Why

__all__ = ["StorageTierContract"]

AnyShelf = Shelf[StorageTier]
DONE, CORRUPT = Outcome.DONE, Outcome.CORRUPT


class StorageTierContract(ABC):
    """The tests. A subclass says how its tier is opened.

    Attributes:
        persistent: Whether what is stored survives closing; where not, such tests are skipped.
        slot_nbytes: Slot size the tests use.
        capacity_slots: Slots the tests use.
    """

    persistent: ClassVar[bool] = True
    slot_nbytes: ClassVar[int] = 8192
    capacity_slots: ClassVar[int] = 24

    @abstractmethod
    def open_tier(
        self, directory: Path, context: TierContext, capacity_slots: int
    ) -> StorageTier:
        """Open a tier with ``capacity_slots`` slots that keeps its files in ``directory``."""

    @pytest.fixture
    def pool(self) -> Iterator[IoPool]:
        """Threads for the tier."""
        pool = IoPool(3, name="kvtier-contract")
        yield pool
        assert pool.close(timeout_s=10)

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        """Memory for the buffers."""
        arena = Arena()
        yield arena
        arena.close()

    @pytest.fixture
    async def shelf(
        self, tmp_path: Path, pool: IoPool, arena: Arena
    ) -> AsyncIterator[AnyShelf]:
        """An open, empty tier."""
        context = TierContext(
            slot_nbytes=self.slot_nbytes,
            fingerprint=LayoutFingerprint({"model": "contract"}),
            pool=pool,
            piece_nbytes=4 * self.slot_nbytes,
            memory=arena.shared,
        )
        directory = tmp_path / "store"
        shelf = Shelf(
            lambda: self.open_tier(directory, context, self.capacity_slots), pool, arena
        )
        await shelf.open()
        yield shelf
        await shelf.tier.aclose()

    async def restart(self, shelf: AnyShelf) -> list[tuple[ChunkKey, int]]:
        """Reopen the tier, or skip the test if it keeps nothing."""
        if not self.persistent:
            pytest.skip("keeps nothing across restarts")
        return await shelf.reopen()

    async def test_what_was_written_reads_back_bit_for_bit(self, shelf: AnyShelf) -> None:
        keys, slots = make_keys(range(10)), range(3, 13)
        assert await shelf.put(keys, slots) == [DONE] * 10
        assert await shelf.get(keys, slots) == [DONE] * 10

    async def test_scattered_and_shuffled_batches_read_back(self, shelf: AnyShelf) -> None:
        chance = random.Random(7)
        slots = chance.sample(range(self.capacity_slots), 14)
        keys = make_keys(range(14))
        assert await shelf.put(keys, slots) == [DONE] * 14
        order = chance.sample(range(14), 14)
        got = await shelf.get([keys[n] for n in order], [slots[n] for n in order])
        assert got == [DONE] * 14

    async def test_one_slot_may_be_read_twice_in_a_batch(self, shelf: AnyShelf) -> None:
        keys = make_keys([1, 2])
        await shelf.put(keys, [4, 5])
        assert await shelf.get([*keys, keys[0]], [4, 5, 4]) == [DONE] * 3

    async def test_an_empty_batch_is_no_work(self, shelf: AnyShelf) -> None:
        assert await shelf.put([], []) == []
        assert await shelf.get([], []) == []

    async def test_a_slot_never_written_spoils_no_neighbour(self, shelf: AnyShelf) -> None:
        keys = make_keys(range(3))
        await shelf.put([keys[0], keys[2]], [0, 2])
        assert await shelf.get(keys, [0, 1, 2]) == [DONE, CORRUPT, DONE]

    async def test_a_slot_read_under_another_key_is_corrupt(self, shelf: AnyShelf) -> None:
        mine, other = make_keys([1, 2])
        await shelf.put([mine], [5])
        assert await shelf.get([other], [5]) == [CORRUPT]
        assert await shelf.get([mine], [5]) == [DONE]

    async def test_overwriting_a_slot_replaces_its_chunk(self, shelf: AnyShelf) -> None:
        old, new = make_keys([1, 2])
        await shelf.put([old], [5])
        await shelf.put([new], [5])
        assert await shelf.get([old, new], [5, 5]) == [CORRUPT, DONE]

    async def test_a_restart_brings_everything_back(self, shelf: AnyShelf) -> None:
        keys, slots = make_keys(range(9)), [8, 1, 7, 0, 6, 2, 5, 3, 4]
        await shelf.put(keys, slots)
        assert await self.restart(shelf) == list(zip(keys, slots, strict=True))
        assert await shelf.get(keys, slots) == [DONE] * 9

    async def test_an_overwritten_chunk_does_not_come_back(self, shelf: AnyShelf) -> None:
        old, new = make_keys([1, 2])
        await shelf.put([old], [5])
        await shelf.put([new], [5])
        assert await self.restart(shelf) == [(new, 5)]

    async def test_of_two_copies_the_newer_comes_back(self, shelf: AnyShelf) -> None:
        [key] = make_keys([1])
        await shelf.put([key], [9])
        await shelf.put([key], [2])
        assert await self.restart(shelf) == [(key, 2)]
        assert await shelf.get([key], [2]) == [DONE]

    async def test_recovery_starts_with_the_least_recently_used(self, shelf: AnyShelf) -> None:
        keys = make_keys(range(4))
        await shelf.put(keys, range(4))
        shelf.tier.touch([2, 0])
        found = await self.restart(shelf)
        assert [slot for _, slot in found] == [1, 3, 2, 0]
        shelf.tier.touch([1])
        found = await self.restart(shelf)
        assert [slot for _, slot in found] == [3, 2, 0, 1]

    async def test_a_forgotten_slot_does_not_come_back(self, shelf: AnyShelf) -> None:
        keys = make_keys(range(3))
        await shelf.put(keys, range(3))
        shelf.tier.forget([1])
        assert await shelf.get(keys, range(3)) == [DONE, CORRUPT, DONE]
        assert await self.restart(shelf) == [(keys[0], 0), (keys[2], 2)]
        assert await shelf.get(keys, range(3)) == [DONE, CORRUPT, DONE]

    async def test_a_slot_written_after_forget_comes_back(self, shelf: AnyShelf) -> None:
        old, new = make_keys([1, 2])
        await shelf.put([old], [3])
        shelf.tier.forget([3])
        await shelf.put([new], [3])
        assert await self.restart(shelf) == [(new, 3)]

    async def test_touching_an_empty_slot_brings_nothing_back(self, shelf: AnyShelf) -> None:
        shelf.tier.touch([0])
        assert await self.restart(shelf) == []

    async def test_reset_forgets_everything_for_good(self, shelf: AnyShelf) -> None:
        keys = make_keys(range(4))
        await shelf.put(keys, range(4))
        await shelf.tier.reset()
        assert await shelf.get(keys, range(4)) == [CORRUPT] * 4
        assert await self.restart(shelf) == []

    async def test_what_is_stored_after_a_reset_comes_back_right_or_not_at_all(
        self, shelf: AnyShelf
    ) -> None:
        """Whether it does is for the tier to decide: its weights may be gone by then."""
        keys = make_keys(range(4))
        await shelf.put(keys, range(4))
        await shelf.tier.reset()
        assert await shelf.put(keys[:1], [3]) == [DONE]
        assert await shelf.get(keys[:1], [3]) == [DONE]
        assert await self.restart(shelf) in ([], [(keys[0], 3)])
        assert await shelf.put(keys[1:2], [3]) == [DONE]
        assert await self.restart(shelf) == [(keys[1], 3)]

    async def test_a_write_that_a_reset_overtakes_never_comes_back_wrong(
        self, shelf: AnyShelf
    ) -> None:
        keys = make_keys(range(8))
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(shelf.put(keys, range(8)))
            await asyncio.sleep(0)
            group.create_task(shelf.tier.reset())
        kept = [
            (key, slot)
            for key, slot, outcome in zip(keys, range(8), writing.result(), strict=True)
            if outcome is DONE
        ]
        assert set(await self.restart(shelf)) <= set(kept)

    async def test_a_closed_tier_says_so(self, shelf: AnyShelf) -> None:
        keys = make_keys([1])
        await shelf.tier.aclose()
        await shelf.tier.aclose()
        with pytest.raises(ClosedError):
            await shelf.put(keys, [0])
        with pytest.raises(ClosedError):
            await shelf.get(keys, [0])
        with pytest.raises(ClosedError):
            await shelf.tier.reset()

    @pytest.mark.parametrize("slot", [-1, capacity_slots])
    async def test_a_slot_the_tier_does_not_have_is_refused(
        self, shelf: AnyShelf, slot: int
    ) -> None:
        keys = make_keys([1, 2])
        with pytest.raises(CapacityError):
            await shelf.put(keys, [0, slot])
        with pytest.raises(CapacityError):
            await shelf.get(keys, [0, slot])
        assert await shelf.get(keys[:1], [0]) == [CORRUPT]

    async def test_a_buffer_of_another_size_is_refused(self, shelf: AnyShelf) -> None:
        keys = make_keys([1])
        half = make_sources(keys, self.slot_nbytes // 2)
        with pytest.raises(CapacityError):
            await shelf.tier.write(keys, [0], half, why=Why.STORE)

    async def test_a_cancelled_write_is_the_chunk_or_a_miss(self, shelf: AnyShelf) -> None:
        """The sources are reused as soon as the write has raised, as an engine would."""
        keys, slots = make_keys(range(12)), range(12)
        for turns in range(12):
            sources = shelf.sources(keys)
            writing = shelf.tier.write(keys, slots, sources, why=Why.STORE)
            await _cancel_after(turns, writing)
            for source in sources:
                source[:] = bytes(self.slot_nbytes)
            assert set(await shelf.get(keys, slots)) <= {DONE, CORRUPT}

    async def test_a_cancelled_read_leaves_the_buffers_alone(self, shelf: AnyShelf) -> None:
        keys, slots = make_keys(range(12)), range(12)
        await shelf.put(keys, slots)
        for turns in range(4):
            await self._cancel_reading(shelf, shelf.tier.read, keys, turns=turns)

    async def test_what_was_begun_early_is_what_was_asked_for(self, shelf: AnyShelf) -> None:
        keys, slots = make_keys(range(12)), range(12)
        writing = shelf.tier.begin_write(keys, slots, shelf.sources(keys), why=Why.STORE)
        assert list((await writing).outcomes) == [DONE] * 12
        assert await shelf.get(keys, slots) == [DONE] * 12
        buffers = shelf.buffers(12)
        reading = shelf.tier.begin_read(keys, slots, buffers, why=Why.LOAD)
        assert list((await reading).outcomes) == [DONE] * 12
        assert buffers == shelf.sources(keys)

    async def test_what_was_begun_early_and_cancelled_leaves_the_buffers_alone(
        self, shelf: AnyShelf
    ) -> None:
        keys, slots = make_keys(range(12)), range(12)
        await shelf.put(keys, slots)
        for turns in range(1, 4):
            await self._cancel_reading(shelf, shelf.tier.begin_read, keys, turns=turns)

    async def _cancel_reading(
        self,
        shelf: AnyShelf,
        read: Callable[..., Coroutine[Any, Any, SlotOutcomes]],
        keys: Sequence[ChunkKey],
        *,
        turns: int,
    ) -> None:
        """Cancel a read after ``turns`` of the loop; it leaves the buffers alone."""
        slots, buffers = range(len(keys)), shelf.buffers(len(keys))
        await _cancel_after(turns, read(keys, slots, buffers, why=Why.LOAD))
        for buffer in buffers:
            buffer[:] = bytes(self.slot_nbytes)
        assert await shelf.get(keys, slots) == [DONE] * len(keys)
        assert all(buffer == bytes(self.slot_nbytes) for buffer in buffers)

    async def test_many_batches_at_once_do_not_mix(self, shelf: AnyShelf) -> None:
        async def use(number: int) -> None:
            slots = range(number, self.capacity_slots, 4)
            for round_ in range(3):
                keys = make_keys([1000 * number + 100 * round_ + slot for slot in slots])
                assert await shelf.put(keys, slots) == [DONE] * len(keys)
                assert await shelf.get(keys, slots) == [DONE] * len(keys)

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(use(number))


async def _cancel_after(turns: int, call: Coroutine[Any, Any, SlotOutcomes]) -> None:
    """Cancel ``call`` after ``turns`` of the loop, and wait until it is over."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
