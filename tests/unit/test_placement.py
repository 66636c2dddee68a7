"""What goes down, when, and how it comes up again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import floor
from typing import Literal

import pytest

from kvtier.build import build_manager, build_tiers
from kvtier.config import parse_config
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.policies import (
    ChunkCopy,
    Placement,
    PolicyContext,
    Promotion,
    TieredPlacement,
)
from kvtier.policies.admission import Admission, SecondTouch, WriteBudget
from tests.support.fakes import FakeSlotStatus
from tests.support.workbench import Workbench, prefix

CTX = PolicyContext()
DAY_S = 86_400.0
MIB = 1 << 20


def copy_of(number: int, *, generation: int = 1, hits: int = 0) -> ChunkCopy:
    copy = ChunkCopy(key_of(number), 0)
    copy.generation, copy.hits = generation, hits
    return copy


def key_of(number: int) -> ChunkKey:
    return prefix(1, of=number)[0]


# -- admission -------------------------------------------------------------------------------


def test_second_touch_refuses_the_first_copy_and_admits_the_next() -> None:
    second = SecondTouch(8)
    assert not second.admits(copy_of(1, generation=1), 1, CTX)
    assert not second.admits(copy_of(1, generation=1), 1, CTX), "no room is no use"
    assert second.admits(copy_of(1, generation=2), 1, CTX)
    assert second.admits(copy_of(1, generation=2), 1, CTX)
    assert not second.admits(copy_of(1, generation=2), 2, CTX), "tiers are counted apart"


def test_second_touch_admits_what_was_loaded_and_copies_in_slower_tiers() -> None:
    second = SecondTouch(8)
    assert second.admits(copy_of(1, hits=1), 1, CTX)
    assert second.admits(copy_of(2, generation=0), 2, CTX)


def test_second_touch_forgets_the_oldest() -> None:
    second = SecondTouch(2)
    for number in range(3):
        assert not second.admits(copy_of(number), 1, CTX)
    assert not second.admits(copy_of(0, generation=2), 1, CTX)
    assert second.admits(copy_of(2, generation=2), 1, CTX)


@pytest.mark.parametrize("chunks_per_day", [2.5, 24.0, 26.0, 240.0, 1000.5])
@pytest.mark.parametrize("quiet_h", [0, 7])
def test_no_day_sees_more_written_than_the_budget_whenever_it_begins(
    chunks_per_day: float, quiet_h: int
) -> None:
    budget = WriteBudget(bytes_per_day=int(chunks_per_day * MIB), chunk_nbytes=MIB)
    ctx = PolicyContext()
    written: list[float] = []
    for minute in range(3 * 24 * 60):
        if quiet_h and minute // 60 % (2 * quiet_h) < quiet_h:
            continue
        ctx.now = 60.0 * minute
        while budget.admits(copy_of(0), 1, ctx):
            written.append(ctx.now)
    days = [bisect_left(written, begin + DAY_S) - at for at, begin in enumerate(written)]
    assert max(days) <= chunks_per_day
    if not quiet_h:
        assert len(written) >= 3 * floor(chunks_per_day) * 0.95, "nor is much of it left over"


def test_a_quiet_time_pays_for_no_more_than_a_burst() -> None:
    budget, ctx = WriteBudget(bytes_per_day=250 * MIB, chunk_nbytes=MIB), PolicyContext()
    for ctx.now in (0.0, 10 * DAY_S):
        assert sum(budget.admits(copy_of(0), 1, ctx) for _ in range(100)) == 10


def test_a_small_budget_is_a_chunk_now_and_then() -> None:
    budget, ctx = WriteBudget(bytes_per_day=2 * MIB, chunk_nbytes=MIB), PolicyContext()
    admitted = []
    for hour in range(49):
        ctx.now = hour * 3600.0
        if budget.admits(copy_of(0), 1, ctx):
            admitted.append(hour)
    assert admitted == [0, 12, 24, 36, 48]


class Counting(Admission):
    def __init__(self, *, verdict: bool) -> None:
        super().__init__(capacity=0)
        self.verdict = verdict
        self.asked = 0

    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        self.asked += 1
        return self.verdict


def test_a_refusal_spares_the_conditions_behind_it() -> None:
    first, refusing, last = (Counting(verdict=verdict) for verdict in (True, False, True))
    bench = Workbench(2, 4, conditions=[first, refusing, last])
    bench.store(prefix(2))
    bench.settle()
    assert (first.asked, refusing.asked, last.asked) == (2, 2, 0)
    assert bench.resident(1) == set()


class Everywhere(Placement):
    """Wants every chunk in every tier."""

    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        return range(1, self.tiers)

    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        return Promotion.COPY

    def demote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> int | None:
        return source + 1 if source + 1 < self.tiers else None


def test_a_write_budget_holds_in_each_tier_with_any_placement() -> None:
    budget = WriteBudget(bytes_per_day=50, chunk_nbytes=1)
    bench = Workbench(4, 200, 200, placement=Everywhere(3), conditions=[budget])
    for number in range(100):
        bench.manager.end_step(now=number * 600.0)
        for job in bench.manager.take_jobs():
            bench.finish(job)
        bench.store(prefix(2, of=number))
    written = [tier.counters.stored for tier in bench.tiers[1:]]
    assert all(20 < chunks <= 50 for chunks in written), written


# -- the placement ---------------------------------------------------------------------------


def use(bench: Workbench, number: int, req_id: str) -> None:
    """Load chunk ``number`` once, from wherever it is."""
    keys = prefix(1, of=number)
    bench.look(keys, req_id)
    bench.settle()
    bench.look(keys, req_id)
    bench.load(keys, req_id)
    bench.manager.end_request(req_id)
    bench.settle()


def test_selective_write_through_demotes_at_the_nth_use() -> None:
    bench = Workbench(2, 4, placement=TieredPlacement(tiers=2, write="through", write_after=3))
    bench.store(prefix(1))
    bench.settle()
    use(bench, 0, "second")
    assert bench.resident(1) == set()
    use(bench, 0, "third")
    assert bench.resident(1) == {key_of(0)}
    assert bench.ram.dirty == 0
    use(bench, 0, "fourth")
    assert bench.tiers[1].counters.stored == 1


def test_a_move_leaves_nothing_in_the_slower_tier() -> None:
    bench = Workbench(2, 4, placement=TieredPlacement(tiers=2, write="evict", promote="move"))
    bench.manager.recover(1, [(key_of(0), 0)])
    use(bench, 0, "reader")
    assert (bench.resident(0), bench.resident(1)) == ({key_of(0)}, set())


def configured(*lines: str) -> str:
    section = "".join(f"  {line}\n" for line in (*lines, "backlog_limit: 100%"))
    return (
        "tiers:\n  - kind: ram\n    capacity: 4MiB\n"
        f"  - kind: nvme\n    path: /nowhere\n    capacity: 16MiB\nplacement:\n{section}"
    )


@pytest.mark.parametrize(
    ("lines", "loaded_twice", "written"),
    [
        (["write: through"], False, 4),
        (["write: through", "write_after: 2"], True, 4),
        (["write: through", "admit: second-touch"], False, 0),
        (["write: through", "write_budget_per_day: 24MiB"], False, 1),
        (["write: through", "write_budget_per_day: 50MiB"], False, 2),
        (["write: evict"], False, 0),
        (["write: evict", "promote: move"], False, 0),
    ],
)
def test_a_file_says_what_is_written(
    lines: list[str], loaded_twice: bool, written: int
) -> None:
    config = parse_config(configured(*lines), source="a.yaml")
    tiers = build_tiers(config, [4, 16])
    manager = build_manager(
        config,
        tiers,
        slot_nbytes=MIB,
        chunk_tokens=16,
        slot_status=FakeSlotStatus(),
        record_events=False,
    )
    plan = manager.prepare_store(prefix(4), "writer")
    assert plan is not None
    manager.complete_store(plan.keys)
    if loaded_twice:
        manager.prepare_load(prefix(4), "reader")
        manager.complete_load("reader")
    manager.end_step()
    assert sum(len(job.keys) for job in manager.take_jobs()) == written


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["write: evict", "write_after: 2"], "a.yaml:9: placement.write_after = 2: used with"),
        (
            ["promote: move"],
            "a.yaml:8: placement.promote = move: move would keep the only copy",
        ),
        (["retain: 10min"], "a.yaml:8: placement.retain = 10min: no effect without a quota"),
        (
            ["pin_budget: 60%", "retain_quota: 50%"],
            "a.yaml:9: placement.retain_quota = 50%: more than pin_budget leaves of RAM",
        ),
        (["admit: secnd-touch"], "did you mean second-touch?"),
        (["write_budget_per_day: 5"], "5 has no unit"),
    ],
)
def test_words_that_do_not_go_together_are_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(configured(*lines), source="a.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize("write", ["through", "evict"])
def test_the_default_placement_copies_on_store_or_on_eviction(
    write: Literal["through", "evict"],
) -> None:
    placement, copy = TieredPlacement(tiers=3, write=write), copy_of(0)
    down = write == "through"
    assert placement.place(copy, CTX) == ((1, 2) if down else ())
    assert placement.demote(copy, 0, CTX) == (None if down else 1)
    assert placement.demote(copy, 2, CTX) is None
    assert not placement.places_used
