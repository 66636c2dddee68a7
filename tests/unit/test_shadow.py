"""Ghost policies hit what the simulator says they hit."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey, make_key
from kvtier.policies.registry import EVICTIONS
from kvtier.policies.shadow import ShadowTier
from kvtier.sim.single import BELADY, chunk_keys, simulate_single
from kvtier.sim.traces import Trace, generate
from tests.unit.sim_traces import trace_of

CHAINS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 7)), min_size=1, max_size=60).map(
    lambda drawn: [[root * 100 + depth for depth in range(size)] for root, size in drawn]
)


@pytest.mark.parametrize("policy", sorted(EVICTIONS.built_in))
@settings(max_examples=30)
@given(chains=CHAINS, capacity=st.integers(1, 20))
def test_a_shadow_of_all_chunks_has_the_hits_of_the_simulator(
    policy: str, chains: list[list[int]], capacity: int
) -> None:
    trace = trace_of(chains)
    expected = simulate_single(trace, policy=policy, capacity=capacity)
    keys = chunk_keys(trace.distinct)
    shadow = ShadowTier(capacity, [policy])
    for number, chain in enumerate(trace.chains()):
        now = float(trace.timestamps_s[number])
        shadow.serve([keys[chunk] for chunk in chain], now, request=str(number))
    assert (shadow.references, shadow.hits()) == (trace.refs, {policy: expected.hits})


def hashed(distinct: int) -> list[ChunkKey]:
    """Return a key for every chunk number whose bytes are as random as an engine's."""
    draw = random.Random(3)
    return [make_key(draw.randbytes(32), 0) for _ in range(distinct)]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate("chat", sessions=1500, per_s=5.0, chunk_tokens=16, seed=2)


@pytest.mark.untraced
@pytest.mark.parametrize("policy", ["lru", "arc", "s3-fifo"])
def test_a_shadow_of_a_large_tier_is_small_and_accurate(policy: str, trace: Trace) -> None:
    capacity = trace.distinct // 5
    assert capacity > 2 * 4096
    keys = hashed(trace.distinct)
    shadow = ShadowTier(capacity, [policy])
    for number, chain in enumerate(trace.chains()):
        shadow.serve([keys[chunk] for chunk in chain], float(trace.timestamps_s[number]))
    assert shadow.references < trace.refs / 4
    whole = simulate_single(trace, policy=policy, capacity=capacity)
    ratio = shadow.hits()[policy] / shadow.references
    assert ratio == pytest.approx(whole.block_hit_ratio, abs=0.02)


def test_every_policy_sees_the_same_references() -> None:
    shadow = ShadowTier(4, ["lru", "fifo"])
    keys = chunk_keys(6)
    for chain in (keys[:3], keys[:4], keys[3:]):
        shadow.serve(chain, 0.0)
    assert (shadow.references, list(shadow.hits())) == (10, ["lru", "fifo"])


def test_after_a_reset_everything_is_a_miss_and_the_counts_go_on() -> None:
    shadow = ShadowTier(4, ["lru"])
    keys = chunk_keys(3)
    shadow.serve(keys, 0.0)
    shadow.serve(keys, 1.0)
    assert (shadow.references, shadow.hits()) == (6, {"lru": 3})
    shadow.clear()
    shadow.serve(keys, 2.0)
    assert (shadow.references, shadow.hits()) == (9, {"lru": 3})


def test_a_policy_that_needs_the_future_cannot_be_a_shadow() -> None:
    with pytest.raises(ConfigError, match="'belady'"):
        ShadowTier(4, [BELADY])
