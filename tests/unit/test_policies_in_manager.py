"""The manager calls every policy as the contract says."""

from __future__ import annotations

import random

import pytest
from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies import ChunkCopy, PolicyContext
from kvtier.policies.eviction import Lru
from kvtier.policies.registry import EVICTIONS
from tests.support.workbench import Workbench, prefix


class Listening(Lru):
    """LRU that records its calls."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.missed: list[ChunkKey] = []
        self.inserted: list[ChunkKey] = []

    @override
    def on_miss(self, key: ChunkKey, ctx: PolicyContext) -> None:
        self.missed.append(key)

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.inserted.append(copy.key)
        super().on_insert(copy, ctx)

    @override
    def on_insert_many(self, copies: object, ctx: PolicyContext) -> None:
        assert isinstance(copies, list)
        for copy in copies:
            self.on_insert(copy, ctx)


def serve(bench: Workbench, keys: list[ChunkKey], req_id: str) -> int:
    """Load the prefix that is there and store the rest; return the hits."""
    while (hits := bench.look(keys, req_id)) is None:
        bench.settle()
    if hits:
        bench.load(keys[:hits], req_id)
    bench.store(keys, req_id)
    bench.manager.end_request(req_id)
    bench.settle()
    return hits


@pytest.mark.untraced
@pytest.mark.parametrize("write", ["through", "evict"])
@pytest.mark.parametrize("name", sorted(EVICTIONS.built_in))
def test_the_manager_counts_right_with_every_policy(name: str, write: str) -> None:
    bench = Workbench(6, 14, write="through" if write == "through" else "evict", eviction=name)
    rng, hits = random.Random(name), 0
    for number in range(150):
        hits += serve(
            bench, prefix(rng.randint(1, 5), of=int(9 * rng.random() ** 2)), f"r{number}"
        )
    assert hits > 100
    assert all(tier.counters.evicted for tier in bench.tiers)


def test_a_policy_records_each_miss_once_before_the_insertion() -> None:
    bench = Workbench(2, 4)
    ears = [Listening(2), Listening(4)]
    for tier, ear in zip(bench.tiers, ears, strict=True):
        tier.eviction = ear
    for number, of in enumerate([0, 1, 2, 0, 0, 3, 1]):
        serve(bench, prefix(1, of=of), f"r{number}")
    for ear in ears:
        assert ear.missed == ear.inserted
    first, second, third, fourth = (prefix(1, of=of)[0] for of in range(4))
    assert ears[0].missed == [first, second, third, first, fourth, second]
    assert ears[1].missed == [first, second, third, fourth]


def test_a_policy_records_no_miss_of_chunks_without_a_slot() -> None:
    bench = Workbench(2)
    ear = bench.ram.eviction = Listening(2)
    assert bench.manager.prepare_store(prefix(2), "writer") is not None
    for _ in range(30):
        bench.store(prefix(1, of=1), "late")
    assert ear.missed == prefix(2)


class PicksNothing(Lru):
    """Picks no victim, or something that is not a copy, and knows none of its members."""

    picked: list[ChunkCopy] = []  # noqa: RUF012 - a test replaces it

    @override
    def pick_many(self, count: int, evictable: object, ctx: PolicyContext) -> list[ChunkCopy]:
        return self.picked

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        raise KeyError(copy.key)


@pytest.mark.parametrize(
    ("picked", "words"),
    [([], "picks too few victims"), ([5], "picks 5, which is no ChunkCopy")],
)
def test_lru_replaces_a_policy_that_picks_no_victim(
    picked: list[ChunkCopy], words: str
) -> None:
    bench = Workbench(2)
    bench.ram.eviction = eviction = PicksNothing(2)
    eviction.picked = picked
    keys = [prefix(1, of=of)[0] for of in range(4)]
    for number, key in enumerate(keys):
        serve(bench, [key], f"r{number}")
    assert set(bench.ram.copies) == set(keys[2:])
    (error,) = bench.manager.policy_errors
    assert words in str(error)
