"""Generated traces: the same for a seed, and shaped like the traffic they are named after."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.sim.traces import GENERATORS, Trace, describe, generate


def make(name: str, *, seed: int = 3, sessions: int = 40) -> Trace:
    return generate(name, sessions=sessions, per_s=0.5, chunk_tokens=64, seed=seed)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_names_one_trace(name: str) -> None:
    one, same, other = make(name), make(name), make(name, seed=4)
    assert np.array_equal(one.ids, same.ids)
    assert np.array_equal(one.timestamps_s, same.timestamps_s)
    assert one.sha256 == same.sha256 != other.sha256
    assert not np.array_equal(one.input_tokens, other.input_tokens)


@pytest.mark.parametrize("name", GENERATORS)
def test_arrivals_are_in_order_and_only_whole_chunks_have_ids(name: str) -> None:
    trace = make(name)
    assert (np.diff(trace.timestamps_s) >= 0).all()
    assert (np.diff(trace.offsets) == trace.input_tokens // 64).all()


@pytest.mark.parametrize("name", GENERATORS)
def test_a_chunk_has_one_parent(name: str) -> None:
    parents: dict[int, int] = {}
    for chain in make(name).chains():
        for parent, chunk in zip([-1, *chain], chain, strict=False):
            assert parents.setdefault(chunk, parent) == parent


def test_agents_reuse_most_and_single_questions_share_their_beginning() -> None:
    ratios = {name: describe(make(name))["infinite_prefix_hit_ratio"] for name in GENERATORS}
    assert ratios["agents"] > 0.8
    assert 0.2 < ratios["chat"] < 0.9
    shared = make("shared")
    assert shared.requests == 40
    assert len(set(shared.ids.tolist())) < shared.refs
