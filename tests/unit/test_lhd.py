"""Least hit density is never much worse than LRU, and better where it can be."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest

from kvtier.keys import ChunkKey, make_key
from kvtier.policies import ChunkCopy, PolicyContext
from kvtier.policies.base import is_evictable
from kvtier.policies.eviction.lhd import Lhd, Rivalry
from kvtier.sim.single import BELADY, simulate_single
from kvtier.sim.traces import Trace, generate, read_trace
from tests.bench.sim.batching import lead_over_lru as lead_in_a_batching_engine
from tests.unit.sim_traces import TRACES, needs_traces

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
def test_it_closes_a_sixth_of_the_gap_between_lru_and_belady() -> None:
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
    keys = [make_key(b"%d.%d" % (name, depth), 0) for depth in range(length)]
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


def test_it_follows_lru_once_the_allowance_is_lost() -> None:
    rivalry = Rivalry(100)  # allowance: four prompts of ten chunks, and five slots
    for _ in range(45):
        rivalry.record(1, 10, -1)
    assert not rivalry.follows_lru
    for _ in range(5):
        rivalry.record(1, 10, -1)
    assert rivalry.follows_lru


def test_earlier_wins_pay_for_losses_up_to_one_allowance() -> None:
    rivalry = Rivalry(100)
    for _ in range(1000):
        rivalry.record(1, 10, 1)
    for _ in range(90):
        rivalry.record(1, 10, -1)
    assert not rivalry.follows_lru
    for _ in range(10):
        rivalry.record(1, 10, -1)
    assert rivalry.follows_lru


def test_a_tier_of_less_than_half_a_prompt_evicts_like_lru() -> None:
    rivalry = Rivalry(10)
    rivalry.record(1, 21, 10)
    assert rivalry.follows_lru


def parentless(count: int) -> list[ChunkCopy]:
    """Return the copies of a tier that was filled by an earlier engine."""
    return [ChunkCopy(make_key(number.to_bytes(4), 0), number) for number in range(count)]


def test_chunks_of_an_earlier_engine_need_no_prompt_each() -> None:
    count = 16_000
    policy, ctx = Lhd(count), PolicyContext()
    copies = parentless(count)
    tracemalloc.start()
    try:
        policy.on_insert_many(copies, ctx)
        nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert nbytes < 100 * count
    victims = policy.pick_many(count, is_evictable, ctx)
    assert victims == copies, "in the order in which they were recovered"


@pytest.mark.parametrize("length", [3, 64, 200])
def test_unused_chunks_of_an_earlier_engine_leave_before_new_prompts(length: int) -> None:
    capacity = 16_000
    policy, ctx = Lhd(capacity), PolicyContext()
    recovered = parentless(capacity)
    policy.on_insert_many(recovered, ctx)
    victims: list[ChunkCopy] = []
    for number in range(capacity // length):
        ctx.request = str(number)
        victims += policy.pick_many(length, is_evictable, ctx)
        policy.on_insert_many(prompt(number, length), ctx)
    assert victims == recovered[: len(victims)]


@pytest.mark.untraced
def test_in_an_engine_that_batches_it_does_not_lose_to_lru() -> None:
    agents = generate("agents", sessions=8, per_s=0.05, chunk_tokens=512, seed=1)
    assert lead_in_a_batching_engine(agents, 0.1) > -MOST_LOST
    shared = generate("shared", sessions=400, per_s=4.0, chunk_tokens=256, seed=1)
    assert lead_in_a_batching_engine(shared, 0.1) > 0.03


def test_a_request_that_loads_again_leaves_no_chunk_twice() -> None:
    policy, ctx = Lhd(8192), PolicyContext()
    copies = prompt(0, 10)
    ctx.request = "0"
    policy.on_insert_many(copies, ctx)
    again = [("a", copies), ("b", copies[5:]), ("a", copies)]
    for request, used in [*((f"{number}", copies) for number in range(1, 5)), *again]:
        ctx.request = request
        policy.on_hit_many(used, ctx)
    picked = policy.pick_many(20, is_evictable, ctx)
    assert len(picked) == len(set(picked)) == 10


class LiveTier:
    """A tier whose requests come in parts by turns, as in an engine that batches.

    Args:
        policy: The policy.
        is_named: Whether the policy gets the id of the request with each part.
    """

    def __init__(self, policy: Lhd, *, is_named: bool = True) -> None:
        self.policy = policy
        self.members: dict[ChunkKey, ChunkCopy] = {}
        self.evicted: list[ChunkKey] = []
        self._is_named = is_named
        self._ctx = PolicyContext()

    def look_up(self, request: str, chunks: list[ChunkCopy]) -> int:
        """Use the leading hits of ``chunks``, leaf to root; return their number."""
        chain = chunks[::-1]
        present = [self.members.get(chunk.key) for chunk in chain]
        lead = present.index(None) if None in present else len(present)
        self._ctx.request = request
        self.policy.on_hit_many([copy for copy in present[:lead] if copy][::-1], self._ctx)
        return lead

    def store(self, request: str, chunks: list[ChunkCopy]) -> None:
        """Store the part of a prompt, leaf to root, that the tier lacks."""
        new = [chunk for chunk in chunks if chunk.key not in self.members]
        self._ctx.request = request
        short = len(self.members) + len(new) - self.policy.capacity
        for victim in self.policy.pick_many(max(short, 0), lambda _: True, self._ctx):
            del self.members[victim.key]
            self.evicted.append(victim.key)
        self._ctx.request = request if self._is_named else ""
        self.members.update((chunk.key, chunk) for chunk in new)
        self.policy.on_insert_many(new, self._ctx)


@pytest.mark.parametrize("is_named", [True, False])
def test_interleaved_parts_of_prompts_are_evicted_leaf_first(is_named: bool) -> None:
    tier = LiveTier(Lhd(24), is_named=is_named)
    prompts = [prompt(number, 12) for number in range(2)]
    for end in (9, 6, 3, 0):
        for number, chunks in enumerate(prompts):
            tier.store(f"{number}", chunks[end : end + 3])
    for number in range(2, 4):
        tier.store(f"{number}", prompt(number, 12))
    assert len(tier.evicted) == 24
    for chunks in prompts:
        keys = [chunk.key for chunk in chunks]
        assert [key for key in tier.evicted if key in keys] == keys


def test_a_rejected_victim_does_not_end_the_choice_by_density() -> None:
    """Prompts share their beginning; the chunks behind it are never used again."""
    policy = Lhd(64)
    tier, pinned = LiveTier(policy), {0}
    for number in range(400):
        if number == 20:
            ctx = PolicyContext()
            victims = policy.pick_many(1, lambda copy: copy.slot not in pinned, ctx)
            del tier.members[victims[0].key]
        start = number % 8
        chunks = prompt(start, 4) if number < 8 else []
        beginning = prompt(start, 4)
        rest = prompt(8 + number % 200, 12)[:8]
        for at, chunk in enumerate(reversed(rest)):
            chunk.depth = 4 + at
        rest[-1].parent = beginning[0].key
        request = f"{number}"
        tier.store(request, chunks or beginning[: 4 - tier.look_up(request, beginning)])
        tier.store(request, rest)
    kept = sum(chunk.key in tier.members for start in range(8) for chunk in prompt(start, 4))
    assert kept > 28


class Churn:
    """Requests that share beginnings, come in parts by turns, and load again, among pins."""

    def __init__(self, seed: int) -> None:
        self.policy, self.ctx = Lhd(1024), PolicyContext()
        self.members: dict[ChunkKey, ChunkCopy] = {}
        self._rng = random.Random(seed)
        self._prompts = [prompt(name, 24) for name in range(6)]
        for chunks in self._prompts[1:]:  # they begin with eight chunks of the first prompt
            chunks[16:] = self._prompts[0][16:]
            chunks[15].parent = chunks[16].key

    def step(self) -> None:
        chunks = self._rng.choice(self._prompts)
        begin = self._rng.randrange(len(chunks))
        part = chunks[begin : begin + self._rng.randrange(1, 12)]
        self.ctx.request = self._rng.choice(["", "", *"abcdefgh"])
        steps = [self.use] * 4 + [self.insert] * 3 + [self.remove] + [self.evict] * 2
        self._rng.choice(steps)(part)

    def use(self, part: list[ChunkCopy]) -> None:
        self.policy.on_hit_many([copy for copy in part if copy.key in self.members], self.ctx)

    def insert(self, part: list[ChunkCopy]) -> None:
        new = [copy for copy in part if copy.key not in self.members]
        self.members.update((copy.key, copy) for copy in new)
        self.policy.on_insert_many(new, self.ctx)

    def remove(self, part: list[ChunkCopy]) -> None:
        if self.members.pop(part[0].key, None):
            self.policy.on_remove(part[0])

    def evict(self, part: list[ChunkCopy]) -> None:
        pinned = set(self._rng.sample(sorted(self.members), len(self.members) // 2))
        count = self._rng.randrange(6)
        picked = self.policy.pick_many(count, lambda copy: copy.key not in pinned, self.ctx)
        for number, victim in enumerate(picked):
            del self.members[victim.key]  # fails if a copy leaves twice
            if number % 3 == 0 and victim not in part:
                self.members[victim.key] = victim
                self.policy.on_stay(victim, self.ctx)


@pytest.mark.parametrize("seed", range(4))
def test_every_copy_is_evicted_once(seed: int) -> None:
    churn = Churn(seed)
    for _ in range(3000):
        churn.step()
    left = churn.policy.pick_many(2000, is_evictable, churn.ctx)
    assert sorted(copy.key for copy in left) == sorted(churn.members)
