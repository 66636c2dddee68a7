"""Least hit density, leaf first, is never much worse than LRU, and better where it can be."""

from __future__ import annotations

import pytest

from kvtier.policies.eviction import _lru_twin
from kvtier.sim.single import simulate_single
from kvtier.sim.traces import Trace, generate, read_trace
from tests.unit.sim_traces import TRACES, needs_traces

SHARES = (0.01, 0.05, 0.1, 0.2)
MOST_LOST = 0.003


def lead_over(other: str, trace: Trace, share: float) -> float:
    """Return by how much the prefix-hit ratio is above that of policy ``other``."""
    capacity = max(1, int(share * trace.distinct + 0.5))
    ours, theirs = (
        simulate_single(trace, policy=name, capacity=capacity).prefix_hit_ratio
        for name in ("prefix-lhd", other)
    )
    return ours - theirs


@needs_traces
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "name",
    [
        "mooncake_synthetic",
        pytest.param("mooncake_conversation", marks=pytest.mark.slow),
    ],
)
def test_on_public_traces_it_does_not_lose_to_lru(name: str, share: float) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl")
    assert lead_over("lru", trace, share) > -MOST_LOST


@needs_traces
def test_it_closes_a_tenth_of_what_lru_leaves_to_the_future() -> None:
    trace = read_trace(TRACES / "mooncake_conversation.jsonl")
    assert lead_over("lru", trace, 0.05) > 0.1 * (0.374 - 0.200)


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate("chat", sessions=800, per_s=2.0, chunk_tokens=64, seed=7)


@pytest.mark.parametrize("share", SHARES)
def test_on_made_up_chats_it_does_not_lose_to_lru(share: float, chat: Trace) -> None:
    assert lead_over("lru", chat, share) > -MOST_LOST


def test_where_prompts_share_their_beginning_it_learns_to_keep_that() -> None:
    trace = generate("shared", sessions=1500, per_s=4.0, chunk_tokens=512, seed=8)
    assert lead_over("lru", trace, 0.1) > 0.03


def test_while_the_twin_leads_it_is_leaf_first_lru(
    chat: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lru_twin, "_STAKE", -1.0)
    assert lead_over("prefix-lru", chat, 0.05) == pytest.approx(0.0, abs=0.001)
    monkeypatch.undo()
    assert lead_over("prefix-lru", chat, 0.05) != 0.0


def test_the_same_trace_has_the_same_hits_again(chat: Trace) -> None:
    first, again = (
        simulate_single(chat, policy="prefix-lhd", capacity=500).hits for _ in range(2)
    )
    assert first == again
