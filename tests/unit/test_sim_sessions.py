"""A policy hears offline of requests and sessions what it hears live."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import parse_config
from kvtier.policies.shadow import ShadowTier
from kvtier.replay._requests import pick_requests
from kvtier.sim.cache import simulate_cache
from kvtier.sim.single import chunk_keys, simulate_single
from kvtier.sim.traces import generate, read_trace, write_trace
from tests.unit.recording_lru import PolicyCall, RecordingLru
from tests.unit.sim_traces import trace_of

# The second request finds what the first one stored; the third says nothing of itself.
TRACE = trace_of([[0, 1], [0, 1, 2], [3], [0]], every_s=100.0, sessions=["a", "b", "", "a"])
EXPECTED = {
    PolicyCall("insert", "0", "a", "a"),
    PolicyCall("hit", "1", "b", "a"),
    PolicyCall("insert", "1", "b", "b"),
    PolicyCall("insert", "2", "", ""),
    PolicyCall("hit", "3", "a", "a"),
}


NAME = f"{RecordingLru.__module__}:{RecordingLru.__name__}"


@pytest.fixture
def calls() -> list[PolicyCall]:
    RecordingLru.calls.clear()
    return RecordingLru.calls


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_simulated_tier_tells_its_policy_of_requests_and_sessions(
    calls: list[PolicyCall], order: str
) -> None:
    simulate_single(
        TRACE,
        policy=NAME,
        capacity=8,
        touch_order="forward" if order == "forward" else "reverse",
    )
    assert set(calls) == EXPECTED


def test_policies_of_simulated_tiers_see_requests_and_sessions(
    calls: list[PolicyCall],
) -> None:
    config = parse_config(
        f"tiers: [{{kind: ram, capacity: 8MiB, eviction: '{NAME}'}}]", source="test"
    )
    simulate_cache(TRACE, config, chunk_bytes=1 << 20)
    assert set(calls) == EXPECTED


def test_a_simulated_tier_gets_requests_and_sessions(calls: list[PolicyCall]) -> None:
    keys = chunk_keys(TRACE.distinct)
    shadow = ShadowTier(8, [NAME])
    for number, (chain, session) in enumerate(
        zip(TRACE.chains(), TRACE.session_names(), strict=True)
    ):
        shadow.serve(
            [keys[at] for at in chain], float(number), request=str(number), session=session
        )
    assert set(calls) == EXPECTED


def test_a_new_chunk_in_the_slot_of_a_victim_has_its_own_session(
    calls: list[PolicyCall],
) -> None:
    trace = trace_of([[0, 1], [2], [3]], sessions=["a", "b", "c"])
    simulate_single(trace, policy=NAME, capacity=2)
    inserted = [call for call in calls if call.what == "insert"]
    assert all(call.stored_by == call.session for call in inserted)
    assert {call.session for call in inserted} >= {"a", "c"}


def test_sessions_go_with_their_requests() -> None:
    assert pick_requests(TRACE, [3, 1]).session_names() == ["a", "b"]
    assert pick_requests(trace_of([[0], [1]]), [1]).session_names() == ("",)


def test_generated_traffic_has_sessions_and_keeps_them_in_a_file(tmp_path: Path) -> None:
    trace = generate("agents", sessions=3, per_s=1.0, chunk_tokens=512, seed=1)
    assert len(set(trace.sessions)) == 3
    write_trace(trace, tmp_path / "agents.jsonl")
    assert read_trace(tmp_path / "agents.jsonl").sessions == trace.sessions
