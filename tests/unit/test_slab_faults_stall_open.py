"""Opening a store on a disk that hangs, at each call that opening makes.

Nothing here has a deadline: the engine opens a tier in a process of its own, and gives that up
(``hosted_tier/``). What matters is that a call which answers late has no other effect
than one that answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.config import NvmeTierConfig
from kvtier.keys import ChunkKey
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_keys, make_sources
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome, Purpose
from tests.support.faulty_io import FaultyIo
from tests.support.open_files import assert_closed_again, descriptors
from tests.unit.ram_directory import ram_directory
from tests.unit.stall_rig import SLOT, read_and_close
from tests.unit.test_slab_faults_matrix import WAYS

SLOTS = 4
HANG_S = 60.0
KEYS = make_keys(range(SLOTS))


class Place:
    """A directory with a store, the model that is to use it, and how many slots it may have."""

    def __init__(self, root: Path, pool: IoPool) -> None:
        self.root = root
        self.model = "a"
        self.slots = SLOTS
        self.kept: list[ChunkKey] = []
        self._pool = pool

    def open(self, io: FaultyIo) -> SlabTier:
        options = NvmeTierConfig(
            path=self.root, capacity_bytes=self.slots * SLOT, on_mismatch="remove"
        )
        fingerprint = LayoutFingerprint({"model": self.model})
        return SlabTier.open(options, TierContext(SLOT, fingerprint, self._pool), io=io)

    def fill(self) -> None:
        """Let an engine store something and close."""
        tier = self.open(FaultyIo())

        async def store() -> None:
            sources = make_sources(KEYS, SLOT)
            moved = await tier.write(KEYS, range(SLOTS), sources, purpose=Purpose.STORE)
            assert set(moved.outcomes) == {Outcome.DONE}
            await tier.aclose()

        asyncio.run(store())
        self.kept = KEYS

    def damage(self) -> None:
        (index,) = self.root.glob("*/index.sqlite")
        index.write_bytes(b"what was here before" * 1000)
        self.kept = []


def fresh(place: Place) -> None:
    shutil.rmtree(place.root, ignore_errors=True)


def filled(place: Place) -> None:
    place.fill()


def smaller(place: Place) -> None:
    place.fill()
    place.slots, place.kept = SLOTS - 1, KEYS[:-1]


def damaged(place: Place) -> None:
    place.fill()
    place.damage()


def of_another_model(place: Place) -> None:
    place.fill()
    place.model, place.kept = "b", []


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(1, name="kvtier-test")
    yield pool
    assert pool.close(timeout_s=HANG_S)


def use(place: Place, tier: SlabTier) -> None:
    """See that what must be there is there, and close the tier."""
    assert read_and_close(tier) == set(place.kept)


def calls_of_opening(place: Place) -> list[str]:
    """Open the place once and return what that calls."""
    io = FaultyIo()
    tier = place.open(io)
    calls = list(io.calls)
    use(place, tier)
    return calls


def open_late(place: Place, call: str, number: int) -> None:
    """Open the place while a call hangs, which then answers."""
    io = FaultyIo()
    gate = io.stall(call, after=number)
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(place.open, io)
        try:
            assert io.wait_until_stalled(timeout_s=HANG_S)
            assert not opening.done()
        finally:
            gate.set()
        use(place, opening.result(HANG_S))


class Bench:
    """Opens copies of one place, each of them while another call hangs."""

    def __init__(self, original: Place, directory: Path) -> None:
        self._original = original
        self._copy = directory / "copy"

    @contextlib.contextmanager
    def copy(self) -> Iterator[Place]:
        place = copy.copy(self._original)
        place.root = self._copy
        if self._original.root.exists():
            shutil.copytree(self._original.root, place.root)
        yield place
        shutil.rmtree(place.root)

    def calls(self) -> Counter[str]:
        with self.copy() as place:
            return Counter(calls_of_opening(place))

    def run(self, call: str, number: int) -> None:
        before = descriptors()
        with self.copy() as place:
            open_late(place, call, number)
        assert_closed_again(before, f"at {call} {number}")


@pytest.fixture(
    params=[fresh, filled, smaller, damaged, of_another_model],
    ids=lambda prepare: prepare.__name__,
)
def bench(request: pytest.FixtureRequest, pool: IoPool) -> Iterator[Bench]:
    with ram_directory() as directory:
        place = Place(directory / "original", pool)
        request.param(place)
        yield Bench(place, directory)


def test_opening_is_done_when_the_call_that_hung_is(bench: Bench) -> None:
    calls = bench.calls()
    assert set(calls) <= set(WAYS)
    for call in calls:
        bench.run(call, 0)


@pytest.mark.slow
def test_opening_is_done_whichever_call_hung(bench: Bench) -> None:
    for call, count in bench.calls().items():
        for number in range(count):
            bench.run(call, number)
