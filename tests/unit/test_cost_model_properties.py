"""Properties of the choice of loads, for any measurements."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvtier.manager import CostModel
from tests.unit.cost_models import TOKENS, cost_model, kept, measure

LOADS = st.lists(
    st.tuples(st.integers(1, 2), st.integers(1, 64), st.floats(1e-6, 100.0)), max_size=8
)
SOURCES = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def measured(
    loads: Sequence[tuple[int, int, float]], *, slower: int = 0, times: float = 1.0
) -> CostModel:
    gate = cost_model()
    for job, (tier, chunks, seconds) in enumerate(loads):
        measure(gate, tier, chunks, seconds * (times if tier == slower else 1.0), job=job)
    return gate


@given(
    loads=LOADS,
    sources=SOURCES,
    slower=st.integers(1, 2),
    times=st.floats(1.0, 1e3),
    queued=st.integers(0, 64),
)
def test_a_slower_tier_never_makes_more_be_loaded(
    loads: list[tuple[int, int, float]],
    sources: list[int],
    slower: int,
    times: float,
    queued: int,
) -> None:
    before, after = measured(loads), measured(loads, slower=slower, times=times * (1 + 1e-9))
    for gate in (before, after):
        gate.record_job(100, slower, queued)
    assert kept(after, sources) <= kept(before, sources)


@given(loads=LOADS, sources=SOURCES, queued=st.integers(0, 64), more=st.integers(0, 64))
def test_a_longer_queue_never_makes_more_be_loaded(
    loads: list[tuple[int, int, float]], sources: list[int], queued: int, more: int
) -> None:
    before, after = measured(loads), measured(loads)
    for gate, chunks in ((before, queued), (after, queued + more)):
        for tier in (1, 2):
            gate.record_job(100 + tier, tier, chunks)
    assert kept(after, sources) <= kept(before, sources)


@given(loads=LOADS, sources=SOURCES)
def test_every_tier_is_tried_again_in_the_end(
    loads: list[tuple[int, int, float]], sources: list[int]
) -> None:
    gate = measured(loads)
    slow = sum(map(bool, sources))
    loaded = sum(map(bool, sources[: kept(gate, sources, now=1000.0)]))
    assert loaded >= min(slow, 1)


@given(loads=LOADS, sources=SOURCES, now=st.floats(0, 1e4))
def test_a_choice_keeps_a_head_and_accounts_for_the_rest(
    loads: list[tuple[int, int, float]], sources: list[int], now: float
) -> None:
    choice = measured(loads).choose(sources, counted=len(sources), now=now)
    if choice is None:
        return
    assert 0 <= choice.kept < len(sources)
    tail = sources[choice.kept :]
    assert choice.skipped == {tier: tail.count(tier) for tier in {*tail} - {0}}
    assert choice.tokens == len(tail) * TOKENS
    leading = next((at for at, tier in enumerate(sources) if tier), len(sources))
    assert choice.kept >= leading, "what is in RAM costs nothing"


@given(
    loads=LOADS,
    chunks=st.integers(1, 400),
    counted=st.integers(1, 400),
    queued=st.integers(0, 64),
    now=st.floats(0, 1e4),
)
def test_a_load_is_foreseen_if_any_chunk_would_be_loaded(
    loads: list[tuple[int, int, float]], chunks: int, counted: int, queued: int, now: float
) -> None:
    gate = measured(loads)
    counted = min(counted, chunks)
    gate.record_job(100, 1, queued)
    choice = gate.choose([1] * chunks, counted=counted, now=now)
    foreseen = gate.would_load(1, chunks, counted=counted, now=now)
    assert foreseen == (choice is None or choice.kept > 0)
