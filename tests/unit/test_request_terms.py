"""What the manager does for a request that may use some tiers only, or has a session."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies import PolicyContext, TieredPlacement
from kvtier.policies.base import NO_TERMS, ChunkCopy, RequestTerms
from kvtier.policies.eviction import Lru
from tests.support.workbench import TIER_NAMES, Workbench, prefix


def only(*tiers: int) -> RequestTerms:
    return RequestTerms(load_tiers=frozenset(tiers))


def bench_with_copies(*where: int) -> Workbench:
    """Two slower tiers, and one chunk in each tier of ``where``."""
    bench = Workbench(4, 8, 8, write="evict")
    if 0 in where:
        bench.store(prefix(1))
    for tier in {*where} - {0}:
        bench.manager.recover(tier, [(prefix(1)[0], 5)])
    return bench


@pytest.mark.parametrize(
    ("where", "allowed"),
    [
        (where, allowed)
        for size in range(4)
        for where in itertools.combinations(range(3), size)
        for count in range(4)
        for allowed in itertools.combinations(range(3), count)
    ],
)
def test_a_chunk_is_found_if_an_allowed_tier_has_it(
    where: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    bench = bench_with_copies(*where)
    bench.manager.begin_request("r", only(*allowed))
    found = bool({*where} & {*allowed})
    assert (bench.look(prefix(1), "r") != 0) == found
    if not found:
        assert bench.step() == []
        assert bench.look(prefix(1), "r") == 0
        return
    for _ in range(2):
        for job in bench.step():
            assert TIER_NAMES.index(job.source) in allowed
            bench.finish(job)
    assert bench.look(prefix(1), "r") == 1
    bench.load(prefix(1), "r")


def test_a_chunk_moved_to_ram_for_a_request_is_still_its_hit() -> None:
    bench = Workbench(4, 8, placement=TieredPlacement(tiers=2, write="evict", promote="move"))
    bench.manager.recover(1, [(prefix(1)[0], 5)])
    bench.manager.begin_request("r", only(1))
    assert bench.look(prefix(1), "r") is None
    for job in bench.step():
        bench.finish(job)
    assert bench.resident(1) == set()
    assert bench.look(prefix(1), "r") == 1
    bench.load(prefix(1), "r")


def test_a_request_that_may_load_nothing_takes_no_part_in_the_misses() -> None:
    bench = bench_with_copies(0, 1)
    bench.manager.begin_request("r", only())
    assert bench.look(prefix(1), "r") == 0
    assert [tier.counters.misses for tier in bench.tiers] == [0, 0, 0]


@pytest.mark.parametrize("write", ["through", "evict"])
def test_chunks_go_to_the_tiers_their_request_allows(write: str) -> None:
    bench = Workbench(2, 8, 8, write="through" if write == "through" else "evict")
    terms = {"near": frozenset({0}), "far": frozenset({0, 1, 2}), "only nvme": frozenset({1})}
    for number, (name, tiers) in enumerate(terms.items()):
        bench.manager.begin_request(name, RequestTerms(store_tiers=tiers))
        bench.store(prefix(2, of=number), name)
        bench.settle()
    bench.store(prefix(2, of=9), "last")
    bench.settle()
    gone = set(prefix(2, of=0))
    assert not gone & (bench.resident(1) | bench.resident(2))
    if write == "through":
        assert set(prefix(2, of=1)) <= bench.resident(1) & bench.resident(2)
        assert set(prefix(2, of=2)) <= bench.resident(1) - bench.resident(2)
    assert bench.ram.counters.lost == 0, "what may not go down is not lost"


def test_an_orderly_shutdown_keeps_to_it_too() -> None:
    bench = Workbench(4, 8, write="evict")
    bench.manager.begin_request("near", RequestTerms(store_tiers=frozenset({0})))
    bench.store(prefix(2), "near")
    bench.store(prefix(2, of=1), "other")
    bench.manager.flush()
    (job,) = bench.manager.take_jobs()
    assert set(job.keys) == set(prefix(2, of=1))


class Listening(Lru):
    """LRU that records the request and the session of each call."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.hits: list[tuple[str, str]] = []
        self.inserted: list[str] = []
        self.inserting: list[str] = []

    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        self.inserted += [copy.session for copy in copies]
        self.inserting.append(ctx.request)
        super().on_insert_many(copies, ctx)

    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        self.hits.append((ctx.request, ctx.session))
        super().on_hit_many(copies, ctx)


def test_a_policy_sees_the_storing_session_and_the_using_session() -> None:
    bench = Workbench(4, 8)
    heard = [Listening(tier.slots.capacity) for tier in bench.tiers]
    for tier, policy in zip(bench.tiers, heard, strict=True):
        tier.eviction = policy
    bench.manager.begin_request("w", RequestTerms(session="chat"))
    bench.store(prefix(2), "w")
    bench.settle()
    bench.manager.begin_request("r", RequestTerms(session="other chat"))
    bench.look(prefix(2), "r")
    bench.load(prefix(2), "r")
    assert heard[0].inserted == ["chat"] * 2
    assert heard[1].inserted == ["chat"] * 2, "a copy below belongs to the same session"
    assert heard[0].inserting == ["w"]
    assert heard[1].inserting == [""], "no request waits for a demotion"
    assert heard[0].hits[-1] == ("r", "other chat")
    bench.look(prefix(2), "nobody")
    bench.load(prefix(2), "nobody")
    assert heard[0].hits[-1] == ("nobody", "")


@given(
    stored=st.lists(st.integers(1, 6), max_size=4),
    asked=st.lists(
        st.tuples(st.integers(0, 3), st.frozensets(st.integers(0, 2))), min_size=1, max_size=6
    ),
)
def test_every_request_is_answered_whatever_it_allows(
    stored: list[int], asked: list[tuple[int, frozenset[int]]]
) -> None:
    bench = Workbench(3, 6, 6, write="evict")
    for number, chunks in enumerate(stored):
        bench.store(prefix(chunks, of=number), f"w{number}")
        bench.settle()
    for number, (prompt, allowed) in enumerate(asked):
        name = f"r{number}"
        bench.manager.begin_request(name, RequestTerms(load_tiers=allowed))
        keys = prefix(6, of=prompt)
        found = bench.look(keys, name)
        for _ in range(3):
            if found is None:
                bench.settle()
                found = bench.look(keys, name)
        assert found is not None
        hits = keys[:found]
        for key in hits:
            holders = {tier.index for tier in bench.tiers if key in bench.resident(tier.index)}
            origin = bench.ram.copies[key].origin
            assert (holders | {origin}) & allowed
        if hits:
            bench.load(hits, name)
        bench.manager.end_request(name)


def test_a_copy_made_by_hand_has_no_session_and_no_terms() -> None:
    copy = ChunkCopy(prefix(1)[0], 0)
    assert (copy.session, copy.terms) == ("", NO_TERMS)
