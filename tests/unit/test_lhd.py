"""Least hit density is never much worse than LRU, and better where it can be."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvtier.keys import make_key
from kvtier.policies import ChunkCopy, PolicyContext
from kvtier.policies.eviction.lhd import Lhd, Rivalry
from kvtier.sim.single import BELADY, simulate_single
from kvtier.sim.traces import Trace, generate, read_trace
from tests.unit.sim_traces import TRACES, needs_traces

NUMBERS = itertools.count()
MOST_LOST = 0.0075
"""Points that are lost at most, as a share: an allowance is spent before LRU is followed."""


def hits(trace: Trace, share: float, *policies: str) -> list[float]:
    """Return the prefix hit ratio of each policy."""
    capacity = max(1, int(share * trace.distinct + 0.5))
    results = (simulate_single(trace, policy=name, capacity=capacity) for name in policies)
    return [result.prefix_hit_ratio for result in results]


def lead_over_lru(trace: Trace, share: float) -> float:
    """Return by how much the prefix hit ratio is above that of LRU."""
    ours, theirs = hits(trace, share, "lhd", "lru")
    return ours - theirs


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("name", ["mooncake_synthetic", "mooncake_conversation"])
def test_on_public_traces_it_is_close_to_the_best(name: str, share: float) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl")
    ours, *others = hits(trace, share, "lhd", "lru", "arc", "s3-fifo")
    assert ours > max(others) - 0.015


@needs_traces
@pytest.mark.slow
def test_it_closes_a_sixth_of_what_lru_leaves_to_the_future() -> None:
    trace = read_trace(TRACES / "mooncake_conversation.jsonl")
    ours, lru, best = hits(trace, 0.05, "lhd", "lru", BELADY)
    assert ours - lru > (best - lru) / 6


@pytest.mark.untraced
@pytest.mark.parametrize("share", [0.02, 0.1])
def test_on_made_up_chats_and_agents_it_does_not_lose_to_lru(share: float) -> None:
    chat = generate("chat", sessions=100, per_s=2.0, chunk_tokens=64, seed=7)
    agents = generate("agents", sessions=8, per_s=0.2, chunk_tokens=512, seed=5)
    assert lead_over_lru(chat, share) > -MOST_LOST
    assert lead_over_lru(agents, share) > -MOST_LOST


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_where_prompts_share_their_beginning_it_learns_to_keep_that(share: float) -> None:
    trace = generate("shared", sessions=1500, per_s=4.0, chunk_tokens=256, seed=8)
    assert lead_over_lru(trace, share) > 0.03


def test_the_same_trace_has_the_same_hits_again() -> None:
    chat = generate("chat", sessions=100, per_s=2.0, chunk_tokens=64, seed=7)
    assert len({tuple(hits(chat, 0.05, "lhd")) for _ in range(2)}) == 1


def prompt(name: int, length: int) -> list[ChunkCopy]:
    """Return the copies of one prompt, leaf to root."""
    keys = [make_key(bytes([name, depth]), 0) for depth in range(length)]
    parents = [None, *keys]
    return [
        ChunkCopy(key, depth, parent, depth)
        for depth, (key, parent) in enumerate(zip(keys, parents, strict=False))
    ][::-1]


def insert_one_by_one(policy: Lhd, copies: list[ChunkCopy], ctx: PolicyContext) -> None:
    for copy in copies:
        policy.on_insert(copy, ctx)


INSERTS: list[Callable[[Lhd, list[ChunkCopy], PolicyContext], None]] = [
    insert_one_by_one,
    Lhd.on_insert_many,
    lambda policy, copies, ctx: policy.on_insert_many(copies[::-1], ctx),
]


def test_prompts_that_come_whole_or_in_chunks_leave_in_the_same_order() -> None:
    orders = []
    for insert in INSERTS:
        policy, ctx, order = Lhd(64), PolicyContext(), []
        members: list[ChunkCopy] = []
        for number in range(200):
            ctx.request = str(number)
            copies = prompt(number * 7 % 23, 3 + number * 5 % 11)
            present = {copy.key: copy for copy in members}
            used = [present[copy.key] for copy in copies if copy.key in present]
            new = [copy for copy in copies if copy.key not in present]
            policy.on_hit_many(used, ctx)
            members += new
            left = policy.pick_many(len(members) - 64, lambda _: True, ctx)
            members = [copy for copy in members if copy not in left]
            order += [copy.key for copy in left]
            insert(policy, [copy for copy in new if copy in members], ctx)
        orders.append(order)
    assert orders[0] == orders[1] == orders[2] != []


def serve(rivalry: Rivalry, ours: int, theirs: int, *, times: int, length: int = 10) -> None:
    """Let requests hit their first chunks: ``ours`` in the tier, ``theirs`` with LRU."""
    for _ in range(times):
        for depth in reversed(range(length)):
            rivalry.record(depth, depth, missed=depth >= ours, lru_missed=depth >= theirs)
        rivalry.go_on(f"{next(NUMBERS)}", 0)


def test_it_follows_lru_once_the_allowance_is_lost() -> None:
    rivalry = Rivalry(100)
    serve(rivalry, 5, 6, times=40)
    assert not rivalry.follows_lru
    serve(rivalry, 5, 6, times=10)
    assert rivalry.follows_lru


def test_what_was_won_may_be_lost_again_up_to_one_allowance() -> None:
    rivalry = Rivalry(100)
    serve(rivalry, 6, 5, times=1000)
    serve(rivalry, 5, 6, times=80)
    assert not rivalry.follows_lru
    serve(rivalry, 5, 6, times=20)
    assert rivalry.follows_lru


def test_hits_behind_a_missing_chunk_do_not_count() -> None:
    rivalry = Rivalry(100)
    for _ in range(1000):
        rivalry.record(9, 1, missed=False, lru_missed=True)
        rivalry.record(0, 0, missed=True, lru_missed=True)
        rivalry.go_on(f"{next(NUMBERS)}", 0)
    serve(rivalry, 5, 6, times=60)
    assert rivalry.follows_lru


def test_a_tier_of_less_than_half_a_prompt_evicts_like_lru() -> None:
    rivalry = Rivalry(10)
    serve(rivalry, 10, 0, times=1, length=21)
    assert rivalry.follows_lru


def test_prompts_that_come_in_parts_by_turns_are_compared_whole() -> None:
    rivalry = Rivalry(100)
    for turn in range(1000):
        for depth in (8, 4, 0):  # both requests miss the first chunk; the others do not help
            for request in ("a", "b"):
                rivalry.go_on(f"{request}{turn}", 0)
                rivalry.record(depth + 3, depth, count=4, missed=depth == 0, lru_missed=False)
    rivalry.go_on("", 0)
    assert rivalry.follows_lru
