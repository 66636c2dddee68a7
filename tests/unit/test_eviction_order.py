"""What one request stored or used leaves deepest first, whatever KV cache groups it is in."""

from __future__ import annotations

from typing import Literal

import pytest

from kvtier.keys import ChunkKey, group_of
from kvtier.manager import ManagerLimits
from kvtier.policies import PolicyContext
from tests.support.workbench import Workbench, prefix

LEAF_FIRST = ["arc", "fifo", "lhd", "lru", "slru"]
"""Policies that treat chunks alike that came together, and take the first to arrive."""


def two_groups(chunks: int, *, of: int = 0, begin: int = 0) -> list[ChunkKey]:
    """Return the keys that an engine offers for one prompt: group after group."""
    return [key for group in (0, 1) for key in prefix(chunks, of=of, group=group)[begin:]]


def evict(bench: Workbench, chunks: int, *, tier: int = 0) -> list[ChunkKey]:
    """Make so many chunks leave ``tier``, as if others needed the room; return them."""
    state = bench.tiers[tier]
    slots, victims = state.take_slots(state.slots.free + chunks, PolicyContext())
    state.slots.release(slots)
    return victims


def lengths(bench: Workbench, *, of: int = 0, tier: int = 0, groups: int = 2) -> list[int]:
    """Return how long the prefix is that each group has whole."""
    here = bench.resident(tier)
    counts = []
    for group in range(groups):
        keys = prefix(64, of=of, group=group)
        counts.append(next(at for at, key in enumerate(keys) if key not in here))
    return counts


@pytest.mark.parametrize("policy", LEAF_FIRST)
def test_chunks_stored_together_leave_deepest_first_in_all_groups(policy: str) -> None:
    bench = Workbench(16, eviction=policy)
    bench.store(two_groups(8))
    for left in range(7, -1, -1):
        evict(bench, 2)
        assert lengths(bench) == [left, left]
        assert len(bench.resident()) == 2 * left


def test_chunks_used_together_leave_deepest_first_in_all_groups() -> None:
    bench = Workbench(20)
    bench.store(two_groups(8))
    bench.store(two_groups(2, of=1))
    bench.load(two_groups(8))
    assert {*evict(bench, 4)} == {*two_groups(2, of=1)}
    for left in range(7, -1, -1):
        evict(bench, 2)
        assert lengths(bench) == [left, left]


def test_groups_with_longer_chunks_lose_as_many_tokens() -> None:
    bench = Workbench(10)
    bench.store([*prefix(2), *prefix(8, group=1)])
    left = []
    while bench.resident():
        left.append(lengths(bench))
        evict(bench, 1)
    tokens = [(whole * 64, short * 16) for whole, short in left]
    assert all(abs(whole - short) <= 64 for whole, short in tokens), tokens
    assert left[5] == [1, 4]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_prompt_that_comes_in_parts_leaves_deepest_first(groups: int) -> None:
    bench = Workbench(16 * groups)
    bench.manager.begin_request("a")
    bench.manager.begin_request("b")
    for begin in range(0, 8, 2):
        for number, req_id in enumerate("ab"):
            keys = two_groups(begin + 2, of=number, begin=begin)
            bench.store(keys[: len(keys) * groups // 2], req_id)
    for left in range(7, -1, -1):
        evict(bench, groups)
        assert lengths(bench, groups=groups) == [left] * groups, "it was used longest ago"
    assert lengths(bench, of=1, groups=groups) == [8] * groups


def test_loaded_chunks_leave_after_the_chunks_computed_behind_them() -> None:
    bench = Workbench(12)
    bench.store(prefix(4))
    bench.store(prefix(4, of=1))
    bench.manager.begin_request("next turn")
    bench.load(prefix(4), "next turn")
    bench.store(prefix(8)[4:], "next turn")
    assert {*evict(bench, 4)} == {*prefix(4, of=1)}
    for left in range(7, -1, -1):
        assert evict(bench, 1) == [prefix(8)[left]]


def test_a_prefix_of_several_requests_outlives_what_they_add() -> None:
    bench = Workbench(12)
    for req_id in "ab":
        bench.manager.begin_request(req_id)
    bench.store(prefix(4))
    for req_id in "ab":
        bench.load(prefix(4), req_id)
    bench.store(prefix(8)[4:], "a")
    assert [evict(bench, 1) for _ in range(8)] == [[key] for key in reversed(prefix(8))]


@pytest.mark.parametrize("write", ["through", "evict"])
def test_demoted_chunks_leave_deepest_first(write: Literal["through", "evict"]) -> None:
    bench = Workbench(32, 32, write=write)
    for number in range(2 if write == "through" else 4):
        bench.manager.begin_request(f"{number}")
    for begin in range(0, 8, 2):  # two prompts in parts; those of a step go down in one job
        for number in (0, 1):
            bench.store(two_groups(begin + 2, of=number, begin=begin), f"{number}")
        bench.settle()
    if write == "evict":
        for number in (2, 3):
            assert bench.store(two_groups(8, of=number), f"{number}") is None
            bench.settle()
            assert bench.store(two_groups(8, of=number), f"{number}") is not None
    assert lengths(bench, tier=1) == lengths(bench, of=1, tier=1) == [8, 8]
    for _ in range(16):
        evict(bench, 2, tier=1)
        for number in (0, 1):
            here = [key for key in bench.resident(1) if key in two_groups(8, of=number)]
            assert len(here) == sum(lengths(bench, of=number, tier=1)), "one is stranded"


@pytest.mark.parametrize("chunks", [3, 4, 6])
def test_a_store_that_finds_little_room_takes_the_heads_of_all_groups(chunks: int) -> None:
    bench = Workbench(chunks)
    plan = bench.store(two_groups(8))
    assert plan is not None
    assert [group_of(key) for key in plan.keys] == sorted(map(group_of, plan.keys))
    assert lengths(bench) == [(chunks + 1) // 2, chunks // 2]


def test_of_a_long_backlog_the_heads_of_all_groups_are_demoted() -> None:
    limits = ManagerLimits(pin_budget=8, reserve=0.0, queue=1024, backlog=6)
    bench = Workbench(32, 64, limits=limits)
    bench.store(two_groups(8))
    bench.settle()
    assert lengths(bench, tier=1) == [3, 3]


def test_chunks_that_come_one_by_one_leave_as_the_textbook_says() -> None:
    bench = Workbench(8)
    for key in [*prefix(4), *prefix(4, of=1)]:
        bench.store([key])
    assert [evict(bench, 1) for _ in range(4)] == [[key] for key in prefix(4)]
