"""One tier for several KV cache groups, also against a connector's scheduler side."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey, make_key
from kvtier.policies import Eviction, build_eviction
from kvtier.policies.base import NoVictimError
from kvtier.policies.registry import EVICTIONS
from kvtier.policies.simulated_tier import SimulatedTier
from kvtier.sim.hybrid import HybridTier, PromptHits, parse_group_list
from kvtier.sim.single import BELADY, distinct_chunks, simulate_single
from kvtier.sim.sweep import sweep
from tests.unit.sim_traces import trace_of
from tests.unit.toy_engine import FULL, TOKENS, ToyEngine, window

PROMPTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=12)
"""Requests as (root, number of chunks); chunks of one root form a chain."""


def keys_of(root: int, chunks: int, groups: int = 2) -> list[list[ChunkKey]]:
    return [
        [make_key(bytes([root, depth]), group) for depth in range(chunks)]
        for group in range(groups)
    ]


class Tier:
    """A tier of LRU for some groups of 16-token chunks; requests name a root and a length."""

    def __init__(self, groups: str, capacity: int = 999, policy: str = "lru") -> None:
        self.groups = parse_group_list(groups, chunk_tokens=TOKENS)
        self.inner = HybridTier(build_eviction(policy, capacity=capacity), self.groups)

    def serve(self, root: int, chunks: int) -> PromptHits:
        keys = keys_of(root, chunks, len(self.groups))
        return self.inner.serve_groups(keys, chunks)

    def drop(self, root: int, depth: int, group: int) -> None:
        self.inner.eviction.on_remove(
            self.inner.members.pop(make_key(bytes([root, depth]), group))
        )

    def has(self, root: int) -> list[list[int]]:
        """Return the depths of the resident chunks of ``root``, per group."""
        everything = keys_of(root, 99, len(self.groups))
        return [
            [at for at, key in enumerate(part) if self.inner.has(key)] for part in everything
        ]


# -- one group ---------------------------------------------------------------------------------


@pytest.mark.untraced
@pytest.mark.parametrize("policy", [*EVICTIONS.built_in, BELADY])
@settings(max_examples=settings().max_examples // 3)
@given(prompts=PROMPTS, capacity=st.integers(1, 20))
def test_one_group_of_full_attention_is_what_a_tier_without_groups_is(
    policy: str, prompts: list[tuple[int, int]], capacity: int
) -> None:
    trace = trace_of([[root * 100 + at for at in range(chunks)] for root, chunks in prompts])
    plain = simulate_single(trace, policy=policy, capacity=capacity)
    one = simulate_single(trace, policy=policy, capacity=capacity, groups=" prefix")
    same = replace(plain, groups=" prefix", seconds=0, refs_per_second=0)
    assert replace(one, seconds=0, refs_per_second=0) == same


@given(prompts=PROMPTS)
def test_where_nothing_is_evicted_batches_find_what_single_chunks_find(
    prompts: list[tuple[int, int]],
) -> None:
    one = SimulatedTier(build_eviction("lru", capacity=999))
    batches = Tier("prefix")
    for root, chunks in prompts:
        lead, hits, behind = one.serve(keys_of(root, chunks)[0])
        assert batches.serve(root, chunks) == (lead, lead, hits, chunks, behind)


# -- which chunks a hit needs ------------------------------------------------------------------


def test_a_window_stores_and_needs_the_chunks_before_the_end_alone() -> None:
    tier = Tier("prefix,window:32")
    assert tier.serve(0, 8) == (0, 0, 0, 10, 0)
    assert tier.has(0) == [[*range(8)], [6, 7]]
    assert tier.serve(0, 8) == (8, 10, 10, 10, 0)
    assert tier.serve(0, 9).depth == 8


def test_without_its_window_a_prefix_is_no_hit_and_its_chunks_are_stranded() -> None:
    tier = Tier("prefix,window:32")
    tier.serve(0, 8)
    tier.drop(0, 7, 1)
    assert tier.serve(0, 8) == (0, 0, 9, 10, 9)
    assert tier.serve(0, 8).depth == 8, "the window was stored again"


def test_a_state_is_needed_where_the_hit_ends_alone() -> None:
    tier = Tier("prefix,state")
    tier.serve(0, 3)
    assert tier.serve(0, 8) == (3, 4, 4, 10, 0)
    assert tier.has(0) == [[*range(8)], [2, 7]]
    tier.drop(0, 2, 1)
    assert tier.serve(0, 8) == (8, 9, 9, 9, 0)
    tier.drop(0, 7, 1)
    assert tier.serve(0, 8).depth == 0


def test_local_attention_needs_the_chunks_since_the_last_multiple() -> None:
    tier = Tier("prefix,local:64")
    tier.serve(0, 7)
    assert tier.has(0) == [[*range(7)], [4, 5, 6]]
    assert tier.serve(0, 7).depth == 7


def test_where_prompts_part_their_common_prefix_becomes_a_hit_the_second_time() -> None:
    trace = trace_of([[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]])
    result = simulate_single(trace, policy="lru", capacity=99, groups="prefix,state")
    assert result.prefix_hit_ratio == 2 / 12
    assert distinct_chunks(trace, "prefix,state") == 8 + 4


def test_the_window_ends_with_the_last_whole_chunk_of_a_prompt() -> None:
    trace = trace_of([[0, 1, 2], [0, 1, 3, 4]], tokens=[40, 64])
    result = simulate_single(trace, policy="lru", capacity=99, groups="prefix,window:16")
    assert result.prefix_hit_ratio == 32 / 104


@pytest.mark.untraced
@given(prompts=PROMPTS, tokens=st.integers(1, 80))
def test_hits_and_stores_are_those_of_a_live_engine(
    prompts: list[tuple[int, int]], tokens: int
) -> None:
    engine = ToyEngine(FULL, window(tokens), slots=(512,), retention_tokens=0)
    tier = HybridTier(
        build_eviction("lru", capacity=512),
        parse_group_list(f"prefix,window:{tokens}", chunk_tokens=TOKENS),
    )
    for number, (root, chunks) in enumerate(prompts):
        request = engine.arrive(f"{number}", [root] * (chunks * TOKENS) + [9])
        keys = [[make_key(each, group) for each in request.block_hashes] for group in (0, 1)]
        request.shared_prefix_boundary = tier.lead(keys[0]) * TOKENS
        found = engine.match(request)
        assert found is not None
        if found:
            engine.load(request, found)
            engine.step()
            engine.acknowledge()
        engine.counted.offers.clear()
        engine.schedule(request)
        engine.step()
        engine.acknowledge()
        engine.finish(request)
        engine.step()
        result = tier.serve_groups(keys, chunks)
        assert result.depth * TOKENS == found
        assert result.refs - result.loaded == sum(engine.counted.offers)


# -- evictions ---------------------------------------------------------------------------------


def test_the_deepest_chunks_of_all_groups_are_evicted_first() -> None:
    tier = Tier("prefix,prefix", capacity=8)
    tier.serve(0, 4)
    tier.serve(1, 2)
    assert tier.has(0) == [[0, 1], [0, 1]]
    assert tier.serve(0, 2).depth == 2


def test_a_tier_too_small_for_a_prompt_keeps_its_beginning_in_all_groups() -> None:
    tier = Tier("prefix,prefix", capacity=5)
    for _ in range(2):
        tier.serve(0, 9)
        assert tier.has(0) == [[0, 1, 2], [0, 1]]


@pytest.mark.untraced
@pytest.mark.parametrize("policy", sorted(EVICTIONS.built_in))
@settings(max_examples=settings().max_examples // 3)
@given(
    prompts=PROMPTS,
    capacity=st.integers(1, 20),
    groups=st.sampled_from(["prefix,window:40", "prefix,state", "state", "local:48,prefix"]),
)
def test_no_policy_overfills_a_tier_or_hits_what_no_prompt_had(
    policy: str, prompts: list[tuple[int, int]], capacity: int, groups: str
) -> None:
    tier = Tier(groups, capacity, policy)
    longest: dict[int, int] = {}
    for root, chunks in prompts:
        result = tier.serve(root, chunks)
        assert result.depth <= min(longest.get(root, 0), chunks)
        assert result.loaded <= result.hits <= result.refs
        assert len(tier.inner.members) <= capacity
        assert not any(copy.pins for copy in tier.inner.members.values())
        longest[root] = max(longest.get(root, 0), chunks)


class Lazy(Eviction):
    """Picks nothing."""

    def on_insert(self, copy: object, ctx: object) -> None:
        pass

    def on_hit(self, copy: object, ctx: object) -> None:
        pass

    def on_remove(self, copy: object) -> None:
        pass

    def pick(self, evictable: object, ctx: object) -> None:
        return None


def test_a_policy_that_picks_too_little_is_named() -> None:
    tier = HybridTier(Lazy(4), parse_group_list("prefix,state", chunk_tokens=TOKENS))
    tier.serve_groups(keys_of(0, 3), 3)
    with pytest.raises(NoVictimError, match="Lazy"):
        tier.serve_groups(keys_of(1, 3), 3)


# -- what a user writes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is no kind of group"),
        ("prefix,", "'' is no kind of group"),
        ("full", "'full' is no kind of group"),
        ("prefix:16", "prefix has no number of tokens"),
        ("prefix,window", "window needs its number of tokens, such as window:1024"),
        ("local:0", "local needs its number of tokens, such as local:1024"),
        ("window:-4", "window needs its number of tokens"),
        ("window:1KiB", "window needs its number of tokens"),
        ("state:16", "state has no number of tokens"),
    ],
)
def test_invalid_groups_are_refused_with_a_remedy(text: str, problem: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^--groups {re.escape(f'{text}: {problem}')}.*; write"
    ):
        parse_group_list(text, chunk_tokens=TOKENS)


def test_belady_is_refused_for_several_groups() -> None:
    trace = trace_of([[0, 1]])
    with pytest.raises(ConfigError, match=r"^--groups prefix,state: .*; leave out belady, or"):
        sweep([trace], ["lru", BELADY], ["9"], chunk_bytes=[1], groups="prefix,state")
    with pytest.raises(ConfigError, match="leave out belady"):
        simulate_single(trace, policy=BELADY, capacity=1, groups="state")


def test_prompts_shorter_than_a_chunk_leave_no_state() -> None:
    trace = trace_of([[0], [0]], tokens=[3, 3])
    (result,) = sweep([trace], ["lru"], ["100%"], chunk_bytes=[1], groups="state")
    assert (result.distinct, result.refs, result.block_hit_ratio) == (1, 0, 0.0)


def test_a_share_is_of_the_chunks_that_a_tier_without_evictions_has() -> None:
    trace = trace_of([[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    (result,) = sweep([trace], ["lru"], ["50%"], chunk_bytes=[1], groups="prefix,window:32")
    assert result.distinct == 6 + 4
    assert (result.capacity_chunks, result.capacity_share) == (5, 0.5)
    assert result.groups == "prefix,window:32"
