"""Every request is loaded or recomputed soon, whatever the sizes of the tiers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.keys import ChunkKey
from kvtier.manager import ManagerLimits
from kvtier.policies import ChunkCopy, PolicyContext, Promotion, TieredPlacement
from kvtier.testing.probes import count_steps
from tests.support.workbench import Workbench, prefix


@dataclass
class Waiting:
    """A request as a scheduler knows it."""

    req_id: str
    keys: list[ChunkKey]
    lookups: int = 0
    loaded: int = -1
    """Chunks loaded when it started; -1 while it waits."""


class FakeScheduler:
    """Looks every waiting request up at every step, as vLLM does.

    A load begun in one step is over in the next, and so is a storage job.
    """

    def __init__(self, bench: Workbench, requests: list[Waiting]) -> None:
        self.bench = bench
        self.requests = requests
        self.loading: list[str] = []

    def step(self) -> None:
        manager = self.bench.manager
        done, self.loading = self.loading, []
        started = [
            request for request in self.requests if request.loaded < 0 and self.start(request)
        ]
        for job in self.bench.step(started=[request.req_id for request in started]):
            self.bench.finish(job)
        for req_id in done:
            manager.complete_load(req_id)
        for request in started:
            # What was computed is offered; whether it is taken is not the point here.
            self.bench.store(request.keys, request.req_id)
        self.bench.check()

    def start(self, request: Waiting) -> bool:
        request.lookups += 1
        hits = self.bench.look(request.keys, request.req_id)
        if hits is None:
            return False
        request.loaded = hits
        if hits:
            head = request.keys[:hits]
            plan = self.bench.manager.prepare_load(head, request.req_id)
            assert len(plan.slots) == hits
            self.loading.append(request.req_id)
        return True


def crowded(ram: int, requests: int, *, distinct: bool, **values: Any) -> FakeScheduler:
    limits = ManagerLimits(
        **{"pin_budget": ram, "reserve": 0.0, "queue": 64, "max_queue_steps": 3, **values}
    )
    bench = Workbench(ram, 64, limits=limits)
    prompts = [number if distinct else 0 for number in range(requests)]
    keys = [key for prompt in sorted(set(prompts)) for key in prefix(8, of=prompt)]
    bench.manager.recover(1, zip(keys, range(len(keys)), strict=True))
    return FakeScheduler(
        bench,
        [Waiting(f"r{at}", prefix(8, of=prompt)) for at, prompt in enumerate(prompts)],
    )


@pytest.mark.parametrize("ram", [4, 2, 1])
@pytest.mark.parametrize("budget", ["all of ram", "one chunk", "nothing"])
def test_a_prefix_larger_than_ram_is_answered_within_five_steps(ram: int, budget: str) -> None:
    pins = {"all of ram": ram, "one chunk": 1, "nothing": 0}[budget]
    scheduler = crowded(ram, 1, distinct=True, pin_budget=pins)
    for _ in range(5):
        scheduler.step()
    (request,) = scheduler.requests
    assert request.loaded == pins, "the head that fits is loaded, the rest recomputed"
    assert request.lookups == 2


@pytest.mark.parametrize("ram", [4, 2, 1])
@pytest.mark.parametrize("distinct", [True, False], ids=["distinct", "shared"])
def test_four_prefixes_larger_than_ram_at_once_are_answered_within_five_steps(
    ram: int, *, distinct: bool
) -> None:
    scheduler = crowded(ram, 4, distinct=distinct)
    for _ in range(5):
        scheduler.step()
    assert all(request.loaded >= 0 for request in scheduler.requests)
    assert max(request.loaded for request in scheduler.requests) == ram


@given(
    ram=st.integers(0, 12),
    budget=st.integers(0, 14),
    chunks=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    patience=st.integers(1, 5),
)
def test_each_earlier_request_delays_a_request_by_a_bounded_time(
    ram: int, budget: int, chunks: list[int], patience: int
) -> None:
    scheduler = crowded(
        ram, len(chunks), distinct=True, pin_budget=budget, max_queue_steps=patience
    )
    for request, count in zip(scheduler.requests, chunks, strict=True):
        request.keys = request.keys[:count]
    for _ in range(patience + 2):
        scheduler.step()
    assert all(request.loaded >= 0 for request in scheduler.requests)


def test_four_requests_that_fit_one_after_the_other_are_all_loaded_whole() -> None:
    scheduler = crowded(8, 4, distinct=True, max_queue_steps=100)
    for _ in range(20):
        scheduler.step()
    assert [request.loaded for request in scheduler.requests] == [8, 8, 8, 8]


def test_a_step_costs_the_same_however_much_a_request_waits_for() -> None:
    """And the request is granted in the step in which there is room for it."""
    assert lines_of_a_step_in_which_one_waits(8) == lines_of_a_step_in_which_one_waits(512)


def lines_of_a_step_in_which_one_waits(chunks: int) -> int:
    limits = ManagerLimits(pin_budget=chunks, reserve=0.0, queue=4 * chunks, batch=chunks)
    bench = Workbench(2 * chunks, 2 * chunks, limits=limits)
    first, second = prefix(chunks, of=1), prefix(chunks, of=2)
    bench.manager.recover(1, zip([*first, *second], range(2 * chunks), strict=True))
    bench.look(first, "first")
    bench.look(second, "second")
    jobs = bench.step()
    assert sum(len(job.keys) for job in jobs) == chunks, "there is room for one of them"
    lines = count_steps(bench.manager.end_step)
    assert not bench.manager.take_jobs()
    bench.manager.end_request("first")
    assert sum(len(job.keys) for job in bench.step()) == chunks
    return lines


# -- an exclusive pair is one large tier -----------------------------------------------------


class Exclusive(TieredPlacement):
    """A chunk is in one tier at a time."""

    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        return Promotion.MOVE


@given(
    ram=st.integers(2, 5),
    nvme=st.integers(1, 6),
    accesses=st.lists(st.integers(0, 9), max_size=60),
)
def test_an_exclusive_pair_of_lru_tiers_hits_like_one_lru_of_the_sum(
    ram: int, nvme: int, accesses: list[int]
) -> None:
    """One RAM slot is the reserve for evictions ahead of need; it stays free."""
    bench = Workbench(
        ram,
        nvme,
        placement=Exclusive(tiers=2, write="evict"),
        limits=ManagerLimits(pin_budget=ram, reserve=1.0001 / ram, queue=64),
    )
    one = OrderedDict[int, None]()
    for at, chunk in enumerate(accesses):
        assert access(bench, prefix(1, of=chunk), f"r{at}") == (chunk in one)
        one[chunk] = None
        one.move_to_end(chunk)
        if len(one) > ram - 1 + nvme:
            one.popitem(last=False)
        both = [bench.resident(0), bench.resident(1)]
        assert both[0] | both[1] == {prefix(1, of=chunk)[0] for chunk in one}
        assert not both[0] & both[1]
    assert bench.ram.counters.lost == 0


def access(bench: Workbench, keys: list[ChunkKey], req_id: str) -> bool:
    """Load or else store ``keys``, and let everything settle; return whether it was a hit."""
    hits = bench.look(keys, req_id)
    if hits is None:
        bench.settle()
        hits = bench.look(keys, req_id)
    if hits:
        bench.load(keys, req_id)
    else:
        bench.store(keys, req_id)
    bench.manager.end_request(req_id)
    bench.settle()
    return bool(hits)


def test_a_moved_chunk_leaves_the_slower_tier_and_is_dirty_in_the_faster() -> None:
    bench = Workbench(2, 4, placement=Exclusive(tiers=2, write="evict"))
    bench.manager.recover(1, [(prefix(1)[0], 3)])
    bench.look(prefix(1))
    (job,) = bench.step()
    bench.finish(job)
    assert bench.resident(1) == set()
    assert bench.tiers[1].slots.free == 4
    bench.load(prefix(1))
    assert (bench.resident(), bench.ram.dirty) == ({*prefix(1)}, 1)
