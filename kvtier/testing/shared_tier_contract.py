"""The contract of shared tiers, as a test class to inherit.

::

    class TestMyTier(SharedTierContract):
        tier_class = MyTier

        def section(self, directory):
            return "address: 127.0.0.1:6379"

The tests need pytest-asyncio in auto mode. The service must run before the tests start. For
example, a module fixture with ``autouse`` can start the service. All tests may use the same
service, because each test has its own keys.
"""

# ruff: noqa: D102 - a test is documented by its name

from __future__ import annotations

import asyncio
import random
import secrets
from abc import ABC
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import ClassVar, TypeAlias

import pytest

from kvtier.config import SharedTierConfig, parse_tier
from kvtier.os.iopool import IoPool
from kvtier.testing.shared_tier_harness import KEY_CHARACTERS, RecordingTier, SharedTierHarness
from kvtier.testing.tier_harness import Arena, TierHarness, make_keys, tier_section
from kvtier.testing.tier_probes import (
    blocking_calls,
    cancel_after,
    cancel_with_held_threads,
    clear_buffers,
)
from kvtier.tiers.base import TierContext
from kvtier.tiers.shared import PROOF_NBYTES, KeyedTier, SharedContext, SharedTier
from kvtier.types import LayoutFingerprint, Outcome, QuestionPart

__all__ = ["SharedTierContract"]

DONE, MISSING, CORRUPT = Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT
_KEY_LENGTH = 200


class EngineHarness(TierHarness[KeyedTier]):
    """Opens a shared tier for one engine, and finds, stores and loads chunks.

    Attributes:
        recorder: The client, which records the keys that the engine puts.
    """

    recorder: RecordingTier

    async def find(self, numbers: Sequence[int], *, is_prefix: bool = True) -> list[Outcome]:
        """Ask the tier for the chunks ``numbers`` of a prefix or a sliding window."""
        part = QuestionPart(len(numbers), 0, 1, is_prefix=is_prefix)
        return list((await self.tier.find(make_keys(numbers), [part])).outcomes)

    async def store(self, numbers: Sequence[int]) -> list[Outcome]:
        """Store the chunks ``numbers``."""
        return await self.put(make_keys(numbers), range(len(numbers)))

    async def load(self, numbers: Sequence[int]) -> list[Outcome]:
        """Load and verify the chunks ``numbers``."""
        return await self.get(make_keys(numbers), range(len(numbers)))


MakeEngine: TypeAlias = Callable[..., Awaitable[EngineHarness]]
"""Opens an engine's view, given ``model`` and ``keep_after_reset``."""


class SharedTierContract(ABC):
    """Tests that every shared tier must pass.

    Inherit as ``TestX``, set :attr:`tier_class` and implement :meth:`section`.

    Attributes:
        tier_class: Class of the tier to test.
        payload_nbytes: Size in bytes of a chunk in the tests.
        values_outlive_client: Whether the service keeps a value after the value's client is
            closed.
        arena_nbytes: Size in bytes of the shared memory that a client may register.
    """

    tier_class: ClassVar[type[SharedTier]]
    payload_nbytes: ClassVar[int] = 8192
    values_outlive_client: ClassVar[bool] = True
    arena_nbytes: ClassVar[int] = 128 << 20

    def section(self, directory: Path) -> str:  # noqa: ARG002 - for those that override it
        """Return the tier's section of a YAML file, without ``kind``.

        Each key is on its own line. Every client of a test gets the same text.

        Args:
            directory: Directory for the service's files. It does not exist yet.
        """
        return ""

    def open_tier(self, options: SharedTierConfig, context: SharedContext) -> SharedTier:
        """Open a client. Override this method if :attr:`tier_class` needs other arguments."""
        return self.tier_class.open(options, context)

    async def stored_bytes(self, harness: SharedTierHarness, key: str) -> bytes:
        """Return the bytes of a stored value: at least the payload and the proof.

        Override this method and :meth:`replace_stored` to access the service directly.
        """
        [value] = into = harness.buffers(1)
        assert await harness.tier.get([key], into) == [DONE]
        return bytes(value.payload) + bytes(value.proof)

    async def replace_stored(self, harness: SharedTierHarness, key: str, value: bytes) -> None:
        """Replace the bytes of a stored value, to simulate damage or another program.

        Args:
            harness: Clients of the service.
            key: Key of the value.
            value: The bytes to store, perhaps fewer bytes than a whole value has.
        """
        payload_nbytes = len(value) - PROOF_NBYTES
        client = await harness.client(payload_nbytes)
        [buffers] = harness.buffers(1, payload_nbytes)
        buffers.payload[:] = value[:payload_nbytes]
        buffers.proof[:] = value[payload_nbytes:]
        assert await client.put([key], [buffers]) == [DONE]

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        """The directory of the service's files."""
        return tmp_path / "store"

    @pytest.fixture
    def pool(self) -> Iterator[IoPool]:
        """Threads for the clients."""
        pool = IoPool(4, name="kvtier-contract")
        yield pool
        assert pool.close(timeout_s=10)

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        """Memory for the payloads."""
        arena = Arena(self.arena_nbytes)
        yield arena
        arena.close()

    @pytest.fixture
    def text(self, directory: Path, request: pytest.FixtureRequest) -> str:
        """The tier's section; pytest shows it if a test fails."""
        return tier_section(self.tier_class, request, self.section(directory))

    @pytest.fixture
    async def harness(
        self, text: str, pool: IoPool, arena: Arena
    ) -> AsyncIterator[SharedTierHarness]:
        """Two open clients of the service."""
        options = self._parse(text)
        memory = arena.view

        def open_client(payload_nbytes: int) -> SharedTier:
            return self.open_tier(options, SharedContext(payload_nbytes, pool, memory))

        harness = SharedTierHarness(
            open_client, pool, arena, payload_nbytes=self.payload_nbytes
        )
        await harness.open()
        yield harness
        await harness.aclose()

    @pytest.fixture
    async def make_engine(
        self, text: str, pool: IoPool, arena: Arena
    ) -> AsyncIterator[MakeEngine]:
        """A function that opens the tier as one more engine."""
        engines: list[EngineHarness] = []
        test_id = secrets.token_hex(6)

        async def make(
            *, model: str = "contract", keep_after_reset: bool = False
        ) -> EngineHarness:
            options = self._parse(f"{text}keep_after_reset: {str(keep_after_reset).lower()}\n")
            context = TierContext(
                slot_nbytes=self.payload_nbytes,
                fingerprint=LayoutFingerprint({"model": model, "test": test_id}),
                pool=pool,
                memory=arena.shared,
            )

            def open_keyed() -> KeyedTier:
                shared = SharedContext(self.payload_nbytes, pool, arena.view)
                engine.recorder = RecordingTier(self.open_tier(options, shared))
                scratch = arena.take(self.payload_nbytes)
                return KeyedTier(options, context, engine.recorder, scratch)

            engine = EngineHarness(open_keyed, pool, arena)
            await engine.open()
            engines.append(engine)
            return engine

        yield make
        while engines:
            await engines.pop().tier.aclose()

    def _parse(self, text: str) -> SharedTierConfig:
        return parse_tier(
            text, self.tier_class.Options, source=f"{type(self).__name__}.section"
        )

    async def test_what_was_put_is_got_bit_for_bit(self, harness: SharedTierHarness) -> None:
        keys = harness.keys(range(10))
        assert await harness.put(keys) == [DONE] * 10
        assert await harness.get(keys) == [0] * 10

    async def test_another_client_gets_what_one_put(self, harness: SharedTierHarness) -> None:
        keys = harness.keys(range(10))
        assert await harness.put(keys) == [DONE] * 10
        assert await harness.get(keys, client=harness.other) == [0] * 10

    async def test_a_value_stays_when_its_client_is_closed(
        self, harness: SharedTierHarness
    ) -> None:
        if not self.values_outlive_client:
            pytest.skip("keeps values in its clients")
        keys = harness.keys(range(4))
        await harness.put(keys)
        await harness.tier.aclose()
        assert await harness.get(keys, client=harness.other) == [0] * 4

    async def test_a_missing_key_spoils_no_neighbour(self, harness: SharedTierHarness) -> None:
        keys = harness.keys(range(5))
        await harness.put(keys[::2])
        assert await harness.get(keys) == [0, MISSING, 0, MISSING, 0]

    async def test_keys_in_another_order_get_their_own_values(
        self, harness: SharedTierHarness
    ) -> None:
        keys = harness.keys(range(14))
        await harness.put(keys)
        shuffled = random.Random(7).sample(keys, 14)
        assert await harness.get([*shuffled, keys[0]]) == [0] * 15

    @pytest.mark.parametrize("pages", [1, 4])
    async def test_a_value_of_another_size_is_missing(
        self, harness: SharedTierHarness, pages: int
    ) -> None:
        keys = harness.keys(range(3))
        await harness.put(keys)
        nbytes = pages * 4096
        client = await harness.client(nbytes)
        into = harness.buffers(3, nbytes)
        assert set(await client.get(keys, into)) <= {MISSING, CORRUPT}

    async def test_a_later_value_replaces_an_earlier_one(
        self, harness: SharedTierHarness
    ) -> None:
        keys = harness.keys(range(3))
        await harness.put(keys, version=1)
        assert await harness.put(keys[:2], version=2, client=harness.other) == [DONE] * 2
        assert await harness.get(keys) == [2, 2, 1]

    async def test_a_batch_may_have_hundreds_of_values(
        self, harness: SharedTierHarness
    ) -> None:
        keys = harness.keys(range(300))
        assert await harness.put(keys) == [DONE] * 300
        assert await harness.get(keys, client=harness.other) == [0] * 300
        assert list(await harness.other.contains(keys)) == [True] * 300

    async def test_many_batches_at_once_do_not_mix(self, harness: SharedTierHarness) -> None:
        async def use(number: int) -> None:
            client = (harness.tier, harness.other)[number % 2]
            keys = harness.keys(range(100 * number, 100 * number + 20))
            for version in range(3):
                assert await harness.put(keys, version=version, client=client) == [DONE] * 20
                assert await harness.get(keys, client=client) == [version] * 20
                assert list(await client.contains(keys)) == [True] * 20

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(use(number))

    async def test_an_empty_batch_is_no_work(self, harness: SharedTierHarness) -> None:
        assert await harness.put([]) == []
        assert await harness.get([]) == []
        assert list(await harness.tier.contains([])) == []
        assert list(await harness.tier.contains_leading([])) == []

    async def test_keys_may_have_all_characters_and_the_full_length(
        self, harness: SharedTierHarness
    ) -> None:
        start = harness.keys([1])[0].partition("/")[0]
        body = f"{KEY_CHARACTERS.replace('/', '')}/{KEY_CHARACTERS[:-1]}"
        keys = [f"{start}/{'-' * number}{body}"[:_KEY_LENGTH] for number in range(3)]
        keys += [f"{start}/{'a' * _KEY_LENGTH}"[: _KEY_LENGTH - 1] + end for end in "aA-0"]
        keys += [f"{start}/{'/'.join('abcde')}", f"{start}/a-b-c-d-e"]
        assert await harness.put(keys) == [DONE] * len(keys)
        assert await harness.get(keys, client=harness.other) == [0] * len(keys)
        assert list(await harness.other.contains(keys)) == [True] * len(keys)
        assert list(await harness.other.contains([f"{start}/A-b-c-d-e"])) == [False]

    async def test_contains_is_exact(self, harness: SharedTierHarness) -> None:
        keys = harness.keys(range(40))
        is_there = [random.Random(number).random() < 0.5 for number in range(40)]
        await harness.put([key for key, there in zip(keys, is_there, strict=True) if there])
        for client in (harness.tier, harness.other):
            assert list(await client.contains(keys)) == is_there

    async def test_contains_leading_finds_the_end_of_a_prefix(
        self, harness: SharedTierHarness
    ) -> None:
        keys = harness.keys(range(70))
        stored = 0
        for count in (0, 1, 2, 7, 32, 33, 69, 70):
            await harness.put(keys[stored:count])
            stored = count
            found = list(await harness.other.contains_leading(keys))
            assert found == [True] * count + [False] * (70 - count)
            assert list(await harness.other.contains_leading(keys[:1])) == [count > 0]

    async def test_a_value_is_whole_while_others_replace_it(
        self, harness: SharedTierHarness
    ) -> None:
        keys = harness.keys(range(4))
        await harness.put(keys)
        found: set[int | Outcome] = set()

        async def write(client: SharedTier, first: int) -> None:
            for version in range(first, first + 20, 2):
                assert await harness.put(keys, version=version, client=client) == [DONE] * 4

        async def read(client: SharedTier) -> None:
            for _ in range(20):
                found.update(await harness.get(keys, client=client))

        async with asyncio.TaskGroup() as group:
            for number, client in enumerate((harness.tier, harness.other)):
                group.create_task(write(client, number + 1))
                group.create_task(read(client))
                group.create_task(read(client))
        assert all(isinstance(version, int) or version is MISSING for version in found)
        assert set(await harness.get(keys)) <= {19, 20}

    async def test_a_new_value_is_whole_or_absent_while_it_is_put(
        self, harness: SharedTierHarness
    ) -> None:
        keys = harness.keys(range(30))

        async def read() -> None:
            into = harness.buffers(30)
            while not writing.done():
                found = await harness.get(keys, client=harness.other, into=into)
                assert set(found) <= {0, MISSING}

        async with asyncio.TaskGroup() as group:
            writing = group.create_task(harness.put(keys))
            group.create_task(read())
        assert await harness.get(keys, client=harness.other) == [0] * 30

    async def test_a_cancelled_put_stores_values_whole_or_not_at_all(
        self, harness: SharedTierHarness
    ) -> None:
        """Like an engine, this test overwrites the source buffers once ``put`` has raised."""
        for turns in range(12):
            keys = harness.keys(range(100 * turns, 100 * turns + 8))
            values = harness.values(keys)
            await cancel_after(turns, harness.tier.put(keys, values))
            clear_buffers(chain.from_iterable(values))
            assert set(await harness.get(keys)) <= {0, MISSING}

    async def test_a_cancelled_get_leaves_the_buffers_alone(
        self, harness: SharedTierHarness
    ) -> None:
        keys = harness.keys(range(12))
        await harness.put(keys)
        for turns in range(1, 6):
            into = harness.buffers(12)
            await cancel_after(turns, harness.tier.get(keys, into))
            clear_buffers(chain.from_iterable(into))
            assert await harness.get(keys) == [0] * 12
            assert _is_clear(chain.from_iterable(into)), (
                "a buffer was filled after the call was over"
            )

    async def test_a_cancelled_get_waits_for_the_threads_that_fill_its_buffers(
        self, harness: SharedTierHarness, pool: IoPool
    ) -> None:
        keys, into = harness.keys(range(12)), harness.buffers(12)
        await harness.put(keys)
        await cancel_with_held_threads(
            harness.tier.get(keys, into), list(chain.from_iterable(into)), pool
        )
        assert _is_clear(chain.from_iterable(into)), (
            "a thread filled a buffer after the call was over"
        )

    async def test_a_cancelled_put_waits_for_the_threads_that_read_its_sources(
        self, harness: SharedTierHarness, pool: IoPool
    ) -> None:
        keys = harness.keys(range(12))
        values = harness.values(keys)
        await cancel_with_held_threads(
            harness.tier.put(keys, values), list(chain.from_iterable(values)), pool
        )
        assert set(await harness.get(keys)) <= {0, MISSING}

    async def test_nothing_blocks_the_loop(self, harness: SharedTierHarness) -> None:
        keys = harness.keys(range(8))
        values, into = harness.values(keys), harness.buffers(8)
        with blocking_calls() as found:
            await harness.tier.put(keys, values)
            await harness.tier.contains(keys)
            await harness.tier.contains_leading(keys)
            await harness.tier.get(keys, into)
            await harness.tier.aclose()
        assert not found, f"on the loop's thread it called {', '.join(sorted({*found}))}"

    async def test_the_last_chunks_of_a_window_are_found_without_the_first(
        self, make_engine: MakeEngine
    ) -> None:
        one, other = await make_engine(), await make_engine()
        await one.store(range(20, 24))
        found = await other.find(range(24), is_prefix=False)
        assert found == [MISSING] * 20 + [DONE] * 4

    async def test_an_engine_finds_and_loads_what_another_stored(
        self, make_engine: MakeEngine
    ) -> None:
        first, second = await make_engine(), await make_engine()
        assert await first.store(range(6)) == [DONE] * 6
        assert await second.find(range(8)) == [DONE] * 6 + [MISSING] * 2
        assert await second.load(range(8)) == [DONE] * 6 + [MISSING] * 2

    async def test_nothing_is_put_twice(self, make_engine: MakeEngine) -> None:
        first, second = await make_engine(), await make_engine()
        await first.store(range(6))
        assert await second.store(range(3, 9)) == [DONE] * 6
        assert await first.store(range(9)) == [DONE] * 9
        if first.recorder.asks_before_adding:
            assert len(first.recorder.puts) == 6
            assert len(second.recorder.puts) == 3
        assert await first.load(range(9)) == [DONE] * 9

    async def test_a_value_that_another_client_stored_is_added_without_harm(
        self, harness: SharedTierHarness
    ) -> None:
        keys = harness.keys(range(4))
        await harness.put(keys[::2], version=1)
        values = harness.values(keys, version=2)
        assert list(await harness.other.add(keys, values)) == [DONE] * 4
        first, second, third, fourth = await harness.get(keys)
        assert {first, third} <= {1, 2}
        assert (second, fourth) == (2, 2)

    @pytest.mark.parametrize(
        "place", [0, payload_nbytes // 2, payload_nbytes - 1, payload_nbytes, -1]
    )
    async def test_a_flipped_bit_is_a_miss_until_the_chunk_is_stored_again(
        self, make_engine: MakeEngine, harness: SharedTierHarness, place: int
    ) -> None:
        engine = await make_engine()
        await engine.store(range(3))
        damaged = bytearray(await self.stored_bytes(harness, engine.recorder.puts[1]))
        if place == -1:
            place = self.payload_nbytes + PROOF_NBYTES - 1
        damaged[place] ^= 1
        await self.replace_stored(harness, engine.recorder.puts[1], bytes(damaged))
        assert await engine.load(range(3)) == [DONE, CORRUPT, DONE]
        assert await engine.find(range(3)) == [DONE, MISSING, DONE]
        assert await engine.store(range(3)) == [DONE] * 3
        assert await engine.load(range(3)) == [DONE] * 3

    async def test_a_truncated_value_is_a_miss_until_the_chunk_is_stored_again(
        self, make_engine: MakeEngine, harness: SharedTierHarness
    ) -> None:
        engine = await make_engine()
        await engine.store(range(3))
        key = engine.recorder.puts[1]
        whole = await self.stored_bytes(harness, key)
        await self.replace_stored(harness, key, whole[: 4096 + PROOF_NBYTES])
        first, second, third = await engine.load(range(3))
        assert (first, third) == (DONE, DONE)
        assert second in {MISSING, CORRUPT}
        assert await engine.find(range(2)) == [DONE, MISSING]
        assert await engine.store(range(3)) == [DONE] * 3
        assert await engine.load(range(3)) == [DONE] * 3

    async def test_a_value_that_another_engine_has_repaired_is_not_replaced(
        self, make_engine: MakeEngine, harness: SharedTierHarness
    ) -> None:
        engine, other = await make_engine(), await make_engine()
        await engine.store(range(3))
        keys = engine.recorder.puts[:2]
        for key in keys:
            damaged = bytearray(await self.stored_bytes(harness, key))
            damaged[0] ^= 1
            await self.replace_stored(harness, key, bytes(damaged))
        assert await engine.load(range(3)) == [CORRUPT, CORRUPT, DONE]
        assert await other.load(range(3)) == [CORRUPT, CORRUPT, DONE]
        assert await engine.store([0]) == [DONE]
        assert await other.store(range(3)) == [DONE] * 3
        assert await engine.store(range(3)) == [DONE] * 3
        assert engine.recorder.replaced == keys[:1]
        assert other.recorder.replaced == keys[1:]
        for each in (engine, other):
            assert await each.find(range(3)) == [DONE] * 3
            assert await each.load(range(3)) == [DONE] * 3

    async def test_the_values_of_other_keys_are_misses(
        self, make_engine: MakeEngine, harness: SharedTierHarness
    ) -> None:
        engine = await make_engine()
        await engine.store(range(3))
        one, other = engine.recorder.puts[:2]
        values = [await self.stored_bytes(harness, key) for key in (one, other)]
        await self.replace_stored(harness, one, values[1])
        await self.replace_stored(harness, other, values[0])
        assert await engine.load(range(3)) == [CORRUPT, CORRUPT, DONE]

    async def test_the_chunks_of_another_model_are_misses(
        self, make_engine: MakeEngine, harness: SharedTierHarness
    ) -> None:
        engine, other = await make_engine(), await make_engine(model="other")
        await engine.store([0])
        assert await other.find([0]) == [MISSING]
        assert await other.load([0]) == [MISSING]
        await other.store([0])
        foreign = await self.stored_bytes(harness, other.recorder.puts[0])
        await self.replace_stored(harness, engine.recorder.puts[0], foreign)
        assert await engine.load([0]) == [CORRUPT]
        assert await other.load([0]) == [DONE]

    async def test_a_reset_hides_chunks_from_this_engine_only(
        self, make_engine: MakeEngine
    ) -> None:
        engine, other = await make_engine(), await make_engine()
        await engine.store(range(3))
        await engine.tier.reset()
        assert await engine.find(range(3)) == [MISSING] * 3
        assert await engine.load(range(3)) == [MISSING] * 3
        assert await other.load(range(3)) == [DONE] * 3
        assert await engine.store([7]) == [DONE]
        assert await engine.load([7]) == [DONE]
        assert await other.find([7]) == [MISSING]

    async def test_an_engine_that_keeps_its_chunks_shares_them_after_a_reset(
        self, make_engine: MakeEngine
    ) -> None:
        engine, other = await make_engine(keep_after_reset=True), await make_engine()
        await engine.store([0])
        await engine.tier.reset()
        assert await engine.load([0]) == [DONE]
        await engine.store([1])
        assert await other.load([0, 1]) == [DONE] * 2


def _is_clear(buffers: Iterable[memoryview]) -> bool:
    return not any(map(any, buffers))
