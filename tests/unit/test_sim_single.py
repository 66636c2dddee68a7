"""One tier: the driver against a model small enough to be read at a glance."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.policies.registry import EVICTIONS
from kvtier.sim.capacity import parse_capacity, parse_chunk_bytes
from kvtier.sim.single import BELADY, TouchOrder, simulate_single
from kvtier.sim.traces import generate
from tests.unit.sim_traces import trace_of

CHAT = generate("chat", sessions=60, per_s=1.0, chunk_tokens=128, seed=5)

Chains = Sequence[Sequence[int]]


class Counted(NamedTuple):
    """Hits and leading hits."""

    hits: int
    leads: int


def lru(chains: Chains, capacity: int, *, backwards: bool) -> Counted:
    """Count what an LRU of the definition hits."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = leads = 0
    for chain in chains:
        for chunk in chain:
            if chunk not in cache:
                break
            leads += 1
        for chunk in reversed(chain) if backwards else chain:
            if chunk in cache:
                hits += 1
                cache.move_to_end(chunk)
                continue
            if len(cache) == capacity:
                cache.popitem(last=False)
            cache[chunk] = None
    return Counted(hits, leads)


def trees(draw: st.DrawFn) -> list[list[int]]:
    """Draw requests whose chunks have one parent each: prefixes of a few long chains."""
    lengths = draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=40)
    )
    return [[root * 100 + depth for depth in range(length)] for root, length in lengths]


CHAINS = st.composite(trees)().filter(any)


@given(chains=CHAINS, capacity=st.integers(1, 20), backwards=st.booleans())
@example(  # a batch that a shorter one joined
    chains=[[200, 201], [200], [200, 201], list(range(8)), [200]], capacity=9, backwards=False
)
def test_lru_hits_what_the_definition_says(
    chains: list[list[int]], capacity: int, backwards: bool
) -> None:
    order: TouchOrder = "reverse" if backwards else "forward"
    result = simulate_single(
        trace_of(chains), policy="lru", capacity=capacity, touch_order=order
    )
    assert Counted(result.hits, result.lead_chunks) == lru(
        chains, capacity, backwards=backwards
    )


@pytest.mark.untraced
@pytest.mark.parametrize("policy", [*EVICTIONS.built_in, BELADY])
@settings(max_examples=settings().max_examples // 3)
@given(chains=CHAINS, capacity=st.integers(1, 20))
def test_no_policy_hits_more_than_an_infinite_cache_or_less_than_nothing(
    policy: str, chains: list[list[int]], capacity: int
) -> None:
    trace = trace_of(chains)
    for order in ("forward", "reverse"):
        result = simulate_single(trace, policy=policy, capacity=capacity, touch_order=order)
        assert 0 <= result.hits <= trace.refs - trace.distinct
        assert 0 <= result.lead_chunks <= trace.refs - trace.distinct
        assert result.stranded_hits >= 0
        if order == "forward":
            assert result.stranded_hits == result.hits - result.lead_chunks


def test_in_reverse_what_is_stranded_is_counted_at_arrival() -> None:
    # 9 pushes out 0, and 1 and 2 stay behind.
    behind = trace_of([[0, 1, 2], [1], [2], [9], [0, 1, 2]])
    result = simulate_single(behind, policy="lru", capacity=3, touch_order="reverse")
    assert (result.hits, result.lead_chunks, result.stranded_hits) == (4, 2, 2)
    # 9 pushes out 3, whose return pushes out the chunks before it, one by one.
    pushed = trace_of([[0, 1, 2, 3], [9], [0, 1, 2, 3]])
    result = simulate_single(pushed, policy="fifo", capacity=4, touch_order="reverse")
    assert (result.hits, result.lead_chunks, result.stranded_hits) == (0, 3, 0)


@given(chains=CHAINS, capacity=st.integers(1, 20))
def test_belady_is_not_beaten(chains: list[list[int]], capacity: int) -> None:
    trace = trace_of(chains)
    best = simulate_single(trace, policy=BELADY, capacity=capacity, touch_order="forward")
    for policy in ("fifo", "lru", "arc", "s3-fifo"):
        other = simulate_single(trace, policy=policy, capacity=capacity, touch_order="forward")
        assert other.hits <= best.hits, policy


def test_a_partial_last_chunk_counts_as_the_tokens_it_has() -> None:
    trace = trace_of([[0, 1], [0, 1], [0, 2]], chunk_tokens=100, tokens=[150, 150, 120])
    result = simulate_single(trace, policy="lru", capacity=9)
    assert result.lead_chunks == 3
    assert result.prefix_hit_ratio == (150 + 100) / 420


def test_the_order_asked_for_is_the_policys_own_unless_said_otherwise() -> None:
    assert simulate_single(CHAT, policy="lru", capacity=9).touch_order == "reverse"
    forward = simulate_single(CHAT, policy="lru", capacity=9, touch_order="forward")
    assert forward.touch_order == "forward"


def test_progress_is_reported_and_ends_at_one() -> None:
    shares: list[float] = []
    simulate_single(CHAT, policy="lru", capacity=9, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 10


def test_a_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="best"):
        simulate_single(CHAT, policy="best", capacity=9)


@pytest.mark.parametrize(
    ("text", "chunks"),
    [("5%", 9140), ("0.1%", 183), ("100%", 182_790), ("7", 7), ("1GiB", 16)],
)
def test_a_capacity_is_a_share_a_number_or_a_size(text: str, chunks: int) -> None:
    assert parse_capacity(text, distinct=182_790, chunk_bytes=64 << 20) == chunks


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "capacity"),
        ("0", "holds no chunk"),
        ("0%", "capacity 0%: holds no chunk; 1 of the trace's 100 chunks is 1%: write more"),
        ("0.4%", "holds no chunk; 1 of the trace's 100 chunks is 1%"),
        ("-5", "capacity -5: "),
        ("5%%", "capacity 5%%: '%%' is not a percent sign; write a share"),
        ("5 %%", "'%%' is not a percent sign"),
        ("200%", "more than 100%"),
        ("1KiB", "holds no chunk"),
        ("1GB/s", "capacity 1GB/s: "),
        ("x%", "capacity x%: "),
    ],
)
def test_an_invalid_capacity_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        parse_capacity(text, distinct=100, chunk_bytes=64 << 20)


def test_chunk_bytes_are_a_number_or_a_size() -> None:
    assert parse_chunk_bytes("4096") == 4096
    assert parse_chunk_bytes("2MiB") == 2 << 20
    for wrong in ("0", "2 MB/s", "-1", ""):
        with pytest.raises(ConfigError, match="--chunk-bytes"):
            parse_chunk_bytes(wrong)
